"""CUDA streams of other libraries."""

from __future__ import annotations

from typing import Any

from hostweave.base.errors import ArgumentError


def handle_of(stream: Any) -> int:
    """The cudaStream_t of an int, a torch.cuda.Stream, a cupy.cuda.Stream, or of any object with `__cuda_stream__`.

    Raises ArgumentError where it is none of them.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "cuda_stream"):  # PyTorch
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    if hasattr(stream, "ptr"):  # CuPy
        return int(stream.ptr)
    raise ArgumentError(f"stream=: expected an int, a stream of PyTorch or CuPy, or one with __cuda_stream__, got {type(stream).__name__}")
