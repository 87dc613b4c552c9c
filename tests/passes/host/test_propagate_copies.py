"""The pass propagate_copies: a rank uses its local chunk in place, without a copy."""

from __future__ import annotations

import numpy as np
import pytest
from interpret import interpret

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.host.propagate_copies import propagate_copies

SWAP = "group {{\nrecv {0} from %p on x\nsend {1} to (rank.x - %i) % 3 on x\n}}\n"
OWN = "if %p == rank.x {{\ncopy {1} -> {0}\n}} else {{\n" + SWAP + "}}\n"
OTHERS = "if %p != rank.x {{\n" + SWAP + "}}\n"
G, H = "%g = allocate f32[4, 4]\n", "%h = allocate f32[4, 4]\nmatmul %x, %x -> %h\n"
LANDS = "%l_i = select %l[0: %p]\n"

# For each name: an iteration before and after the pass.
CASES = {
    "reads of the copy and of views of it": (
        f"{G}{OWN.format('%g', '%x')}%t = permute %g by [1, 0]\n%a = allocate f32[4, 4]\nmatmul %t, %g -> %a\nmatmul %a, %g -> %y_i\n",
        f"{G}{OTHERS.format('%g', '%x')}%x_chunk = choose %x if %p == rank.x else %g\n%t = permute %x_chunk by [1, 0]\n"
        "%a = allocate f32[4, 4]\nmatmul %t, %x_chunk -> %a\nmatmul %a, %x_chunk -> %y_i\n",
    ),
    "a read of the copy before a result overwrites it": (
        f"{G}{OWN.format('%g', '%x')}%r = reshape %g to [4, 4]\nlaunch @negative_b %g -> %r\n%s = reshape %r to [4, 4]\n"
        "launch @negative_b %r -> %s\nmatmul %s, %x -> %y_i\n",
        f"{G}{OTHERS.format('%g', '%x')}%r = reshape %g to [4, 4]\n%x_chunk = choose %x if %p == rank.x else %g\n"
        "launch @negative_b %x_chunk -> %r\n%s = reshape %r to [4, 4]\nlaunch @negative_b %r -> %s\nmatmul %s, %x -> %y_i\n",
    ),
    "a read of the copy by a matmul that accumulates in place": (
        f"{G}{OWN.format('%g', '%x')}%r = reshape %g to [4, 4]\nmatmul %x, %x accumulate %g -> %r\nmatmul %r, %x -> %y_i\n",
        f"{G}{OTHERS.format('%g', '%x')}%r = reshape %g to [4, 4]\n%x_chunk = choose %x if %p == rank.x else %g\n"
        "matmul %x, %x accumulate %x_chunk -> %r\nmatmul %r, %x -> %y_i\n",
    ),
    "a read of the copy in the branch of another copy": (
        f"{G}%k = allocate f32[4, 4]\n{OWN.format('%g', '%x')}"
        f"{OWN.format('%k', '%x').replace('send %x', 'send %g')}matmul %g, %k -> %y_i\n",
        f"{G}%k = allocate f32[4, 4]\n{OTHERS.format('%g', '%x')}%x_chunk = choose %x if %p == rank.x else %g\n"
        f"{OTHERS.format('%k', '%x').replace('send %x', 'send %x_chunk')}%x_chunk_2 = choose %x if %p == rank.x else %k\n"
        "matmul %x_chunk, %x_chunk_2 -> %y_i\n",
    ),
    "reads of several copies of one branch": (
        f"{G}%k = allocate f32[4, 4]\nif %p == rank.x {{\ncopy %x -> %k\ncopy %x -> %g\n}} else {{\n{SWAP.format('%g', '%x')}"
        f"{SWAP.format('%k', '%x')}}}\nmatmul %g, %k -> %y_i\n",
        f"{G}%k = allocate f32[4, 4]\nif %p != rank.x {{\n{SWAP.format('%g', '%x')}{SWAP.format('%k', '%x')}}}\n"
        "%x_chunk = choose %x if %p == rank.x else %g\n%x_chunk_2 = choose %x if %p == rank.x else %k\n"
        "matmul %x_chunk, %x_chunk_2 -> %y_i\n",
    ),
    "a read of the copy in the loop, if all gathered data is read later": (
        f"{LANDS}{OWN.format('%l_i', '%x')}matmul %l_i, %x -> %y_i\n",
        f"{LANDS}{OTHERS.format('%l_i', '%x')}%x_chunk = choose %x if %p == rank.x else %l_i\nmatmul %x_chunk, %x -> %y_i\n"
        "if %p == rank.x {\ncopy %x -> %l_i\n}\n",
    ),
    "kernels that compute the source": (
        f"{H}launch @negative_b %h -> %h\n%q = (rank.x - %i) % 3\n%l_i = select %l[0: %q]\n{OWN.format('%l_i', '%h')}",
        "%h = allocate f32[4, 4]\n%q = (rank.x - %i) % 3\n%l_i = select %l[0: %q]\n"
        "%h_chunk = choose %l_i if %p == rank.x else %h\nmatmul %x, %x -> %h_chunk\nlaunch @negative_b %h_chunk -> %h_chunk\n"
        + OTHERS.format("%l_i", "%h"),
    ),
}
# Iterations in which the pass keeps the copy.
STAYS = {
    "the copy is overwritten": f"{G}{OWN.format('%g', '%x')}launch @negative_b %g -> %g\nmatmul %g, %x -> %y_i\n",
    "part of the copy is overwritten": f"{G}{OWN.format('%g', '%x')}%r = slice %g[0: 1 from 0]\nfill %r with 1.0\nmatmul %g, %x -> %y_i\n",
    "the copy is read after a result overwrites it": f"{G}{OWN.format('%g', '%x')}%r = reshape %g to [4, 4]\n"
    "launch @negative_b %g -> %r\nmatmul %r, %g -> %y_i\n",
    "a result that is read later overwrites the copy": f"{LANDS}{OWN.format('%l_i', '%x')}%r = reshape %l_i to [4, 4]\n"
    "launch @negative_b %l_i -> %r\nmatmul %r, %x -> %y_i\n",
    "the copy is an output": OWN.format("%y_i", "%x"),
    "the copy has another layout": f"{G}%g_t = permute %g by [1, 0]\n%b = allocate f32[4, 4]\n"
    f"if %p == rank.x {{\ncopy %x -> %g_t\n}} else {{\n{SWAP.format('%b', '%x')}copy %b -> %g_t\n}}\nmatmul %g_t, %x -> %y_i\n",
    "the source is overwritten": f"%s = allocate f32[4, 4]\ncopy %x -> %s\n{G}{OWN.format('%g', '%s')}fill %s with 1.0\n"
    "matmul %g, %s -> %y_i\n",
    "the source is read afterwards, too": f"{H}{LANDS}{OWN.format('%l_i', '%h')}copy %h -> %y_i\n",
    "the loop reads the buffer to which the copy writes": f"{H}{LANDS}{OWN.format('%l_i', '%h')}copy %l_i -> %y_i\n",
    "another stream may read the destination before the copy": f"{H}wait done[0]\n{LANDS}{OWN.format('%l_i', '%h')}",
}


