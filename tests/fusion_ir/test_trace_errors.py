"""Errors of tracing, with their exact messages."""

from __future__ import annotations

import pytest
from traced import X, trace

from hostweave.base.errors import ProgramError

ERRORS = {
    "inner dims": (
        "return hw.matmul(x, w)",
        {"w": 'hw.bf16["J", "N"]'},
        "4: matmul: inner dims differ: bf16[M, K] x bf16[J, N]; "
        "the last dim of the first must equal the second-to-last dim of the second: transpose or reshape one of them",
    ),
    **{
        f"matmul of {dtype}": (
            "return hw.matmul(x, w)",
            {"x": f'hw.{dtype}["M", "K"]', "w": f'hw.{dtype}["K", "N"]'},
            f"4: matmul: a product of {dtype} by {dtype} is not supported; the supported dtypes are f16, bf16, f32, f64 and ints; "
            "use hw.astype on both",
        )
        for dtype in ("f8e4m3", "f8e5m2")
    },
    "rank of matmul": (
        "return hw.matmul(x, w)",
        {"w": 'hw.bf16["K"]'},
        "4: matmul: bf16[K] has 1 dims, at least 2 are needed; use x[None] or x[:, None]",
    ),
    "batch dims": (
        "return hw.matmul(x, w)",
        {"x": 'hw.f32[3, "M", "K"]', "w": 'hw.f32[4, "K", "N"]'},
        "4: matmul: batch dims do not broadcast: f32[3, M, K] x f32[4, K, N]",
    ),
    "broadcast": (
        "return x + w",
        {"w": 'hw.bf16["M"]'},
        "4: add: shapes do not broadcast: bf16[M, K] and bf16[M] differ in dim -1; dims are aligned from the "
        "right: give the smaller one a dim of 1 at its end, as in y[:, None]",
    ),
    "dtypes": ("return x + w", {"w": 'hw.f32["M", "K"]'}, "4: add: dtypes differ: bf16[M, K] and f32[M, K]; use hw.astype on one of them"),
    "dtype": ("return hw.exp(x)", {"x": 'hw.i32["M"]'}, "4: exp: not defined for i32; use hw.astype to a dtype that is float"),
    "number": (
        "return x + 0.5",
        {"x": 'hw.i32["M"]'},
        "4: add: 0.5 is not a value of i32[M]; use hw.astype or another number",
    ),
    "large number": (
        "return x + 300",
        {"x": 'hw.u8["M"]'},
        "4: add: 300 is not a value of u8[M]; use hw.astype or another number",
    ),
    "sums of other rows": (
        "return hw.scatter_add(x, 1, i, s)",
        {"x": 'hw.f32[1, "K"]', "i": 'hw.i64["M", "N"]', "s": 'hw.f32["M", "N"]'},
        "4: scatter_add: cannot add f32[M, N] to f32[1, K]: the sums would be f32[M, K]; make all dims except dim 1 equal",
    ),
    "condition": ("return hw.where(x, x, x)", {}, "4: where: the condition must be bool, not bf16[M, K]; compare it first"),
    "two numbers": (
        "return hw.where(x > 0, 1.0, 2)",
        {},
        "4: where: 1.0 and 2 are numbers without a dtype; write one as hw.full((), 2, hw.f32)",
    ),
    "operand": ("return hw.add(x, 'a')", {}, "4: add: 'a' is neither a tensor of this fusion nor a Python number; make it an input"),
    "numbers alone": ("return hw.add(1, 2)", {}, "4: add: no operand is a tensor; compute with Python numbers instead"),
    "unknown dim": ('return hw.sum(x, axis="Q")', {}, "4: sum: bf16[M, K] has no dim named Q"),
    "repeated dim": (
        'return hw.sum(x, axis="M")',
        {"x": 'hw.f32["M", "M"]'},
        "4: sum: f32[M, M] has 2 dims named M: choose one by its index",
    ),
    "axis": ("return hw.sum(x, axis=2)", {}, "4: sum: bf16[M, K] has no dim 2: dims go from 0 to 1"),
    "axis of no int": ("return hw.sum(x, axis=1.0)", {}, "4: sum: 1.0 is not a dim of bf16[M, K]; write its index or its name"),
    "cast to a name": ("return hw.astype(x, 'f32')", {}, "4: astype: 'f32' is not a dtype; use hw.f32, hw.bf16 and the like"),
    "loop": (
        "return sum(x)",
        {},
        "4: a loop: bf16[M, K] has no first dim of known size; use functions of whole tensors, such as hw.sum",
    ),
    "length": ("return x * len(x)", {}, "4: len: bf16[M, K] has no first dim of known size; use x.shape[0], the name of the size"),
    "change": ("x[0] = 1", {}, "4: tensors are immutable; create a new one by hw.where or hw.concat"),
    "NumPy": (
        "import numpy; return numpy.exp(x)",
        {},
        "4: numpy.exp: NumPy cannot compute with a tensor of a fusion; use operators and functions of hostweave, and pass arrays as inputs",
    ),
    "NumPy's sum": (
        "import numpy; return numpy.sum(numpy.asarray(x))",
        {},
        "4: numpy.asarray: a tensor of a fusion holds no data; use functions of hostweave, and pass arrays as inputs",
    ),
    "axis twice": ("return hw.sum(x, axis=(0, -2))", {}, "4: sum: axis=(0, 0) names a dim twice; name it once"),
    "expand": ("return hw.expand_dims(x, 3)", {}, "4: expand_dims: axis 3 is out of range: the result has 3 dims"),
    "permute_dims": (
        "return hw.permute_dims(x, (0, 0))",
        {},
        "4: permute_dims: axes=(0, 0) is not a permutation of the 2 dims of bf16[M, K]; name each dim once",
    ),
    "T of three dims": ("return x[None].T", {}, "4: T: bf16[1, M, K] has 3 dims, not 2; use hw.permute_dims(x, axes)"),
    "reshape": (
        'return hw.reshape(x, "M", 4)',
        {},
        "4: reshape: bf16[M, K] differs in its number of elements from [M, 4]; make the products equal",
    ),
    "reshape rest": ("return hw.reshape(x, 'J', -1)", {}, "4: reshape: -1 cannot be inferred for bf16[M, K] to ['J', -1]; write every dim"),
    "reshape dim": (
        "return hw.reshape(x, 'M+1', 'K')",
        {},
        "4: reshape: not a size: 'M+1'; write a name, an int, or a product such as 8*M/4",
    ),
    "reshape size": ("return hw.reshape(x, 0, 'K')", {}, "4: reshape: a dim has at least one element, not 0"),
    "broadcast_to": (
        'return hw.broadcast_to(x, "M", "N")',
        {},
        "4: broadcast_to: bf16[M, K] does not broadcast to [M, N]; dims are aligned from the right and must be equal or 1",
    ),
    "index": (
        "return x[x > 0]",
        {"x": "hw.f32[8, 4]"},
        "4: indexing: Tensor(bool[8, 4]) is neither an int, a slice, None nor '...'; choose by values with hw.where(condition, x, 0)",
    ),
    "indices": ("return x[:, :, :]", {}, "4: indexing: 3 keys for the 2 dims of bf16[M, K]; leave some out"),
    "index twice": ("return x[..., 0, ...]", {}, "4: indexing: '...' is given twice; write ':' for each dim instead"),
    "index outside": ("return x[8]", {"x": "hw.f32[8, 4]"}, "4: indexing: 8 is outside dim 0 of f32[8, 4]; indices go from -8 to 7"),
    "slice outside": (
        "return x[:, 2:5]",
        {"x": "hw.f32[8, 4]"},
        "4: indexing: [2:5] of dim 1 of f32[8, 4] is out of range; bounds go from -4 to 4",
    ),
    "slice before": ("return x[-9:]", {"x": "hw.f32[8]"}, "4: indexing: [-9:] of dim 0 of f32[8] is out of range; bounds go from -8 to 8"),
    "slice after": ("return x[9:]", {"x": "hw.f32[8]"}, "4: indexing: [9:] of dim 0 of f32[8] is out of range; bounds go from -8 to 8"),
    "slice of nothing": (
        "return x[-2:3]",
        {},
        "4: indexing: [-2:3] of dim 0 of bf16[M, K] is empty for a large M; take at least one element",
    ),
    "slice of never anything": ("return x[3:3]", {}, "4: indexing: [3:3] of dim 0 of bf16[M, K] is empty; take at least one element"),
    "slice backwards": ("return x[::-1]", {}, "4: indexing: [::-1] of dim 0 of bf16[M, K] has a negative step; use a step of at least 1"),
    "slice by step 0": ("return x[::0]", {}, "4: indexing: [::0] of dim 0 of bf16[M, K] has step 0; use a step of at least 1"),
    "slice by a name": (
        "return x['K':]",
        {},
        "4: indexing: [K:] of dim 0 of bf16[M, K] has a bound or step that is not an int; write an int, or split the dim with hw.reshape",
    ),
    "concat": (
        "return hw.concat(x)",
        {},
        "4: concat: Tensor(bf16[M, K]) is not a list of tensors of this fusion; write hw.concat([a, b], axis=0)",
    ),
    "concat of numbers": (
        "return hw.concat([x, 1])",
        {},
        "4: concat: [Tensor(bf16[M, K]), 1] is not a list of tensors of this fusion; write hw.concat([a, b], axis=0)",
    ),
    "concat axis": ("return hw.concat([x, x], axis=2)", {}, "4: concat: bf16[M, K] has no dim 2: dims go from 0 to 1"),
    "concat sizes": (
        "return hw.concat([x, w], axis='M')",
        {"w": 'hw.bf16["J", 4]'},
        "4: concat: bf16[M, K] and bf16[J, 4] differ in dim 1; only dim 0, along which they are joined, may differ",
    ),
    "concat ranks": (
        "return hw.concat([x, w])",
        {"w": 'hw.bf16["K"]'},
        "4: concat: bf16[M, K] and bf16[K] differ in their number of dims; use hw.expand_dims or hw.reshape",
    ),
    "concat dtypes": (
        "return hw.concat([x, w])",
        {"w": 'hw.f32["M", "K"]'},
        "4: concat: dtypes differ: bf16[M, K] and f32[M, K]; use hw.astype on one of them",
    ),
    "pad": (
        "return hw.pad(x, (1, 2, 3))",
        {},
        "4: pad: (1, 2, 3) is not a flat list of two ints per dim, for up to 2 dims of bf16[M, K]; "
        "write (before, after) of the last dim first, like (2, 3, 0, 1)",
    ),
    "dims": (
        "return hw.expand_dims(x, 0)",
        {"x": "hw.f32[1, 2, 3, 4, 5, 6, 7, 8]"},
        "4: f32[1, 1, 2, 3, 4, 5, 6, 7, 8] has 9 dims, and an array has at most 8; reshape it",
    ),
    "mesh": (
        "return hw.reshard(x, 'M', 'K', mesh='x')",
        {},
        "4: reshard: mesh='x' is not an hw.Mesh; write it like hw.Mesh(x=4).ranks([0, 1])",
    ),
    "kernel of nothing": (
        "return hw.kernel('', 'k', 'M', [x, hw.f32['M']])",
        {},
        "4: kernel: the source has no `__global__ void k(...)`; set name= to the function to launch",
    ),
    "pad as NumPy's": (
        "return hw.pad(x, ((0, 1), (2, 3)))",
        {},
        "4: pad: ((0, 1), (2, 3)) is not a flat list of two ints per dim, for up to 2 dims of bf16[M, K]; "
        "write (before, after) of the last dim first, like (2, 3, 0, 1)",
    ),
    "reshape to a fraction": (
        "return hw.reshape(x, 3, -1)",
        {"x": "hw.f32[5]"},
        "4: reshape: [3, 5/3] has a size that is not whole; write whole sizes with the same product",
    ),
    "pad widths": (
        "return hw.pad(x, (-1, 2))",
        {},
        "4: pad: widths (0, -1) before and (0, 2) after are not all at least 0; use a slice to remove elements",
    ),
    "pad mode": (
        "return hw.pad(x, (1, 2), mode='reflect')",
        {},
        "4: pad: mode='reflect' is not 'constant'; build other modes from slices and hw.concat",
    ),
    "pad value": (
        "return hw.pad(x, (1, 1), value=0.5)",
        {"x": "hw.i32[4]"},
        "4: pad: 0.5 is not a value of i32[4]; use hw.astype or another number",
    ),
    "stream of a joined dim": (
        "return hw.concat([x, x]).stream(0, chunks=2)",
        {},
        "4: stream: dim 0 of bf16[2*M, K] is joined by a concat, so no loop can iterate over it; stream an earlier tensor",
    ),
    "gelu": ("return hw.gelu(x, approximate='x')", {}, "4: gelu: approximate='x' is neither 'none' nor 'tanh'"),
    "clip": ("return hw.clip(x)", {}, "4: clip: neither min nor max is given; pass one"),
    "var": (
        "return hw.var(x, correction=0.5)",
        {},
        "4: var: correction=0.5 must be an int, because the size K*M is symbolic; use int sizes",
    ),
    "logical": ("return x & x", {}, "4: logical_and: not defined for bf16; use hw.astype to a dtype that is bool"),
    "iota": ("return hw.iota(x, 0, hw.f32)", {}, "4: iota: not defined for f32; use hw.astype to a dtype that is int or uint"),
    "seed": (
        "return hw.uniform(x, seed=-1)",
        {},
        "4: seed=-1 is not a u32; give an int from 0 to 4294967295, or a u32 tensor without dims",
    ),
    "seed dtype": (
        "return hw.uniform(x, seed=w)",
        {"w": "hw.i32[()]"},
        "4: seed=Tensor(i32[]) is not a u32; give an int from 0 to 4294967295, or a u32 tensor without dims",
    ),
    "seed of several": (
        "return hw.uniform(x, seed=w)",
        {"w": 'hw.u32["K"]'},
        "4: seed=Tensor(u32[K]) is not a u32; give an int from 0 to 4294967295, or a u32 tensor without dims",
    ),
    "uniform": (
        "return hw.uniform(x, seed=1)",
        {"x": 'hw.f32["A", "B", "C", "D", "E"]'},
        "4: f32[A, B, C, D, E] has 5 dims, but at most 4 are supported; reshape it",
    ),
    "no repeats": ("return hw.repeat_interleave(x, 0)", {}, "4: repeat_interleave: repeats=0 leaves no elements; repeat at least once"),
    "dropout": ("return hw.dropout(x, 2, seed=1)", {}, "4: dropout: p=2 is not a probability from 0 to 1"),
    "softmax axis": ("return hw.softmax(x, axis='Q')", {}, "4: softmax: bf16[M, K] has no dim named Q"),
    "log_softmax axis": ("return hw.log_softmax(x, axis=2)", {}, "4: log_softmax: bf16[M, K] has no dim 2: dims go from 0 to 1"),
    "norm axis": ("return hw.rms_norm(x, axis=-3)", {}, "4: rms_norm: bf16[M, K] has no dim -3: dims go from 0 to 1"),
    "norm weight": (
        "return hw.layer_norm(x, w)",
        {"w": 'hw.bf16["N"]'},
        "4: layer_norm: the weight is bf16[N], and x bf16[M, K]; pass a shape that broadcasts to x",
    ),
    "norm bias": (
        "return hw.layer_norm(x, None, w)",
        {"w": 'hw.bf16["M", "M", "K"]'},
        "4: layer_norm: the bias is bf16[M, M, K], and x bf16[M, K]; pass a shape that broadcasts to x",
    ),
    "linear dtypes": (
        "return hw.linear(x, w)",
        {"w": 'hw.f32["N", "K"]'},
        "4: linear: dtypes differ: bf16[M, K] and a weight of f32[N, K]; use hw.astype on one of them",
    ),
    "dtypes of where": (
        "return hw.where(x > 0, x, w)",
        {"w": 'hw.f32["M", "K"]'},
        "4: where: dtypes differ: bf16[M, K] and f32[M, K]; use hw.astype on one of them",
    ),
    "dtypes of a comparison": (
        "return x < w",
        {"w": 'hw.i32["M", "K"]'},
        "4: less: dtypes differ: bf16[M, K] and i32[M, K]; use hw.astype on one of them",
    ),
    "dtypes of matmul": (
        "return x @ w",
        {"w": 'hw.f16["K", "N"]'},
        "4: matmul: dtypes differ: bf16[M, K] and f16[K, N]; use hw.astype on one of them",
    ),
    "axis of var": ("return hw.var(x, axis=4)", {}, "4: var: bf16[M, K] has no dim 4: dims go from 0 to 1"),
    "axis of argmax": ("return hw.argmax(x, axis='J')", {}, "4: argmax: bf16[M, K] has no dim named J"),
    "argmax of bools": (
        "return hw.argmax(x > 0, axis=0)",
        {},
        "4: argmax: not defined for bool; use hw.astype to a dtype that is float or int or uint",
    ),
    "mean of ints": (
        "return hw.mean(x, axis=0)",
        {"x": "hw.i32[4]"},
        "4: mean: not defined for i32; use hw.astype to a dtype that is float",
    ),
    "softmax of ints": (
        "return hw.softmax(x)",
        {"x": "hw.i32[4]"},
        "4: softmax: not defined for i32; use hw.astype to a dtype that is float",
    ),
    "number at a tensor": (
        "return 3 @ x",
        {"x": "hw.f32[4, 4]"},
        "4: matmul: f32[] has 0 dims, at least 2 are needed; use x[None] or x[:, None]",
    ),
    "linear rank": (
        "return hw.linear(x, w)",
        {"w": 'hw.bf16["N"]'},
        "4: linear: bf16[M, K] and a weight of bf16[N] are not [..., M, K] and [N, K]; reshape them",
    ),
    "linear": (
        "return hw.linear(x, w)",
        {"w": 'hw.bf16["K", "N"]'},
        "4: linear: inner dims differ: bf16[M, K] and a weight of bf16[K, N]; transpose the weight to [N, K]",
    ),
    "linear bias": (
        "return hw.linear(x, w, w)",
        {"w": 'hw.bf16["N", "K"]'},
        "4: linear: the bias is bf16[N, K], and the weight bf16[N, K]; pass one element per row of the weight",
    ),
    "attention": (
        "return hw.scaled_dot_product_attention(x, w, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.bf16[4, 'T', 16]"},
        "4: attention: query bf16[4, S, 8], key bf16[4, T, 16], value bf16[4, T, 16] are not "
        "[..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them",
    ),
    "attention heads": (
        "return hw.scaled_dot_product_attention(x, w, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.bf16[2, 'T', 8]"},
        "4: attention: query bf16[4, S, 8], key bf16[2, T, 8], value bf16[2, T, 8] differ in their numbers of heads; "
        "use enable_gqa=True if query heads share key heads",
    ),
    "attention groups": (
        "return hw.scaled_dot_product_attention(x, w, w, enable_gqa=True)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.bf16[3, 'T', 8]"},
        "4: attention: query bf16[4, S, 8], key bf16[3, T, 8], value bf16[3, T, 8]: "
        "the query heads must be an int multiple of the key heads; reshape them",
    ),
    "attention masks": (
        "return hw.scaled_dot_product_attention(x, x, x, w, is_causal=True)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.bool_['S', 'S']"},
        "4: attention: attn_mask and is_causal are both given; put both into the mask",
    ),
    "attention mask": (
        "return hw.scaled_dot_product_attention(x, x, x, w)",
        {"x": "hw.bf16[2, 4, 'S', 8]", "w": "hw.bool_[2, 'S', 'S']"},
        "4: attention: the mask bool[2, S, S] does not broadcast to the scores, [2, 4, S, S]; reshape it",
    ),
    "attention mask dtype": (
        "return hw.scaled_dot_product_attention(x, x, x, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.i32['S', 'S']"},
        "4: attention: the mask i32[S, S] is neither bool nor float; compare it: mask != 0",
    ),
    "attention dropout": (
        "return hw.scaled_dot_product_attention(x, x, x, dropout_p=1.5)",
        {"x": "hw.bf16[4, 'S', 8]"},
        "4: attention: dropout_p=1.5 is not a probability from 0 to 1",
    ),
    "attention seed": (
        "return hw.scaled_dot_product_attention(x, x, x, dropout_p=0.1)",
        {"x": "hw.bf16[4, 'S', 8]"},
        "4: attention: dropout_p=0.1 without a seed; pass seed=, an int or a u32 tensor without dims",
    ),
    "attention dtypes": (
        "return hw.scaled_dot_product_attention(x, w, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.f32[4, 'T', 8]"},
        "4: scaled_dot_product_attention: dtypes differ: bf16[4, S, 8] and f32[4, T, 8]; use hw.astype on one of them",
    ),
    "rotary": (
        "return hw.rotary_embedding(x, x, x)",
        {"x": "hw.bf16['S', 7]"},
        "4: rotary_embedding: bf16[S, 7] is not floats [..., S, E] with an even E; cast, reshape or pad it",
    ),
    "rotary ints": (
        "return hw.rotary_embedding(x, w, w)",
        {"x": "hw.i32['S', 8]", "w": "hw.f32['S', 4]"},
        "4: rotary_embedding: i32[S, 8] is not floats [..., S, E] with an even E; cast, reshape or pad it",
    ),
    "rotary table": (
        "return hw.rotary_embedding(x, w, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.f32['S', 8]"},
        "4: rotary_embedding: cos is f32[S, 8], and x bf16[4, S, 8]; pass one element per pair: [S, 4]",
    ),
    "attention rank": (
        "return hw.scaled_dot_product_attention(x, x, x)",
        {},
        "4: attention: query bf16[M, K], key bf16[M, K], value bf16[M, K] are not [..., H, S, E], [..., H, T, E] and [..., H, T, F]; "
        "reshape them",
    ),
    "attention values": (
        "return hw.scaled_dot_product_attention(x, x, w)",
        {"x": "hw.bf16[4, 'S', 8]", "w": "hw.bf16[4, 'T', 8]"},
        "4: attention: query bf16[4, S, 8], key bf16[4, S, 8], value bf16[4, T, 8] are not "
        "[..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them",
    ),
    "attention batches": (
        "return hw.scaled_dot_product_attention(x, w, w)",
        {"x": "hw.bf16['B', 4, 'S', 8]", "w": "hw.bf16['C', 4, 'S', 8]"},
        "4: attention: query bf16[B, 4, S, 8], key bf16[C, 4, S, 8], value bf16[C, 4, S, 8] are not "
        "[..., H, S, E], [..., H, T, E] and [..., H, T, F]; reshape them",
    ),
    "attention scale": (
        "return hw.scaled_dot_product_attention(x, x, x)",
        {"x": "hw.bf16[4, 'S', 'E']"},
        "4: attention: E, the query's last dim, is unknown at compile time; pass scale=",
    ),
    "truth": ("return x if x > 0 else -x", {}, "4: the values of a tensor are not known while a fusion is traced; use hw.where"),
    "reshard rank": (
        'return hw.reshard(x, "M")',
        {},
        "4: reshard: bf16[M, K] cannot become bf16[M]; write the same dims: only the mesh axes may differ",
    ),
    "reshard of an int by a name": (
        'return hw.reshard(x, "X@x", "K")',
        {"x": 'hw.f32[8, "K"]'},
        "4: reshard: f32[8, K] cannot become f32[X@x, K]; dim 0 is 8 and not X: write '8@x'",
    ),
    "reshard dim": ('return hw.reshard(x, "M@", "K")', {}, "4: reshard: not a dim: 'M@'; write it like 'M', 'M@x' or 'M@dp,tp'"),
    "reshard axis": ('return hw.reshard(x, "M@y", "K")', {}, "4: bf16[M@y, K]: there is no axis y in mesh(x=8); its axes: x"),
    "reshard twice": (
        'return hw.reshard(x, "M@x", "K@x")',
        {},
        "4: bf16[M@x, K@x]: mesh axis x is used twice; each axis can split one dim",
    ),
    "axis twice in a spec": (
        "return x",
        {"x": 'hw.f32["M@x", "K@x"]'},
        "2: f32[M@x, K@x]: mesh axis x is used twice; each axis can split one dim",
    ),
    "axis of the mesh": ("return x", {"x": 'hw.f32["M@y"]'}, "2: f32[M@y]: there is no axis y in mesh(x=8); its axes: x"),
    "dim of an input": ("return x", {"x": 'hw.f32["M/2"]'}, "2: not a dim of an input: 'M/2'; give it one name"),
    "dim type": ("return x", {"x": "hw.f32[1.5]"}, "2: not a dim: 1.5; write a name or an int"),
    "empty dim": ("return x", {"x": "hw.f32[0]"}, "2: a dim has at least one element, not 0"),
    "stream of an input": ('return x.stream("M")', {}, "4: stream: %x is an input; stream a value computed from it, or hw.copy(x)"),
    "stream twice": ("return (-x).stream(0).stream(1)", {}, "4: stream: the value is already streamed; stream one dim only"),
    "stream dim": ('return (-x).stream("N")', {}, "4: stream: bf16[M, K] has no dim named N"),
    "stream chunks": ("return (-x).stream(0, chunks=0)", {}, "4: stream: chunks=0 must be an int of at least 1"),
    "stream chunking": (
        'return (-x).stream(0, chunking="slow")',
        {},
        "4: stream: there is no chunking='slow'; use one of by_shard, across_shards",
    ),
    "stream of a merged dim": (
        'return hw.reshape(x, "M*K").stream(0)',
        {},
        "4: stream: dim 0 of bf16[K*M] is split or merged by a reshape, so no loop can iterate over it; stream an earlier tensor",
    ),
    "stream of a split dim": (
        'return hw.reshape(x, 4, "M/4", "K").stream(1)',
        {},
        "4: stream: dim 1 of bf16[4, M/4, K] is split or merged by a reshape, so no loop can iterate over it; stream an earlier tensor",
    ),
    "reduced stream": (
        "return hw.max(x, axis=1, keepdims=True).stream(1)",
        {},
        "4: stream: dim 1 of bf16[M, 1] is reduced by a max, so no loop can iterate over it; stream an earlier tensor",
    ),
    "name": ('return (-x).named("2h")', {}, "4: named: '2h' is not a name; use ASCII letters, digits and _, and no digit first"),
    "name of an input": ('return x.named("h")', {}, "4: named: %x is an input; rename the parameter instead"),
    "name twice": ('h = (-x).named("h")\nreturn (-h).named("h")', {}, "5: named: %h is taken by another value; choose another name"),
    "result": ("return 5", {}, "2: fusion @f returns 5; return a tensor of the fusion, or a tuple of tensors"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(case: str) -> None:
    body, inputs, message = ERRORS[case]
    with pytest.raises(ProgramError) as caught:
        trace(body, **{"x": X, **inputs})
    assert str(caught.value) == f"mlp.py:{message}"
