"""Canaries: each private part of PyTorch that `qfx.host` touches still does what qfx needs of it.

A row says which feature is lost where its check fails; a file of host without a row is an error.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import linecache
import pickle
import tempfile
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch._dynamo import exc
from torch.autograd import forward_ad
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

import qfx.host
from qfx.graph.capture import clone
from qfx.host import (
    aten_graphs,
    autograd,
    conversions,
    direct_calls,
    distributed,
    dynamo,
    frame,
    gpu_build,
    inductor,
    inductor_calls,
    inductor_convolutions,
    inductor_packages,
    modules,
    native_library,
    nodes,
    operators,
    optimizers,
    partitioner,
    shapes,
    source_text,
    subclasses,
    tensors,
)
from qfx.ops import sharding

X = torch.randn(4, 8)
Look = Callable[[fx.GraphModule], Any]


def _capture(
    function: Callable[..., Any], *inputs: Any, look: Look, dynamic: bool = False
) -> list[Any]:
    """What `look` returns for each graph, while Dynamo waits for its backend."""
    found = []

    def backend(gm: fx.GraphModule, examples: object) -> Any:
        found.append(look(gm))
        return gm.forward

    try:
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    finally:
        torch._dynamo.reset()
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# --- Dynamo ---


def frame_is_seen() -> None:
    model = Model()
    (here,) = _capture(model, X, look=lambda gm: frame.surroundings())
    assert here.code is Model.forward.__code__ and here.locals == {"self": model}
    assert here.prefixes() == {"L['self']": ""} and here.owner() == "L['self']"
    assert frame.surroundings().code is None


def running_modules_are_seen() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Model()

        def forward(self, x: Tensor) -> list[Any]:
            torch._dynamo.graph_break()
            return _capture(self.layer, x, look=lambda gm: frame.surroundings())

    outer = Outer()
    (here,) = outer(X)
    assert here.running[0] is outer and here.prefixes()["L['self']"] == "layer"


def guards_tie_graphs_to_objects() -> None:
    graphs = []

    def backend(gm: fx.GraphModule, examples: object) -> Any:
        dynamo.tie_to_objects([dynamo.local_source("self")])
        graphs.append(gm)
        return gm.forward

    a, b = Model(), Model()
    for model in (a, b, a, b):
        model.compile(backend=backend)
        model(X)
    assert len(graphs) == 2
    torch._dynamo.reset()


def code_is_compiled_anew() -> None:
    graphs = []

    def backend(gm: fx.GraphModule, examples: object) -> Any:
        graphs.append(gm)
        return gm.forward

    model = Model()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(X)
    dynamo.discard_compiled(Model.forward.__code__)
    compiled(X)
    assert len(graphs) == 2
    torch._dynamo.reset()


def breaks_are_told() -> None:
    before = dynamo.break_counters()

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, backend="eager")(X)
    assert dynamo.break_counters() - before
    torch._dynamo.reset()


def skipped_code_is_captured_again() -> None:
    def run(x: Tensor, called: Callable[[Tensor], Any]) -> Any:
        return called(x)

    graphs = []

    def backend(gm: fx.GraphModule, examples: object) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(run, backend=backend)
    compiled(X, nn.LSTM(X.shape[-1], 3))  # PyTorch captures none
    compiled(X, torch.relu)
    assert graphs == []
    with dynamo.without_skip_marks():
        compiled(X, torch.relu)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_dynamo_leaves_recurrent_layers_out_of_graphs() -> None:
    """Feature: a warning under torch.compile that names the layers that stay float."""
    captured: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        captured.append(sum("lstm" in str(node.target) for node in gm.graph.nodes))
        return gm.forward

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x + 1)

    for allowed in (False, True):
        captured.clear()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(allow_rnn=allowed):
            assert dynamo.captures_recurrent() is allowed
            torch.compile(Net(), backend=backend)(torch.ones(2, 1, 3))
        assert (sum(captured) > 0) is allowed
    torch._dynamo.reset()


def test_captures_are_told_beforehand() -> None:
    """Feature: the same warning."""
    told: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    dynamo.before_captures(told.append)
    torch.compile(torch.nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    assert [getattr(found, "compiler_fn", found) for found in told] == [backend]
    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    assert len(told) == 2
    callbacks = torch._dynamo.callback.callback_handler.start_callbacks
    callbacks[:] = [each for each in callbacks if getattr(each, "of", None) != told.append]
    torch._dynamo.reset()


def test_methods_are_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feature: the warning that torch.compile(model).generate runs nothing of qfx."""
    wrapper = torch._dynamo.eval_frame.OptimizedModule
    monkeypatch.setattr(wrapper, "__getattr__", wrapper.__getattr__)

    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    class WithMethods(Model):
        def generate(self, x: Tensor, steps: int = 2) -> Tensor:
            return x + steps

        def other(self) -> int:
            return 7

    told: list[Any] = []
    dynamo.before_methods(["generate"], lambda *found: told.append(found))
    model = WithMethods()
    compiled: Any = torch.compile(model, backend=backend)
    assert inspect.signature(compiled.generate) == inspect.signature(model.generate)
    assert compiled.other() == 7 and not told  # reading a method is no call of it
    assert compiled.generate(1, steps=3) == 4
    ((found, name, of),) = told
    assert getattr(found, "compiler_fn", found) is backend and (name, of) == ("generate", model)


