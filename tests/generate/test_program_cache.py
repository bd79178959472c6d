"""Programs on disk: another process runs what one has made, and nothing that was made of another
model."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import qfx
from qfx.generate import model_programs, program_cache, program_key
from qfx.generate.cache_slots import cache_slots
from qfx.generate.fingerprint import NoFingerprint
from qfx.generate.layout import with_rings, without_rings
from qfx.generate.program_key import key_of
from qfx.generate.request import Request
from qfx.io import disk_memo
from tests.conftest import same_bits
from tests.lib.decoders import decoder, ids
from tests.lib.fresh_process import run_python

LENGTH = 64
SWITCH = program_cache.PROGRAMS.switch
LAYOUTS = [
    with_rings(LENGTH, {"": 8}, [""] * 2),
    with_rings(4 * LENGTH, {"": 8}, [""] * 2),
    without_rings(4 * LENGTH, {"": 8}, 2),
]
Change = Callable[[Any, pytest.MonkeyPatch], object]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SWITCH, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens a step each program has that was made, and not read."""
    found: list[int] = []

    def noted(model: Any, inputs: tuple[Tensor, ...], **others: Any) -> Any:
        found.append(inputs[0].shape[1])
        return step_graph(model, inputs=inputs, **others)

    step_graph = model_programs.step_graph
    monkeypatch.setattr(model_programs, "step_graph", noted)
    return found


def small(**others: Any) -> Any:
    return decoder("llama", num_hidden_layers=1, **others)


def compiled(model: Any = None, scheme: str = "w4a8", **how: Any) -> Any:
    return qfx.compile_for_generate(model or small(), scheme, **{"max_length": LENGTH, **how})


def logits(model: Any) -> Tensor:
    """Of four steps."""
    cache, found = transformers.DynamicCache(), []
    with torch.no_grad():
        for tokens in ids(4, 1)[:, None]:
            found.append(model(input_ids=tokens, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, 1)


def drawn_anew(model: Any) -> Any:
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + 0.1 * torch.randn_like(weight))
    return model


