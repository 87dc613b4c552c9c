"""Common mistakes of users who know PyTorch and NumPy. Errors of a trace or a declaration begin with the user's file and line."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import pickle
import re
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.environment import VARIABLES, warn_of_misspelt
from hostweave.base.errors import ArgumentError, HostweaveError, ProgramError
from hostweave.base.paths import PACKAGE

MESH = hw.Mesh(x=2)
A = hw.f32["M@x", "K"]
HERE = rf"^{Path(__file__).name}:\d+: "
WEIGHTED = {"w": hw.f32["K", "N"]}
X = np.arange(8, dtype=np.float32).reshape(4, 2)
W = np.ones((2, 3), dtype=np.float32)


def fused(body: Callable[..., Any], **others: Any) -> hw.Fusion:
    def program(x, **rest):  # type: ignore[no-untyped-def]
        return body(x, **rest)

    return hw.fusion(mesh=MESH, x=A, **others)(program)


TRACED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "dim=": (lambda x: hw.sum(x, dim=0), {}, "sum: sum(x, axis=None, keepdims=False) has no parameter 'dim'; did you mean axis?"),
    "keepdim=": (lambda x: hw.mean(x, 0, keepdim=True), {}, "did you mean keepdims?"),
    "softmax dim=": (lambda x: hw.softmax(x, dim=0), {}, "softmax: softmax(x, axis=-1) has no parameter 'dim'; did you mean axis?"),
    "too few": (lambda x: hw.matmul(x), {}, "matmul: missing 1 required positional argument: 'b'; write matmul(a, b)"),
    "view": (lambda x: x.view(-1), {}, "x.view: a tensor of a fusion has no view; use hw.reshape(x, ...)"),
    "x.sum()": (lambda x: x.sum(), {}, "x.sum: a tensor of a fusion has no sum; use hw.sum"),
    "x.transpose()": (lambda x: x.transpose(0, 1), {}, "use hw.transpose(x, 0, 1), or x.T"),
    "x.cholesky()": (lambda x: x.cholesky(8), {}, "x.cholesky: a tensor of a fusion has no cholesky; dir(hw) lists the functions"),
    "x.dtpye": (lambda x: x.dtpye, {}, "did you mean dtype?"),
    "size * 2": (lambda x: x.shape[0] * 2, {}, "M * 2: M is the name of a size that is known only at a call; write '2*M'"),
    "2 * size": (lambda x: 2 * x.shape[0], {}, "write '2*M'"),
    "size * size": (lambda x: x.shape[0] * x.shape[1], {}, "write 'K*M'"),
    "size + size": (lambda x: x.shape[0] + x.shape[1], {}, "write '(K + M)'"),
    "size - 2": (lambda x: x.shape[0] - 2, {}, "write '(M - 2)'"),
    "size // 2": (lambda x: x.shape[0] // 2, {}, "write 'M/2'"),
    "size * 0.5": (lambda x: x.shape[0] * 0.5, {}, "write sizes as text, such as '2*M' and 'M/2'"),
    "2 // size": (lambda x: 2 // x.shape[0], {}, "2 // M: M is the name of a size that is known only at a call; write sizes as text"),
    "2 % size": (lambda x: 2 % x.shape[0], {}, "2 % M: M is the name of a size that is known only at a call; write sizes as text"),
    "size ** 2": (lambda x: x.shape[0] ** 2, {}, "M ** 2: M is the name of a size that is known only at a call; write sizes as text"),
    "size == 4": (lambda x: x if x.shape[0] == 4 else -x, {}, "M == 4: M is the name of a size that is known only at a call; write sizes"),
    "shape ==": (lambda x: x if x.shape == (4, 4) else -x, {}, "M == 4: M is the name of a size that is known only at a call"),
    "max of sizes": (lambda x: x * max(x.shape), {}, "K > M: K is the name of a size that is known only at a call"),
    "size < 4": (lambda x: x * min(4, x.shape[0]), {}, "M < 4: M is the name of a size that is known only at a call"),
    "range of a size": (lambda x: [*range(x.shape[0])], {}, "index M: M is the name of a size that is known only at a call"),
    "int of a size": (lambda x: int(x.shape[0]), {}, "int M: M is the name of a size that is known only at a call"),
    "sqrt of a size": (lambda x: x / math.sqrt(x.shape[1]), {}, "float K: K is the name of a size that is known only at a call; write"),
    "NumPy's sqrt": (lambda x: x / np.sqrt(x.shape[1]), {}, "sqrt K: K is the name of a size that is known only at a call"),
    "size & 1": (lambda x: x.shape[0] & 1, {}, "M & 1: M is the name of a size that is known only at a call"),
    "np.sum": (lambda x: np.sum(x), {}, "numpy.add: NumPy cannot compute with a tensor of a fusion; use operators and functions"),
    "an array": (
        lambda x: x + np.ones((2, 2)),
        {},
        "add: array([[1., 1.], [1., 1.]]) is neither a tensor of this fusion nor a Python number",
    ),
    "slice from a size": (lambda x: x["M/2":], {}, "indexing: [M/2:] of dim 0 of f32[M@x, K] has a bound or step that is not an int"),
    "slice to no size": (
        lambda x: x[:"M//"],
        {},
        "indexing: [:M//] of dim 0 of f32[M@x, K] has no valid bound: not a size: 'M//'; write a name",
    ),
    "x.all_gather()": (lambda x: x.all_gather(), {}, "a tensor of a fusion has no all_gather; use hw.reshard(x, ...), which names"),
    "divmod": (lambda x: divmod(x.shape[0], 2), {}, "M // 2: M is the name of a size that is known only at a call; write 'M/2'"),
    "abs": (lambda x: abs(x.shape[0]), {}, "abs M: M is the name of a size that is known only at a call; write sizes as text"),
    "+size": (lambda x: +x.shape[0], {}, "+ M: M is the name of a size that is known only at a call; write sizes as text"),
    "-size": (lambda x: -x.shape[0], {}, "- M: M is the name of a size that is known only at a call; write sizes as text"),
    "x / size": (lambda x: x / x.shape[0], {}, "divide: 'M' is a size that is known only at a call, not a number; use hw.mean for a mean"),
    "float": (lambda x: float(x), {}, "float: the values of f32[M@x, K] are not known while a fusion is traced; compute with the tensor"),
    "int": (lambda x: int(x), {}, "int: the values of f32[M@x, K] are not known"),
    "range": (lambda x: range(x), {}, "the values of f32[M@x, K] are not known"),
    "math": (lambda x: math.sqrt(x), {}, "the values of f32[M@x, K] are not known"),
    "w": (
        lambda x, w: hw.matmul(x, w),
        {"w": hw.f32["N", "K"]},
        "inner dims differ: f32[M@x, K] x f32[N, K]; transpose the second one: hw.matmul(a, b.T)",
    ),
    "x": (lambda x, w: hw.matmul(w, x), {"w": hw.f32["M", "N"]}, "transpose the first one: hw.matmul(a.T, b)"),
    "batched w": (lambda x, w: hw.matmul(x, w), {"w": hw.f32["B", "N", "K"]}, "transpose the second one: hw.permute_dims(b, axes)"),
    "sum": (
        lambda x, w: x + w,
        {"w": hw.f32["K", "M"]},
        "f32[M@x, K] and f32[K, M] differ in dim -2; transpose one of them, as in x + y.T",
    ),
    "columns": (lambda x, w: x + w, {"w": hw.f32["M"]}, "give the smaller one a dim of 1 at its end, as in y[:, None]"),
    "ids": (
        lambda x, ids: x[ids],
        {"ids": hw.i32["L"]},
        "Tensor(i32[L]) is neither an int, a slice, None nor '...'; to select rows by a tensor of indices, use hw.take(x, ids, 0)",
    ),
    "mask": (lambda x: x[x > 0], {}, "choose by values with hw.where(condition, x, 0)"),
    "list": (lambda x: x[[0, 1]], {}, "use hw.stack([x[i], ...]) for known indices"),
    "no file": (
        lambda x: hw.kernel("nothing.cu", "f", 1, [x]),
        {},
        f"kernel: nothing.cu: No such file or directory in {Path.cwd()}; give the path",
    ),
    "stream": (lambda x: (-x).stream(0, chunk=2), {}, "has no parameter 'chunk'; did you mean chunks?"),
    "a bool as a width": (lambda x: hw.pad(x, (True, False)), {}, "pad: pad=(True, False) is not a Sequence of int; write pad(x, pad"),
    "named": (lambda x: (-x).named(3), {}, "named: name=3 is not a str; write named(name)"),
    "del": (lambda x: x.__delitem__(0), {}, "tensors are immutable"),
    "round to digits": (lambda x: round(x, 2), {}, "round: digits=2: only digits=0 is supported; scale the tensor before and after"),
    "seed": (lambda x: hw.dropout(x, 0.5, -7), {}, "seed=-7 is not a u32; give an int from 0 to 4294967295, or a u32 tensor"),
    "no elements": (lambda x: hw.dynamic_slice(x, (0, 0), (-1, "K")), {}, "dynamic_slice: a dim has at least one element, not -1"),
    "beyond floats": (lambda x: x + 10**400, {}, "0 is not a value of f32[M@x, K]; use hw.astype or another number"),
    "text": (lambda x, w: x, {"w": "f32[M]"}, "w='f32[M]' is not the type of a tensor; write w=hw.f32[\"M\"]"),
}


@pytest.mark.parametrize("case", TRACED)
def test_in_a_fusion(case: str) -> None:
    body, others, message = TRACED[case]
    with pytest.raises(ProgramError, match=HERE) as caught:
        fused(body, **others)
    assert message in str(caught.value)


LEFT: list[hw.Tensor] = []
fused(lambda x: LEFT.append(x) or x + 1)  # type: ignore[func-returns-value]

OUTSIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "mesh": (lambda: hw.Mesh(4), "Mesh(4): the axes have no names; write hw.Mesh(x=4)"),
    "mesh of two": (lambda: hw.Mesh((2, 4)), "write hw.Mesh(x=2, y=4)"),
    "options": (lambda: hw.Options(stream=4), "has no parameter 'stream'; did you mean streams?"),
    "option": (lambda: hw.Options(foo=4), "Options: Options has no parameter 'foo'; use one of streams, check, sizes, "),
    "zeros": (lambda: hw.zeros(3), "zeros: no function is being traced; call it in the function of an hw.fusion"),
    "like": (lambda: hw.zeros_like, "hw.zeros_like: hostweave has no zeros_like; use hw.zeros(x.shape, x.dtype)"),
    "eye": (lambda: hw.eye, "use hw.arange(n)[:, None] == hw.arange(n)[None, :]"),
    "no inputs": (lambda: hw.fusion()(lambda: hw.zeros(3)), "fusion @program has no inputs; add at least one tensor parameter"),
    "unknown": (lambda: hw.cholesky, "hw.cholesky: hostweave has no cholesky; dir(hw) lists the names"),
    "complex": (lambda: hw.complex64, "hw.complex64: hostweave has no complex64; there are no complex numbers"),
    "function": (lambda: hw.sofmax, "hw.sofmax: hostweave has no sofmax; did you mean softmax?"),
    "dtype": (lambda: hw.float33, "did you mean float32?"),
    "bare decorator": (
        lambda: hw.fusion(lambda x: x),
        "fusion: takes at most 0 positional arguments, but gets 1; write fusion(mesh=None, donate=(), **inputs)",
    ),
    "a call": (
        lambda: PRODUCT.compiled.given(X, W),
        "@program: a fusion is not a function of arrays or tensors; use hw.compile(fusion).run(...)",
    ),
    "afterwards": (
        lambda: LEFT[0] + 1,
        "add: the function that made the tensor f32[M@x, K] has returned; use the tensor in the function, or use the result of run",
    ),
    "init": (lambda: hw.init(rank=0), "has no parameter 'rank'; use one of provider, group, timeout, call_timeout, device"),
    "compile": (lambda: hw.compile(PRODUCT.compiled.given, streams=2), "has no parameter 'streams'"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_outside_of_a_fusion(case: str) -> None:
    act, message = OUTSIDE[case]
    with pytest.raises(ProgramError, match=HERE) as caught:
        act()
    assert message in str(caught.value)


def test_errors_are_listed() -> None:
    assert set(dir(hw.errors)) >= {"HostweaveError", "ProgramError", "ArgumentError", "ExecutionError", "OverlapWarning"}
    assert all(issubclass(getattr(hw.errors, name), Exception) for name in dir(hw.errors))
    assert import_module("hostweave.errors") is hw.errors
    with pytest.raises(AttributeError, match=r"hw.HostweaveError: hostweave has no HostweaveError; use hw.errors.HostweaveError$"):
        _ = hw.HostweaveError


def test_one_input_is_singular() -> None:
    program = hw.compile(hw.fusion(x=hw.f32[2])(lambda x: x + 1))
    with pytest.raises(ArgumentError, match="2 positional arrays for 1 input; the program takes x: "):
        program.run(X, X)


def test_a_misspelt_variable_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="HOSTWEAVE_CACHEE is set, but hostweave reads no such variable; did you mean HOSTWEAVE_CACHE?"):
        warn_of_misspelt({"HOSTWEAVE_CACHEE": "/tmp", "HOSTWEAVE_CACHE": "/tmp", "HOSTWEAVE_MINE": "1"})
    read = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'environ[^"\n]*"(HOSTWEAVE_\w+)"', path.read_text())}
    assert set(VARIABLES) >= read
    assert "HOSTWEAVE_CACHE" in read


def test_a_variable_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames() -> int:
        with pytest.raises(ProgramError) as caught:
            fused(lambda x: x @ x @ x)
        return len(caught.traceback)

    few = frames()
    monkeypatch.setenv("HOSTWEAVE_FRAMES", "1")
    assert frames() > few


def test_the_traceback_of_a_trace_has_the_users_frames() -> None:
    """The traceback has the user's frames, and only one frame of Hostweave: the decorator."""

    def normalised(x: hw.Tensor) -> hw.Tensor:
        return x / x.shape[0]

    with pytest.raises(ProgramError) as caught:
        fused(lambda x: hw.relu(normalised(x)))
    named = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert named[1:] == ["fused", "decorate", "program", "<lambda>", "normalised"]