def control_flow_is_known() -> None:
    assert {exc.RestartAnalysis, exc.SkipFrame} == {*dynamo.control_flow()}
    assert all(issubclass(kind, Exception) for kind in dynamo.control_flow())


def compiled_models_are_unwrapped() -> None:
    model, other = Model(), Model()
    other.compile(backend="eager")
    assert dynamo.uncompiled(torch.compile(model)) is model
    assert dynamo.uncompiled_module(torch.compile(model)) is model  # type: ignore[arg-type]
    assert dynamo.uncompiled(other).__self__ is other  # type: ignore[attr-defined]
    assert callable(dynamo.aot_eager())


def inputs_have_sources() -> None:
    def look(gm: fx.GraphModule) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        return [(nodes.source_text(n), nodes.is_static_input(n)) for n in inputs]

    (found,) = _capture(Model(), X, look=look)
    texts = {text for text, static in found if static}
    assert texts == {f"L['self']._modules['inner']._parameters['{p}']" for p in ("weight", "bias")}
    assert ("L['x']", False) in found


# --- FX ---


def graphs_are_copied_whole() -> None:
    program = torch.export.export(Model(), (X,)).module()
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(program.graph, copies))
    nodes.copy_signature(program.graph, graph)
    copy = fx.GraphModule(program, graph)
    nodes.copy_annotations(program, copy, copies)  # type: ignore[arg-type]
    assert torch.equal(copy(X), program(X))


def erased_nodes_are_known() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert not nodes.is_erased(node)
    graph.erase_node(node)
    assert nodes.is_erased(node)


def new_inputs_are_accepted() -> None:
    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        gm = clone(gm)
        last = [*gm.graph.find_nodes(op="placeholder")][-1]
        with gm.graph.inserting_after(last):
            nodes.mark_as_new_input(gm.graph.placeholder("more"))
        gm.recompile()
        run = dynamo.aot_eager()(gm, [*examples, torch.zeros(1)])
        return lambda *inputs: run(*inputs, torch.zeros(1))

    model = Model()
    assert torch.equal(torch.compile(model, backend=backend)(X), model(X))
    torch._dynamo.reset()


# --- Inductor ---


def inductor_takes_operators() -> None:
    def foreign(gm: fx.GraphModule) -> bool:
        return inductor.settings(gm, {"aten", "prims", "qfx"})["size_asserts"]

    ours, other = fx.Graph(), fx.Graph()
    ours.call_function(torch.ops.qfx.pack_weight.default, (ours.placeholder("w"),))
    other.call_function(torch.ops.quantized.linear.default, (other.placeholder("x"),))
    assert [foreign(fx.GraphModule({}, g)) for g in (ours, other)] == [False, True]
    assert "max_autotune" in inductor.known_options()
    from torch._inductor import lowering

    inductor.inductor({}, None, [torch.ops.qfx.quantize], "digest")
    assert torch.ops.qfx.quantize in lowering.needs_realized_inputs
    assert inductor._takes_addcdiv_apart() in (True, False)