def uncached(model: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setenv(SWITCH, "0")
        return logits(compiled(model, **how))


def test_another_model_of_the_kind_makes_nothing(
    folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of what was made, of other weights too."""
    first = logits(compiled())
    assert made == [1] and len([*folder.iterdir()]) == 1
    assert same_bits(logits(compiled()), first)
    other = logits(compiled(drawn_anew(small())))
    assert made == [1]
    assert same_bits(uncached(small(), monkeypatch), first)
    assert same_bits(uncached(drawn_anew(small()), monkeypatch), other)
    assert not torch.equal(first, other)


def test_a_changed_setting_is_not_served_from_before(
    folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled() -> Any:
        model = small()
        model.model.layers[0].self_attn.scaling = 0.7
        return model

    first, other = logits(compiled()), logits(compiled(scaled()))
    assert made == [1, 1] and not torch.equal(first, other)
    assert same_bits(uncached(scaled(), monkeypatch), other)


def test_a_program_of_equal_factors_serves_no_model_whose_factors_differ(
    folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads that of q for k and v."""

    def other() -> Tensor:
        model = compiled()
        factor = model.model.layers[0].self_attn.k_proj.factor
        factor.mul_(torch.linspace(-4, 4, len(factor)).exp2())
        return logits(model)

    first, changed = logits(compiled()), other()
    assert made == [1, 1] and not torch.equal(first, changed)
    monkeypatch.setenv(SWITCH, "0")
    assert same_bits(other(), changed)


# --- keys ---


def key(model: Any, **others: Any) -> str:
    """Of the program of one token."""
    placed, cache = model.forward, transformers.Cache(layers=model.forward._layers())
    texts = others.pop("batch", 1)
    request = Request(ids(1, 1), cache, None, None, 0, 1)
    placed._begin(request, texts, texts)
    how = {"forward": placed.inner, "layout": placed.layout, "one": False, **others}
    at = cache_slots(cache.layers[0], placed.places.numbers(0, 1), None, placed.length)
    inputs = (*placed._inputs(request, at, 0, 1), *placed._bound(request).tensors)
    return key_of(model, placed, inputs, **how)[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return compiled()


def layer(model: Any) -> Any:
    return model.model.layers[0]


def doubled(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return 2 * x


def turned(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return q, k


class Added(LlamaMLP):
    """Adds a tensor that is no parameter and no buffer."""

    added: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.added


def with_added(model: Any, value: float) -> Any:
    layer(model).mlp.__class__ = Added
    layer(model).mlp.added = torch.full((64,), value)
    return model


def tied(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer(model).input_layernorm.weight = layer(model).post_attention_layernorm.weight


def untied(model: Any, patch: pytest.MonkeyPatch) -> None:
    """A copy that lies elsewhere in a larger memory."""
    weight = layer(model).input_layernorm.weight
    layer(model).input_layernorm.weight = nn.Parameter(torch.cat([weight, weight])[64:])


def turned_weight(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer(model).mlp.register_buffer("more", torch.zeros(2, 3).t())


CHANGES: dict[str, Change] = {
    "a number of a module": lambda m, p: setattr(layer(m).self_attn, "scaling", 0.7),
    "a flag of a module": lambda m, p: setattr(layer(m).self_attn, "is_causal", False),
    "a None of a module": lambda m, p: setattr(layer(m).mlp, "window", None),
    "1.0 and not 1": lambda m, p: setattr(layer(m).self_attn, "layer_idx", 0.0),
    "-0.0 and not 0.0": lambda m, p: setattr(layer(m).self_attn, "attention_dropout", -0.0),
    "a list of a module": lambda m, p: setattr(layer(m).mlp, "sizes", [1, (2, "3")]),
    "a plain tensor": lambda m, p: setattr(layer(m).mlp, "shift", torch.ones(3)),
    "a function of a module": lambda m, p: setattr(layer(m).mlp, "also", doubled),
    "a module's forward": lambda m, p: setattr(layer(m).mlp, "forward", doubled),
    "a module": lambda m, p: setattr(layer(m).mlp, "act_fn", nn.GELU()),
    "a module that trains": lambda m, p: layer(m).mlp.train(),
    "the configuration": lambda m, p: setattr(m.config, "rms_norm_eps", 0.1),
    "a nested setting": lambda m, p: m.config.rope_parameters.update(factor=2.0),
    "a class's method": lambda m, p: p.setattr(LlamaMLP, "forward", doubled),
    "a class's number": lambda m, p: p.setattr(LlamaMLP, "scale", 2, raising=False),
    "a function of its file": lambda m, p: p.setattr(
        modeling_llama, "apply_rotary_pos_emb", turned
    ),
    "a function of torch": lambda m, p: p.setattr(F, "silu", doubled),
    "what attends": lambda m, p: p.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", turned),
    "two weights that are one": tied,
    "a weight elsewhere": untied,
    "one buffer more": turned_weight,
    "a bias": lambda m, p: setattr(layer(m).mlp.up_proj, "bias", nn.Parameter(torch.ones(128))),
    "of another type": lambda m, p: layer(m).mlp.register_buffer("more", torch.zeros(3)[None]),
    "an environment variable": lambda m, p: p.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1"),
    "the version of transformers": lambda m, p: p.setattr(
        program_key.transformers, "__version__", "6"
    ),
    "the version of torch": lambda m, p: p.setattr(torch, "__version__", "3"),
    "qfx": lambda m, p: p.setattr(program_key, "own_digest", lambda: "other"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_key(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, seen = copy.deepcopy(model), key(model)
    assert key(copy.deepcopy(model)) == seen
    CHANGES[name](changed, monkeypatch)
    assert key(changed) != seen


def test_calls_that_differ_have_keys_of_their_own(model: Any) -> None:
    others: list[dict[str, Any]] = [
        {"max_length": 2 * LENGTH}, {"key_bits": 4}, {"value_bits": 4}, {"scheme": "w8a8"},
    ]  # fmt: skip
    keys = [key(compiled(**each)) for each in others]
    keys += [key(model), key(model, batch=2), key(model, one=True)]
    keys += [key(model, layout=layout) for layout in LAYOUTS]
    assert len({*keys}) == len(keys)


def test_what_does_not_change_the_key(model: Any) -> None:
    changed, seen = drawn_anew(copy.deepcopy(model)), key(model)
    assert key(changed) == seen
    logits(changed)
    changed.generate(ids(1, 9), max_new_tokens=3)
    with torch.no_grad():
        changed(input_ids=ids(1, 9), output_hidden_states=True, use_cache=False)
    assert key(changed) == seen


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def local_class(model: Any) -> None:
    class Local(LlamaMLP):
        pass

    layer(model).mlp.__class__ = Local


def of_main(model: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    names = {"__name__": "__main__"}
    layer(model).mlp.forward = type(forward)(forward.__code__, names)


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a forward hook": lambda m: layer(m).mlp.register_forward_hook(doubled),
    "a hook before": lambda m: layer(m).mlp.register_forward_pre_hook(doubled),
    "a hook of gradients": lambda m: layer(m).mlp.register_full_backward_hook(doubled),
    "a hook on the model": lambda m: m.register_forward_hook(doubled),
    "a local class": local_class,
    "a function of a notebook": of_main,
    "a lock": lambda m: setattr(layer(m).mlp, "lock", threading.Lock()),
    "another module": lambda m: setattr(layer(m).mlp, "others", [nn.Linear(2, 2)]),
    "a large tensor": lambda m: setattr(layer(m).mlp, "table", torch.zeros(1 << 17)),
    "a parameter of a class": lambda m: setattr(
        layer(m).mlp, "p", nn.Parameter(torch.zeros(2).as_subclass(Odd))
    ),
}


class Odd(Tensor):
    pass


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_key(name: str, model: Any) -> None:
    changed = copy.deepcopy(model)
    UNKNOWN[name](changed)
    with pytest.raises(NoFingerprint):
        key(changed)


@contextmanager
def global_hook() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *call: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("seeing", [Seeing, global_hook])
def test_what_sees_all_modules_leaves_no_key(seeing: Any, model: Any) -> None:
    with seeing(), pytest.raises(NoFingerprint):
        key(model)


def test_a_constant_that_was_computed_is_of_these_weights(
    folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(compiled(with_added(small(), 0.5)))
    assert same_bits(logits(compiled(with_added(small(), 0.5))), first)
    assert made == [1]
    other = logits(compiled(with_added(drawn_anew(small()), 0.5)))
    assert made == [1] * 2
    third = logits(compiled(with_added(drawn_anew(small()), 0.25)))
    assert made == [1] * 3
    assert same_bits(uncached(with_added(drawn_anew(small()), 0.5), monkeypatch), other)
    assert same_bits(uncached(with_added(drawn_anew(small()), 0.25), monkeypatch), third)


# --- files ---


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_damaged_file_is_written_anew(
    folder: Path, made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(flipped(whole))
    compiled()
    assert made == [1, 1] and path.read_bytes() == whole
    (told,) = warnings_in(caplog)
    assert "is cut off, damaged" in told and str(path) in told


def link(path: Path) -> None:
    """To a file of the user's own."""
    path.rename(path.with_name("victim"))
    path.symlink_to(path.with_name("victim"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("put", [link, fifo])
def test_what_was_put_in_the_place_of_a_file_is_replaced(
    put: Callable[[Path], None], folder: Path, made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    put(path)
    victim = folder / "victim"
    if victim.exists():
        victim.write_text("of the user")
    compiled()
    assert made == [1, 1] and len(warnings_in(caplog)) == 1
    assert path.is_file() and not path.is_symlink() and path.read_bytes() == whole
    assert not victim.exists() or victim.read_text() == "of the user"
    compiled()
    assert made == [1, 1]


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def anothers(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 12345, 12345)


def link_to_anothers(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    anothers(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize("change", [open_to_all, anothers, link_to_anothers])
def test_a_folder_that_others_can_write_to_is_not_used(
    change: Callable[[Path], None],
    folder: Path,
    made: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder.mkdir()
    change(folder)
    compiled()
    compiled()
    assert made == [1, 1] and [*folder.iterdir()] == []
    for told in warnings_in(caplog):
        assert str(folder) in told and "not kept on disk" in told


def test_it_is_switched_off(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled()
    compiled()
    assert made == [1, 1] and [*tmp_path.rglob("*")] == []


def test_it_lies_with_what_else_qfx_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = program_cache.PROGRAMS.cache()
    assert cache is not None and cache.folder == tmp_path / "qfx/programs"


def test_no_folder_is_no_error(
    tmp_path: Path,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    disk_memo._warn.cache_clear()
    for place in (tmp_path / "file/programs", Path("/proc/programs")):
        monkeypatch.setenv(SWITCH, str(place))
        for _ in range(2):
            compiled()
    told = warnings_in(caplog)
    assert made == [1] * 4 and len(told) == 2 and "/proc/programs" in told[1]


def test_those_that_were_not_read_for_longest_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_cache, "PROGRAMS", replace(program_cache.PROGRAMS, most=2))
    folder.mkdir(mode=0o700)
    for age, name in enumerate("cab"):
        (folder / (name * 64)).touch()
        os.utime(folder / (name * 64), (100 - age, 100 - age))
    (folder / "of the user").touch()
    compiled()
    names = {path.name for path in folder.iterdir()}
    assert {"c" * 64, "of the user"} < names and len(names) == 3


# --- processes ---

SCRIPT = """
import logging, torch, qfx
from tests.lib.decoders import decoder, ids
logging.basicConfig(format="%(message)s")
logging.getLogger("qfx.generate").setLevel("INFO")
model = decoder("gemma3", num_hidden_layers=1, layer_types=["sliding_attention"])
qfx.compile_for_generate(model, "w4a8", max_length=64)
print(model.generate(ids(1, 1), max_new_tokens=6, do_sample=False)[0].tolist())
"""


def process() -> tuple[str, str]:
    """What a fresh one prints and logs."""
    done = run_python(SCRIPT)
    return done.stdout, done.stderr


def test_a_second_process(folder: Path) -> None:
    (said, told), (again, log) = process(), process()
    assert said and said == again and "read from" not in told
    assert log.count("read from") == 1 and len([*folder.iterdir()]) == 1, log


def test_two_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing and write the same file."""
    model, cache = compiled(), program_cache.PROGRAMS.cache()
    runner, held = model.forward.runners[1, 1, (), torch.float32], program_key._named_tensors(model)
    (path,) = folder.iterdir()
    assert cache is not None
    whole, read = path.read_bytes(), []

    def write() -> None:
        for _ in range(20):
            cache.write(path.name, program_cache.written(runner, held))
            read.append(path.read_bytes())

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 80 and {*read} == {whole} and [*folder.iterdir()] == [path]