def test_a_type_error_of_the_user_is_not_changed() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        fused(lambda x: x + len("a") + (1 + "a"))  # type: ignore[operator]


def test_missing_names_are_attribute_errors() -> None:
    assert not hasattr(hw, "sofmax")
    seen = []
    fused(lambda x: seen.append(hasattr(x, "view")) or x)
    assert seen == [False]


def test_a_size_can_be_joined_with_the_text_of_a_spec() -> None:
    assert str(fused(lambda x: hw.reshard(x, x.shape[0] + "@x", f"{x.shape[1]}")).values()["y"].type) == "f32[M@x, K]"


def test_signs_and_rounding_of_tensors() -> None:
    x = np.array([[-1.5, 0.4]], np.float32)
    for y in hw.compile(hw.fusion(x=hw.f32["M", "K"])(lambda x: (+x, round(x), round(x, 0)))).run(x)[1:]:
        np.testing.assert_array_equal(y, np.round(x))


def test_a_random_number_without_dims() -> None:
    program = hw.compile(hw.fusion(x=hw.f32[()], y=hw.f32["M"])(lambda x, y: (hw.uniform(x, 7), hw.uniform(y, 7))))
    one, first = program.run(np.zeros((), np.float32), np.zeros(1, np.float32))
    assert one.shape == ()
    assert one == first[0]