def linears_are_called_directly() -> None:
    """By a compiled graph, but not by a package."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    torch._dynamo.reset()
    model = nn.Linear(64, 64).eval()
    f = torch.compile(model, backend=qfx.backend, options={"minimum_gain": 0})
    with fresh_cache(), torch.no_grad():
        _, (code,) = run_and_get_code(f, torch.randn(1, 64))
    assert "qfx_linears(" in code and "torch.ops.qfx" not in code


def convolutions_are_called_directly() -> None:
    """By a compiled graph."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=32)).eval()
    f = torch.compile(model, backend=qfx.backend, options={"minimum_gain": 0})
    with fresh_cache(), torch.no_grad():
        _, (code,) = run_and_get_code(f, torch.randn(1, 16, 8, 8))
    assert code.count("qfx_convolution(") == 2 and "torch.ops.qfx" not in code


def functions_are_declared_while_a_package_is_made() -> None:
    import torch._inductor.config as config
    from torch._inductor.virtualized import V

    before = config.aot_inductor.custom_ops_to_c_shims
    with V.set_aot_compilation(True):
        inductor_packages.declare_package_calls()
        names = str(config.aot_inductor.custom_ops_to_c_shims[torch.ops.qfx.linear_dynamic.default])
    inductor_packages.declare_package_calls()
    assert "aoti_torch_cpu_linear_dynamic(" in names and "aoti_torch_cuda_linear_dynamic(" in names
    assert config.aot_inductor.custom_ops_to_c_shims == before


def tags_are_in_cache_keys() -> None:
    before = torch.compiler.config.cache_key_tag
    with inductor.in_cache_keys("ours"):
        assert torch.compiler.config.cache_key_tag == f"{before}ours"
    assert torch.compiler.config.cache_key_tag == before


def the_trace_takes_texts() -> None:
    dynamo.trace_artifact("a_name", lambda: "a text")


# --- autograd ---


def autograd_is_left_out() -> None:
    weight = torch.ones(2, requires_grad=True)
    with autograd.below_autograd():
        assert not (weight * 2).requires_grad
    assert autograd.any_requires_grad(1, weight) and not autograd.any_requires_grad(X)


