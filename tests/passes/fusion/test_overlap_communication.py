"""The pass overlap_communication: which communication becomes asynchronous, and where communication is issued."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusion_text import check, fusion

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.rewriting import in_order
from hostweave.options import Options
from hostweave.passes.fusion.overlap_communication import overlap_communication
from hostweave.pipeline import lower
from hostweave.tune.cost import H200, seconds

FSDP = "%x: bf16[M@x, K], %v: bf16[K@x, N], %w: bf16[N@x, K]"
SUM = "%x: bf16[M@x, K], %dy: bf16[M@x, N], %w: bf16[N, K]"

# For each name: inputs, and the ops before and after the pass. Named dims have 4096 elements. A gather of K x N elements takes 117 us. A
# matmul of 1/8 of the rows takes about 25 us.
CASES = {
    "a gather is issued before the matmul that hides part of it": (
        FSDP,
        """%vg: bf16[K, N] = all_gather(%v, dim=0, axes=(x))
        %h: bf16[M@x, N] = matmul(%x, %vg)
        %wg: bf16[N, K] = all_gather(%w, dim=0, axes=(x))
        %y: bf16[M@x, K] = matmul(%h, %wg)""",
        """%vg: bf16[K, N] = all_gather(%v, dim=0, axes=(x))
        %wg: bf16[N, K] async = all_gather(%w, dim=0, axes=(x))
        %h: bf16[M@x, N] = matmul(%x, %vg)
        %y: bf16[M@x, K] = matmul(%h, %wg)""",
    ),
    "a short all-reduce that no matmul needs follows the matmuls, together with its consumers": (
        "%x: bf16[M@x, K], %w: bf16[K, K]",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)
        %h: bf16[M@x, K] = matmul(%x, %w)
        %n: bf16[K] partial(sum, x) = sum(%h, axis=(0,))
        %m: bf16[K] = all_reduce(%n, axes=(x), reduction=sum)
        %k: bf16[K] = exp(%m)""",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %h: bf16[M@x, K] = matmul(%x, %w)
        %n: bf16[K] partial(sum, x) = sum(%h, axis=(0,))
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %m: bf16[K] = all_reduce(%n, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)
        %k: bf16[K] = exp(%m)""",
    ),
    "a short all-reduce that no grouped matmul needs follows the grouped matmuls": (
        "%x: bf16[M@x, K], %w: bf16[8, K, K], %starts: i32[8], %ends: i32[8]",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)
        %h: bf16[M@x, K] = grouped_matmul(%x, %w, %starts, %ends)""",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %h: bf16[M@x, K] = grouped_matmul(%x, %w, %starts, %ends)
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)""",
    ),
    "a short all-reduce that no gradient of attention needs follows the gradients": (
        "%x: bf16[M@x, K], %q: bf16[8, M, 64], %k: bf16[8, M, 64], %v: bf16[8, M, 64], %l: f32[8, M]",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)
        %dq: bf16[8, M, 64] = attention_query_gradient(%q, %k, %v, %q, %q, %l, scale=0.125)""",
        """%p: bf16[K] partial(sum, x) = sum(%x, axis=(0,))
        %dq: bf16[8, M, 64] = attention_query_gradient(%q, %k, %v, %q, %q, %l, scale=0.125)
        %s: bf16[K] = all_reduce(%p, axes=(x), reduction=sum)
        %t: bf16[K] = negative(%s)""",
    ),
    "a gather is hidden behind a matmul, and not behind ops in the kernel that waits for it": (
        "%x: bf16[M, K], %v: bf16[K, K], %b: bf16[M@x, K]",
        """%h: bf16[M, K] = matmul(%x, %v)
        %t: bf16[M, K] = exp(%h)
        %bg: bf16[M, K] = all_gather(%b, dim=0, axes=(x))
        %y: bf16[M, K] = add(%t, %bg)""",
        """%bg: bf16[M, K] async = all_gather(%b, dim=0, axes=(x))
        %h: bf16[M, K] = matmul(%x, %v)
        %t: bf16[M, K] = exp(%h)
        %y: bf16[M, K] = add(%t, %bg)""",
    ),
    "a gather is issued only as early as is needed to hide it": (
        "%x: bf16[M@x, K], %v: bf16[K, K], %w: bf16[K@x, 8]",
        """%a: bf16[M@x, K] = matmul(%x, %v)
        %b: bf16[M@x, K] = matmul(%a, %v)
        %wg: bf16[K, 8] = all_gather(%w, dim=0, axes=(x))
        %y: bf16[M@x, 8] = matmul(%b, %wg)""",
        """%a: bf16[M@x, K] = matmul(%x, %v)
        %wg: bf16[K, 8] async = all_gather(%w, dim=0, axes=(x))
        %b: bf16[M@x, K] = matmul(%a, %v)
        %y: bf16[M@x, 8] = matmul(%b, %wg)""",
    ),
    "a gather is issued before attention": (
        "%q: bf16[2, M, 128], %w: bf16[M@x, K]",
        """%a: bf16[2, M, 128] = attention(%q, %q, %q, scale=1.0)
        %t: bf16[2, 128, M] = permute_dims(%a, axes=(0, 2, 1))
        %wg: bf16[M, K] = all_gather(%w, dim=0, axes=(x))
        %y: bf16[2, 128, K] = matmul(%t, %wg)""",
        """%wg: bf16[M, K] async = all_gather(%w, dim=0, axes=(x))
        %a: bf16[2, M, 128] = attention(%q, %q, %q, scale=1.0)
        %t: bf16[2, 128, M] = permute_dims(%a, axes=(0, 2, 1))
        %y: bf16[2, 128, K] = matmul(%t, %wg)""",
    ),
    "the matmul of a weight gradient follows the communication that the next layer needs": (
        "%dy: bf16[M, N@x], %w: bf16[N@x, K], %x: bf16[M, K], %v: bf16[K, K]",
        """%t: bf16[N@x, M] = permute_dims(%dy, axes=(1, 0))
        %p: bf16[M, K] partial(sum, x) = matmul(%dy, %w)
        %dw: bf16[N@x, K] = matmul(%t, %x)
        %dx: bf16[M, K] = all_reduce(%p, axes=(x), reduction=sum)
        %y: bf16[M, K] = matmul(%dx, %v)
        %z: bf16[M@x, K] = shard(%y, dim=0, axes=(x))
        %zg: bf16[M, K] = all_gather(%z, dim=0, axes=(x))""",
        """%t: bf16[N@x, M] = permute_dims(%dy, axes=(1, 0))
        %p: bf16[M, K] partial(sum, x) = matmul(%dy, %w)
        %dx: bf16[M, K] async = all_reduce(%p, axes=(x), reduction=sum)
        %dw: bf16[N@x, K] = matmul(%t, %x)
        %y: bf16[M, K] = matmul(%dx, %v)
        %z: bf16[M@x, K] = shard(%y, dim=0, axes=(x))
        %zg: bf16[M, K] = all_gather(%z, dim=0, axes=(x))""",
    ),
    "the all-reduce of a gradient overlaps with the next matmul": (
        SUM,
        """%t: bf16[K, M@x] = permute_dims(%x, axes=(1, 0))
        %p: bf16[K, N] partial(sum, x) = matmul(%t, %dy)
        %dw: bf16[K, N] = all_reduce(%p, axes=(x), reduction=sum)
        %dx: bf16[M@x, K] = matmul(%dy, %w)""",
        """%t: bf16[K, M@x] = permute_dims(%x, axes=(1, 0))
        %p: bf16[K, N] partial(sum, x) = matmul(%t, %dy)
        %dw: bf16[K, N] async = all_reduce(%p, axes=(x), reduction=sum)
        %dx: bf16[M@x, K] = matmul(%dy, %w)""",
    ),
    "a view of the result does not wait for the communication": (
        SUM,
        """%t: bf16[K, M@x] = permute_dims(%x, axes=(1, 0))
        %p: bf16[K, N] partial(sum, x) = matmul(%t, %dy)
        %dw: bf16[K, N] = all_reduce(%p, axes=(x), reduction=sum)
        %v: bf16[N, K] = permute_dims(%dw, axes=(1, 0))
        %dx: bf16[M@x, K] = matmul(%dy, %w)
        %y: bf16[N, K] = add(%v, %w)""",
        """%t: bf16[K, M@x] = permute_dims(%x, axes=(1, 0))
        %p: bf16[K, N] partial(sum, x) = matmul(%t, %dy)
        %dw: bf16[K, N] async = all_reduce(%p, axes=(x), reduction=sum)
        %v: bf16[N, K] = permute_dims(%dw, axes=(1, 0))
        %dx: bf16[M@x, K] = matmul(%dy, %w)
        %y: bf16[N, K] = add(%v, %w)""",
    ),
    "a gather is issued before a whole loop": (
        "%x: bf16[M@x, K], %v: bf16[K, K], %w: bf16[K@x, K]",
        """loop 2 chunks across_shards {
          %a: bf16[M@x, K] stream(M) = matmul(%x, %v)
          %b: bf16[M@x, K] stream(M) = relu(%a)
        }
        %wg: bf16[K, K] = all_gather(%w, dim=0, axes=(x))
        %y: bf16[M@x, K] = matmul(%b, %wg)""",
        """%wg: bf16[K, K] async = all_gather(%w, dim=0, axes=(x))
        loop 2 chunks across_shards {
          %a: bf16[M@x, K] stream(M) = matmul(%x, %v)
          %b: bf16[M@x, K] stream(M) = relu(%a)
        }
        %y: bf16[M@x, K] = matmul(%b, %wg)""",
    ),
}
# Programs that the pass does not change.
SAME = {
    "no op can hide the communication": (
        "%x: bf16[M, K@x], %w: bf16[K@x, N]",
        "%p: bf16[M, N] partial(sum, x) = matmul(%x, %w)\n%y: bf16[M, N] = all_reduce(%p, axes=(x), reduction=sum)",
    ),
    "the only independent op is too short": (
        "%x: bf16[M@x, K], %z: bf16[8], %w: bf16[K, N]",
        "%a: bf16[8] = negative(%z)\n%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))\n%y: bf16[M, N] = matmul(%g, %w)",
    ),
    "another communication cannot hide a communication": (
        "%x: bf16[M@x, K], %y: bf16[M@x, K]",
        """%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))
        %h: bf16[M, K] = all_gather(%y, dim=0, axes=(x))
        %z: bf16[M, K] = add(%g, %h)""",
    ),
    "the communication is in a loop": (
        "%x: bf16[M@x, K], %w: bf16[K, N], %v: bf16[N, K]",
        """loop 8 chunks by_shard local_first {
          %g: bf16[M, K] stream(M, p2p) = all_gather(%x, dim=0, axes=(x))
          %y: bf16[M, N] stream(M) = matmul(%g, %w)
        }
        %z: bf16[K, K] = matmul(%w, %v)""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_asynchronous_communication(case: str) -> None:
    check(overlap_communication, *CASES[case])


@pytest.mark.parametrize("case", SAME)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    inputs, ops = SAME[case]
    check(overlap_communication, inputs, ops, ops)


def test_off() -> None:
    inputs, before, _ = next(iter(CASES.values()))
    program = fusion(inputs, before)
    assert overlap_communication(program, Options(overlap="off")) == program


def test_typical_sizes_decide() -> None:
    inputs, before, _ = next(iter(CASES.values()))
    program = fusion(inputs, before)
    assert overlap_communication(program, Options(sizes={"M": 8, "N": 1024})) == program  # %h takes only 6 us.
    assert overlap_communication(program, Options(sizes={"M": 8, "N": 16384})) != program


def test_unknown_overlap() -> None:
    with pytest.raises(ProgramError) as caught:
        hw.Options(overlap="of")
    assert str(caught.value) == "Options: there is no overlap='of'; did you mean off?"


def test_times() -> None:
    """A matmul of 8192 x 8192 x 8192 takes the time of its waves on 132 multiprocessors. A gather of 128 MiB among 8 ranks takes 386 us."""
    program = fusion(
        "%x: bf16[8192@x, 8192], %w: bf16[8192, 8192]",
        """%g: bf16[8192, 8192] = all_gather(%x, dim=0, axes=(x))
        %t: bf16[8192, 8192] = permute_dims(%w, axes=(1, 0))
        %y: bf16[8192, 8192] = matmul(%g, %t)
        %z: bf16[8192, 8192] = negative(%y)""",
    )
    times = {name: time * 1e6 for name, time in seconds(program, {}).items()}
    assert times == pytest.approx({"g": 386, "t": 0, "y": 1352, "z": 2 + 2 * 2**27 / H200.memory * 1e6}, rel=1e-2)


def test_a_gather_that_overlaps_with_nothing() -> None:
    """The gather uses copy engines if copy engines are faster, and if a second communication overlaps and may use copy engines."""
    inputs, before, _ = next(iter(CASES.values()))
    for ranks, size, by in ((2, 8192, "async peer"), (2, 1024, ""), (8, 8192, "")):
        sizes = dict.fromkeys("MNK", size)
        text = str(overlap_communication(fusion(inputs, before, f"x={ranks}"), Options(sizes=sizes, machine=H200)))
        assert f"%vg: bf16[K, N] {by}".strip() + " = all_gather" in text, (ranks, size)
    alone = fusion("%v: bf16[K@x, N]", "%vg: bf16[K, N] = all_gather(%v, dim=0, axes=(x))", "x=2")
    assert overlap_communication(alone, Options(sizes={"K": 8192, "N": 8192}, machine=H200)) == alone


def test_sums_that_kernels_may_add_up() -> None:
    """All-reduces that kernels can compute stay synchronous if no other communication overlaps."""
    inputs = "%x: bf16[M, 64@x], %w: bf16[64@x, 4096], %u: bf16[N, N], %s: bf16[N@x, N]"
    ops = """%p: bf16[M, 4096] partial(sum, x) = matmul(%x, %w)
        %h: bf16[M, 4096] = all_reduce(%p, axes=(x), reduction=sum)
        %z: bf16[N, N] = matmul(%u, %u)
        %y: bf16[M, 4096] = relu(%h)"""
    program, beside = fusion(inputs, ops), "async = all_reduce"
    for options, is_beside in (
        (Options(), False),
        (Options(sizes={"M": 16}), False),
        (Options(sizes={"M": 8192}), True),
        (Options(transport="two_sided"), True),
        (Options(machine=replace(H200, no_peers="here")), True),
    ):
        assert (beside in str(overlap_communication(program, options))) == is_beside, options
    gather = "\n%g: bf16[N, N] = all_gather(%s, dim=0, axes=(x))\n%a: bf16[N, N] = matmul(%g, %u)"
    assert beside in str(overlap_communication(fusion(inputs, ops + gather), Options()))  # Now a gather also overlaps.


@pytest.mark.parametrize(("sums", "columns", "is_beside"), [(1, 512, True), (6, 512, False), (6, 4096, True)])
def test_many_sums_in_kernels_save_more_than_a_short_gather_hides(sums: int, columns: int, is_beside: bool) -> None:
    """If a gather overlaps with a product, NCCL computes small sums, although kernels would be faster. So with many sums, a short gather
    does not overlap."""
    inputs = "%x: bf16[16, 64@x], %w: bf16[64@x, 64], %u: bf16[4096, 4096], %s: bf16[N@x, N]"
    ops = "\n".join(
        f"""%p{i}: bf16[16, 64] partial(sum, x) = matmul({f"%y{i - 1}" if i else "%x"}, %w)
        %h{i}: bf16[16, 64] = all_reduce(%p{i}, axes=(x), reduction=sum)
        %y{i}: bf16[16, 64@x] = shard(%h{i}, dim=1, axes=(x))"""
        for i in range(sums)
    )
    rest = """%z: bf16[4096, 4096] = matmul(%u, %u)
        %g: bf16[N, N] = all_gather(%s, dim=0, axes=(x))
        %a: bf16[N, N] = relu(%g)"""
    made = overlap_communication(fusion(inputs, f"{ops}\n{rest}", "x=2"), Options(sizes={"N": columns}, machine=H200))
    assert ("async" in str(made)) == is_beside


@pytest.mark.parametrize(("calls", "in_kernels"), [(1, False), (6, True)])
def test_each_call_of_a_function_counts(calls: int, in_kernels: bool) -> None:
    """The cost of a function's communication counts once per call, even if the function has several results."""

    @hw.block(x=hw.bf16[16, 64], w=hw.bf16["64@x", 64])
    def layer(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.reshard(hw.matmul(hw.reshard(x, 16, "64@x"), w), 16, 64)
        return h, hw.relu(h)

    types = {"x": hw.bf16[16, 64], "w": hw.bf16["64@x", 64], "u": hw.bf16[4096, 4096], "s": hw.bf16["512@x", 512]}

    @hw.fusion(mesh=hw.Mesh(x=2), **types)
    def program(x: hw.Tensor, w: hw.Tensor, u: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, ...]:
        for _ in range(calls):
            _, x = layer(x, w)
        return x, hw.matmul(u, u), hw.relu(hw.reshard(s, 512, 512))

    assert ("launch_all_reduce" in str(lower(program, Options(machine=H200)))) == in_kernels


def test_a_reduce_scatter_that_overlaps_with_products() -> None:
    """With peer access, copy engines and a kernel that adds can replace NCCL. The reduce-scatter uses copy engines and the kernel if they
    take less time, including the delay of concurrent ops."""
    inputs = "%dy: bf16[M, N@x], %w: bf16[N@x, K], %a: bf16[M, K], %b: bf16[M, K]"
    ops = """%p: bf16[M, K] partial(sum, x) = matmul(%dy, %w)
        %dx: bf16[M@x, K] = reduce_scatter(%p, dim=0, axes=(x), reduction=sum)
        %t: bf16[K, M] = permute_dims(%a, axes=(1, 0))
        %dw: bf16[K, K] = matmul(%t, %b)
        %y: bf16[M@x, K] = negative(%dx)"""
    for machine, size, by in (
        (H200, 8192, "async peer"),
        (H200, 2048, "async"),
        (H200.without("peer", "here").without("one_sided", "here"), 8192, "async"),
    ):
        options = Options(sizes=dict.fromkeys("MNK", size), machine=machine)
        text = str(overlap_communication(fusion(inputs, ops, "x=2"), options))
        assert f"%dx: bf16[M@x, K] {by} = reduce_scatter" in text, (size, by)


def test_a_gradient_that_only_an_update_needs_moves_down() -> None:
    """Only an optimizer's update uses %dw. The matmul of %dw moves down, and overlaps with the next communication."""

    @hw.block(w=hw.bf16["N@x", "K"], gradient=hw.bf16["N@x", "K"])
    def update(w: hw.Tensor, gradient: hw.Tensor) -> hw.Tensor:
        return w - gradient * 0.5

    program = fusion(
        "%dy: bf16[M, N@x], %w: bf16[N@x, K], %z: bf16[M@x, K], %v: bf16[K, K]",
        """%t: bf16[N@x, M] = permute_dims(%dy, axes=(1, 0))
        %g: bf16[M, K] = all_gather(%z, dim=0, axes=(x))
        %h: bf16[M, K] = matmul(%g, %v)
        %dw: bf16[N@x, K] = matmul(%t, %h)
        %p: bf16[M, K] partial(sum, x) = matmul(%dy, %w)
        %dx: bf16[M, K] = all_reduce(%p, axes=(x), reduction=sum)
        %y: bf16[M, K] = matmul(%dx, %v)""",
    )

    @hw.fusion(mesh=hw.Mesh(x=8), w=hw.bf16["N@x", "K"], gradient=hw.bf16["N@x", "K"])
    def step(w: hw.Tensor, gradient: hw.Tensor) -> hw.Tensor:
        return update(w, gradient)

    (call,) = (op for op in step.ops if op.callee)
    call = replace(call, operands=("w", "dw"), result=replace(call.result, name="updated"))
    made = overlap_communication(in_order(program, [*program.ops, call]), Options())
    assert [op.result.name for op in made.ops] == ["t", "g", "h", "p", "dx", "dw", "y", "updated"]


def test_a_collective_on_another_mesh_is_not_in_a_kernel() -> None:
    """The axis z belongs to another mesh than the program's."""
    other = "on mesh(z=3 of ranks 2, 1, 0)"
    text = f"""fusion @f(%x: f64[5@x, 5, 5], %c: f64[2, 5] {other}, %d: f64[2@x, 5], %v: f64[2, 5]) mesh(x=3) {{
      %part: f64[2, 5@z] {other} pinned = reshard(%v)
      %sum: f64[2, 5] {other} = add(%c, %part)
      %twice: f64[2, 5] = multiply(%d, 2.0)
      %y: f64[2, 5] = add(%twice, %v)
      %whole: f64[5@x, 5, 5] pinned = reshard(%x)
      %flat: f64[125] = reshape(%whole)
      %c_1: f64[2, 5] {other} pinned = reshard(%sum)
      %d_1: f64[2@x, 5] pinned = reshard(%y)
      %flat_shards: f64[125@x] pinned = reshard(%flat)
      %d_2: f64[2@x, 5] pinned = reshard(%d_1)
      %c_2: f64[2, 5] {other} pinned = reshard(%c_1)
      return %flat_shards, %d_2 in %d, %c_2 in %c
    }}"""
    lower(Fusion.parse(text), Options())
