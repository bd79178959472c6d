"""A model that the user named on the command line, with inputs to run it with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qfx.command.errors import CommandError
from qfx.command.example_inputs import TEXT, example_inputs
from qfx.command.model_kinds import Kind, kind_of


@dataclass(frozen=True)
class OpenedModel:
    """A model in eval mode. `where`: what the user named. `example`: makes the inputs of one call,
    when they are asked for. `tokenizer`: of transformers, None if the model has none that can
    be read, and `no_tokenizer` says why. `folder`:
    that of the configuration and tokenizer of a model of transformers, or its name; None for other
    models."""

    kind: Kind
    where: str
    model: nn.Module
    example: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    tokenizer: Any = None
    folder: str | None = None
    no_tokenizer: str = ""

    @cached_property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of one call. Raises CommandError for a model with inputs of an unknown
        kind."""
        return self.example()

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional inputs."""
        return self.inputs[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The inputs by name."""
        return self.inputs[1]

    @property
    def kwargs_without_cache(self) -> dict[str, Any]:
        """The inputs by name for a call that returns no cache, which is no output to compare or to
        export."""
        cached = getattr(getattr(self.model, "config", None), "use_cache", False)
        return {**self.kwargs, "use_cache": False} if cached else self.kwargs


def open_model(
    where: str,
    *,
    like: str | None = None,
    quantization: Any = None,
    batch: int = 1,
    tokens: int | None = None,
    text: str | None = None,
) -> OpenedModel:
    """Opens a model of transformers, a folder of qfx.save, a GGUF file or an exported program.

    `like`: a model of transformers whose configuration says what a folder of qfx.save is; a GGUF
    file says so itself. `quantization`: a QfxConfig with which a model of transformers is loaded.
    `batch`, `tokens`, `text`: of the inputs; a text is repeated up to the number of tokens, by
    default 128 or as many as the model has positions. Raises CommandError, and what the readers of
    the files raise."""
    kind = kind_of(where)
    if kind == "programs":
        raise CommandError(f"{where}: only `qfx generate` and `qfx verify` run files of programs")
    if kind == "exported":
        return _exported(where)
    transformers = _transformers(where)
    if kind == "transformers":
        config, model, folder = *_pretrained(transformers, where, quantization), where
        found: dict[str, str] = {}
    elif kind == "gguf":
        path = Path(where)
        found, folder = {"gguf_file": path.name}, str(path.parent)
        config = transformers.AutoConfig.from_pretrained(folder, **found)
        model = _loaded(transformers, where, config)
    else:
        if like is None:
            raise CommandError(
                f"{where} holds weights alone: name a folder with its config.json with --like"
            )
        found, folder = {}, like
        config = transformers.AutoConfig.from_pretrained(like)
        model = _loaded(transformers, where, config)
    tokenizer, no_tokenizer = _tokenizer(transformers, folder, found)
    with_text = text if text is not None else TEXT
    model.eval()

    def example() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), example_inputs(model, config, tokenizer, with_text, batch, tokens)

    return OpenedModel(kind, where, model, example, tokenizer, folder, no_tokenizer)


def _transformers(where: str) -> Any:
    try:
        import transformers

        import qfx.hf  # noqa: F401  (folders with its weights are read)
    except ImportError as why:
        raise CommandError(
            f'{where} is read with transformers 5: pip install "qfx[hf]" ({why})'
        ) from why
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _pretrained(transformers: Any, where: str, quantization: Any) -> tuple[Any, nn.Module]:
    config = transformers.AutoConfig.from_pretrained(where)
    kwargs = {} if quantization is None else {"quantization_config": quantization}
    make = _class_of(transformers, config).from_pretrained
    return config, make(where, dtype="auto", **kwargs)


def _class_of(transformers: Any, config: Any) -> Any:
    """Returns the class that wrote the configuration, with the head that it names."""
    name = next(iter(config.architectures or ()), "")
    return getattr(transformers, name, None) or transformers.AutoModel


def _loaded(transformers: Any, where: str, config: Any) -> nn.Module:
    """Reads weights of a file into a model of this configuration, without float values."""
    import qfx

    name = next(iter(config.architectures or ()), "")
    make: Callable[[Any], nn.Module] = getattr(transformers, name, None) or (
        transformers.AutoModelForCausalLM.from_config
    )
    with torch.device("meta"):
        skeleton = make(config).eval()
    return qfx.load(where, skeleton)


def open_tokenizer(where: str, like: str | None) -> tuple[Any, set[int]]:
    """Returns the tokenizer of the model `like`, of which the file of programs `where` is, and the
    tokens that end a text. Raises CommandError without one."""
    if like is None:
        raise CommandError(f"{where} has no tokenizer: name its transformers model with --like")
    tokenizer, why = _tokenizer(_transformers(where), like, {})
    if tokenizer is None:
        raise CommandError(f"{like} has no tokenizer ({why})")
    return tokenizer, {tokenizer.eos_token_id} - {None}


def _tokenizer(transformers: Any, folder: str, found: dict[str, str]) -> tuple[Any, str]:
    """Returns the tokenizer beside a model; None, and why, if there is none that can be read."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **found), ""
    except Exception as why:  # each tokenizer has errors of its own
        return None, f"{type(why).__name__}: {why}"


def _exported(where: str) -> OpenedModel:
    with suppress(ImportError):  # a program may return the outputs of transformers
        importlib.import_module("transformers.modeling_outputs")
    try:
        program = torch.export.load(where)
    except OSError:
        raise
    except Exception as why:  # of zip files, pickles, schemas, operators
        raise CommandError(f"{where} is no program of torch.export.save: {why}") from why
    if program.example_inputs is None:
        raise CommandError(f"{where} was exported without example inputs, and so cannot be run")
    args, kwargs = program.example_inputs
    model = program.module()
    for module in model.modules():
        module.training = False  # eval() of an exported program raises, and it is what it was
    return OpenedModel("exported", where, model, lambda: (tuple(args), dict(kwargs)))
