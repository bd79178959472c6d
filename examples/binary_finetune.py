"""A vision transformer on 8x8 digits whose MLPs get 1-bit weights and activations, fine-tuned.

`python examples/binary_finetune.py` prints the accuracy on 597 held-out images, in percent.
"""

import sys
from pathlib import Path

import torch

import qfx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.digits import Data, DigitsViT, score, train

FLOAT_EPOCHS, BINARY_EPOCHS = 20, 12
MLP = qfx.Config(only=["blocks.*.up", "blocks.*.down"])


def main() -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, held_out = Data.load()
    model = DigitsViT()
    train(model, model, training, FLOAT_EPOCHS, 4e-3, seed=0)
    print("float", score(model, held_out))
    qfx.prepare_binary(model, training.x[:256], config=MLP, shift=True)
    print("binary, not trained", score(model, held_out))
    train(model, model, training, BINARY_EPOCHS, 3e-3, seed=0)
    model.eval()
    return score(model, held_out).accuracy


if __name__ == "__main__":
    print(f"{main():.2f}")
