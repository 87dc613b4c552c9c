"""`scatter_add` and `scatter` on a GPU, compared with NumPy: one index per row or per element, full and partial warps."""

from __future__ import annotations

import numpy as np
import pytest

import hostweave as hw

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 1, 1), (33, 40, 31), (100, 7, 96), (1000, 300, 257), (4096, 1024, 512)])
@pytest.mark.parametrize("shared", [True, False])
def test_sums_at_indices(tokens: int, rows: int, width: int, shared: bool) -> None:
    """Sums of integers are exact, and the last of several writes to one position is kept."""
    index = hw.i64["T", 1 if shared else "E"]

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["V", "E"], index=index, source=hw.f32["T", "E"])
    def sent(x: hw.Tensor, index: hw.Tensor, source: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.scatter_add(x, 0, index, source), hw.scatter(x, 0, index, source)

    rng = np.random.default_rng(0)
    x, source = (rng.integers(-8, 8, (size, width)).astype(np.float32) for size in (rows, tokens))
    at = rng.integers(0, rows, (tokens, 1 if shared else width))
    places = np.broadcast_to(at, source.shape), np.broadcast_to(np.arange(width), source.shape)
    added, put = x.copy(), x.copy()
    np.add.at(added, places, source)
    for token in range(tokens):
        put[places[0][token], places[1][token]] = source[token]
    program = hw.compile(sent, target="cuda")
    for _ in range(2):
        made = program.run(*(torch.from_numpy(array).cuda() for array in (x, at, source)))
        for got, want in zip(made, (added, put), strict=True):
            np.testing.assert_array_equal(got.cpu().numpy(), want)
    program.close()
