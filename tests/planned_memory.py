"""Host programs before and after the passes that save memory."""

from __future__ import annotations

import host_text

from hostweave.check.check import check
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.host.multi_buffer import multi_buffer
from hostweave.pipeline import PASSES

ONE = "(%x: f32[M, N]) -> (%y: f32[M, N]) mesh(x=2) streams(loop[2])"
KERNELS = """\
kernel @negative(%a: f32[M, N]) {
  %b: f32[M, N] = negative(%a)
}
kernel @add(%a: f32[M, N], %b: f32[M, N]) {
  %c: f32[M, N] = add(%a, %b)
}
kernel @sign(%a: f32[M, M]) {
  %b: f32[M, M] = negative(%a)
}
kernel @turn(%a: f32[M, M]) {
  %t: f32[M, M] = permute_dims(%a, axes=(1, 0))
  %b: f32[M, M] = add(%t, 1.0)
}
kernel @softmax(%a: f32[M, N]) {
  %m: f32[M, 1] = max(%a, axis=(1,), keepdims=true)
  %s: f32[M, N] = subtract(%a, %m)
  %b: f32[M, N] = exp(%s)
}
kernel @count(%a: f32[M, N]) {
  %b: i32[M, N] = astype(%a)
}
"""


def host(body: str, header: str) -> HostProgram:
    lines = "".join(f"  {line}\n" for line in body.strip().splitlines())
    return host_text.parse(f"{KERNELS}host @t{header} {{\n{lines}}}\n")


def with_planned_memory(program: HostProgram) -> HostProgram:
    for apply in PASSES[PASSES.index(multi_buffer) :]:
        program = apply(program, Options())
    return program


def expect_plan(header: str, before: str, after: str) -> None:
    planned = with_planned_memory(host(before, header))
    verify_host(planned)
    check(planned)
    assert str(planned) == str(host(after, header))
