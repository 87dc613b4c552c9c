"""Parses host programs whose text lacks channel declarations. Text of a program with every instruction."""

from __future__ import annotations

import re
from itertools import permutations

from hostweave.host_ir.ir import HostProgram
from hostweave.types.mesh import Mesh
from hostweave.types.text import Reader

EVERYTHING = """\
kernel @k(%a: f32[M/2, 4], %b: f32[M/2, 4]) {
  %c: f32[M/2, 4] = add(%a, %b)
  %d: f32[M/2] = sum(%c, axis=(1,))
}
function @b(%s: f32[M@x, 4]) -> (%t: f32[M@x, 4]) {
  copy %s -> %t
}
host @t(%x: f32[M@x, 4]) -> (%y: f32[M@x, 4], %z: f32[M]) mesh(x=2, dp=3) \
channels(x_dp: x, dp two_sided, near: x one_sided, x: x two_sided, back: dp, x two_sided, \
dp: dp two_sided, pair: x, tp on mesh(x=2, tp=1 of ranks 0, 3) two_sided) \
streams(loop[2], copy[1]) events(done[3]) uneven(M) {
  %b = allocate f32[M/2, 4]
  fill %b with -0.5
  fork loop
  for %i in 0..M/2 {
    %p = (rank.x - 1 - %i) % 2
    %q = %p * 2 + %i % 3
    stream loop[%i] {
      %x_i = select %x[0: %i]
      %s_i = chunk %b[1: %q / 2 of 2]
      %r_i = reshape %x_i to [2, 2]
      %t_i = permute %r_i by [1, 0]
      %u_i = slice %b[0: local(M, x) from rank.x * ceil(M/2)]
      %v_i = strided %b[1: 2 from 1 by 2]
      %w_i = choose %x_i if %p == rank.x + 1 else %u_i
      if %p == rank.x {
        copy %t_i -> %r_i
      } else {
        group {
          recv %x_i from %p on x_dp
          send %x_i to (rank.x + %i) % 6 on x_dp
        }
      }
      if %i < M / 4 {
        record done[%i % 3]
        mark
      }
      wait done[0]
    }
  }
  join loop
  launch @k %x, %b -> %z
  matmul %x, %b -> %y
  matmul %x, %b accumulate %y -> %y
  matmul %x, %b in tf32 scaled -0.125 accumulate %x bias %b activation gelu_tanh rest [1, 0, 2] -> %y
  matmul %x, %b bias %z activation relu -> %y
  grouped_matmul %x, %b rows %z to %z -> %y
  grouped_outer %x, %b rows %z to %z from rank.x * 4 -> %y
  attention %x, %b, %b scaled 0.125 -> %y
  attention %x, %b, %b scaled 0.125 diagonal rank.x * 4 + M - 2 window 128 -> %y lse %z
  attention %x, %b, %b scaled 0.125 diagonal -1 corner bottom_right lengths %z -> %y
  attention_backward %x, %b, %b, %y, %x, %z scaled 0.125 diagonal 0 window 128 lengths %z -> %x, %b, %y
  attention_backward %x, %b, %b, %y, %x, %z scaled 0.125 bias %z kernels bf16_64 -> %x, %b, %y dbias %z
  pack %x -> %b in [2 of M/2, 1 of 4]
  unpack %b -> %y in [4 of local(M, x), 1 of 4]
  all_gather %x -> %y on x
  all_gather %x -> %z along 0 on x
  reduce_scatter sum %x along 1 -> %y on x
  all_to_all %x along 1 -> %y along 0 on x
  all_reduce sum %x -> %y on x
  launch_all_reduce @k %x, %b -> %z on x
  launch_reduce_scatter @k %x, %b -> %z on x
  launch_all_gather @k %x, %b -> %z on x
  launch @k %x, %b -> %z sent on x
  reduce_scatter max %x -> %y on dp
  broadcast %x -> %y from rank.dp + 1 on x
  broadcast_to_others %x to %y from rank.dp + 1 on x
  reduce min %x -> %y to 1 on x
  gather %x -> %y to 0 on x
  scatter %x -> %y from rank.dp on x
  all_to_all %x -> %y on back
  collective_permute %x -> %y from [none, 0, 1] on dp
  barrier %b on x
  on mesh(x=2, tp=1 of ranks 0, 3) {
    all_gather %x -> %y on pair
    send %x to rank - 1 on x_dp
    send_blocks %x in 2 by [0[1] -> 2[0], 0[0] -> 3[0]] on x_dp
    recv_blocks %y in [2 of M, 1 of 4] by [0[1] -> 2[0]] on x_dp
  }
  on mesh(of ranks 2) {
    recv_blocks %y in 1 by [0[1] -> 2[0], 0[0] -> 3[0]] on x_dp
  }
  %w = allocate_window f32[M/2, 4]
  signal 0 at rank.x + 1 that %w is free on near
  wait_signal 63 from 1 until %w is free on near
  put %x -> %w at 1 - rank.x signal 2 on near
  get %w at 1 - rank.x -> %y on near
  deallocate %b
  call @b %x -> %y
}
"""


def parse(text: str) -> HostProgram:
    """Parses a program, and declares the channels that its communications name, such as `x`, `dp_tp` or `x_of_ranks_2_3`."""
    return HostProgram.parse(declared(text))


def declared(text: str) -> str:
    if " channels(" in text:
        return text
    head = text.index("host @")
    found = re.compile(r"\) (mesh\([^)]*\))").search(text, head)
    assert found
    program = Reader(found[1]).mesh()
    meshes = [program, *(Reader(mesh).mesh() for mesh in dict.fromkeys(re.findall(r"mesh\([^)]* of [^)]*\)", text)))]
    known = {name: channel for mesh in meshes for name, channel in _channels(mesh, program).items()}
    used = [name for name in dict.fromkeys(re.findall(r"\bon (\w+)", text)) if name in known]
    channels = f" channels({', '.join(f'{name}: {known[name]} two_sided' for name in used)})" if used else ""
    return text[: found.end()] + channels + text[found.end() :]


def _channels(mesh: Mesh, program: Mesh) -> dict[str, str]:
    """Declarations of all channels along one axis or along two axes of the mesh, in either order."""
    of, on = ("", "") if mesh == program else (f"_of_{mesh.label}", f" on {mesh}")
    axes = (along for count in range(1, 3) for along in permutations([name for name, _ in mesh.axes], count))
    return {"_".join(along) + of: ", ".join(along) + on for along in axes}
