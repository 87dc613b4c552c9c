"""Invalid host programs that the verifier refuses, with the messages, and valid programs."""

from __future__ import annotations

from dataclasses import replace

import host_text
import pytest
from lowered_fusions import NAMES, RANKS, program

from hostweave.base.errors import ProgramError
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Symbol
from hostweave.host_ir.size_requirements import not_negative, undivided
from hostweave.host_ir.verify import verify_host
from hostweave.types.size import LocalSize, Size

HEAD = "host @t(%x: f32[M@x, 4], %n: i32[M@x, 4]) -> (%y: f32[M@x, 4]) mesh(x=2) streams(loop[2]) events(done[2]) {\n"
KERNEL = "kernel @double(%a: f32[M/2, 4]) {\n  %b: f32[M/2, 4] = add(%a, %a)\n}\n"

DIVISOR = "the divisor may be 0 or negative: divide by a positive number, or by a size of an enclosing loop"
BODIES = {
    # blocks along a dim, and packed blocks
    "all_gather %x -> %y along 2 on x": "text:2: @t: all_gather %x -> %y along 2 on x: %y is f32[M/2, 4]: it has no dim 2",
    "all_gather %x -> %y along 1 on x": (
        "text:2: @t: all_gather %x -> %y along 1 on x: %x is f32[M/2, 4], "
        "but this rank's block of %y along dim 1 has M elements: make them equal"
    ),
    "reduce_scatter sum %x along 1 -> %y on x": (
        "text:2: @t: reduce_scatter sum %x along 1 -> %y on x: %y is f32[M/2, 4], "
        "but this rank's block of %x along dim 1 has M elements: make them equal"
    ),
    "all_to_all %x along 0 -> %y on x": (
        "text:2: @t: all_to_all %x along 0 -> %y on x: only one buffer has `along`: write it for both, or for none"
    ),
    "%b = allocate f32[6, 4]\nall_to_all %x along 1 -> %b along 0 on x": (
        "text:3: @t: all_to_all %x along 1 -> %b along 0 on x: this rank sends itself M elements of %x, but receives 12 in %b"
    ),
    "pack %x -> %y in [2 of M, 1 of 4]": (
        "text:2: @t: pack %x -> %y in [2 of M, 1 of 4]: %x is f32[M/2, 4], of 2*M elements, but the blocks have 4*M: make them equal"
    ),
    "%b = permute %x by [1, 0]\nunpack %b -> %y in [1 of M/2, 2 of 4]": (
        "text:3: @t: unpack %b -> %y in [1 of M/2, 2 of 4]: %b is not contiguous: copy it to a contiguous buffer first"
    ),
    "pack %x -> %y in [2 of K]": "text:2: @t: pack %x -> %y in [2 of K]: K is not a size of any input or output; the sizes are M",
    "send_blocks %x in [] by [] on x": (
        "text:2: @t: send_blocks %x in [] by [] on x: a buffer has at least one block: cut it into 1 or more"
    ),
    "send_blocks %x in [2 of M/2, 2 of 4] by [0[4] -> 1[0]] on x": (
        "text:2: @t: send_blocks %x in [2 of M/2, 2 of 4] by [0[4] -> 1[0]] on x: 0[4] -> 1[0]: there are 4 blocks, from 0 to 3"
    ),
    # names, deallocates, and writes to inputs
    "copy %q -> %y": "text:2: @t: copy %q -> %y: %q is used before its definition: define it above, in this body or around it",
    "%x = allocate f32[4]": "text:2: @t: %x = allocate f32[4]: %x is defined twice: rename one",
    "for %i in 0..2 {\n%b = allocate f32[M/2, 4]\n}\ncopy %b -> %y": (
        "text:5: @t: copy %b -> %y: %b is used before its definition: define it above, in this body or around it"
    ),
    "%b = allocate f32[M/2, 4]\ndeallocate %b\ncopy %b -> %y": (
        "text:4: @t: copy %b -> %y: %b is used after its deallocate: move the deallocate down"
    ),
    "%b = allocate f32[M/2, 4]\n%v = chunk %b[1: 0 of 1]\ndeallocate %b\ncopy %v -> %y": (
        "text:5: @t: copy %v -> %y: %v is used after its deallocate: move the deallocate down"
    ),
    "deallocate %y": "text:2: @t: deallocate %y: %y belongs to the caller: deallocate only buffers of this program",
    "%b = allocate f32[4, 4]\n%v = select %b[0: 1]\ndeallocate %v": "text:4: @t: deallocate %v: %v is a view: deallocate %b",
    "copy %y -> %x": "text:2: @t: copy %y -> %x: %x is an input and may not be written: allocate a buffer",
    "%v = reshape %x to [2*M]\n%w = reshape %y to [2*M]\ncopy %w -> %v": (
        "text:4: @t: copy %w -> %v: %v is an input and may not be written: allocate a buffer"
    ),
    "%b = allocate f32[M/2, 4]\n%v = choose %b if rank.x == 0 else %x\ncopy %y -> %v": (
        "text:4: @t: copy %y -> %v: %v is an input and may not be written: allocate a buffer"
    ),
    "%b = allocate f32[M/2, 4]\n%v = choose %x if rank.x == 0 else %b\ndeallocate %b\ncopy %v -> %y": (
        "text:5: @t: copy %v -> %y: %v is used after its deallocate: move the deallocate down"
    ),
    # expressions
    "%i = %j + 1": "text:2: @t: %i = %j + 1: %j is not a known index: define it above",
    "%i = rank.q": "text:2: @t: %i = rank.q: mesh(x=2) has no axis 'q': its axes are x",
    "%i = K": "text:2: @t: %i = K: K is not a size of any input or output; the sizes are M",
    "%i = 1 % rank.x": "text:2: @t: %i = 1 % rank.x: 1 % rank.x: " + DIVISOR,
    "%i = rank.x % -3": "text:2: @t: %i = rank.x % -3: rank.x % -3: " + DIVISOR,
    "%i = rank.x / (0 - M)": "text:2: @t: %i = rank.x / (0 - M): rank.x / (0 - M): " + DIVISOR,
    f"%i = rank.x * {2**62}": f"text:2: @t: %i = rank.x * {2**62}: {2**62} may overflow int64_t in a sum or product: write at most {2**48}",
    "%i = 3 / M": "text:2: @t: %i = 3 / M: 3 / M: " + DIVISOR,
    "for %i in 0..2 {\n%j = %i / (M / 4)\n}": "text:3: @t: %j = %i / (M / 4): %i / (M / 4): " + DIVISOR,
    "%i = rank.x / (M - 4)": "text:2: @t: %i = rank.x / (M - 4): rank.x / (M - 4): " + DIVISOR,
    "%b = allocate f32[4]\nif rank.x == 0 {\ndeallocate %b\n}": (
        "text:4: @t: deallocate %b: %b is allocated outside of this loop or branch: deallocate it there, to free it once on each rank"
    ),
    "for %i in 0..2 {\n%b = allocate f32[4]\nfor %j in 0..2 {\ndeallocate %b\n}\n}": (
        "text:5: @t: deallocate %b: %b is allocated outside of this loop or branch: deallocate it there, to free it once on each rank"
    ),
    "for %i in 0..K {\n}": "text:2: @t: for %i in 0..K: K is not a size of any input or output; the sizes are M",
    "matmul %x, %x scaled nan -> %y": "text:2: @t: matmul %x, %x scaled nan -> %y: scaled nan: write a finite number",
    "attention %x, %x, %x scaled inf -> %y": "text:2: @t: attention %x, %x, %x scaled inf -> %y: scaled inf: write a finite number",
    "%b = allocate u8[4]\nfill %b with -1": "text:3: @t: fill %b with -1: u8 cannot hold -1: write an int from 0 to 255",
    # memory and views
    "%b = allocate f32[K]": "text:2: @t: %b = allocate f32[K]: K is not a size of any input or output",
    "%v = select %x[2: 0]": "text:2: @t: %v = select %x[2: 0]: %x is f32[M/2, 4]: it has no dim 2",
    "%v = choose %x if %i == 0 else %y": ("text:2: @t: %v = choose %x if %i == 0 else %y: %i is not a known index: define it above"),
    "%v = chunk %x[1: 0 of 2]\n%w = choose %x if rank.x == 0 else %v": (
        "text:3: @t: %w = choose %x if rank.x == 0 else %v: %x is f32[M/2, 4]: %v is f32[M/2, 2]: "
        "both buffers must have the same type and layout"
    ),
    "%v = chunk %x[1: 0 of 3]": "text:2: @t: %v = chunk %x[1: 0 of 3]: %x is f32[M/2, 4]: cannot cut 4 into 3 chunks",
    "%v = slice %x[2: 1 from 0]": "text:2: @t: %v = slice %x[2: 1 from 0]: %x is f32[M/2, 4]: it has no dim 2",
    "%v = slice %x[0: 1 from ceil(K/2)]": (
        "text:2: @t: %v = slice %x[0: 1 from ceil(K/2)]: K is not a size of any input or output; the sizes are M"
    ),
    "%v = slice %x[1: 3 from 2]": ("text:2: @t: %v = slice %x[1: 3 from 2]: %x is f32[M/2, 4]: 1 of the indices are outside of dim 1"),
    "%v = strided %x[1: 2 from 0 by 0]": (
        "text:2: @t: %v = strided %x[1: 2 from 0 by 0]: %x is f32[M/2, 4]: the step is 0: it must be at least 1"
    ),
    "%v = strided %x[1: 2 from 1 by 3]": (
        "text:2: @t: %v = strided %x[1: 2 from 1 by 3]: %x is f32[M/2, 4]: 1 of the indices are outside of dim 1"
    ),
    "%b = allocate f32[(M + K)]": "text:2: @t: %b = allocate f32[(K + M)]: K is not a size of any input or output",
    "%b = allocate f32[local(M, q)]": "text:2: @t: %b = allocate f32[local(M, q)]: mesh(x=2) has no axis 'q': its axes are x",
    "%v = reshape %x to [M, 4]": (
        "text:2: @t: %v = reshape %x to [M, 4]: %x is f32[M/2, 4]: "
        "these dims are not contiguous in memory, or the number of elements differs"
    ),
    "%v = permute %x by [0, 0]": "text:2: @t: %v = permute %x by [0, 0]: %x is f32[M/2, 4]: the order must name each of its dims once",
    # compute
    "%a = allocate f32[4, 4, 2]\n%b = select %a[2: 0]\n%c = permute %x by [1, 0]\nmatmul %c, %x -> %b": (
        "text:5: @t: matmul %c, %x -> %b: neither the rows nor the columns of %b are contiguous: copy it to or from a contiguous buffer"
    ),
    "matmul %x, %n -> %y": (
        "text:2: @t: matmul %x, %n -> %y: dtypes differ: %x is f32[M/2, 4], %n is i32[M/2, 4], %y is f32[M/2, 4]; cast first"
    ),
    "%a = allocate i32[4, 4]\nmatmul %a, %a -> %a": (
        "text:3: @t: matmul %a, %a -> %a: cuBLASLt has no product of i32 by i32 that gives i32: launch a kernel that computes it"
    ),
    "matmul %x, %x -> %y": "text:2: @t: matmul %x, %x -> %y: inner dims differ: f32[M/2, 4] x f32[M/2, 4]",
    "%v = select %x[0: 0]\nmatmul %v, %x -> %y": "text:3: @t: matmul %v, %x -> %y: both operands need at least two dims",
    "%a = reshape %x to [2, M/4, 4]\n%b = allocate f32[3, 4, 4]\nmatmul %a, %b -> %y": (
        "text:4: @t: matmul %a, %b -> %y: leading dims do not broadcast: f32[2, M/4, 4] x f32[3, 4, 4]"
    ),
    "%b = allocate f32[4, 2]\nmatmul %x, %b -> %y": "text:3: @t: matmul %x, %b -> %y: %y is f32[M/2, 4], not f32[M/2, 2]",
    "%b = allocate f32[4, 4]\nmatmul %x, %b in bf16x3 -> %y": (
        "text:3: @t: matmul %x, %b in bf16x3 -> %y: there is no precision bf16x3: write tf32, or leave it out"
    ),
    "%a = allocate bf16[2, 4]\n%b = allocate bf16[4, 4]\n%c = allocate bf16[2, 4]\nmatmul %a, %b in tf32 -> %c": (
        "text:5: @t: matmul %a, %b in tf32 -> %c: only products of f32 can be in tf32, and %a is bf16[2, 4]: leave tf32 out"
    ),
    "%a = allocate f8e4m3[32, 16]\n%s = allocate f32[32, 1]\n%y2 = allocate bf16[32, 32]\nmatmul %a, %a scales %s -> %y2": (
        "text:5: @t: matmul %a, %a scales %s -> %y2: 1 scales are given, not 2: name the scales of %a, then those of %a"
    ),
    "%a = allocate f8e4m3[32, 16]\n%b = permute %a by [1, 0]\n%s = allocate f32[32, 1]\n"
    "%y2 = allocate bf16[32, 32]\nmatmul %a, %b scales %s, %s -> %y2": (
        "text:6: @t: matmul %a, %b scales %s, %s -> %y2: scales f32[32, 1] and f32[32, 1] do not fit f8e4m3[32, 16] and f8e4m3[16, 32]; "
        "they must be [1, 1] and [1, 1], [M, 1] and [1, N], or [M or M/128, K/128] and [K/128, N or N/128]"
    ),
    "%a = allocate f8e4m3[32, 16]\n%b = allocate f8e4m3[16, 32]\n%s = allocate f32[1, 1]\n"
    "%y2 = allocate bf16[32, 32]\nmatmul %a, %b scales %s, %s -> %y2": (
        "text:6: @t: matmul %a, %b scales %s, %s -> %y2: the elements of %b along dim 0 are not contiguous: "
        "copy it to or from a contiguous buffer"
    ),
    "%a = allocate f8e4m3[32, 256]\n%b = permute %a by [1, 0]\n%s = allocate f32[32, 2]\n%t2 = allocate f32[2, 32]\n"
    "%y2 = allocate bf16[32, 32]\nmatmul %a, %b scales %s, %t2 -> %y2": (
        "text:7: @t: matmul %a, %b scales %s, %t2 -> %y2: the scales %s do not have a layout that cuBLASLt supports, "
        "row-major or column-major: copy them to such a buffer"
    ),
    "%b = allocate f32[4, 4]\nmatmul %x, %b accumulate %x, %y -> %y": (
        "text:3: @t: matmul %x, %b accumulate %x, %y -> %y: at most one buffer and one bias can be added: add the others before"
    ),
    "%b = allocate f32[4, 4]\nmatmul %x, %b accumulate %b -> %y": (
        "text:3: @t: matmul %x, %b accumulate %b -> %y: shapes differ: %b is f32[4, 4], %y is f32[M/2, 4]"
    ),
    "%b = allocate f32[4, 4]\n%c = allocate f32[M/2, 8]\n%v = chunk %c[1: 0 of 2]\nmatmul %x, %b accumulate %v -> %y": (
        "text:5: @t: matmul %x, %b accumulate %v -> %y: the memory layouts of %v and %y differ: copy %v to a buffer with the layout of %y"
    ),
    "%b = allocate f32[4, 4]\nmatmul %x, %b bias %b -> %y": (
        "text:3: @t: matmul %x, %b bias %b -> %y: %b is f32[4, 4], not f32[4], one element for each column of %y"
    ),
    "%b = allocate f32[4, 4]\n%v = select %b[1: 0]\nmatmul %x, %b bias %v -> %y": (
        "text:4: @t: matmul %x, %b bias %v -> %y: %v is not contiguous, but a bias must be: copy it to a contiguous buffer first"
    ),
    "%b = allocate f32[4, 4]\nmatmul %x, %b activation gelu -> %y": (
        "text:3: @t: matmul %x, %b activation gelu -> %y: cuBLASLt has no gelu, only relu and gelu_tanh: launch a kernel after the matmul"
    ),
    **{
        f"%a = allocate {a}\n%b = allocate {b}\n%c = allocate {c}\n{view}matmul %a, %b activation relu -> %{dst}": (
            f"text:{5 + bool(view)}: @t: matmul %a, %b activation relu -> %{dst}: "
            f"cuBLASLt has no bias and no activation for this product, because {why}: launch a kernel after the matmul"
        )
        for a, b, c, view, dst, why in [
            ("f64[2, 4]", "f64[4, 4]", "f64[2, 4]", "", "c", "it is of f64"),
            ("f32[2, 2, 4]", "f32[2, 4, 4]", "f32[2, 2, 4]", "", "c", "it is a batch of products"),
            ("f32[2, 2, 4]", "f32[4, 4]", "f32[2, 4, 4]", "%d = chunk %c[1: 0 of 2]\n", "d", "its rows are not consecutive"),
            ("f32[2, 4]", "f32[4, 4]", "f32[4, 2]", "%d = permute %c by [1, 0]\n", "d", "the elements of a row are not contiguous"),
        ]
    },
    "launch @triple %x -> %y": "text:2: @t: launch @triple %x -> %y: there is no kernel @triple; the kernels are @double",
    "launch @double %x, %x -> %y": "text:2: @t: launch @double %x, %x -> %y: @double takes 1 buffers, not 2",
    "launch @double %n -> %y": "text:2: @t: launch @double %n -> %y: %n is i32[M/2, 4], and @double takes f32[M/2, 4] as %a",
    "copy %n -> %y": "text:2: @t: copy %n -> %y: dtypes differ: %n is i32[M/2, 4], %y is f32[M/2, 4]; cast first",
    "%b = allocate f32[4]\ncopy %b -> %y": "text:3: @t: copy %b -> %y: shapes differ: %b is f32[4], %y is f32[M/2, 4]",
    "%b = allocate i32[4]\nfill %b with 0.5": (
        "text:3: @t: fill %b with 0.5: i32 cannot hold 0.5: write an int from -2147483648 to 2147483647"
    ),
    # communication
    "%v = chunk %x[1: 0 of 2]\nsend %v to 0 on x": (
        "text:3: @t: send %v to 0 on x: %v is not contiguous, which communication needs: copy it to a contiguous buffer first"
    ),
    "all_gather %x -> %y on x": ("text:2: @t: all_gather %x -> %y on x: %y must hold 2 x %x, but has 2*M elements, not 4*M"),
    "all_gather %x -> %y on q\nsend %x to 0 on x": (
        "text:2: @t: all_gather %x -> %y on q: channel q is not declared: add channels(q: ...) to the header; declared: x"
    ),
    "group {\n}": "text:2: @t: group: the group is empty: remove it",
    "%b = allocate f32[M, 4]\nall_reduce sum %x -> %b on x": (
        "text:3: @t: all_reduce sum %x -> %b on x: %b must hold 1 x %x, but has 4*M elements, not 2*M"
    ),
    "all_reduce mul %x -> %y on x": (
        "text:2: @t: all_reduce mul %x -> %y on x: unknown reduction 'mul'; use one of sum, prod, min, max, avg"
    ),
    "reduce_scatter sum %x -> %y on x": (
        "text:2: @t: reduce_scatter sum %x -> %y on x: %x must hold 2 x %y, but has 2*M elements, not 4*M"
    ),
    "%b = allocate f32[4]\nbroadcast %b -> %y from 0 on x": (
        "text:3: @t: broadcast %b -> %y from 0 on x: %y must hold 1 x %b, but has 2*M elements, not 4"
    ),
    "%b = allocate f32[4]\nbroadcast_to_others %b to %y from 0 on x": (
        "text:3: @t: broadcast_to_others %b to %y from 0 on x: %y must hold 1 x %b, but has 2*M elements, not 4"
    ),
    "%b = allocate bool[2]\n%c = allocate bool[2]\nall_reduce max %b -> %c on x": (
        "text:4: @t: all_reduce max %b -> %c on x: NCCL cannot reduce bool: cast to u8 before the reduction and back after it"
    ),
    "%b = allocate f8e4m3[2]\n%c = allocate f8e4m3[2]\nreduce sum %b -> %c to 0 on x": (
        "text:4: @t: reduce sum %b -> %c to 0 on x: NCCL cannot reduce f8e4m3: cast to f32 before the reduction and back after it"
    ),
    "gather %x -> %y to 0 on x": "text:2: @t: gather %x -> %y to 0 on x: %y must hold 2 x %x, but has 2*M elements, not 4*M",
    "scatter %x -> %y from 0 on x": "text:2: @t: scatter %x -> %y from 0 on x: %x must hold 2 x %y, but has 2*M elements, not 4*M",
    "%b = allocate f32[3]\n%c = allocate f32[3]\nall_to_all %b -> %c on x": (
        "text:4: @t: all_to_all %b -> %c on x: %b is f32[3]: 2 blocks cannot be proven equal; give it a dim of 2, one block per rank"
    ),
    "collective_permute %x -> %y from [1] on x": (
        "text:2: @t: collective_permute %x -> %y from [1] on x: a process group of 2 needs 2 sources, each below 2 or none"
    ),
    "collective_permute %x -> %y from [none, 2] on x": (
        "text:2: @t: collective_permute %x -> %y from [none, 2] on x: a process group of 2 needs 2 sources, each below 2 or none"
    ),
    "collective_permute %x -> %y from [1, 1] on x": (
        "text:2: @t: collective_permute %x -> %y from [1, 1] on x: rank 1 is named twice: "
        "each rank sends to at most one rank; use a broadcast"
    ),
    "barrier %y on x": "text:2: @t: barrier %y on x: %y is f32[M/2, 4]: a barrier needs one number, such as i32[1]",
    "if rank.x == 0 {\nall_reduce sum %x -> %y on x\n}": (
        "text:3: @t: all_reduce sum %x -> %y on x: a collective is not allowed under `if rank.x == 0`, "
        "which differs between ranks: use send and recv there"
    ),
    "%r = rank.x + 1\nif %r == 1 {\nbroadcast %x -> %y from 0 on x\n}": (
        "text:4: @t: broadcast %x -> %y from 0 on x: a collective is not allowed under `if %r == 1`, "
        "which differs between ranks: use send and recv there"
    ),
    "%r = rank.x + 1\nfor %i in 0..2 {\nif %i == %r {\nbarrier %y on x\n}\n}": (
        "text:5: @t: barrier %y on x: a collective is not allowed under `if %i == %r`, which differs between ranks: use send and recv there"
    ),
    "if rank.x == 0 {\ncopy %x -> %y\n} else {\ngroup {\nall_to_all %x -> %y on x\n}\n}": (
        "text:6: @t: all_to_all %x -> %y on x: a collective is not allowed under `if rank.x == 0`, "
        "which differs between ranks: use send and recv there"
    ),
    "for %i in 0..local(M, x) {\nall_reduce sum %x -> %y on x\n}": (
        "text:3: @t: all_reduce sum %x -> %y on x: a collective cannot be in a loop of local(M, x) iterations, "
        "which differ between ranks: use send and recv there"
    ),
    "group {\ncopy %x -> %y\n}": "text:3: @t: copy %x -> %y: a group may contain only communications, no kernels: move the instruction out",
    # streams and events
    "stream pool[0] {\n}": "text:2: @t: stream pool[0]: pool is not declared: add streams(pool[...]) to the header",
    "stream loop[0] {\nstream loop[1] {\n}\n}": ("text:3: @t: stream loop[1]: stream blocks cannot be nested: end the outer one first"),
    "fork pool": "text:2: @t: fork pool: pool is not declared: add streams(pool[...]) to the header",
    "stream loop[0] {\njoin loop\n}": (
        "text:3: @t: join loop: fork and join apply to the caller's stream: move the instruction out of the stream block"
    ),
    "fork loop first 3": (
        "text:2: @t: fork loop first 3: there are 2 streams loop, not 3: give a number from 1 to 2, or omit the number for all"
    ),
    "record ready[0]": "text:2: @t: record ready[0]: ready is not declared: add events(ready[...]) to the header",
    "wait ready[0]": "text:2: @t: wait ready[0]: ready is not declared: add events(ready[...]) to the header",
}

