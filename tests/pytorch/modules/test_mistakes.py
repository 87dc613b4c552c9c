"""Errors after mistakes of users of `hostweave.torch.compile` and `as_torch_op`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput  # noqa: E402
from torch_threads import on_ranks  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, HostweaveError, ProgramError  # noqa: E402
from hostweave.torch.nodes import location  # noqa: E402

X = torch.ones(4, 8)
MESH = hw.Mesh(tp=2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.down(self.act(self.up(x)))
        return y if scale is None else y * scale


class Written(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


LAYER = Layer().eval()


def test_a_sparse_tensor() -> None:
    message = r"Layer: example_inputs\[0\] is a tensor of torch.sparse_csr, but only torch.strided is supported; pass its to_dense\(\)"
    with pytest.raises(ProgramError, match=message), pytest.warns(UserWarning, match="beta"):
        compiled(inputs=(X.to_sparse_csr(),))


def compiled(plan: Any = None, mesh: Any = MESH, inputs: Any = (X,), module: Any = None) -> Any:
    return hostweave.torch.compile(module or LAYER, mesh, plan, inputs)


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "matches nothing": ({"upp.weight": "tp, -"}, r'plan: "upp.weight" matches none of the parameters, .*; did you mean up.weight\?'),
    "no such layer": ({"layers.*.weight": "tp, -"}, 'plan: "layers.*.weight" matches none of the parameters, inputs or modules; '),
    "a style for a missing module": ({"gate": ColwiseParallel()}, 'plan: "gate" matches none of the modules; .*'),
    "two entries that contradict each other": (
        {"up.weight": "tp, -", "*.weight": "-, tp"},
        r'plan: up.weight is sharded as "tp, -" by "up.weight" and as "-, tp" by "\*.weight"; keep one',
    ),
    "a style that contradicts a text": (
        {"up": ColwiseParallel(), "up.weight": "-, tp"},
        'plan: up.weight is sharded as "tp, -" by "up" and as "-, tp" by "up.weight"; keep one',
    ),
    "too few dims": ({"up.weight": "tp"}, 'plan: "up.weight" states 1 dim, but up.weight has 2; write "tp" or "-" for each dim'),
    "too many dims": ({"up.bias": "tp, -"}, 'plan: "up.bias" states 2 dims, but up.bias has 1'),
    "no such axis": ({"up.weight": "dp, -"}, r"""plan: "up.weight": "dp, -": mesh\(tp=2\) has no axis 'dp'; its axes: tp"""),
    "axis twice": ({"up.weight": "tp, tp"}, 'plan: "up.weight": "tp, tp": the axis tp is named twice; name it once'),
    "no text": ({"up.weight": 0}, r'plan: "up.weight": 0 is neither a str such as "tp, -" nor a ParallelStyle of torch'),
    "style of an activation": ({"act": ColwiseParallel()}, "plan: act is a ReLU, but ColwiseParallel supports only Linear and Embedding"),
    "unknown style": (
        {"up": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())},
        "plan: up: PrepareModuleOutput is not supported; use ColwiseParallel, ",
    ),
    "dims of a result": ({"act": "-, -, tp"}, "plan: act returns 2 dims, but 3 dims are stated; write an axis or - for each dim"),
    "input": ({"x": "-"}, 'plan: "x" states 1 dim, but x has 2'),
}


@pytest.mark.usefixtures("exported_once")
@pytest.mark.parametrize(("plan", "message"), PLANS.values(), ids=PLANS)
def test_plan(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compiled(plan)


def branch(x: Any) -> Any:
    return x + 1 if x.sum() > 0 else x - 1


def unsupported(x: Any) -> Any:
    return torch.linalg.svdvals(x)


@dataclass
class Result:
    logits: Any


def masked(x: Any) -> Any:
    return x[x > 0]


def replaced_data(x: Any) -> Any:
    y = x + 1
    y.data = x * 2
    return y


MODULES: dict[str, tuple[Callable[..., Any], str]] = {
    "branch on data": (
        branch,
        r"^test_mistakes.py:\d+: Written: a branch depends on the values of a tensor, .*; write tensor ops instead, such as torch.where$",
    ),
    "an exception of the user": (
        lambda x: {"a": x}["b"],
        r"^test_mistakes.py:\d+: Written: forward raises KeyError: 'b'; correct forward, or the example inputs$",
    ),
    "another shape": (
        lambda x: x @ torch.ones(7, 3),
        r"^test_mistakes.py:\d+: Written: torch.export: a and b must have same reduction dim.*$",
    ),
    "dataclass": (
        Result,
        r"Written: torch.export: Found <class '.*'> .*; use tensors, or call torch.export.register_dataclass\(Result\) for a dataclass$",
    ),
    "unsupported": (unsupported, r"ops that are not supported: aten._linalg_svd.default, 1 times, first at test_mistakes.py:\d+.*"),
    "gradients": (torch.func.grad(torch.sum), r"forward computes gradients, which is not compiled; .* torch.func.jvp$"),
    "mask": (
        masked,
        r"^test_mistakes.py:\d+: a size depends on a tensor, as in x\[mask\] .*, and is known only at a call; use .* torch.where",
    ),
    "size": (
        lambda x: torch.arange(x.argmax().item()),
        r"^test_mistakes.py:\d+: a size depends on a tensor, as in .* torch.arange\(t.item\(\)\), and is known only at a call; use a fixed",
    ),
    "int": (
        lambda x: x * int(x.argmax()),
        r"^test_mistakes.py:\d+: Written: a branch depends on the values of a tensor, .*; int\(t\), .* are branches, too",
    ),
    "data": (
        lambda x: x.data.add_(0),
        r"^test_mistakes.py:\d+: forward uses .data of a tensor, which torch.export does not trace; use detach\(\), or write in place in",
    ),
    "new data": (replaced_data, r"^test_mistakes.py:\d+: forward uses .data of a tensor, .*; use detach\(\)"),
}


@pytest.mark.parametrize(("forward", "message"), MODULES.values(), ids=MODULES)
def test_module(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compiled(module=Written(forward).eval())


COMPILES: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: hostweave.torch.compile(torch.relu, MESH, {}, (X,)), "is not a torch.nn.Module; pass the module itself"),  # type: ignore[arg-type]
    "no inputs": (lambda: compiled(inputs=()), "example_inputs is empty; pass the arguments of one call"),
    "a lazy module": (
        lambda: compiled(module=nn.Sequential(nn.LazyLinear(3))),
        "^Sequential: 0.weight has no shape yet; call the lazy module",
    ),
    "wrong shape": (lambda: compiled(inputs=(torch.ones(4, 9),)), "(?s)Layer: torch.export: .*pass example_inputs that the module takes"),
    "too many": (lambda: compiled(inputs=(X, None, X)), "(?s)Layer: torch.export: "),
    "unknown keyword": (lambda: compiled(inputs={"y": X}), "(?s)Layer: torch.export: "),
    "mesh": (lambda: compiled(mesh=2), "mesh=2 is neither an hw.Mesh nor a DeviceMesh with mesh_dim_names; write hw.Mesh"),
    "two axes": (
        lambda: compiled({"up": ColwiseParallel()}, mesh=hw.Mesh(a=2, b=2)),
        r'plan: "up": a ParallelStyle needs one mesh axis, but mesh\(a=2, b=2\) has 2; name one of them tp',
    ),
    "compiled before": (
        lambda: hostweave.torch.compile(compiled(), hw.Mesh(tp=2), {}, (X,)),
        "the module is already compiled; pass the original module",
    ),
}


@pytest.mark.parametrize(("make", "message"), COMPILES.values(), ids=COMPILES)
def test_compile(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        make()


@pytest.fixture(scope="module")
def layer() -> Any:
    return compiled({"up": ColwiseParallel()}, inputs=(X, 2.0))


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too few": (lambda c: c(X), "Layer: the arguments differ in structure from example_inputs; pass the same number"),
    "keyword": (
        lambda c: c(X, scale=2.0),
        r"Layer: the keyword arguments are \['scale'\], and were \[\] at compile time; pass the same arguments",
    ),
    "number": (lambda c: c(X, 3.0), "Layer: scale is 3.0, and was 2.0 at compile time; compile it again"),
    "a tensor for a number": (
        lambda c: c(X, torch.tensor([2.0, 3.0])),
        r"Layer: scale is tensor\(\[2., 3.\]\), and was 2.0 at compile time; compile it again",
    ),
    "no tensor": (lambda c: c(1, 2.0), "Layer: x is 1, and was a tensor at compile time; pass a tensor"),
    "shape": (lambda c: c(torch.ones(5, 8), 2.0), "x: dim 0 is 5; it must be 4.*; or compile for sizes that change, with dynamic_shapes=$"),
    "dtype": (lambda c: c(torch.ones(4, 8, dtype=torch.float64), 2.0), r"x: expected f32\[4, 8\], got f64\[4, 8\]; cast it"),
    "tangents": (
        lambda c: torch.func.jvp(lambda x: c(x, 2.0), (X,), (X,)),
        r"Layer: torch.vmap, torch.func.jvp, .* do not see the ops of a compiled module; apply the transform to the original module",
    ),
    "captured without a group": (
        lambda c: c.capture(X, 2.0),
        "Layer: capture: without a group all ranks run in this process .*; call hw.init on each rank",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch itself uses torch.jit for jvp.
@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_call(layer: Any, call: Callable[[Any], Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(ArgumentError, match=message):
        call(layer)


def test_a_number_that_is_nan() -> None:
    call = compiled({"up": ColwiseParallel()}, inputs=(X, math.nan))
    with torch.no_grad():
        assert call(X, math.nan).isnan().all()


def test_gradients_are_refused(layer: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Layer: this is a forward program, without gradients; call it in torch.no_grad"):
        layer(X, 2.0)


def test_a_module_that_was_changed_is_refused() -> None:
    module = Layer().eval()
    program = compiled(module=module)
    with torch.no_grad():
        module.train()
        with pytest.raises(ArgumentError, match=r"Layer: the mode has changed from eval\(\); compile it again"):
            program(X)
        module.eval()
        module.up.weight = nn.Parameter(torch.zeros(16, 8))
        with pytest.raises(ArgumentError, match=r"Layer: up\.weight was replaced after compilation; compile again, or use copy_ on"):
            program(X)


# --- programs as ops of torch, other arrays, groups -------------------------------------------------------------------


@hw.fusion(mesh=hw.Mesh(tp=1), x=hw.f32["M", "K"], w=hw.f32["K", "N"])
def product(x, w):  # type: ignore[no-untyped-def]
    return x @ w


@hw.fusion(mesh=hw.Mesh(tp=1), x=hw.f32["M"], donate="x")
def updated(x):  # type: ignore[no-untyped-def]
    return x + 1


PRODUCT = hw.compile(product)
W = torch.ones(8, 3)
as_torch_op = hostweave.torch.as_torch_op


@pytest.fixture(scope="module")
def op() -> Any:
    return as_torch_op(PRODUCT, "hostweave_mistakes::product")


def of_closed() -> Any:
    program = hw.compile(product)
    closed = as_torch_op(program, "hostweave_mistakes::closed")
    program.close()
    return closed(X, W)


MORE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a tensor as inputs": (lambda c, op: compiled(inputs=X), r"compile: example_inputs is a tensor; pass .* as a tuple: \(x,\)"),
    "a list as plan": (lambda c, op: compiled([("up", "tp, -")]), r"compile: plan=\[\('up', 'tp, -'\)\] is not a dict of names; write"),
    "a number as pattern": (lambda c, op: compiled({3: "tp, -"}), r"compile: plan=\{3: 'tp, -'\} is not a dict of names; write"),
    "options": (
        lambda c, op: hostweave.torch.compile(Layer().eval(), MESH, {}, (X,), options={"streams": 2}),  # type: ignore[arg-type]
        r"layer: options must be hw.Options, got dict; write hw.Options\(streams=4\)",
    ),
    "target": (
        lambda c, op: hostweave.torch.compile(Layer().eval(), MESH, {}, (X,), target="gpu"),
        "layer: there is no target 'gpu'; the targets are cpu and cuda",
    ),
    "a class": (
        lambda c, op: compiled(module=Layer),
        "<class '.*Layer'> is not a torch.nn.Module; pass the module itself, not its class or forward",
    ),
    "arrays of NumPy": (
        lambda c, op: compiled(inputs=(X.numpy(),)),
        "Layer: torch.export: Unsupported input type <class 'numpy.ndarray'>; use tensors, or call ",
    ),
    "a module without memory": (
        lambda c, op: compiled(module=Layer().to("meta").eval(), inputs=(X.to("meta"),))(X),
        r'layer: bind: up_weight: it is on meta; call .to\("cpu"\) or .to\("cuda"\)',
    ),
    "NumPy at a call": (lambda c, op: c(X.numpy(), 2.0), "(?s)Layer: x is array.*, and was a tensor at compile time; pass a tensor"),
    "a global input in a group": (
        lambda c, op: on_ranks(lambda rank: c(X, 2.0), 2),
        r"layer: x: expected f32\[2, 8\], got f32\[4, 8\]",
    ),
    "no program": (lambda c, op: as_torch_op(product, "a::b"), "as_torch_op: .* is not a compiled program; pass hw.compile"),
    "no name": (lambda c, op: as_torch_op(PRODUCT, 3), "as_torch_op: 3 is not the name of an op; write it with a namespace"),  # type: ignore[arg-type]
    "a name with a dash": (
        lambda c, op: as_torch_op(PRODUCT, "my-lib::product"),
        "as_torch_op: 'my-lib::product' is not the name of an op; ",
    ),
    "donated": (lambda c, op: as_torch_op(hw.compile(updated), "a::updated"), "as_torch_op: updated donates x; a torch op cannot"),
    "dtype of an op": (lambda c, op: op(X.double(), W), r"product: x: expected f32\[M, K\], got f64\[4, 8\]; cast it, or compile for f64"),
    "dims of an op": (lambda c, op: op(X[0], W), r"product: x: expected f32\[M, K\], got f32\[8\]; pass an array of 2 dims"),
    "sizes of an op": (lambda c, op: op(X, W[:5]), "product: w: K is 5 here and 8 in x; pass arrays that agree"),
    "a closed program": (lambda c, op: of_closed(), "product: the program is closed; compile it again"),
    "an op in a larger group": (
        lambda c, op: on_ranks(lambda rank: op(X, W), 2),
        r"product: the program is for the 1 ranks of mesh\(tp=1\), but group 'default' has 2",
    ),
}


@pytest.fixture(scope="module")
def sharded() -> Any:
    return compiled({"x": "tp, -"}, inputs=(X, 2.0))


@pytest.mark.parametrize(("call", "message"), MORE.values(), ids=MORE)
def test_more(sharded: Any, op: Any, call: Callable[[Any, Any], Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(HostweaveError, match=message):
        call(sharded, op)


def test_a_user_folder_named_torch() -> None:
    """Lines in the user's folder `torch` are the user's. Lines of the installed PyTorch and of Python's library are not."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    libraries = torch.nn.functional.__file__, contextlib.__file__
    steps = [("/home/me/torch/model.py", 3, "y = f(x)"), *((file, 9, "return g(x)") for file in libraries)]
    node.meta["stack_trace"] = "".join(f'  File "{file}", line {line}, in forward\n    {text}\n' for file, line, text in steps)
    assert str(location(node)).startswith("model.py:3")
