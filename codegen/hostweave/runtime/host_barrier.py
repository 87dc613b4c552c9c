"""A barrier in shared memory, at which processes of one host also compare a number. A barrier takes a few microseconds."""

import mmap
import os
import time
from collections.abc import Callable

_BITS = 48  # low bits of a word, for the value; the upper 16 bits are the number of the exchange
_WORD = 8  # bytes, read and written atomically
_MAX_SPINS = 200  # polls without a pause
_CHECK_SECONDS = 0.05  # seconds between calls of `on_wait`


class HostBarrier:
    """Two words per rank, for alternate exchanges. A rank that starts exchange n + 2 has seen all ranks start exchange n + 1. All ranks
    have therefore read the words of exchange n, which are now overwritten."""

    def __init__(self, rank: int, count: int, path: str = ""):
        """Creates the shared memory, or maps the memory that another process has created at `path`. Raises OSError if that fails."""
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
        return [rank for rank in range(self._count) if self._words[first_word + rank] >> _BITS != self._number % (1 << 64 - _BITS)]

    def forget_path(self) -> None:
        """Closes the file, so that its path becomes invalid. Call this method after all ranks have mapped the memory."""
        os.close(self._file)

    def agree(self, value: int, on_wait: Callable[[], None]) -> bool:
        """Returns True on all ranks if the low 48 bits of all ranks' values are equal, otherwise False on all ranks. Calls `on_wait` every
        50 ms until all ranks have arrived. `on_wait` may raise."""
        self._number += 1
        count, first_word = self._number % (1 << 64 - _BITS), self._number % 2 * self._count
        own_word = count << _BITS | value & (1 << _BITS) - 1
        self._words[first_word + self._rank] = own_word
        same = True
        for index in range(first_word, first_word + self._count):
            same &= self._await(index, count, on_wait) == own_word
        return same

    def _await(self, index: int, count: int, on_wait: Callable[[], None]) -> int:
        polls, pause, last_check = 0, 1e-5, 0.0
        while (word := self._words[index]) >> _BITS != count:
            polls += 1
            if polls < _MAX_SPINS:
                time.sleep(0)
                continue
            now = time.monotonic()
            if not last_check:
                last_check = now
            elif now - last_check > _CHECK_SECONDS:
                last_check = now
                on_wait()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return word
