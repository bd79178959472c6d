"""Models of other tools: the weights are bit for bit those that the tool makes of the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import qfx
import qfx.hf  # for tables of positions of models on the meta device
from qfx.files.foreign.gguf_blocks import KINDS, weight_at
from qfx.files.foreign.gguf_table import gguf_table_of
from qfx.values.config import ASYMMETRIC
from tests.files.foreign import make
from tests.lib import bounds
from tests.lib.gguf_files import Kind, llama_gguf, write_gguf

HERE = Path(make.__file__).parent
VALUES: dict[str, str] = json.loads((HERE / "values.json").read_text())
IDS = torch.arange(12)[None]
FILES = (*make.COMPRESSED, *(f"{name}.safetensors" for name in make.TORCHAO))


class Net(nn.Module):
    """With the names of its file."""

    def __init__(self, k: int = 64, n: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, k)
        self.up = nn.Linear(k, n)
        self.up.weight.data[0, :32] = 0  # a group of zeros
        self.up.weight.data[1] *= 1000
        self.up.weight.data[2, :] = self.up.weight.data[2].abs()  # scales of either sign
        self.up.weight.data[3, :] = -self.up.weight.data[3].abs()

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.table(ids))


def meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make().eval()


def llama(dtype: torch.dtype = torch.float32) -> Any:
    return meta(lambda: LlamaForCausalLM(make.config())).to(dtype)


def net_file(path: Path, kind: Any, table: Any = Kind.F32, k: int = 64) -> dict[str, Tensor]:
    net = Net(k)
    state = {n: t.detach() for n, t in net.state_dict().items()}
    kinds = {"table.weight": table, "up.weight": kind, "up.bias": Kind.F32}
    return write_gguf(path, {n: (state[n], kinds[n]) for n in state})


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign of zeros."""
    return a.dtype == b.dtype and torch.equal(a, b)


# --- GGUF ---


OF_GGUF = {
    "Q8_0": "xs8g32_ws8g32", "Q4_0": "xs8g32_ws4p32", "Q5_0": "xs8g32_ws5p32",
    "Q4_1": "xs8g32_wa4p32", "Q5_1": "xs8g32_wa5p32",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_GGUF)
def test_kinds_of_gguf_keep_their_values(name: str, tmp_path: Path) -> None:
    values = net_file(tmp_path / "a.gguf", Kind[name])
    got = qfx.load(tmp_path / "a.gguf", meta(Net))
    assert isinstance(got.up, qfx.nn.Linear)
    assert equal(got.up.weight.detach(), values["up.weight"])
    assert equal(got.up.bias.data, values["up.bias"])
    assert str(got.up.scheme) == OF_GGUF[name]
    signs = weight_at(tmp_path / "a.gguf", gguf_table_of(tmp_path / "a.gguf").tensors["up.weight"],
                      None).scale.sign()  # fmt: skip
    assert {*signs.unique().tolist()} == (
        {-1, 0, 1} if name[3] == "0" and name != "Q8_0" else {0, 1}
    )


@pytest.mark.parametrize("name", KINDS)
def test_codes_scales_and_minima_are_those_of_gguf(name: str, tmp_path: Path) -> None:
    """Of kinds that no linear holds, too; of more rows than are read at once."""
    path = tmp_path / "a.gguf"
    w = torch.randn(9000, 256, generator=torch.Generator().manual_seed(0))
    values = write_gguf(path, {"w": (w, Kind[name])})
    block = gguf_table_of(path).tensors["w"]
    assert block.size > 2**20
    read = weight_at(path, block, None)
    assert equal(read.values(), values["w"])
    assert int(read.codes.min()) >= -(2 ** (read.grid.bits - 1)) and read.scale.dtype == torch.half
    order = torch.randperm(len(w))
    assert equal(weight_at(path, block, order).values()[order], values["w"])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q6_K"])
