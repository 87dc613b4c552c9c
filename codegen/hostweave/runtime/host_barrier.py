"""A barrier of a few microseconds in shared memory, at which processes of one host also compare a number."""

import mmap
import os
import time
from collections.abc import Callable

_LOW_BITS = 48  # low bits of a word: the value; the upper 16 bits are the number of the barrier
_WORD = 8  # bytes, read and written atomically
_MAX_SPINS = 200  # polls without a pause
_CHECK_SECONDS = 0.05  # seconds between calls of `on_wait`


class HostBarrier:
    """Two words per rank, for alternate barriers. A rank starts barrier n + 2 only after all ranks have started barrier n + 1. So all
    ranks have read the words of barrier n, which barrier n + 2 overwrites."""

    def __init__(self, rank: int, count: int, path: str = ""):
        """Creates the shared memory, or maps the shared memory of another process at `path`. Raises OSError on failure."""
        self._rank, self._count, self._number = rank, count, 0
        size = 2 * count * _WORD
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else os.memfd_create("hostweave", os.MFD_CLOEXEC)
        try:
            if not path:
                os.ftruncate(file, size)
            self._words = memoryview(mmap.mmap(file, size)).cast("Q")
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self.path = f"/proc/{os.getpid()}/fd/{file}"

    @property
    def missing(self) -> list[int]:
        first_word = self._number % 2 * self._count
        return [rank for rank in range(self._count) if self._words[first_word + rank] >> _LOW_BITS != self._number % (1 << 64 - _LOW_BITS)]

    def forget_path(self) -> None:
        """Closes the file, after all ranks have mapped the memory."""
        os.close(self._file)

    def agree(self, value: int, on_wait: Callable[[], None]) -> bool:
        """Returns True if the low 48 bits of all ranks' values are equal. Until all ranks have arrived, calls `on_wait` about
        every 50 ms; `on_wait` may raise."""
        self._number += 1
        count, first_word = self._number % (1 << 64 - _LOW_BITS), self._number % 2 * self._count
        own_word = count << _LOW_BITS | value & (1 << _LOW_BITS) - 1
        self._words[first_word + self._rank] = own_word
        same = True
        for index in range(first_word, first_word + self._count):
            same &= self._await(index, count, on_wait) == own_word
        return same

    def _await(self, index: int, count: int, on_wait: Callable[[], None]) -> int:
        polls, pause, last_check = 0, 1e-5, 0.0
        while (word := self._words[index]) >> _LOW_BITS != count:
            polls += 1
            if polls < _MAX_SPINS:
                time.sleep(0)
                continue
            now = time.monotonic()
            last_check = last_check or now
            if now - last_check > _CHECK_SECONDS:
                last_check = now
                on_wait()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return word