PROGRAMS = {
    "host @t(%x: f32[4], %x: f32[4]) -> () mesh(x=1) {\n}\n": "@t: %x is declared twice: rename one",
    "host @t(%x: f32[4@q]) -> () mesh(x=1) {\n}\n": "@t: mesh(x=1) has no axis 'q': its axes are x",
    "host @t() -> () mesh(x=1) streams(loop[0]) {\n}\n": "@t: loop[0] is empty: declare at least one",
    "host @t() -> () mesh(x=1) streams(loop[2]) events(loop[1]) {\n}\n": "@t: loop is declared twice: rename one",
    **{
        f"host @t(%x: f32[4]) -> (%y: f32[4]) mesh(x=2) channels({channels}) {{\n  all_reduce sum %x -> %y on x\n}}\n": f"@t: {why}"
        for channels, why in (
            ("x: q two_sided", "mesh(x=2) has no axis 'q': its axes are x"),
            ("x: x, x two_sided", "channel x: axis x is named twice: name each axis once"),
            ("x: x on mesh(x=2 of ranks 1, 2) two_sided", "mesh(x=2) has no rank 2: name only its ranks"),
            ("x: x two_sided, x: x on mesh(x=1 of ranks 1) two_sided", "channel x is declared twice: rename one"),
            ("x: x two_sided, z: x two_sided", "channels x and z have the same ranks and transport: declare one"),
            ("z: x on mesh(x=1 of ranks 1) two_sided, x: x two_sided", "channel z is unused: remove it from the header"),
        )
    },
    "host @t(%x: f32[4]) -> (%y: f32[N]) mesh(x=1) {\n  fill %y with 1.0\n}\n": (
        "@t: no input has a dim N, so its size is unknown; add it to an input, or write an int"
    ),
    "host @t(%x: f32[M@x]) -> () mesh(x=2) uneven(K) {\n}\n": ("@t: uneven(K): K is not a size of any input or output; leave it out"),
    "host @t(%x: f32[M@x]) -> (%y: f32[M]) mesh(x=2) uneven(M) {\n  all_gather %x -> %y on x\n}\n": (
        "text:2: @t: all_gather %x -> %y on x: %y must hold 2 x %x, but has M elements, not 2*local(M, x)"
    ),
    HEAD.replace("%n: i32[M@x, 4]", "%g: f32[D, M@x, 4] as g_0 to g_2 of gs") + "copy %g -> %y\n}\n": (
        "text:2: @t: copy %g -> %y: %g is a group of tensors: use one of them, such as %g_i = select %g[0: 0]"
    ),
    HEAD.replace("(%y: f32[M@x, 4])", "(%y: f32[M, 4] partial(sum, x))") + "}\n": (
        "@t: %y is f32[M, 4] partial(sum, x): a caller has no partial sums; reduce it in the program"
    ),
    2 * KERNEL + HEAD + "}\n": "@t: kernel @double is declared twice: rename one",
    "kernel @none() {\n}\n" + HEAD + "}\n": "@t: kernel @none has no ops: give it one",
}