def test_tables_are_floats_of_the_type_of_the_skeleton(kind: str, tmp_path: Path) -> None:
    values = net_file(tmp_path / "a.gguf", Kind.Q8_0, Kind[kind], k=256)
    for dtype in (torch.float32, torch.bfloat16):
        got = qfx.load(tmp_path / "a.gguf", meta(lambda: Net(256)).to(dtype))
        assert equal(got.table.weight.data, values["table.weight"].to(dtype))
        assert got(torch.arange(4)).dtype == dtype


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_linears_in_float_stay_float(kind: str, tmp_path: Path) -> None:
    values = net_file(tmp_path / "a.gguf", Kind[kind])
    up = qfx.load(tmp_path / "a.gguf", meta(Net)).up
    assert type(up) is nn.Linear and equal(up.weight.data, values["up.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_of_gguf(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows of queries and keys are back in the order of transformers; a head that is tied has the
    codes of the embedding, which is float."""

    def float_model() -> LlamaForCausalLM:
        config = make.config()
        config.tie_word_embeddings = tied
        config.num_hidden_layers = 2
        return LlamaForCausalLM(config).eval()

    torch.manual_seed(1)
    kinds = [Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.Q4_1]
    values = llama_gguf(tmp_path / "a.gguf", float_model(), kinds)
    got = qfx.load(tmp_path / "a.gguf", meta(float_model).to(dtype))
    if tied:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    check_model(got, values, dtype)
    assert isinstance(got.lm_head, qfx.nn.Linear)
    expected = float_model()
    expected.load_state_dict(values)
    assert torch.equal(got.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


def test_an_architecture_whose_rows_are_as_they_are(tmp_path: Path) -> None:
    """With biases of queries and keys."""
    config = Qwen2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config).eval()
    model.model.layers[0].self_attn.q_proj.bias.data.normal_()
    values = llama_gguf(tmp_path / "a.gguf", model, [Kind.Q8_0], "qwen2", interleaved=False)
    got = qfx.load(tmp_path / "a.gguf", meta(lambda: Qwen2ForCausalLM(config)))
    check_model(got, values, torch.float32)


def check_model(model: Any, values: dict[str, Tensor], dtype: torch.dtype) -> None:
    """All weights are those; each linear is within its bound of the float product at its input."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, qfx.nn.Linear)}
    for name, value in values.items():
        owner = name.removesuffix(".weight")
        if owner in linears:
            assert equal(linears[owner].weight.dequantize(torch.float32), value), name
        else:
            assert equal(state[name].detach(), value.to(dtype)), name
    assert len(linears) >= 7
    check_calls(model, linears)


def check_calls(model: Any, linears: dict[str, Any]) -> None:
    """(B2) with an exact weight, at what each linear is called with."""
    calls: list[Any] = []
    for module in linears.values():
        module.register_forward_hook(lambda m, args, y: calls.append((m, args[0], y)))
    with torch.no_grad():
        model(IDS)
    assert len(calls) == len(linears)
    for module, x, y in calls:
        exact = [bounds.Known(t.double(), torch.zeros_like(t).double()) for t in
                 (x, module.weight.detach(), torch.zeros(1))]  # fmt: skip
        if module.scheme.x is not None:
            exact[0] = bounds.widened(module.scheme.x, exact[0], (-1,))

        def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return x @ w.mT + b

        if module.bias is not None:
            b = module.bias.detach().double()
            exact[2] = bounds.Known(b, torch.zeros_like(b))
        u = bounds.UNIT[y.dtype]
        allowed = bounds.product(u, linear, *exact, module.in_features)
        off = (y.double() - linear(*(known.v for known in exact))).abs()
        assert (off <= allowed).all() and float(off.max()) > 0


# --- compressed-tensors and torchao ---


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_libraries_keep_their_values(name: str, tmp_path: Path) -> None:
    got = qfx.load(HERE / name, llama())
    key = name.removesuffix(".safetensors")
    linears = {n: m for n, m in got.named_modules() if isinstance(m, qfx.nn.Linear)}
    found = {f"{key}/{n}.weight": make.digest(m.weight.detach()) for n, m in linears.items()}
    assert found == {n: d for n, d in VALUES.items() if n.startswith(f"{key}/")}
    floats = make.float_model()
    assert equal(got.lm_head.weight.data, floats.lm_head.weight.data)  # in the type of the file
    assert {str(m.scheme) for m in linears.values()} == {SCHEMES[name]}
    check_calls(got, linears)
    qfx.save(got, tmp_path)
    with torch.no_grad():
        assert torch.equal(qfx.load(tmp_path, llama())(IDS).logits, got(IDS).logits)


def test_what_was_loaded_is_saved_by_transformers_as_what_it_is(tmp_path: Path) -> None:
    """From a file of another tool, and from a folder of ours."""
    got = qfx.load(HERE / "w4a16_zeros", llama())
    with torch.no_grad():
        expected = got(IDS).logits
        qfx.save(got, tmp_path / "ours")
        for name, model in {"a": got, "b": qfx.load(tmp_path / "ours", llama())}.items():
            model.save_pretrained(tmp_path / name)
            again = LlamaForCausalLM.from_pretrained(tmp_path / name)
            assert torch.equal(again(IDS).logits, expected)


def test_every_grid_of_compressed_tensors() -> None:
    """Bits, groups, zero points, and rows that fill no word; each a group of its own in
    config.json, by name or by pattern."""
    got = qfx.load(HERE / "grids", meta(make.Grids))
    for name, (bits, size, zeros) in make.GRIDS.items():
        module = got.get_submodule(name)
        assert make.digest(module.weight.detach()) == VALUES[f"grids/{name}.weight"], name
        x = qfx.QSpec(group=size) if size else ASYMMETRIC
        assert module.scheme == qfx.Scheme(x, qfx.QSpec(bits, not zeros, group=size))


SCHEMES = {
    "w8a8": "xs8r_ws8r",
    "w4a16": "xs8g32_ws4p32",
    "w4a16_zeros": "xs8g32_wa4p32",
    "int8_weights.safetensors": "xa8r_ws8r",
    "int8_dynamic.safetensors": "xs8r_ws8r",
}


def test_codes_below_those_that_we_make_are_kept() -> None:
    """Other tools use all of the range: -128, and -8 of four bits."""
    for name, least in {"w8a8": -128, "w4a16": -8}.items():
        got = qfx.load(HERE / name, llama())
        codes = [int(m.codes.min()) for m in got.modules() if isinstance(m, qfx.nn.Linear)]
        assert min(codes) == least


@pytest.mark.parametrize("x", [None, qfx.QSpec(), ASYMMETRIC, qfx.QSpec(bits=7)])
def test_activations_are_chosen(x: Any) -> None:
    got = qfx.load(HERE / "int8_weights.safetensors", llama(), x=x)
    linears = {n: m for n, m in got.named_modules() if isinstance(m, qfx.nn.Linear)}
    assert {m.scheme.x for m in linears.values()} == {x}
    check_calls(got, linears)


def test_activations_in_groups_as_llama_cpp_has_them(tmp_path: Path) -> None:
    values = net_file(tmp_path / "a.gguf", Kind.Q4_0)
    got = qfx.load(tmp_path / "a.gguf", meta(Net), x=qfx.QSpec(group=32))
    assert str(got.up.scheme) == "xs8g32_ws4p32"
    assert equal(got.up.weight.detach(), values["up.weight"])


def test_the_files_are_what_the_libraries_write(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("torchao", reason="torchao is not installed")
    make.make(tmp_path)
    assert json.loads((tmp_path / "values.json").read_text()) == VALUES


def test_a_state_dict_of_torchao(tmp_path: Path) -> None:
    """In memory, and as torch.save keeps it."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = Net()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch.save(model.state_dict(), tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"net\.pt is a file of torch\.save.*of torchao: import"):
        qfx.load(tmp_path / "net.pt", meta(Net))
    for state in (model.state_dict(), torch.load(tmp_path / "net.pt", weights_only=True)):
        got = qfx.load(state, meta(Net))
        assert equal(got.up.weight.detach(), model.up.weight.dequantize().detach())
    got.up.bias.data.fill_(7)
    assert not (model.up.bias == 7).any()  # nothing is shared


# --- what no linear holds ---


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_other_kinds_are_refused_by_name_or_quantized_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.gguf"
    values = net_file(path, Kind[kind], k=256)
    with pytest.raises(
        ValueError, match=rf"a\.gguf: up\.weight is {kind}, which has .*requantize="
    ):
        qfx.load(path, meta(lambda: Net(256)))
    w = values["up.weight"]
    with caplog.at_level(logging.WARNING):
        got = qfx.load(path, meta(lambda: Net(256)), requantize=qfx.Config())
    lost = (got.up.weight.detach() - w).norm() / w.norm()
    assert 0 < lost < 0.02
    assert f"up ({kind}): xa8r_ws8r_h64, off by {float(lost):.2%}" in caplog.text
    left = qfx.load(path, meta(lambda: Net(256)), requantize=qfx.Config(skip=["up"])).up
    assert type(left) is nn.Linear and equal(left.weight.data, w)


PER_COLUMN = qfx.Scheme(w=qfx.QSpec(axes=qfx.PER_COLUMN))


@pytest.mark.parametrize("scheme", ["w8", "w8a8-groups", "w4a8", PER_COLUMN])
def test_any_scheme_quantizes_again(scheme: Any, tmp_path: Path) -> None:
    values = net_file(tmp_path / "a.gguf", Kind.Q6_K, k=256)
    how = qfx.Config(scheme=scheme)
    got = qfx.load(tmp_path / "a.gguf", meta(lambda: Net(256)), requantize=how)
    expected = Net(256)
    expected.load_state_dict(values)
    plain = qfx.Config(scheme=scheme, smoothing=False)
    assert torch.equal(got.up.weight, qfx.quantize_(expected, plain).up.weight)