def kernels_redispatch() -> None:
    library = torch.library.Library("qfx_canary", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    op = torch.ops.qfx_canary.twice.default

    def kernel(keys: Any, *inputs: Any) -> Any:
        return autograd.redispatch_below(op, keys, inputs)

    library.impl("twice", kernel, "Autograd", with_keyset=True)
    y = op(torch.ones(1, requires_grad=True))
    assert y.item() == 2 and not y.requires_grad


def forward_mode_is_seen() -> None:
    assert not autograd.in_forward_mode()
    with forward_ad.dual_level():
        assert autograd.in_forward_mode()


def compiled_backward_is_seen() -> None:
    from torch._dynamo import compiled_autograd

    assert not autograd.in_compiled_backward()
    seen = []

    def backend(gm: fx.GraphModule, examples: object) -> Any:
        seen.append(autograd.in_compiled_backward())
        return gm.forward

    model = Model()
    y = model(X).sum()
    with compiled_autograd._enable(torch.compile(backend=backend)):  # type: ignore[arg-type]
        y.backward()
    assert seen and all(seen)


def gradients_are_switched_in_graphs() -> None:
    def switched(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2

    def look(gm: fx.GraphModule) -> bool:
        return any(n.target is autograd.SET_GRAD_ENABLED for n in gm.graph.nodes)

    assert _capture(switched, X.clone().requires_grad_(), look=look) == [True]


# --- tensors ---


def fakes_are_known() -> None:
    (found,) = _capture(
        Model(), X, look=lambda gm: [n.meta.get("example_value") for n in gm.graph.nodes]
    )
    fake = next(v for v in found if tensors.is_fake(v))
    mode = tensors.fake_mode_of([1, fake])
    assert mode is not None and isinstance(mode, tensors.FakeMode)
    assert not tensors.has_values(fake) and tensors.has_values(X) and not tensors.is_fake(X)
    made = mode.from_tensor(X, static_shapes=True)
    assert tensors.is_fake(made) and made.shape == X.shape


def shapes_are_propagated() -> None:
    gm = fx.symbolic_trace(Model())
    tensors.propagate_shapes(gm, (X,))
    assert all(n.meta["val"].shape == (4, 8) for n in gm.graph.nodes if "val" in n.meta)


def modes_are_left() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), tensors.without_modes():
        assert not tensors.is_fake(torch.ones(1))


def python_definitions_run() -> None:
    with tensors.symbolic_dispatch():
        assert torch.equal(X.sum(0), X.sum(0))


def wrappers_are_known() -> None:
    nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    assert tensors.wraps_tensors(nested) and not tensors.wraps_tensors(X)


def trees_are_walked() -> None:
    assert tensors.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert tensors.tree_map(lambda x: x + 1, [1, (2,)]) == [2, (3,)]


def writes_are_counted() -> None:
    x = torch.zeros(1)
    before = tensors.version(x)
    x += 1
    assert tensors.version(x) == before + 1
    with torch.inference_mode():
        assert tensors.version(torch.zeros(1)) == 0


def storages_are_told_apart() -> None:
    ids = [tensors.storage_id(t) for t in (X, X[1:], X.clone())]
    assert ids[0] == ids[1] != ids[2] and None not in ids
    held = torch.zeros(3)
    weak = tensors.weak_storage(held)
    assert not weak.expired()
    del held
    assert weak.expired()


def symbolic_sizes_are_known() -> None:
    def look(gm: fx.GraphModule) -> Any:
        x = next(
            v for n in gm.graph.nodes
            if isinstance(v := n.meta.get("example_value"), Tensor) and v.ndim == 2
            and isinstance(v.shape[0], torch.SymInt)
        )  # fmt: skip
        m = x.shape[0]
        size = shapes.expression(m)
        assert shapes.hint(m) == 5 and shapes.ends(m)[1] == 90
        assert tensors.statically(m == m) and not tensors.statically(m == 5)
        assert shapes.compute(size * 2 + 1, {size: 3}) == 7
        assert shapes.holds_now(m, size > 2)
        return [ends for _, ends in shapes.marked(m)]

    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0, min=3, max=90)
    ((found,),) = _capture(lambda x: x * 2, x, look=look)
    assert found == (3, 90)


# --- operators, modules, optimizers, FSDP ---


def operators_are_known() -> None:
    mm = torch.ops.aten.mm
    assert isinstance(mm.default, operators.OpOverload) and mm.default in operators.overloads(mm)
    assert isinstance(mm, operators.OpOverloadPacket) and operators.overloads(torch.mm) == []
    names = [argument.name for argument in operators.schema(mm).arguments]
    assert names == ["self", "mat2"] and not operators.schema(mm).is_mutable
    assert operators.has_kernel("qfx::quantize", "CPU")
    assert not operators.has_kernel("qfx::quantize", "MPS")
    higher = torch.ops.higher_order.cond
    assert isinstance(higher, operators.HigherOrderOperator)
    assert operators.ENCODER_LAYER in operators.UNNAMED_MATMULS
    assert len(operators.UNNAMED_MATMULS) >= 3


def hooks_are_where_they_were() -> None:
    of, to = nn.Linear(2, 2), nn.Linear(2, 2)
    calls = []
    handle = of.register_forward_pre_hook(lambda *_: calls.append(1))
    modules.share_hooks(of, to)
    to(torch.zeros(1, 2))
    handle.remove()
    to(torch.zeros(1, 2))
    assert calls == [1] and not [*modules.pre_hooks(of)]
    of.register_state_dict_post_hook(lambda *_: None)
    assert len([*modules.state_hooks(of)]) == 1
    assert not modules.has_old_backward_hook(of)
    of.register_backward_hook(lambda *_: None)
    assert modules.has_old_backward_hook(of)
    assert [[*names] for names in modules.registries(of)] == [["weight", "bias"], [], []]


def owners_are_counted() -> None:
    tensor = torch.zeros(3)
    assert tensors.owners(tensor) == 1
    other = tensor[1:]
    assert (tensors.owners(tensor), tensors.owners(other)) == (2, 2)
    storage = tensor.untyped_storage()
    del other
    assert tensors.owners(tensor) == 1, storage


