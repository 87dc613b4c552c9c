"""Groups: ranks that call programs together. Each rank is a thread or a process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, TypeVar

from hostweave.base.errors import ArgumentError, CaptureError, ExecutionError, HostweaveError, reason_of
from hostweave.base.forks import reset_after_fork
from hostweave.base.interrupts import interruptibly, within
from hostweave.base.shortages import explains_shortages
from hostweave.base.signatures import checked
from hostweave.runtime.coordinator import CallSignature, Coordinator, Failed, PeerLost, StoreCoordinator, ThreadCoordinator, disagreement
from hostweave.runtime.failures import SEND_TIMEOUT, FallibleGroup, StartedCalls
from hostweave.runtime.host_barrier import HostBarrier
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.lifetime import expect_own_devices, on_end
from hostweave.runtime.providers import Communicators, Environment, Provider, SplitProvider, Threads, default_provider
from hostweave.runtime.rendezvous import World, meet, timed_out
from hostweave.runtime.standstill import marks_graphs, to_json
from hostweave.runtime.stores import MAX_SECONDS, Store, TcpStore
from hostweave.runtime.watchdog import Watchdog
from hostweave.runtime.windows import Windows, checked_shape, memory_module
from hostweave.targets.target import Target, find_target
from hostweave.types.tensor import DType

T = TypeVar("T")

INIT_TIMEOUT = 300.0  # seconds for all ranks to join, and to make their first call of a program
CALL_TIMEOUT = 600.0  # seconds for a call


class _Thread(threading.local):
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # groups in which this thread is a rank


_thread = _Thread()

_process_groups: dict[str, Group] = {}
_epochs = itertools.count()
_init_lock = reset_after_fork(threading.Lock())
_all: weakref.WeakSet[Group] = weakref.WeakSet()


@explains_shortages
@checked
def init(
    provider: Provider | None = None,
    group: str = "default",
    *,
    timeout: float = INIT_TIMEOUT,
    call_timeout: float = CALL_TIMEOUT,
    device: int | None = None,
) -> Group:
    """Makes this process a rank of a group, so that the process can call programs. With `hw.Threads`, the current thread becomes the rank.

    All ranks must call `init`. The call returns when all ranks have joined, or at once without a store. Returns the existing group if the
    process or thread is already a rank of the group. If the existing group has failed, returns a new group. `provider` gives the rank, and
    a store for messages between ranks. By default the environment variables of torchrun, mpirun or srun give the rank and the store.
    Without these variables, this process is the only rank.

    `timeout` in seconds limits how long ranks may take to join, and to make their first call of a program. `call_timeout` in seconds limits
    the duration of a call. `device` is the index of this rank's GPU. The default is the local rank modulo the number of visible GPUs.

    Raises ExecutionError if ranks cannot connect, do not join in time, or disagree on the number of ranks. Raises ArgumentError for invalid
    arguments or environment variables. Also raises ArgumentError if this process is already in the group with a different rank or a
    different number of ranks.

    Example: `group = hw.init()` under `torchrun --nproc-per-node 8`.
    """
    if provider is not None and not (hasattr(provider, "rank_and_count") and hasattr(provider, "store")):
        raise ArgumentError(f"hw.init: {provider!r} is not a provider; pass hw.TorchStore(), hw.MPI(), hw.Threads(8), or omit it")
    if not isinstance(group, str):
        raise ArgumentError(f"hw.init: group={group!r} is not a name; pass a str")
    for name, seconds in (("timeout", timeout), ("call_timeout", call_timeout)):
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise ArgumentError(f"hw.init: {name}={seconds!r} is not a number of seconds; pass a number such as 60")
    timeout, call_timeout = min(timeout, MAX_SECONDS), min(call_timeout, MAX_SECONDS)
    existing = current(group)
    if existing and not existing.failure and provider is None:
        return existing
    provider = default_provider() if provider is None else provider
    threads = isinstance(provider, Threads)
    with contextlib.nullcontext() if threads else _init_lock:
        rank, count = provider.rank_and_count(group)
        if not isinstance(rank, int) or not isinstance(count, int) or not 0 <= rank < count:
            why = f"the provider returned rank {rank!r} of {count!r}"
            raise ArgumentError(f"hw.init: {why}; a rank must be an int from 0 to the number of ranks minus 1")
        existing = current(group)
        if existing and not existing.failure:
            if (existing.rank, existing.count) == (rank, count):
                return existing
            raise ArgumentError(
                f"hw.init: group {group!r} exists already, with this process as rank {existing.rank} of {existing.count}, "
                f"not rank {rank} of {count}; close it first, or use another name"
            )
        if existing:
            existing.close()
        created = Group(provider, group, rank, count, timeout, call_timeout, device)
        (_thread.groups if threads else _process_groups)[group] = created
        return created


def current(group: str = "default") -> Group | None:
    """Returns the group of this thread or this process that is named `group`, or None."""
    for joined in (_thread.groups, _process_groups):
        if (joined_group := joined.get(group)) and not joined_group.closed:
            return joined_group
    return None


class Group(FallibleGroup):
    """Ranks that call programs together. `hw.init` returns a separate object of this class to each rank.

    `rank` is the index of this rank, `count` the number of ranks, and `local_rank` the index of this rank among the ranks on its host. If
    the hosts are unknown, `local_rank` is `rank`. A split keeps `local_rank`. A group that has failed cannot be used again.

    Example: `torch.cuda.set_device(hw.init().local_rank)`.
    """

    def __init__(
        self,
        provider: Provider,
        name: str,
        rank: int,
        count: int,
        timeout: float,
        call_timeout: float,
        device: int | None,
        has_watchdog: bool = True,
    ):
        """Without `has_watchdog`, the creator of the group must detect hangs and failures of other ranks."""
        super().__init__(name, rank, count, call_timeout)
        self.timeout = timeout
        self.in_process = isinstance(provider, Threads) or count == 1
        self._device, self._provider, self._has_watchdog = device, provider, has_watchdog
        self._subgroups: list[Group] = []  # groups that were split from this group, and are closed with this group
        self._splits = 0
        self._communicators = provider.communicators if isinstance(provider, Communicators) else None
        self._watchdogs: list[Watchdog] = []
        self.windows = Windows()
        self.barrier: tuple[HostBarrier | None] | None = None  # None before the barrier is created; (None,) if a barrier is impossible
        # Keyed by an object that all variants of a program share.
        self.last_sizes: weakref.WeakKeyDictionary[object, StartedCalls] = weakref.WeakKeyDictionary()
        self.calling = threading.RLock()  # held by the thread that makes a call on this rank
        self._store = store = provider.store(name, timeout)
        self._world: World | None = None
        if store is not None:
            try:
                self._world = meet(store, name, rank, count, timeout)
            except BaseException:
                self._close_store()
                raise
            self.coordinator = self._create_coordinator(provider, store, self._world)
        given = provider.local_rank if isinstance(provider, Environment) else None
        self.local_rank = given if given is not None else self._world.local_rank(rank) if self._world else rank
        _all.add(self)

    def __repr__(self) -> str:
        return f"<hostweave group {self.name!r}, rank {self.rank} of {self.count}>"

    @property
    def can_coordinate(self) -> bool:
        """True if ranks can exchange messages. False for `hw.Communicators`."""
        return type(self.coordinator) is not Coordinator

    @property
    def hosts(self) -> int:
        """Number of hosts of the ranks, or 1 if the hosts are unknown."""
        return self._world.hosts if self._world else 1

    def check(self) -> None:
        """Raises ExecutionError if the group has failed or is closed. On CUDA, synchronize the stream first, because a call returns before
        its work has run."""
        if not self._failure and (reason := self._known_failure()):
            self.abort(reason)
        self.expect_working()

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Splits the group. Ranks that pass the same `color` form a new group, ordered by `key`, then by rank in this group.

        All ranks of the group must call `split`. A rank that passes color None gets None. `program(x, group=part)` calls a program in the
        new group `part`. Several groups can work at the same time. If one group fails, the other groups still work. Closing this group also
        closes the new groups.

        Raises ArgumentError if `color` is neither an int nor None, if `key` is not an int, or in a group of `hw.Communicators`. Raises
        ExecutionError if the group has failed or is closed, or if another rank makes a different call or is late.

        Example: `pair = group.split(group.rank // 2)` makes groups of ranks 0 and 1, 2 and 3, and so on.
        """
        for name, value in (("color", color), ("key", key)):
            if isinstance(value, bool) or (not isinstance(value, int) and not (value is None and name == "color")):
                raise ArgumentError(f"group.split: {name}={value!r} is not an int{' or None' if name == 'color' else ''}; pass one")
        if self._communicators is not None:
            raise ArgumentError("group.split: hw.Communicators has no store; split the communicators in the application")
        self.expect_working()
        self._splits += 1
        signature = CallSignature("group.split", self.name, str(self._splits), bound=json.dumps((color, key)))
        signatures = self.agree(signature, "", self.timeout)
        if color is None:
            return None
        given = [json.loads(signature.bound) for signature in signatures]
        ranks = [rank for _, rank in sorted((order, rank) for rank, (chosen, order) in enumerate(given) if chosen == color)]
        name, provider = f"{self.name}/{self._splits}/{color}", self._provider
        unique_name = f"{name} {self._world}"  # a later group of the same name may have other splits
        own_provider = provider.split(unique_name, ranks) if isinstance(provider, Threads) else SplitProvider(provider, self.rank, ranks)
        created = Group(own_provider, name, ranks.index(self.rank), len(ranks), self.timeout, self.call_timeout, self._device)
        created.local_rank = self.local_rank
        self._subgroups.append(created)
        return created

    def empty(self, shape: Sequence[int], dtype: DType, target: str = "cpu") -> Any:
        """Allocates a contiguous, uninitialised array in memory that the other ranks can access directly (a window).

        All ranks must call `empty` together, with the same dtype and the same `target`, "cpu" or "cuda". Shapes may differ. With the
        transports peer and one_sided, ranks read and write arrays in windows in place, and copy arrays that are not in windows. If an
        argument is in a window, all ranks must pass arrays from the same call of `empty`. Views of these arrays must have equal offsets.
        Programs that can access windows are compiled again for each new set of arguments in windows, unless `Options.windows` is set.

        On the CPU target, the result is a NumPy array; bf16 and f8 have dtypes of `ml_dtypes`, which DLPack does not support. On CUDA, the
        result is an array for functions such as `torch.from_dlpack` and `cupy.from_dlpack`. Memory is allocated in pieces of 2 MiB. After
        `close`, only this rank can access the array.

        Raises ArgumentError for an invalid shape, dtype or target, and in a group of `hw.Communicators` with several ranks. Raises
        ExecutionError if the ranks cannot share memory, for example on several hosts. Also raises ExecutionError if the group is unusable,
        if another rank makes a different call or is late, or if memory runs out.

        Example: `x = group.empty((M // group.count, K), hw.bf16)`, then `x[:] = rows` and `y = program(x, w)`.
        """
        shape = checked_shape(shape, dtype, target)
        on, windows = find_target(target), self.windows
        if not self.can_coordinate and self.count > 1:
            raise ArgumentError("group.empty: hw.Communicators has no store; create the group by another provider")
        self.expect_working()
        what = f"group.empty of {dtype} for {target}"
        windows.allocated += 1
        bytes = json.dumps(prod(shape) * dtype.itemsize)
        signatures = self.agree(CallSignature(what, self.name, str(windows.allocated), bound=bytes), "", self.timeout)
        if self.hosts > 1:
            raise ExecutionError(f"{what}: the ranks are on {self.hosts} hosts, but shared memory needs one host; pass ordinary arrays")
        module = interruptibly(lambda: memory_module(target))
        member = self.member(module, on)
        if target not in windows.connected:
            if why := self.connect_all(member, module, target):
                raise ExecutionError(f"{what}: {why.partition(';')[0]}; pass ordinary arrays, which programs copy")
            windows.connected.add(target)
        size = max(json.loads(signature.bound) for signature in signatures)
        memory = self.run_and_wait(what, member, lambda: module.GroupMemory(member, size))
        return windows.array(memory, module, size, shape, dtype, on.device_of_arrays(member))

    def close(self) -> None:
        """Frees this rank's devices and channels. The group cannot be used afterwards."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._send(self._announce_leaving)  # before the channels are freed, because freeing may wait for other ranks
            for subgroup in self._subgroups:
                subgroup.close()
            for program in list(self.programs.values()):
                program.close()
            self.members.clear()
            for watchdog in self._watchdogs:
                watchdog.end()
            self._close_store()

    def _announce_leaving(self) -> None:
        self.coordinator.publish_position(to_json(self.positions()))
        self.coordinator.leave(self._calls)

    def leave_to_parent(self) -> None:
        """Marks the group as unusable in a forked child of the rank's process."""
        self._lock, self.calling = threading.RLock(), threading.RLock()
        self.closed = True
        self._failure = "this process was forked from the rank's process"
        self._aborted.set()

    def member(self, module: ModuleType, target: Target) -> Any:
        """Returns the native object of this rank for the target. All programs share this object."""
        native_calls.modules.add(module)
        with self._lock:
            if target.name not in self.members:
                expect_own_devices()
                device = target.choose_device(self._device, lambda: module.device_for(self.rank, self.local_rank))
                epoch = self._world.epoch if self._world else next(_epochs)  # a later group of the same name has not failed
                self.members[target.name] = module.Member(f"{self.name} {epoch}", device, self.rank, self.count, not self.in_process)
                if self._has_watchdog and (target.is_asynchronous or not self.in_process):
                    self._watchdogs.append(Watchdog(self))
            return self.members[target.name]

    def agree(self, signature: CallSignature, waits_for: str, timeout: float, error: HostweaveError | None = None) -> list[CallSignature]:
        """Gathers and compares the signatures of all ranks. Returns the signatures by rank.

        If `error` is given, raises it after the gather. If another rank fails or times out, the message ends with `waits_for`.
        """
        records = self._gather(str(signature), timeout, f"{signature.program}: ", waits_for)
        if error:
            raise error
        signatures = [CallSignature.parse(record) for record in records]
        if difference := disagreement(signatures):
            raise ExecutionError(f"{signature.program}: {difference}")
        return signatures

    def same_on_host(self, program: str, value: int, announce: Callable[[], None], waits_for: str) -> bool | None:
        """True if all ranks pass the same value, None if the ranks have no shared memory, and otherwise False. Collective.

        Calls `announce` if a rank does not arrive at once. If the group fails, or a rank does not arrive within `call_timeout`, the message
        ends with `waits_for`.
        """
        deadline = time.monotonic() + self.call_timeout
        try:
            if self.barrier is None:
                self.barrier = self.make_barrier()
            if not (barrier := self.barrier[0]):
                return None

            def waits() -> None:
                if not self._waits_at_barrier:
                    self._waits_at_barrier = True
                    announce()
                problem = time.monotonic() > deadline and timed_out(self.call_timeout, barrier.missing)
                if reason := self.failure or problem:
                    raise ExecutionError(f"{reason.removesuffix(waits_for)}{waits_for}")

            same = barrier.agree(value, waits)
            self.coordinator.number += 1
            return same
        except BaseException as error:
            reason = str(error) if isinstance(error, ExecutionError) else f"rank {self.rank}: {reason_of(error)}"
            self.fail(reason)
            if isinstance(error, ExecutionError):
                raise ExecutionError(f"{program}: {reason}") from None
            raise
        finally:
            self._waits_at_barrier = False

    def make_barrier(self) -> tuple[HostBarrier | None]:
        """Creates the barrier's shared memory. Returns (None,) if some rank cannot map the memory, for example on another host.
        Collective."""
        if self.hosts > 1 or not self._store:
            return (None,)
        barrier = None
        with contextlib.suppress(OSError):
            barrier = HostBarrier(self.rank, self.count) if self.rank == 0 else None
        path = self._share_id("barrier", (barrier.path if barrier else "").encode() if self.rank == 0 else None).decode()
        if self.rank and path:
            with contextlib.suppress(OSError):
                barrier = HostBarrier(self.rank, self.count, path)
        all_have = self.all_true(barrier is not None)
        if barrier:
            barrier.forget_path()
        return (barrier if all_have else None,)

    def all_true(self, value: bool) -> bool:
        """Returns True if all ranks pass True. Collective."""
        return all(record == str(True) for record in self._gather(str(value), self.call_timeout))

    def _gather(self, record: str, timeout: float, where: str = "", waits_for: str = "") -> list[str]:
        """Returns the records of all ranks. If a rank fails or times out, fails the group, and raises an error. The message begins with
        `where` and ends with `waits_for`. If the store does not answer, the error comes at most a second after the timeout."""
        gather = partial(self.coordinator.gather, record, timeout)
        try:
            return within(timeout + SEND_TIMEOUT, gather) if isinstance(self.coordinator, StoreCoordinator) and self.count > 1 else gather()
        except (PeerLost, Failed, TimeoutError) as failure:
            problem = str(failure) if isinstance(failure, Failed) else timed_out(timeout, getattr(failure, "ranks", (0,)))
            self.fail(problem)
            raise ExecutionError(f"{where}{problem.removesuffix(waits_for)}{waits_for}") from None
        except BaseException as interruption:
            self.fail(f"rank {self.rank}: {reason_of(interruption)}")
            raise

    def connected(self, member: Any, module: ModuleType, tune: bool = False) -> Any:
        """Returns the module's program on this rank. Creates channels that the rank lacks. Collective."""

        def connect() -> Any:
            if self._communicators is not None:
                module.adopt(member, self._communicators)
            elif process_groups := module.missing_process_groups(member):
                ids = ((key, module.new_id(member, key) if rank == 0 else None) for key, rank in process_groups)
                module.connect(member, {key: self._share_id(f"process_group/{key}", id) for key, id in ids}, self.timeout)
            return module.Instance(member, tune, marks_graphs())

        with self.failing(), native_calls:
            return self.waiting(connect)

    def connect_all(self, member: Any, module: ModuleType, target: str) -> str:
        """Creates the channel through which all ranks share memory. Returns "", or on all ranks the reason why sharing is impossible."""

        def connect() -> str:
            id = module.new_peer_id(member) if self.rank == 0 else None
            id = self._share_id(f"process_group/all for {target}", id) if self._store else id
            return str(module.connect_all(member, id, self.timeout))

        with self.failing(), native_calls:
            return self.waiting(connect)

    def waiting(self, work: Callable[[], T]) -> T:
        """Runs `work`, which may wait for other ranks in native code. Ctrl-C fails the group, which ends the wait."""
        return interruptibly(work, self.interrupted) if self.count > 1 else work()

    def run_and_wait(self, program: str, member: Any, call: Callable[..., T], *arguments: Any) -> T:
        """Like `run`, for a call that waits for the other ranks."""
        return self.run(program, member, lambda: self.waiting(partial(call, *arguments)))

    def run(self, program: str, member: Any, call: Callable[..., T], *arguments: Any) -> T:
        """Makes a call that all ranks make. An error other than CaptureError fails the group on all ranks."""
        self._calls += 1
        try:
            with native_calls:
                return call(*arguments)
        except CaptureError:  # nothing was enqueued, so only this call fails
            raise
        except BaseException as error:
            reason = f"rank {self.rank}: {reason_of(error)}"
            first = self._failure or self._known_failure() or member.stopped or reason
            self.fail(first)
            if first != reason and isinstance(error, Exception):  # `error` is a consequence of an earlier failure
                raise ExecutionError(f"{program}: {first}") from error
            raise

    def _create_coordinator(self, provider: Provider, store: Store, world: World) -> Coordinator:
        if isinstance(provider, Threads):
            of_threads, here = ThreadCoordinator(provider.table(world.epoch), self.rank), weakref.ref(self)
            of_threads.answer_positions_by(lambda: to_json(group.positions()) if (group := here()) else None)
            return of_threads
        coordinator = StoreCoordinator(store, world.prefix, self.rank, self.count)
        if isinstance(store, TcpStore):
            # Requests then fail at most SEND_TIMEOUT after the timeout of a call, even if the process of rank 0 is stopped.
            store.answer_timeout = min(store.answer_timeout, self.call_timeout + SEND_TIMEOUT)
            for key, reason in coordinator.last_wills().items():
                store.on_disconnect(key, reason.encode())
        return coordinator

    def _share_id(self, key: str, id: bytes | None) -> bytes:
        assert self._store is not None
        assert self._world is not None
        key = f"{self._world.prefix}/{key}"
        if id is not None:
            self._store.set(key, id)
            return id
        return self._store.get(key, self.timeout)

    def _close_store(self) -> None:
        if isinstance(self._store, TcpStore):
            self._store.close()


def _interrupt_all() -> None:
    for group in list(_all):
        group.abort("the interpreter is ending")


on_end(_interrupt_all)


def _after_fork() -> None:
    """Marks all groups as unusable in a forked child. The parent is still the rank, so the child must not announce that the rank leaves."""
    for group in list(_all):
        group.leave_to_parent()
    _process_groups.clear()
    _thread.groups.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    why = _ended_by()
    native_calls.end()
    for group in list(_all):
        if why and not group.failure:
            group._send(partial(group.coordinator.fail, f"rank {group.rank}: its process has ended by {why}"))
        group.close()
    native_calls.finish()


def _ended_by() -> str | None:
    """The exception that ends this process, or None. Also None at an interactive prompt, because the user has seen the exception."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # multiprocessing runs exit handlers while the exception propagates
    if error is None or hasattr(sys, "ps1") or (isinstance(error, SystemExit) and not error.code):
        return None
    return f"{type(error).__name__}: {error}".rstrip(": ")


Finalize(None, _close_all, exitpriority=10)  # processes of multiprocessing do not run atexit handlers
