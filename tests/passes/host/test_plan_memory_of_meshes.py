"""Memory of programs with several meshes, and of buffers that several stream blocks use."""

from __future__ import annotations

import pytest
from planned_memory import ONE, expect_plan

A, B = "on mesh(x=2 of ranks 0, 1)", "on mesh(x=2 of ranks 2, 3)"
SQUARE_STAGES = f"(%x: f32[M, M] {A}) -> (%y: f32[M, M] {B}) mesh(x=4)"
STAGES = f"(%x: f32[M, N] {A}) -> (%y: f32[M, N] {B}) mesh(x=4) streams(loop[2])"
CASES = {
    "memory of each mesh is planned separately": (
        SQUARE_STAGES,
        f"""
{A} {{
  %a = allocate f32[M, M]
  %b = allocate f32[M, M]
  %c = allocate f32[M, M]
}}
{B} {{
  %d = allocate f32[M, M]
  %e = allocate f32[M, M]
  %f = allocate f32[M, M]
}}
{A} {{
  launch @turn %x -> %a
  launch @turn %a -> %b
  launch @turn %b -> %c
  send %c to rank + 2 on x
}}
{B} {{
  recv %d from rank - 2 on x
  launch @turn %d -> %e
  launch @sign %e -> %f
  launch @turn %f -> %y
}}
""",
        f"""
{A} {{
  %a = allocate f32[M, M]
  launch @turn %x -> %a
  %b = allocate f32[M, M]
  launch @turn %a -> %b
  deallocate %a
  %c = allocate f32[M, M]
  launch @turn %b -> %c
  send %c to rank + 2 on x
}}
{B} {{
  %d = allocate f32[M, M]
  recv %d from rank - 2 on x
  %e = allocate f32[M, M]
  launch @turn %d -> %e
  %f = reshape %e to [M, M]
  launch @sign %e -> %f
  launch @turn %f -> %y
}}
""",
    ),
    "a buffer that a later body reads is not freed": (
        STAGES,
        f"""
{A} {{
  %a = allocate f32[M, N]
  %b = allocate f32[M, N]
  launch @negative %x -> %a
  launch @negative %a -> %b
}}
group {{
  send_blocks %b in 1 by [0[0] -> 2[0], 1[0] -> 3[0]] on x
  recv_blocks %y in 1 by [0[0] -> 2[0], 1[0] -> 3[0]] on x
}}
{A} {{
  %c = allocate f32[M, N]
  launch @softmax %b -> %c
  launch @softmax %c -> %b
}}
""",
        f"""
{A} {{
  %a = allocate f32[M, N]
  launch @negative %x -> %a
  %b = allocate f32[M, N]
  launch @negative %a -> %b
  deallocate %a
}}
group {{
  send_blocks %b in 1 by [0[0] -> 2[0], 1[0] -> 3[0]] on x
  recv_blocks %y in 1 by [0[0] -> 2[0], 1[0] -> 3[0]] on x
}}
{A} {{
  %c = allocate f32[M, N]
  launch @softmax %b -> %c
  launch @softmax %c -> %b
}}
""",
    ),
    "chunks of a stage become one buffer per stream": (
        STAGES,
        f"""
{A} {{
  %a = allocate f32[M, N]
}}
{B} {{
  %d = allocate f32[M, N]
}}
fork loop
for %i in 0..4 {{
  stream loop[%i] {{
    {A} {{
      %x_i = chunk %x[0: %i of 4]
      %a_i = chunk %a[0: %i of 4]
      copy %x_i -> %a_i
      send %a_i to rank + 2 on x
    }}
    {B} {{
      %d_i = chunk %d[0: %i of 4]
      %y_i = chunk %y[0: %i of 4]
      recv %d_i from rank - 2 on x
      copy %d_i -> %y_i
    }}
  }}
}}
join loop
""",
        f"""
fork loop
for %i in 0..4 {{
  stream loop[%i] {{
    {A} {{
      %x_i = chunk %x[0: %i of 4]
      %a = allocate f32[M/4, N]
      copy %x_i -> %a
      send %a to rank + 2 on x
    }}
    {B} {{
      %y_i = chunk %y[0: %i of 4]
      %d = reshape %y_i to [M/4, N]
      recv %d from rank - 2 on x
    }}
  }}
}}
join loop
""",
    ),
    "a join on one mesh does not apply to another mesh": (
        STAGES,
        f"""
{A} {{
  %a = allocate f32[M, N]
  %b = allocate f32[M, N]
}}
fork loop
stream loop[0] {{
  {A} {{
    launch @softmax %x -> %a
    launch @softmax %a -> %a
    send %a to rank + 2 on x
  }}
}}
stream loop[1] {{
  {B} {{
    recv %y from rank - 2 on x
  }}
}}
{B} {{
  join loop
}}
{A} {{
  launch @softmax %x -> %b
}}
join loop
{A} {{
  launch @softmax %b -> %b
}}
""",
        f"""
{A} {{
  %a = allocate f32[M, N]
}}
fork loop
stream loop[0] {{
  {A} {{
    launch @softmax %x -> %a
    launch @softmax %a -> %a
    send %a to rank + 2 on x
  }}
}}
stream loop[1] {{
  {B} {{
    recv %y from rank - 2 on x
  }}
}}
{B} {{
  join loop
}}
{A} {{
  %b = allocate f32[M, N]
  launch @softmax %x -> %b
}}
join loop
{A} {{
  launch @softmax %b -> %b
}}
""",
    ),
    "a buffer whose chunks two stream blocks of a loop use gets a slot per stream": (
        ONE,
        """
%a = allocate f32[M, N]
fork loop
for %j in 0..5 {
  if %j < 4 {
    stream loop[%j] {
      %x_j = chunk %x[0: %j of 4]
      %a_j = chunk %a[0: %j of 4]
      copy %x_j -> %a_j
    }
  }
  if %j > 0 {
    %i = %j - 1
    stream loop[%i] {
      %a_i = chunk %a[0: %i of 4]
      %y_i = chunk %y[0: %i of 4]
      copy %a_i -> %y_i
    }
  }
}
join loop
""",
        """
%a = allocate f32[2, M/4, N]
fork loop
for %j in 0..5 {
  if %j < 4 {
    stream loop[%j] {
      %x_j = chunk %x[0: %j of 4]
      %a_j = select %a[0: %j % 2]
      copy %x_j -> %a_j
    }
  }
  if %j > 0 {
    %i = %j - 1
    stream loop[%i] {
      %a_i = select %a[0: %i % 2]
      %y_i = chunk %y[0: %i of 4]
      copy %a_i -> %y_i
    }
  }
}
join loop
""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan_of_meshes(case: str) -> None:
    expect_plan(*CASES[case])
