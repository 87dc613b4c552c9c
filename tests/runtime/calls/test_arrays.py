"""Arrays of other libraries as arguments and results, and errors for wrong arrays."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, OverlapWarning
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DTYPES


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])
def ag_matmul(x, w):
    return hw.matmul(x, w).stream("M", chunks=2)


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def same(x):
    return hw.copy(x)


MATMUL, SAME = hw.compile(ag_matmul), hw.compile(same)
X = np.arange(32, dtype=np.float32).reshape(8, 4)
W = np.arange(12, dtype=np.float32).reshape(4, 3)
BF16 = ml_dtypes.bfloat16


def message_of(**arrays: Any) -> str:
    with pytest.raises(ArgumentError) as error:
        MATMUL.run(**{"x": X.astype(BF16), "w": W.astype(BF16), **arrays})
    return str(error.value)


def test_numpy() -> None:
    y = MATMUL.run(x=X.astype(BF16), w=W.astype(BF16))
    assert (y.dtype, y.shape) == (BF16, (8, 3))
    np.testing.assert_array_equal(y.astype(np.float32), (X @ W).astype(BF16).astype(np.float32))


def test_every_dtype_passes_through() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), **{f"x_{dtype}": dtype["M@x", "K"] for dtype in DTYPES.values()})
    def identity(**inputs):
        return tuple(hw.reshard(x, "M", "K") for x in inputs.values())

    arrays = {f"x_{dtype}": (np.arange(8).reshape(4, 2) % 5).astype(numpy_dtype(dtype)) for dtype in DTYPES.values()}
    for results in hw.compile(identity).run(**arrays, ranks=True):
        for (name, x), y in zip(arrays.items(), results, strict=True):
            assert y.dtype == x.dtype, name
            np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32), err_msg=name)


def test_arrays_that_are_not_contiguous() -> None:
    wide = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(SAME.run(x=wide[:, ::2]), wide[:, ::2])
    np.testing.assert_array_equal(SAME.run(x=wide.T), wide.T)
    np.testing.assert_array_equal(SAME.run(x=wide[::-1]), wide[::-1])


def test_an_array_that_cannot_be_written_to() -> None:
    x = X.copy()
    x.flags.writeable = False
    np.testing.assert_array_equal(SAME.run(x=x), X)


@pytest.mark.extra("torch")
def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    x, w = torch.from_numpy(X).bfloat16(), torch.from_numpy(W).bfloat16()
    y = MATMUL.run(x=x, w=w)
    assert isinstance(y, torch.Tensor)
    assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, (8, 3))
    torch.testing.assert_close(y, torch.from_numpy(X @ W).bfloat16())
    first, second = SAME.run(x=torch.from_numpy(X).T.contiguous().T, ranks=True)
    torch.testing.assert_close(torch.cat([first, second]), torch.from_numpy(X))


@pytest.mark.extra("torch")
def test_a_call_after_a_call_with_an_empty_torch_tensor() -> None:
    """The data pointer of an empty tensor is null."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M", "K"])
    def on_one_rank(x):
        return hw.copy(x)

    program, group = hw.compile(on_one_rank), hw.init(hw.Threads(1), "empty")
    assert program(torch.empty(0, 4), group=group).shape == (0, 4)
    torch.testing.assert_close(program(torch.from_numpy(X), group=group), torch.from_numpy(X))
    group.close()


@pytest.mark.extra("torch")
def test_torch_tensors_that_do_not_fit() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    sparse = torch.eye(4).bfloat16().to_sparse()
    assert message_of(x=sparse) == "ag_matmul: x: its layout is torch.sparse_coo; call .to_dense()"
    assert message_of(x=torch.empty(8, 4, device="meta")) == 'ag_matmul: x: it is on meta; call .to("cpu") or .to("cuda")'
    assert message_of(x=torch.empty(8, 4).cfloat()) == (
        "ag_matmul: x: expected bf16[M@x, K], got complex64[8, 4]; programs have no complex64: pass real and imaginary part as two arrays"
    )


@pytest.mark.extra("torch")
def test_torch_tensors_that_require_grad() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    x, w = torch.nn.Parameter(torch.from_numpy(X).bfloat16()), torch.from_numpy(W).bfloat16()
    refused = "requires grad, but programs have no gradients; call .detach(), or run the program under torch.no_grad()"
    assert message_of(x=x, w=w) == f"ag_matmul: x: {refused}"
    assert message_of(x=x * 2, w=w) == f"ag_matmul: x: {refused}"
    assert message_of(x=x.detach(), w=w.requires_grad_()) == f"ag_matmul: w: {refused}"
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = MATMUL.run(x=x, w=w)
        assert not y.requires_grad
        torch.testing.assert_close(y, torch.from_numpy(X @ W).bfloat16())


