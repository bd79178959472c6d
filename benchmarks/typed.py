"""The lines that a user types, by library: a language model quantized, saved, loaded, run and
fine-tuned.

Each function is both run and counted: its lines, without the `def` and the `return`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

Model = Any


def code(typed: Callable[..., Any]) -> str:
    """Returns the code with one statement per line, however the function is laid out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(typed)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if isinstance(body[-1], ast.Return):
        assert isinstance(body[-1].value, ast.Name), f"{typed.__name__} hides code in its return"
        body = body[:-1]
    return "\n".join(ast.unparse(statement) for statement in body)


def lines(typed: Callable[..., Any]) -> int:
    return len(code(typed).splitlines())


# --- what several libraries share ---


def load(folder: Path) -> Model:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model


def save(model: Model, folder: Path) -> None:
    model.save_pretrained(folder)


def generate(model: Model, ids: Tensor, count: int) -> Tensor:
    tokens = model.generate(ids, max_new_tokens=count, do_sample=False)
    return tokens


def adapt(model: Model) -> Model:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(model, config)
    return model


def merge(model: Model) -> Model:
    model = model.merge_and_unload()
    return model


# --- qfx ---


def qfx_quantize(folder: Path) -> Model:
    from transformers import AutoModelForCausalLM

    import qfx.hf

    config = qfx.hf.QfxConfig()
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model


def qfx_load(folder: Path) -> Model:
    from transformers import AutoModelForCausalLM

    import qfx.hf  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model


# --- torchao ---


def torchao_dynamic(folder: Path) -> Model:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model


def torchao_weights(folder: Path) -> Model:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model


# --- optimum-quanto ---


def quanto_by_transformers(folder: Path) -> Model:
    from transformers import AutoModelForCausalLM, QuantoConfig

    config = QuantoConfig(weights="int8")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model


def quanto_quantize(folder: Path) -> Model:
    from optimum.quanto import QuantizedModelForCausalLM, qint8
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = QuantizedModelForCausalLM.quantize(model, weights=qint8)
    return model


def quanto_load(folder: Path) -> Model:
    from optimum.quanto import QuantizedModelForCausalLM

    model = QuantizedModelForCausalLM.from_pretrained(folder)
    return model


# --- bitsandbytes ---


def bitsandbytes_quantize(folder: Path) -> Model:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model


@dataclass(frozen=True)
class Library:
    """The functions of a library. `quantize` reads a float model's folder, `load` one that `save`
    wrote. `packages`: those it needs besides qfx, transformers and peft, by their names for pip."""

    quantize: Callable[[Path], Model]
    load: Callable[[Path], Model] = load
    save: Callable[[Model, Path], None] = save
    generate: Callable[[Model, Tensor, int], Tensor] = generate
    adapt: Callable[[Model], Model] = adapt
    merge: Callable[[Model], Model] = merge
    packages: tuple[str, ...] = ()


FLOAT = "float32"
LIBRARIES = {
    FLOAT: Library(load),
    "qfx": Library(qfx_quantize, qfx_load),
    "torchao int8 dynamic": Library(torchao_dynamic, packages=("torchao",)),
    "torchao int8 weights": Library(torchao_weights, packages=("torchao",)),
    "quanto int8 by transformers": Library(quanto_by_transformers, packages=("optimum-quanto",)),
    "quanto int8 by itself": Library(quanto_quantize, quanto_load, packages=("optimum-quanto",)),
    "bitsandbytes int8": Library(bitsandbytes_quantize, packages=("bitsandbytes",)),
}
