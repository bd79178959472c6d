"""Replaces the linears of an OPT model by int8 modules, saves them, loads them into a fresh one.

`python examples/replace_linears.py` prints the memory that is left, in percent. The weights are
random: what it shows is that the bytes are gone, and that the loaded model computes the same bits.
"""

import io

import torch
from transformers import OPTConfig, OPTForCausalLM

import qfx

SIZES = {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"vocab_size": 512, "max_position_embeddings": 128, "word_embed_proj_dim": 256}
W8A8 = qfx.Config(scheme="w8a8-symmetric", skip=["lm_head"])  # tied to the embedding, which stays


def made():
    torch.manual_seed(0)
    return OPTForCausalLM(OPTConfig(**SIZES)).eval()


def megabytes(model):
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}  # tied ones count once
    return sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6


@torch.no_grad()
def main() -> float:
    torch.set_num_threads(1)
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    model = made()
    before, expected = megabytes(model), model(tokens).logits
    qfx.quantize_(model, W8A8)
    logits = model(tokens).logits
    decibel = 20 * torch.log10(expected.norm() / (logits - expected).norm())
    print(f"{before:.1f} MB, now {megabytes(model):.1f} MB; logits at {decibel:.1f} dB")

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = qfx.quantize_(made(), W8A8)
    for parameter in fresh.parameters():
        parameter.zero_()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(tokens).logits, logits)
    return 100 * megabytes(model) / before


if __name__ == "__main__":
    print(f"{main():.1f}")