def program(step: str) -> HostProgram:
    """Three iterations on three ranks. Afterwards, the program sums the blocks of %l."""
    return HostProgram.parse(f"""\
kernel @negative_b(%a: f32[4, 4]) {{
  %b: f32[4, 4] = negative(%a)
}}
kernel @sum_z(%l: f32[3, 4, 4]) {{
  %z: f32[4, 4] = sum(%l, axis=(0,))
}}
host @f(%x: f32[12@x, 4]) -> (%y: f32[3, 4, 4], %z: f32[4, 4]) mesh(x=3) channels(x: x two_sided) streams(loop[2]) events(done[1]) {{
  %l = allocate f32[3, 4, 4]
  fill %l with 0.0
  fill %y with 0.0
  record done[0]
  fork loop
  for %i in 0..3 {{
    %p = (rank.x + %i) % 3
    stream loop[%i] {{
      %y_i = select %y[0: %p]
{step}
    }}
  }}
  join loop
  launch @sum_z %l -> %z
}}
""")


def same_meaning(program: HostProgram, other: HostProgram) -> None:
    x = np.random.default_rng(0).integers(-2, 3, (12, 4)).astype(np.float32)
    for ours, theirs in zip(interpret(program, {"x": x}), interpret(other, {"x": x}), strict=True):
        for name, result in ours.items():
            np.testing.assert_array_equal(result, theirs[name])


@pytest.mark.parametrize("case", CASES)
def test_local_chunks_are_used_in_place(case: str) -> None:
    before, wanted = map(program, CASES[case])
    result = propagate_copies(before, Options())
    assert str(result) == str(wanted)
    assert HostProgram.parse(str(result)) == result
    check(result)
    same_meaning(before, result)


@pytest.mark.parametrize("case", STAYS)
def test_a_copy_stays(case: str) -> None:
    given = program(STAYS[case])
    check(given)
    assert any(isinstance(i, ir.Copy) for i in tree.walk(given.body))
    assert propagate_copies(given, Options()) is given


def test_a_choice_accesses_only_the_selected_buffer() -> None:
    """A `choose` accesses only the selected buffer. A concurrent write to the other buffer is no race."""
    text = """\
host @f(%x: f32[4]) -> (%y: f32[4], %z: f32[4]) mesh(x=2) streams(loop[2]) {{
  fork loop
  stream loop[0] {{
    %c = choose %y if rank.x == 1 else %z
    copy %x -> %c
  }}
  stream loop[1] {{
    if rank.x == {} {{
      fill %y with 0.0
    }} else {{
      fill %z with 0.0
    }}
  }}
  join loop
}}
"""
    check(HostProgram.parse(text.format(0)))
    with pytest.raises(ProgramError, match=r"fill %z with 0\.0 writes %z while rank 0.* writes %c, the same bytes"):
        check(HostProgram.parse(text.format(1)))