def checks_run_once() -> None:
    calls, model = [], Model()

    def check(*arguments: object) -> None:
        calls.append(arguments)

    for _ in range(2):
        modules.register_once(model, check)
    model.load_state_dict(model.state_dict())
    assert len(calls) == 1


def steps_are_seen() -> None:
    seen: list[Tensor] = []
    active = [True]
    optimizers.after_each_step(lambda ps: seen.extend(ps) if active else None)
    model = Model()
    model(X).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    active.clear()  # the hook stays for the life of the process
    assert {*map(id, seen)} == {*map(id, model.parameters())}


def sharded_modules_are_known() -> None:
    from torch.distributed.fsdp import FSDPModule

    class Managed(FSDPModule, Model):
        def __new__(cls) -> Managed:
            return object.__new__(cls)

    assert distributed.is_sharded(Managed()) and not distributed.is_sharded(Model())
    (plain, managed) = (
        _capture(Model(), X, look=lambda gm, around=around: _gathered(gm, around))[0]
        for around in ([], [Managed()])
    )
    assert not any(plain) and all(managed)


def _gathered(gm: fx.GraphModule, around: list[nn.Module]) -> list[bool]:
    held = distributed.gathered_weights(around)
    return [held(node) for node in gm.graph.find_nodes(op="placeholder")]


# --- distributed tensors ---


