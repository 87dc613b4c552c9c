"""Programs as custom ops of torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError  # noqa: E402


@hw.fusion(mesh=hw.Mesh(tp=2), x=hw.f32["M", "K"], w=hw.f32["K", "N@tp"], v=hw.f32["N@tp", "K"])
def mlp(x, w, v):  # type: ignore[no-untyped-def]
    hidden = hw.relu(x @ w)
    return x + hidden @ v, hw.sum(hidden, 1)


X, W, V = torch.randn(6, 8), torch.randn(8, 16), torch.randn(16, 8)


def wanted(x: Any) -> Any:
    hidden = (x @ W).relu()
    return x + hidden @ V, hidden.sum(1)


@pytest.fixture(scope="module")
def op() -> Any:
    return hostweave.torch.as_torch_op(hw.compile(mlp, target="cpu"), "hostweave_tests::mlp")


def test_an_op_is_called_and_compiled_and_exported(op: Any) -> None:
    def function(x: Any) -> Any:
        y, total = op(x.relu(), W, V)
        return y * 2, total

    want = wanted(X.relu())
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    for got in (function(X), compiled(X)):
        torch.testing.assert_close(got[0], want[0] * 2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    torch.library.opcheck(op, (X, W, V), test_utils=("test_schema", "test_faketensor"))


def test_ranks_of_a_group_call_it(op: Any) -> None:
    threads = hw.Threads(2)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        return op(X, W.chunk(2, 1)[rank].contiguous(), V.chunk(2, 0)[rank].contiguous())[0]

    for got in threads.run(rank_main):
        torch.testing.assert_close(got, wanted(X)[0], rtol=1e-5, atol=1e-5)


def test_mistakes(op: Any) -> None:
    program = hw.compile(mlp, target="cpu")
    with pytest.raises(ArgumentError, match="as_torch_op: 'mlp' is not the name of an op; write it with a namespace, such as 'mylib::mlp'"):
        hostweave.torch.as_torch_op(program, "mlp")
    with pytest.raises(ArgumentError, match="as_torch_op: op hostweave_tests::mlp already exists; choose another name"):
        hostweave.torch.as_torch_op(program, "hostweave_tests::mlp")
    with pytest.raises(ArgumentError, match=r"x: dim 1 is 9|K is"):
        op(torch.randn(6, 9), W, V)