@pytest.mark.extra("torch")
def test_torch_tensors_without_memory() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (8, 4), dtype=torch.bfloat16)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return args[0]

    wrapped: list[str] = []
    with torch.no_grad():
        local = torch.zeros(4, 4).bfloat16()
        for given in (Wrapper(), FakeTensorMode().from_tensor(local), torch._to_functional_tensor(local)):
            message = f"it is a {type(given).__name__} without memory; pass a torch.Tensor with the values"
            assert message_of(x=given) == f"ag_matmul: x: {message}"
        torch.vmap(lambda x: wrapped.append(message_of(x=x)) or x)(torch.zeros(2, 8, 4).bfloat16())
        given = distributed(DTensor, local)
    assert wrapped == ["ag_matmul: x: it is a Tensor without memory; pass a torch.Tensor with the values"]
    assert message_of(x=given) == "ag_matmul: x: it is a DTensor, which is distributed; pass .to_local()"
    assert message_of(x=torch._neg_view(local)) == "ag_matmul: x: its negation is pending; call .resolve_neg()"


def distributed(kind: Any, local: Any) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return kind.from_local(local, dist.init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


class Exporter:
    """Array of an unknown library that supports only DLPack."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class ArrayApiExporter(Exporter):
    class Namespace:
        @staticmethod
        def from_dlpack(array: Any) -> "ArrayApiExporter":
            return ArrayApiExporter(np.from_dlpack(array))

    def __array_namespace__(self) -> Any:
        return self.Namespace


def test_any_library_with_dlpack() -> None:
    y = SAME.run(x=Exporter(X))
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, X)
    z = SAME.run(x=ArrayApiExporter(X))
    assert isinstance(z, ArrayApiExporter)
    np.testing.assert_array_equal(z.array, X)


def test_a_library_whose_dlpack_cannot_pass_the_dtype() -> None:
    message = message_of(x=Exporter(X.astype(BF16)))
    assert message.startswith("ag_matmul: x: its library's DLPack fails (")
    assert message.endswith("); pass a NumPy, PyTorch, CuPy or JAX array")


def test_dtype() -> None:
    assert message_of(x=X) == "ag_matmul: x: expected bf16[M@x, K], got f32[8, 4]; cast it, or compile for f32"


def test_byte_order() -> None:
    with pytest.raises(ArgumentError) as error:
        SAME.run(x=X.astype(">f4"))
    assert str(error.value) == "same: x: its byte order is not native; call .astype with the native dtype"


def test_number_of_dims() -> None:
    assert message_of(w=np.ones(4, BF16)) == "ag_matmul: w: expected bf16[K, N], got bf16[4]; pass an array of 2 dims"


def test_an_argument_that_is_not_an_array() -> None:
    assert message_of(w=[1, 2]) == "ag_matmul: w: expected an array, got list; pass a NumPy, PyTorch, CuPy or JAX array"


def test_sizes_that_disagree() -> None:
    assert message_of(w=np.ones((5, 3), BF16)) == "ag_matmul: w: K is 5 here and 4 in x; pass arrays that agree"


def test_a_size_that_is_fixed() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["4@x", "K"])
    def fixed(x):
        return hw.copy(x)

    with pytest.raises(ArgumentError) as error:
        hw.compile(fixed).run(x=X)
    assert str(error.value) == "fixed: x: dim 0 is 8; it must be 4"


def test_a_program_without_inputs() -> None:
    program = hw.compile(hw.HostProgram.parse("host @f() -> () mesh() {\n}\n"))
    with pytest.raises(ArgumentError, match="f: run: there are no inputs, and outputs use the library of an input; add an input"):
        program.run()


def test_a_size_that_ranks_cannot_share() -> None:
    x = np.ones((7, 4), BF16)
    with pytest.warns(OverlapWarning, match="2 ranks do not split the size 7 of dim 0 of %x_gathered evenly"):
        y = MATMUL.run(x=x, w=W.astype(BF16))
    np.testing.assert_array_equal(y.astype(np.float32), np.ones((7, 4)) @ W)


def test_names() -> None:
    takes = "; the program takes x: bf16[M@x, K], w: bf16[K, N]"
    with pytest.raises(ArgumentError, match=r"^ag_matmul: missing argument w" + takes.replace("[", r"\[").replace("]", r"\]")):
        MATMUL.run(x=X.astype(BF16))
    assert message_of(z=X) == "ag_matmul: there is no argument z" + takes


def test_chunks_that_do_not_divide_a_size() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
    def thirds(x, w):
        return hw.matmul(x, w).stream("M", chunks=3)

    np.testing.assert_array_equal(hw.compile(thirds).run(x=X, w=W), X @ W)
