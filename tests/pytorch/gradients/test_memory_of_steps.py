"""Memory of a training step that is one program, according to the plan of the arena."""

from __future__ import annotations

import copy
from math import prod

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from small_models import training_model  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.cli.memory_plan import memory_plan  # noqa: E402
from hostweave.host_ir.ir import Parameter  # noqa: E402


def peak(program: hw.Program) -> int:
    """Bytes of the arena without the workspace for matmuls."""
    plan = memory_plan(program.host, program.host.depths())
    return plan.peak - next(row.bytes for row in plan.rows if row.name.startswith("workspace"))


def size(parameters: list[Parameter], mesh: hw.Mesh) -> int:
    return sum(prod(map(int, one.type.local_shape(mesh))) * one.type.dtype.itemsize for one in parameters)


@pytest.mark.slow  # The test compiles three programs of a model.
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_needs_no_more_memory_than_its_parts(ranks: int) -> None:
    """The arena of a step is at most 1.02 times the memory of separate forward and backward programs, with saved values and gradients."""
    module, inputs, plan = training_model("llama", ranks)
    mesh = hw.Mesh(tp=ranks)
    step = hostweave.torch.compile(module, mesh, plan, inputs, optimizer=torch.optim.AdamW(module.parameters()))
    apart = hostweave.torch.compile(copy.deepcopy(module), mesh, plan, inputs, training=True)
    saved = size([one for one in apart.program.host.results[2:] if not one.memory], mesh)
    gradients = size(list(apart.backward.host.results), mesh)
    of_both = max(peak(apart.program) + saved, peak(apart.backward) + saved + gradients)
    assert saved > 0
    assert all(one.memory for one in step.program.host.results[2:])  # Parameters and state are updated in place.
    assert peak(step.program) <= 1.02 * of_both
