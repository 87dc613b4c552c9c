"""Programs and compiled modules whose inputs or parameters are DTensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch_threads import on_ranks  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402

MESH = hw.Mesh(dp=2, tp=2)


@hw.fusion(mesh=MESH, x=hw.f32["M@dp", "K"], w=hw.f32["K", "N@tp"])
def product(x, w):  # type: ignore[no-untyped-def]
    return x @ w


PROGRAM = hw.compile(product)
X, W = torch.randn(4, 6), torch.randn(6, 8)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Mesh of a fake world of 4 processes. This process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def blocks(rank: int) -> tuple[Any, Any]:
    return X.chunk(2)[rank // 2], W.chunk(2, 1)[rank % 2].contiguous()


def test_inputs_of_a_program(mesh: Any) -> None:
    """DTensors on a mesh with all axes of the program, and on a mesh with only the axes that shard a tensor."""

    def call(rank: int) -> Any:
        x, w = blocks(rank)
        given = DTensor.from_local(x, mesh, [Shard(0), Replicate()], run_check=False)
        return PROGRAM(given, DTensor.from_local(w, mesh["tp"], [Shard(1)], run_check=False))

    for rank, got in enumerate(on_ranks(call, 4)):
        x, w = blocks(rank)
        torch.testing.assert_close(got, x @ w)


def test_inputs_of_a_compiled_module(mesh: Any) -> None:
    module = nn.Linear(6, 8).eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"weight": "tp, -", "input": "tp, -"}, (X,))

    def call(rank: int) -> Any:
        return model(DTensor.from_local(X.chunk(2)[rank], mesh["tp"], [Shard(0)], run_check=False))

    with torch.no_grad():
        want = module(X)
    for got in on_ranks(call, 2):
        torch.testing.assert_close(got, want)


PLACEMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "replicated": ((Replicate(), Replicate()), r"got a DTensor placed as \[Replicate\(\), Replicate\(\)\]"),
    "of another dim": ((Shard(1), Replicate()), r"got a DTensor placed as \[Shard\(dim=1\), Replicate\(\)\]"),
    "along another axis": ((Replicate(), Shard(0)), r"got a DTensor placed as \[Replicate\(\), Shard\(dim=0\)\]"),
    "a sum": ((Shard(0), Partial()), r"got a DTensor placed as \[Shard\(dim=0\), Partial\(sum\)\]"),
}


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ArgumentError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("placements", "found"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_another_placement(mesh: Any, placements: tuple[Any, ...], found: str) -> None:
    def call(rank: int) -> str:
        x, w = blocks(rank)
        return message_of(lambda: PROGRAM(DTensor.from_local(x, mesh, placements, run_check=False), w))

    expected = rf"product: x: expected f32\[M@dp, K\], {found}; call .redistribute\(placements=\[Shard\(0\), Replicate\(\)\]\)"
    assert [bool(re.fullmatch(expected, message)) for message in on_ranks(call, 4)] == [True] * 4


def test_zigzag(mesh: Any) -> None:
    """A zigzag sharding cannot be written as DTensor placements."""

    @hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.f32["M@zigzag(dp)", 3])
    def negated(x: hw.Tensor) -> hw.Tensor:
        return -x

    program = hw.compile(negated)

    def call(rank: int) -> str:
        x = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0), Replicate()], run_check=False)
        return message_of(lambda: program(x))

    why = "negated: x: expected f32[M@zigzag(dp), 3], and DTensor placements cannot express zigzag order"
    assert on_ranks(call, 4) == [f"{why}; pass a tensor of this rank's two pieces"] * 4


def test_another_mesh(mesh: Any) -> None:
    unnamed = dist.init_device_mesh("cpu", (4,))

    def call(rank: int) -> str:
        x, w = blocks(rank)
        return message_of(lambda: PROGRAM(DTensor.from_local(x, unnamed, [Shard(0)], run_check=False), w))

    reason = "is a DTensor on a mesh of dims without names, and the program is for mesh(dp=2, tp=2); "
    reason += "create the device mesh with the names and sizes of these axes"
    assert on_ranks(call, 4) == [f"product: x: {reason}"] * 4


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Any, scale: Any) -> Any:
        return self.down(self.norm(self.up(x))) * scale


def prepared(mesh: Any, **options: Any) -> Any:
    """A module that `parallelize_module` shards on tp, and that `fully_shard` shards on dp."""
    module = Line()
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["dp"], **options)


def test_fully_shard_states_all_shardings(mesh: Any) -> None:
    """If both axes shard one dim of a weight, tp is the outer axis. The example `x` of one rank has 3 rows, and dp has 2 ranks, so `x` has
    6 rows in the program."""
    model = hostweave.torch.compile(prepared(mesh), mesh, example_inputs=(torch.randn(3, 8), torch.randn(8)), training=True)
    (line,) = (line for line in model.program.fusion_ir.splitlines() if line.startswith("fusion @"))
    for of in ("up_weight: f32[16@tp,dp, 8]", "down_weight: f32[8@dp, 16@tp]", "norm_bias: f32[16@dp]", "x: f32[6@dp, 8]", "scale: f32[8]"):
        assert f"%{of}" in line, line
    assert "f32[6@dp, 8]" in str(model.program.host.outputs[0].type)


def test_mixed_precision_of_fully_shard(mesh: Any) -> None:
    """Weights and arguments are f32, and the program casts them to bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = hostweave.torch.compile(
        prepared(mesh, mp_policy=policy), mesh, example_inputs=(torch.randn(3, 8), torch.randn(8)), training=True
    )
    assert {str(one.type.dtype) for one in model.program.host.arguments} == {"f32"}
    assert str(model.program.host.outputs[0].type.dtype) == "f32"
    matmuls = [line for line in model.program.fusion_ir.splitlines() if " = matmul(" in line]
    assert len(matmuls) == 2
    assert all("bf16[" in line for line in matmuls)


class WithMean(nn.Linear):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y, y.mean()


def test_gradients_of_rows_given_to_fully_shard(mesh: Any) -> None:
    """Gradients of parameters are averaged over the 2 ranks of dp. The gradient of an argument is that of the loss of its rank."""
    x = torch.randn(3, 8, requires_grad=True)
    model = hostweave.torch.compile(fully_shard(nn.Linear(8, 4), mesh=mesh["dp"]), mesh, example_inputs=(x,), training=True)
    factors = re.findall(r"%(\w+): \S+ \d+\] = multiply\(%(\w+), (\S+)\)", model.backward.fusion_ir)
    assert factors == [("multiply_gradient_y", "gradient_y", "0.5"), ("multiply_weight", "matmul_weight", "2.0")]
    why = r"x requires grad, but the module returns rows of a rank and a value of all ranks; return only one of the two, or detach\(\)"
    with pytest.raises(ProgramError, match=why):
        hostweave.torch.compile(fully_shard(WithMean(8, 4), mesh=mesh["dp"]), mesh, example_inputs=(x,), training=True)


def test_settings_of_fully_shard_that_are_refused(mesh: Any) -> None:
    module, inputs = prepared(mesh), (torch.randn(3, 8), torch.randn(8))
    with pytest.raises(ProgramError, match=r"fully_shard has a mesh of dims \('dp',\); name them like the axes of mesh\(tp=2\)"):
        hostweave.torch.compile(module, hw.Mesh(tp=2), example_inputs=inputs)
    module.set_gradient_divide_factor(2.0)
    with pytest.raises(ProgramError, match="set_gradient_divide_factor is not compiled; omit it, and multiply the loss instead"):
        hostweave.torch.compile(module, mesh, example_inputs=inputs, training=True)