def rules_look_at_lists() -> None:
    """What is remembered of a rule is told apart by lists of integers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharding.register()
        x = distribute_tensor(X, mesh, [Shard(0)])
        for per_tensor, placement in ((0, Shard(0)), (1, Replicate())):
            q, _, _ = torch.ops.qfx.quantize(x, [8, 1, per_tensor, 0, 0])
            assert q.placements == (placement,)
    finally:
        dist.destroy_process_group()


# --- texts of graph modules ---


def texts_are_where_they_were() -> None:
    with source_text.released_source_texts():
        gm = fx.symbolic_trace(Model())
        first = gm.forward.__code__.co_filename
        gm.recompile()
        name = gm.forward.__code__.co_filename
        assert first != name and {first, name} <= {*source_text._TEXTS}
    assert first not in source_text._TEXTS and name in source_text._TEXTS
    assert linecache.getlines(name) and "def forward" in inspect.getsource(type(gm).forward)
    del gm
    gc.collect()
    assert name not in source_text._TEXTS and name not in linecache.cache


def kernels_are_asked_of_the_dispatcher() -> None:
    assert gpu_build.has_kernel("linear", torch.device("cpu"))
    assert not gpu_build.has_kernel("linear", torch.device("meta"))
    assert gpu_build.why_not(torch.device("cpu")) is None


def libraries_are_where_they_are_looked_for() -> None:
    native_library.make_symbols_global()  # OSError for a libqfx that no process has loaded
    everywhere = ctypes.CDLL(None)
    assert everywhere.aoti_torch_cpu_linear_dynamic and everywhere.qfx_api_isa
    assert native_library.FACE.name == "_C.abi3.so"


class _Half(Tensor):
    """Floats that are half of what its tensor holds."""

    held: Tensor
    __torch_function__ = subclasses.NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := subclasses.decomposed(func, args, kwargs or {})) is not NotImplemented:
            return found
        plain = (a.held / 2 if isinstance(a, _Half) else a for a in args)
        return func(*plain, **(kwargs or {}))


def _half(dtype: torch.dtype = torch.float32) -> _Half:
    made = subclasses.wrapper(_Half, (3, 2), dtype, torch.device("cpu"))
    made.held = torch.full((3, 2), 2.0)
    return made


def wrappers_compute_by_their_own_rules() -> None:
    half = _half()
    assert torch.equal(half + 1, torch.full((3, 2), 2.0))
    assert torch.equal(torch.matmul(half, torch.ones(2, 1)), torch.full((3, 1), 2.0))
    with pytest.raises(RuntimeError, match="data pointer"):
        half.data_ptr()


def wrappers_become_others_and_parameters() -> None:
    half = _half()
    reference = weakref.ref(half)
    assert subclasses.become(half, _half(torch.bfloat16)) and half.dtype == torch.bfloat16
    assert reference() is half and torch.equal(half.held, torch.full((3, 2), 2.0))
    assert isinstance(subclasses.as_parameter(half), nn.Parameter) and not half.requires_grad
    linear = nn.Linear(2, 3)
    linear.weight = half  # type: ignore[assignment]
    assert dict(linear.named_parameters())["weight"] is half
    meta = subclasses.wrapper(_Half, (3, 2), torch.float32, torch.device("meta"))
    assert not subclasses.become(half, meta)


def saved_tensors_are_edited() -> None:
    """What is saved in the place of a tensor reaches the backward graph."""

    def halved(saved: Any, results: Any, gradients: Any) -> Any:
        ((node, read),) = [pair for pair in saved if pair[0].target is torch.ops.aten.mm.default]
        assert results and len(gradients) == 1 and node.name == read.name
        with node.graph.inserting_after(node):
            half = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5), name="half")
        half.meta["val"] = node.meta["val"]
        with read.graph.inserting_before(read):
            made = read.graph.create_node("placeholder", "half", name="half")
        made.meta["val"] = half.meta["val"]
        read.replace_all_uses_with(made)
        read.graph.erase_node(read)
        return {node: [half]}

    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        x = torch.ones(4, 8, requires_grad=True)
        options: Any = {"custom_partitioner_fn": partitioner.partitioner(halved, "digest")}
        step = torch.compile(lambda x: (x @ torch.ones(8, 8)).square().sum(), options=options)
        step(x).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 8), 64.0))  # of 128


def partitioners_are_in_cache_keys() -> None:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Given(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any: ...

        def uuid(self) -> Any:
            return "theirs"

    def key(*arguments: Any) -> Any:
        made = partitioner.partitioner(lambda saved, results, gradients: {}, *arguments)
        assert pickle.loads(pickle.dumps(made)) == made.uuid()
        return made.uuid()

    keys = {key("one"), key("two"), key("one", Given())}
    assert len(keys) == 3 and key("one") in keys


def transforms_are_seen() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(autograd.transforming())
        return x.sum()

    torch.func.grad(f)(X)
    assert seen == [True] and not autograd.transforming()


def weights_know_their_conversions() -> None:
    converter = WeightConverter(["w1", "w3"], "up", operations=[Concatenate(dim=1)])
    other = conversions.with_operations(converter, [Transpose(1, 2)])
    assert [type(each) for each in other.operations] == [Transpose]
    assert (other.source_patterns, other.target_patterns) == (
        converter.source_patterns, converter.target_patterns
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    seen: list[Any] = []
    conversions.change_conversions(loaded, lambda kept: seen.append(kept) or kept)
    assert len(seen) == 1


TINY: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1,
}  # fmt: skip


def graphs_keep_whole_operators() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    graph = aten_graphs.aten_graph(gm, [X])
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert called == {torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default}


def views_know_their_base() -> None:
    x = torch.ones(3, 4)
    assert tensors.view_base(x.t()) is x and tensors.view_base(x) is x


def saved_tensors_are_read() -> None:
    x = torch.ones(3, requires_grad=True)
    node = (x * x.detach()).grad_fn
    assert [t.shape for t in autograd.saved_by(node)] == [(3,)]  # of x.detach() alone
    assert autograd.short_name(node) == "Mul"
    y = torch.cat([x, x]).relu()
    assert torch.equal(autograd.saved_by(y.grad_fn)[0], y)
    q = torch.ops.qfx.rotate(torch.ones(2, 16, requires_grad=True), torch.ones(16), 16)
    assert len(autograd.saved_by(q.grad_fn)) == 1
    assert autograd.short_name(q.grad_fn) == "qfx::rotate"


CANARIES: dict[ModuleType, dict[Callable[[], None], str]] = {
    aten_graphs: {graphs_keep_whole_operators: "the inner compiler 'program'"},
    frame: {
        frame_is_seen: "names of matmuls: skip, only, recipes and explain",
        running_modules_are_seen: "names of layers behind a graph break",
    },
    dynamo: {
        guards_tie_graphs_to_objects: "skip and recipes that tell layers apart which are alike",
        code_is_compiled_anew: "buffers that are rewritten between calls: packed at every call",
        skipped_code_is_captured_again: "explain and calibrate of code that once was not captured",
        breaks_are_told: "explain says why code is not captured",
        control_flow_is_known: "restarts of Dynamo inside the backend: they would be faults",
        compiled_models_are_unwrapped: "explain and calibrate of compiled models",
        the_trace_takes_texts: "plans in TORCH_TRACE",
    },
    nodes: {
        inputs_have_sources: "which inputs are weights, and what they are called",
        graphs_are_copied_whole: "qfx.rewrite of exported programs",
        erased_nodes_are_known: "fusing",
        new_inputs_are_accepted: "packed weights under torch.compile",
    },
    inductor: {
        inductor_takes_operators: "the inner compiler, and reading inputs once",
        tags_are_in_cache_keys: "caches on disk that know which qfx compiled",
    },
    direct_calls: {linears_are_called_directly: "the speed of small calls in compiled graphs"},
    inductor_calls: {linears_are_called_directly: "the speed of small linears in compiled graphs"},
    inductor_convolutions: {
        convolutions_are_called_directly: "the speed of small convolutions in compiled graphs",
    },
    native_library: {
        libraries_are_where_they_are_looked_for: "packages, and files of an earlier build",
    },
    inductor_packages: {
        functions_are_declared_while_a_package_is_made: "the speed of small calls in packages",
    },
    subclasses: {
        wrappers_compute_by_their_own_rules: "quantized weights are read and written as floats",
        wrappers_become_others_and_parameters: "casting, loading and assigning quantized weights",
    },
    autograd: {
        transforms_are_seen: "gradients by torch.func through int8 linears",
        autograd_is_left_out: "the speed of small calls in inference",
        kernels_redispatch: "gradients of all operators",
        forward_mode_is_seen: "errors in the place of lost tangents",
        compiled_backward_is_seen: "compiled autograd keeps its products float",
        gradients_are_switched_in_graphs: "which matmuls of a graph train",
        saved_tensors_are_read: "qfx.saved_tensors: what operators keep for the backward pass",
    },
    tensors: {
        fakes_are_known: "compiling at all: shapes of packed weights",
        views_know_their_base: "save_in_int8 leaves parameters as they are",
        shapes_are_propagated: "qfx.trace with example inputs",
        modes_are_left: "measuring costs while a graph is compiled",
        python_definitions_run: "nn.MultiheadAttention with symbolic sizes",
        wrappers_are_known: "reasons for nested and distributed tensors",
        trees_are_walked: "what operators write",
        writes_are_counted: "explain leaves a model as it was",
        storages_are_told_apart: "the weight cache",
        owners_are_counted: "release_weights leaves what other tensors hold as well",
    },
    shapes: {symbolic_sizes_are_known: "break-evens of symbolic sizes"},
    source_text: {texts_are_where_they_were: "memory of source texts that nobody reads again"},
    gpu_build: {kernels_are_asked_of_the_dispatcher: "which devices run which schemes in int8"},
    operators: {operators_are_known: "matching operators, what they write, what has kernels"},
    conversions: {
        weights_know_their_conversions: "checkpoints of experts quantized while they are read"
    },
    modules: {
        hooks_are_where_they_were: "quantize_ and prepare_qat of linears with hooks",
        checks_run_once: "state dicts are checked as a whole before any of it is taken",
    },
    partitioner: {
        saved_tensors_are_edited: 'saved_activations="int8": what compiled steps save',
        partitioners_are_in_cache_keys: "compiled steps from caches after a change of qfx",
    },
    optimizers: {steps_are_seen: "weights that a fused optimizer has changed"},
    distributed: {
        rules_look_at_lists: "operators of distributed tensors",
        sharded_modules_are_known: "models under FSDP",
    },
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize(
    ("check", "lost"),
    [(check, lost) for rows in CANARIES.values() for check, lost in rows.items()],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_without_it_is_lost(check: Callable[[], None], lost: str) -> None:
    try:
        check()
    except Exception as error:
        changed = f"PyTorch {torch.__version__} has changed"
        raise AssertionError(f"{changed}, and lost is: {lost}") from error


def test_every_file_of_host_has_a_canary() -> None:
    files = {name for name, _ in inspect.getmembers(qfx.host, inspect.ismodule)}
    assert files == {module.__name__.rpartition(".")[2] for module in CANARIES}