@pytest.mark.parametrize("body", BODIES)
def test_body(body: str) -> None:
    host = host_text.parse(KERNEL.replace("\n", " ") + HEAD + body + "\n}\n")
    with pytest.raises(ProgramError) as caught:
        verify_host(host)
    assert str(caught.value) == BODIES[body]


def test_a_condition_on_a_local_size() -> None:
    host = host_text.parse(HEAD + "all_reduce sum %x -> %y on x\n}\n")
    guarded = replace(host, body=(ir.If(Symbol(LocalSize(Size.of("M"), ("x",))).equals(0), host.body),))
    with pytest.raises(ProgramError, match=r"a collective is not allowed under `if local\(M, x\) == 0`, which differs between ranks"):
        verify_host(guarded)


@pytest.mark.parametrize("text", PROGRAMS)
def test_program(text: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify_host(host_text.parse(text))
    assert str(caught.value) == PROGRAMS[text]


BLOCK = "function @b(%p: f32[M@x, 4]) -> (%q: f32[M@x, 4]) { all_reduce sum %p -> %q on x }\n"

CALLS = {
    "call @c %x -> %y": "text:3: @t: call @c %x -> %y: there is no function @c before @t; known: @b",
    "call @b %x, %x -> %y": "text:3: @t: call @b %x, %x -> %y: @b takes 1 buffers, not 2",
    "call @b %x -> ": "text:3: @t: call @b %x ->: @b gives 1 buffers, not 0",
    "call @b %n -> %y": "text:3: @t: call @b %n -> %y: %n is i32[M/2, 4], and @b takes f32[M/2, 4] as %p",
    "%b = allocate f32[M, 4]\ncall @b %x -> %b": "text:4: @t: call @b %x -> %b: %b is f32[M, 4], and @b gives f32[M/2, 4] as %q",
    "call @b %x -> %x": "text:3: @t: call @b %x -> %x: %x is an input and may not be written: allocate a buffer",
    "call @b %y -> %y": "text:3: @t: call @b %y -> %y: %y is named twice: pass a separate buffer for each output",
    "%b = allocate f32[4, M/2]\n%v = permute %b by [1, 0]\ncall @b %v -> %y": (
        "text:5: @t: call @b %v -> %y: %v is not contiguous, but a function needs contiguous buffers: copy it to a contiguous buffer first"
    ),
    "stream loop[0] {\ncall @b %x -> %y\n}": (
        "text:4: @t: call @b %x -> %y: a function runs on the caller's stream: move the call out of the stream block"
    ),
    "if rank.x == 0 {\ncall @b %x -> %y\n}": (
        "text:4: @t: call @b %x -> %y: a function with collectives is not allowed under `if rank.x == 0`, which differs between ranks"
    ),
}


@pytest.mark.parametrize("body", CALLS)
def test_call(body: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify_host(host_text.parse(BLOCK + HEAD + body + "\n}\n"))
    assert str(caught.value) == CALLS[body]


BLOCKS = {
    BLOCK.replace("%p -> %q", "%p -> %r"): (
        "text:1: @b: all_reduce sum %p -> %r on x: %r is used before its definition: define it above, in this body or around it"
    ),
    BLOCK.replace("all_reduce sum %p -> %q on x", "call @b %p -> %q"): (
        "text:1: @b: call @b %p -> %q: there is no function @b before @b; known: none"
    ),
    2 * BLOCK: "@t: function @b is declared twice: rename one",
    BLOCK.replace("{", "{ record done[0]"): "@t: both @b and @t use done: declare events for each",
    BLOCK.replace("{", "{ launch @half %p -> %q"): "text:1: @b: launch @half %p -> %q: there is no kernel @half; the kernels are none",
    BLOCK.replace("{", "{ %r = allocate f32[K]"): "text:1: @b: %r = allocate f32[K]: K is not a size of any input or output",
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_block(blocks: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify_host(host_text.parse(blocks + HEAD + "wait done[0]\n}\n"))
    assert str(caught.value) == BLOCKS[blocks]


def test_a_block_of_sends_may_be_called_by_some_ranks() -> None:
    block = "function @b(%p: f32[M@x, 4]) -> () { send %p to 0 on x }\n"
    verify_host(host_text.parse(block + HEAD + "if rank.x == 1 {\ncall @b %x -> \n}\n}\n"))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_programs_are_legal(name: str, ranks: int) -> None:
    verify_host(program(name, ranks))


def test_sibling_bodies_may_share_a_name() -> None:
    body = "for %i in 0..2 {\n%b = allocate f32[M/2, 4]\ndeallocate %b\n}\nfor %i in 0..2 {\n%b = allocate f32[M/2, 4]\ncopy %x -> %b\n}\n"
    verify_host(host_text.parse(HEAD + body + "}\n"))


def test_a_gather_of_shards_that_may_be_uneven() -> None:
    head = "host @t(%x: f32[M@x, K]) -> (%y: f32[K, M]) mesh(x=2) uneven(M) {\n"
    verify_host(host_text.parse(head + "all_gather %x -> %y along 1 on x\n}\n"))
    with pytest.raises(ProgramError, match=r"this rank's block of %y along dim 0 has M\*local\(K, x\) elements"):
        verify_host(host_text.parse(head.replace("(M)", "(M, K)") + "all_gather %x -> %y along 0 on x\n}\n"))


def test_a_quotient_as_divisor_is_a_whole_number_in_a_call() -> None:
    host = host_text.parse(HEAD + "for %i in 0..M {\n%j = %i / (M / 16)\n}\ncopy %x -> %y\n}\n")
    verify_host(host)
    assert undivided(host, {"M": 24}) == {"M": 24}
    assert undivided(host, {"M": 32}) == {}


def test_trip_counts_are_not_negative_in_a_call() -> None:
    host = host_text.parse(HEAD + "for %i in 0..(M - 4) {\ncopy %x -> %y\n}\n}\n")
    assert list(map(str, not_negative(host))) == ["(M - 4)"]
