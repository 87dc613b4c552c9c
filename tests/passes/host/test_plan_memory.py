"""Passes that save memory: one buffer per stream, results in the memory of operands, and live ranges of buffers."""

from __future__ import annotations

import pytest
from planned_memory import ONE, expect_plan, host, with_planned_memory

SQUARE = "(%x: f32[M, M], %w: f32[M, M]) -> (%y: f32[M, M]) mesh(x=2)"
CASES = {
    # --- live ranges
    "a buffer is freed after its last use": (
        SQUARE,
        """
%a = allocate f32[M, M]
%b = allocate f32[M, M]
%c = allocate f32[M, M]
matmul %x, %w -> %a
matmul %a, %w -> %b
matmul %b, %w -> %c
matmul %c, %w -> %y
""",
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
%b = allocate f32[M, M]
matmul %a, %w -> %b
deallocate %a
%c = allocate f32[M, M]
matmul %b, %w -> %c
matmul %c, %w -> %y
""",
    ),
    "a matmul adds in place": (
        SQUARE,
        """
%r = allocate f32[M, M]
matmul %x, %w -> %r
%a = allocate f32[M, M]
matmul %w, %x accumulate %r -> %a
%b = allocate f32[M, M]
matmul %a, %x accumulate %a -> %b
copy %b -> %y
""",
        """
%r = allocate f32[M, M]
matmul %x, %w -> %r
%a = reshape %r to [M, M]
matmul %w, %x accumulate %r -> %a
%b = reshape %y to [M, M]
matmul %a, %x accumulate %a -> %b
""",
    ),
    "views and allocations move to their first use": (
        SQUARE,
        """
%a = allocate f32[M, M]
%at = permute %a by [1, 0]
%b = allocate f32[M, M]
%bt = permute %b by [1, 0]
matmul %x, %w -> %a
copy %at -> %bt
%c = allocate f32[M, M]
matmul %b, %w -> %c
matmul %c, %w -> %y
""",
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
%at = permute %a by [1, 0]
%b = allocate f32[M, M]
%bt = permute %b by [1, 0]
copy %at -> %bt
deallocate %a
%c = allocate f32[M, M]
matmul %b, %w -> %c
matmul %c, %w -> %y
""",
    ),
    "buffers of one branch are allocated in this branch": (
        SQUARE,
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
if M % 2 == 0 {
  matmul %a, %w -> %y
} else {
  %b = allocate f32[M, M]
  %c = allocate f32[M, M]
  %d = allocate f32[M, M]
  matmul %a, %w -> %b
  matmul %b, %w -> %c
  matmul %c, %w -> %d
  matmul %d, %w -> %y
}
""",
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
if M % 2 == 0 {
  matmul %a, %w -> %y
} else {
  %b = allocate f32[M, M]
  matmul %a, %w -> %b
  %c = allocate f32[M, M]
  matmul %b, %w -> %c
  deallocate %b
  %d = allocate f32[M, M]
  matmul %c, %w -> %d
  matmul %d, %w -> %y
}
""",
    ),
    "buffers of a stream are freed after the join": (
        ONE,
        """
%a = allocate f32[M, N]
%b = allocate f32[M, N]
fork loop
stream loop[0] {
  copy %x -> %a
  launch @add %a, %a -> %y
}
join loop
fork loop
stream loop[1] {
  launch @negative %x -> %b
  launch @add %b, %y -> %y
}
join loop
""",
        """
%a = allocate f32[M, N]
fork loop
stream loop[0] {
  copy %x -> %a
  launch @add %a, %a -> %y
}
join loop
deallocate %a
%b = allocate f32[M, N]
fork loop
stream loop[1] {
  launch @negative %x -> %b
  launch @add %b, %y -> %y
}
join loop
""",
    ),
    "a buffer is freed after an event of another stream": (
        "(%x: f32[M, M], %w: f32[M, M]) -> (%y: f32[M, M], %z: f32[M, M]) mesh(x=2) streams(comm[1]) events(done[4], sent[4])",
        """
fork comm
%a = allocate f32[M, M]
matmul %x, %w -> %a
record done[0]
%s = allocate f32[M, M]
stream comm[0] {
  wait done[0]
  all_reduce sum %a -> %s on x
  record sent[0]
}
wait sent[0]
%b = allocate f32[M, M]
matmul %s, %w -> %b
matmul %b, %a -> %y
%c = allocate f32[M, M]
matmul %y, %w -> %c
matmul %c, %w -> %z
join comm
""",
        """
fork comm
%a = allocate f32[M, M]
matmul %x, %w -> %a
%s = allocate f32[M, M]
record done[0]
stream comm[0] {
  wait done[0]
  all_reduce sum %a -> %s on x
  record sent[0]
}
wait sent[0]
%b = allocate f32[M, M]
matmul %s, %w -> %b
deallocate %s
matmul %b, %a -> %y
deallocate %a
deallocate %b
%c = allocate f32[M, M]
matmul %y, %w -> %c
matmul %c, %w -> %z
join comm
""",
    ),
    "without an event, a buffer is not freed before the join": (
        "(%x: f32[M, M], %w: f32[M, M]) -> (%y: f32[M, M], %z: f32[M, M]) mesh(x=2) streams(comm[1])",
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
fork comm
stream comm[0] {
  collective_permute %a -> %z from [1, 0] on x
}
%b = allocate f32[M, M]
matmul %x, %w -> %b
matmul %b, %w -> %y
join comm
""",
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
fork comm
stream comm[0] {
  collective_permute %a -> %z from [1, 0] on x
}
%b = allocate f32[M, M]
matmul %x, %w -> %b
matmul %b, %w -> %y
join comm
""",
    ),
    # --- one buffer per stream
    "each iteration uses one chunk of a buffer": (
        ONE,
        """
%a = allocate f32[M, N]
fork loop
for %i in 0..4 {
  %p = (rank.x + %i) % 4
  stream loop[%i] {
    %x_i = chunk %x[0: %i of 4]
    %a_i = chunk %a[0: %p of 4]
    copy %x_i -> %a_i
    %y_i = chunk %y[1: %i of 4]
    %a_r = reshape %a_i to [M, N/4]
    copy %a_r -> %y_i
  }
}
join loop
""",
        """
fork loop
for %i in 0..4 {
  %p = (rank.x + %i) % 4
  stream loop[%i] {
    %x_i = chunk %x[0: %i of 4]
    %a = allocate f32[M/4, N]
    copy %x_i -> %a
    %y_i = chunk %y[1: %i of 4]
    %a_r = reshape %a to [M, N/4]
    copy %a_r -> %y_i
  }
}
join loop
""",
    ),
    "each iteration frees a chunk after its last use": (
        SQUARE.replace("mesh(x=2)", "mesh(x=2) streams(loop[2])"),
        """
%a = allocate f32[M, M]
%b = allocate f32[M, M]
%c = allocate f32[M, M]
fork loop
for %i in 0..M {
  stream loop[%i] {
    %x_i = chunk %x[0: %i of M]
    %a_i = chunk %a[0: %i of M]
    matmul %x_i, %w -> %a_i
    %b_i = chunk %b[0: %i of M]
    matmul %a_i, %w -> %b_i
    %c_i = chunk %c[0: %i of M]
    matmul %b_i, %w -> %c_i
    %y_i = chunk %y[0: %i of M]
    matmul %c_i, %w -> %y_i
  }
}
join loop
""",
        """
fork loop
for %i in 0..M {
  stream loop[%i] {
    %x_i = chunk %x[0: %i of M]
    %a = allocate f32[1, M]
    matmul %x_i, %w -> %a
    %b = allocate f32[1, M]
    matmul %a, %w -> %b
    deallocate %a
    %c = allocate f32[1, M]
    matmul %b, %w -> %c
    %y_i = chunk %y[0: %i of M]
    matmul %c, %w -> %y_i
  }
}
join loop
""",
    ),
    # --- in place
    "a softmax overwrites its operand": (
        SQUARE.replace("f32[M, M]", "f32[M, N]").replace("%w: f32[M, N]", "%w: f32[N, N]"),
        """
%a = allocate f32[M, N]
matmul %x, %w -> %a
%b = allocate f32[M, N]
launch @softmax %a -> %b
matmul %b, %w -> %y
""",
        """
%a = allocate f32[M, N]
matmul %x, %w -> %a
%b = reshape %a to [M, N]
launch @softmax %a -> %b
matmul %b, %w -> %y
""",
    ),
    "an operand in the memory of its result": (
        SQUARE,
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
all_reduce sum %a -> %y on x
""",
        """
%a = reshape %y to [M, M]
matmul %x, %w -> %a
all_reduce sum %a -> %y on x
""",
    ),
    "a copy becomes unnecessary": (
        SQUARE,
        """
%a = allocate f32[M, M]
matmul %x, %w -> %a
%b = reshape %a to [M, M]
copy %b -> %y
""",
        """
%a = reshape %y to [M, M]
matmul %x, %w -> %a
""",
    ),
}
# In each case, the name states why memory is not shared. The body does not change.
APART = {
    "as many streams as chunks": (
        ONE.replace("loop[2]", "loop[4]"),
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
    ),
    "a chunk of another iteration": (
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
      %a_i = chunk %a[0: (%i + 2) % 4 of 4]
      %y_i = chunk %y[0: %i of 4]
      copy %a_i -> %y_i
    }
  }
}
join loop
""",
    ),
    "the kernel reads other elements": (SQUARE, "%a = allocate f32[M, M]\nmatmul %x, %w -> %a\nlaunch @turn %a -> %y"),
    "the operand is read again": (
        SQUARE.replace("-> (%y: f32[M, M])", "-> (%y: f32[M, M], %z: f32[M, M])"),
        "%a = allocate f32[M, M]\nmatmul %x, %w -> %a\nall_reduce sum %a -> %y on x\nmatmul %a, %w -> %z",
    ),
    "the result has another dtype": (
        "(%x: f32[M, N], %w: f32[N, N]) -> (%y: i32[M, N]) mesh()",
        "%a = allocate f32[M, N]\nmatmul %x, %w -> %a\nlaunch @count %a -> %y",
    ),
    "a loop reads the operand again": (
        SQUARE.replace("mesh(x=2)", "mesh(x=1)"),
        "%a = allocate f32[M, M]\nmatmul %x, %w -> %a\nfor %i in 0..2 {\n  all_reduce sum %a -> %y on x\n}",
    ),
    "the operand is an input": (SQUARE, "all_reduce sum %x -> %y on x"),
    "the output already contains a value": (
        SQUARE,
        "matmul %x, %w -> %y\n%a = allocate f32[M, M]\nmatmul %y, %w -> %a\nall_reduce sum %a -> %y on x",
    ),
    "a chunk that two iterations use": (
        "(%x: f32[M, N]) -> (%y: f32[M, N]) mesh() streams(loop[2])",
        """
%a = allocate f32[M, N]
fork loop
for %i in 0..4 {
  stream loop[%i] {
    %x_i = chunk %x[0: %i of 4]
    %a_i = chunk %a[0: %i / 2 of 4]
    copy %x_i -> %a_i
    %y_i = chunk %y[0: %i of 4]
    copy %a_i -> %y_i
  }
}
join loop
""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str) -> None:
    expect_plan(*CASES[case])


@pytest.mark.parametrize("case", APART)
def test_memory_that_is_not_shared(case: str) -> None:
    header, body = APART[case]
    program = host(body, header)
    assert str(with_planned_memory(program)) == str(program)