def test_a_block_whose_trace_failed_is_traced_again() -> None:
    failures = [ZeroDivisionError]

    @hw.block(x=A)
    def layer(x):  # type: ignore[no-untyped-def]
        if failures:
            raise failures.pop()
        return x + 1

    def program(x):  # type: ignore[no-untyped-def]
        with contextlib.suppress(ZeroDivisionError):
            layer(x)
        return layer(x)

    assert "call @layer" in str(hw.fusion(mesh=MESH, x=A)(program))


def test_a_result_beyond_all_memory() -> None:
    program = hw.compile(hw.fusion(x=hw.f32["M"])(lambda x: hw.broadcast_to(x, 2**62, "M") + 1))
    with pytest.raises(hw.errors.HostweaveError, match=r"there is no memory for f32\[4611686018427387904, 2\]; use smaller arrays"):
        program.run(X[0])


def test_long_names_of_dtypes() -> None:
    short = (hw.f64, hw.f32, hw.f16, hw.bf16, hw.f8e4m3, hw.f8e5m2, hw.i64, hw.i32, hw.i16, hw.i8, hw.u64, hw.u32, hw.u16, hw.u8, hw.bool_)
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
    assert tuple(getattr(hw, name) for name in names.split()) == short
    assert set(names.split()) <= set(hw.__all__)


