"""Recognises shortages of disk space, memory and other resources by the text of an error, and names a remedy."""

import mmap
import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from hostweave.base.errors import ExecutionError, HostweaveError, reason_of

P = ParamSpec("P")
T = TypeVar("T")

# a full disk may cause a bus error, because a linker maps its output file
_DISK = r"No space left on device|Disk quota exceeded|Bus error|signal 7\b"
_FILES = r"Too many open files"
_SIZE = r"File too large|File size limit exceeded|signal 25\b"
_MEMORY = (
    r"[Cc]annot allocate memory|[Oo]ut of memory|memory exhausted|bad_alloc|MemoryError|failed to map segment|cannot map zero-fill pages"
    r"|Killed signal|signal 9\b"
)
_GPU = r"CUDA out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|Out of memory allocating [\d,]+ bytes"  # torch, CUDA, CuPy
_THREADS = r"can't start new thread|Resource temporarily unavailable"
_REMEDIES = {
    _DISK: "free space on that disk, or set HOSTWEAVE_CACHE and TMPDIR to other folders with enough space",
    _SIZE: "raise the limit of the size of a file: ulimit -f unlimited",
    _FILES: "close files, or raise the limit of open files: ulimit -n 4096",
    _GPU: "end other processes that use memory of the GPU, or pass smaller arrays",
    _MEMORY: "free memory, or raise the limit of the process (ulimit -v) or of its container",
    _THREADS: "end other processes, or raise the limits of processes (ulimit -u) and of memory (ulimit -v), or the limits of the container",
}


def remedy_of(text: str) -> str | None:
    """Remedy for the shortage that an error text reports, or None."""
    return next((remedy for signs, remedy in _REMEDIES.items() if re.search(signs, text)), None)


def expect_memory(count: int) -> None:
    """Raises MemoryError if the process cannot map `count` more bytes."""
    if count:
        try:
            mmap.mmap(-1, count).close()
        except OSError as error:
            raise MemoryError(f"{error}: {count >> 20} MiB") from error


def explains_shortages(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an error that reports a shortage becomes an ExecutionError with a remedy, unless it is a HostweaveError."""

    @wraps(function)
    def wrapper(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(*arguments, **named)
        except HostweaveError:
            raise
        except Exception as error:
            if remedy := remedy_of(f"{type(error).__name__}: {error}"):
                raise ExecutionError(f"the machine has too few resources: {reason_of(error)}; {remedy}") from error
            raise

    return wrapper