def test_the_remedies_for_constants_compute_them() -> None:
    """The remedies for constants do not use elements of a tensor, so they work even if elements are NaN."""

    def constants(x):  # type: ignore[no-untyped-def]
        return hw.zeros(x.shape, x.dtype), hw.full(x.shape, 0.5), hw.arange(x.shape[0])[:, None] == hw.arange(x.shape[0])[None, :]

    made = hw.compile(fused(constants)).run(np.full((4, 2), np.nan, np.float32))
    for got, want in zip(made, (np.zeros((4, 2)), np.full((4, 2), 0.5), np.eye(4)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_remedy_for_rows_by_number_computes_them() -> None:
    fusion = fused(lambda x, ids: hw.matmul(hw.astype(ids[:, None] == hw.iota(x, 0, ids.dtype), x.dtype), x), ids=hw.i32["L"])
    ids = np.array([2, 0, 3], dtype=np.int32)
    np.testing.assert_array_equal(hw.compile(fusion).run(X, ids), X[ids])


def test_a_file_named_by_text(tmp_path: Path) -> None:
    path = tmp_path / "twice.cu"
    path.write_text(
        "__global__ void twice(const float* x, int64_t n, float* y) {\n  for (int64_t i : hw::over_grid(n)) y[i] = 2 * x[i];\n}\n"
    )
    fusion = hw.fusion(x=hw.f32["N"])(lambda x: hw.kernel(str(path), "twice", "N", [x, "N", hw.f32["N"]]))
    assert "__global__ void twice" in str(fusion)


# --- arrays by position and by name -----------------------------------------------------------------------------------

PRODUCT = hw.compile(fused(lambda x, w: hw.matmul(x, w), **WEIGHTED))


def test_run_accepts_arrays_by_position_and_by_name() -> None:
    for y in (PRODUCT.run(X, W), PRODUCT.run(X, w=W), PRODUCT.run(w=W, x=X)):
        np.testing.assert_allclose(y, X @ W)
    assert len(PRODUCT.run(X, W, ranks=True)) == 2
    assert len(PRODUCT.measure(X, w=W, warmups=0, repetitions=1)) == 2


def test_a_rank_accepts_arrays_by_position_and_by_name() -> None:
    ranks = hw.Threads(2)

    def rank(number: int) -> list[np.ndarray[Any, Any]]:
        hw.init(ranks)
        mine = X[2 * number : 2 * number + 2]
        return [PRODUCT(mine, W), PRODUCT(mine, w=W), PRODUCT(w=W, x=mine)]

    for number, results in enumerate(ranks.run(rank)):
        for y in results:
            np.testing.assert_allclose(y, X[2 * number : 2 * number + 2] @ W)


TAKES = "the program takes x: f32[M@x, K], w: f32[K, N]"


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((X, W, W), {}, f"program: 3 positional arrays for 2 inputs; {TAKES}"),
        ((X,), {"x": X}, "program: argument x is given by position and by name; omit one of them"),
        ((X,), {}, f"program: missing argument w; {TAKES}"),
        ((X,), {"v": W}, f"program: there is no argument v; {TAKES}"),
    ],
)
def test_wrong_numbers_and_names_of_arrays(given: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        PRODUCT.run(*given, **named)
    assert str(caught.value) == message


def test_an_array_of_complex_numbers() -> None:
    with pytest.raises(HostweaveError, match="programs have no complex64: pass real and imaginary part as two arrays"):
        PRODUCT.run(X.astype(np.complex64), W)


WRONG = (None, 0, -7, 2.5, "Q", (), (1,), [0, 1], [[0]], {}, hw.f32, object())
FITTING = {"subscripts": "ij,jk->ik", "axis": 0, "dtype": hw.f32, "k": 2, "sections": 2, "p": 0.5, "starts": [0, 0], "pad": [0, 0]}
OF_TENSORS = [name for name in dir(hw) if "Tensor" in str(getattr(getattr(hw, name), "__annotations__", {}).get("return"))]


@pytest.mark.parametrize("name", OF_TENSORS)
def test_any_value_for_any_parameter_is_accepted_or_refused(name: str) -> None:
    function = getattr(hw, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.KEYWORD_ONLY]

    def program(x, ids, wrong, value):  # type: ignore[no-untyped-def]
        fitting = {**FITTING, "indices": ids, "lengths": ids, "tensors": [x, x], "sizes": [2, 2]}
        given = [value if parameter == wrong else fitting.get(parameter, x) for parameter in needed]
        return function(*given, **({} if wrong in needed else {wrong: value}))

    for parameter, value in itertools.product(parameters, WRONG):
        with contextlib.suppress(HostweaveError):
            hw.fusion(x=hw.f32[4, 6], ids=hw.i32[4])(partial(program, wrong=parameter.name, value=value))


@hw.fusion(x=hw.f32["M", "K"], w=hw.f32["K", "N"])
def alone(x, w):  # type: ignore[no-untyped-def]
    return hw.matmul(x, w)


def test_any_value_for_any_parameter_of_running_objects_is_accepted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes many values for parameters of options, groups and programs."""
    monkeypatch.chdir(tmp_path)
    program, group = hw.compile(alone), hw.init(group="alone")
    call, measured = {"x": X, "w": W, "group": group}, {"x": X, "w": W, "repetitions": 1}
    functions: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
        (hw.Options, {}, tuple(inspect.signature(hw.Options).parameters)),
        (partial(hw.compile, alone), {}, ("target", "options")),
        (hw.Threads, {}, ("count",)),
        (hw.init, {"group": "another"}, ("provider", "group", "timeout", "call_timeout", "device")),
        (group.split, {"color": 0}, ("color", "key")),
        (group.empty, {"shape": (2, 2), "dtype": hw.f32}, ("shape", "dtype", "target")),
        (program, call, ("x", "w", "out", "stream", "group", "sizes")),
        (program.capture, call, ("x", "w", "out", "stream", "group", "sizes")),
        (lambda sizes, group: program.prepare(sizes, group=group), {"sizes": {"M": 2, "K": 2, "N": 2}, "group": group}, ("sizes", "group")),
        (lambda array: program.bind(w=array), {}, ("array",)),
        (program.bind, {}, ("x", "v")),
        (program.check, {}, ("M", "Q")),
        (program.export, {}, ("folder",)),
        (program.run, {"x": X, "w": W}, ("x", "w")),
        (program.measure, measured, ("x", "w", "warmups", "repetitions")),
    ]
    for function, fitting, parameters in functions:
        for parameter, value in itertools.product(parameters, (*WRONG, 2**70, "2", X[:, ::2], np.ma.masked_array(X, X > 0), np.float32(1))):
            with contextlib.suppress(HostweaveError):
                function(**{**fitting, parameter: value})
    group.close()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: PRODUCT.run(np.float32(1), W), "program: x: expected an array, got float32; pass np.asarray(value)"),
        (
            lambda: PRODUCT.run(np.ma.masked_array(X, X > 0), W),
            "x: masked arrays are not supported; call .fill",
        ),
        (lambda: PRODUCT.check(M=2**70), f"program: check: M={2**70}: no memory holds so many elements; pass a smaller size"),
        (lambda: PRODUCT.run_in_flight([X]), "is not a Sequence of Mapping of str to Any; write run_in_flight(calls, poison=False)"),
        (lambda: MESH.ranks([0.0]), "ranks: ranks=[0.0] is not a Sequence of int; write ranks(ranks, **axes)"),
        (lambda: MESH.ranks([True]), "ranks: ranks=[True] is not a Sequence of int"),
        (lambda: hw.Options(streams=True), "Options: streams=True is not an int; write Options(streams=4"),
        (lambda: hw.Options(sizes={3: 3}), 'Options: sizes={3: 3} is not a dict of names; write sizes={"NAME": ...}'),
        (lambda: hw.HostProgram.parse(None), "parse: text=None is not a str; write parse(text)"),
        (lambda: A.shard(X, 0, None), "shard: mesh=None is not a Mesh; write shard(array, rank, mesh)"),
        (lambda: A.shard([[1.0]], 0, MESH), "shard: list is not an array; pass an array, such as np.asarray of a list"),
        (lambda: hw.f32["M@y"].shard(X, 0, MESH), "f32[M@y]: there is no axis y in mesh(x=2); its axes: x"),
        (lambda: A.unshard([X, None], MESH), "unshard: NoneType is not an array; pass an array, such as np.asarray of a list"),
        (lambda: A.block((-4, 2), 0, MESH), "block: [-4, 2] is not a shape; pass the shape of the global array"),
        (lambda: hw.fusion(x=A)(3), "fusion @program: 3 is not a function; write a def below the line of the decorator"),
        (lambda: hw.fusion(donate=3, mesh=MESH, x=A)(lambda x: x), 'donate=3: name inputs of the function, as in donate=("x",)'),
        pytest.param(
            lambda: hw.TorchStore(3, 0, 1),
            "hw.TorchStore: store=3 is not a store of torch.distributed; pass a TCPStore, or omit it",
            marks=pytest.mark.extra("torch"),
        ),
        (lambda: hw.init(hw.Communicators({}, "0", 1), "c"), "the provider returned rank '0' of 1; a rank must be an int from 0 to the"),
        (lambda: PRODUCT.bind(W), "bind: takes at most 0 positional arguments, but gets 1; write bind(**arrays)"),
        (
            lambda: hw.compile(PRODUCT.compiled.given, "cpu", None, W),
            "compile: takes at most 3 positional arguments, but gets 4; write compile(",
        ),
        (lambda: PRODUCT.export(None), "export: folder=None is not a str or Path; write export(folder, wheel='', version='0.1.0')"),
        (
            lambda: pickle.dumps(PRODUCT),
            "program: a compiled program cannot be pickled; pickle the fusion, and compile it after",
        ),
        (
            lambda: hw.fusion(MESH, x=A),
            "fusion: takes at most 0 positional arguments, but gets 1; write fusion(mesh=None, donate=(), **inputs)",
        ),
        (lambda: hw.init("torch"), "hw.init: 'torch' is not a provider; pass hw.TorchStore(), hw.MPI(), hw.Threads(8), or omit it"),
        (lambda: hw.init(timeout="a minute"), "hw.init: timeout='a minute' is not a number of seconds; pass a number such as 60"),
        (lambda: PRODUCT(X, W, group="default"), "program: group='default' is not a group; pass the result of hw.init or group.split"),
        (lambda: PRODUCT(X, W, sizes=[4]), 'program: sizes=: [4] is not a dict of names; write {"M": 8}'),
        (lambda: PRODUCT(X, W, sizes={"Q": 4}), "program: sizes=: there is no size named Q; the sizes of the program: M, K, N"),
    ],
)
def test_messages_of_mistakes(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(HostweaveError) as caught:
        act()
    assert message in str(caught.value)


def test_a_compiled_fusion_can_be_pickled() -> None:
    fusion = fused(lambda x, w: hw.matmul(x, w), **WEIGHTED)
    wanted = hw.compile(fusion).run(X, W)
    np.testing.assert_array_equal(hw.compile(pickle.loads(pickle.dumps(fusion))).run(X, W), wanted)
