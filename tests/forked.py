"""Starts Python processes as forks of a server that has imported the package. In short processes, imports take most of the time."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>: orphans among the descendants become children of this process
_USED = (  # modules that `import hostweave` does not import, and that tests use
    "numpy.testing",
    "hostweave.build.make",
    "hostweave.running",
    *(f"hostweave.runtime.{name}" for name in ("local", "team", "watchdog")),
)


class Forked(subprocess.Popen):
    """A process with the command `[sys.executable, "-c", script, ...]` or `[sys.executable, file, ...]`.

    Forks have equal hash seeds, unlike new interpreters.
    """

    def _execute_child(self, args: list[str], *given: Any) -> None:
        env, pipes, new_session = given[5], given[9:15], given[20]
        ends = [end if end != -1 else own for own, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {"args": args[1:], "env": dict(os.environ if env is None else env), "new_session": new_session}
        server, prctl = _server(), ctypes.CDLL(None).prctl
        assert prctl(_ADOPT, 1, 0, 0, 0) == 0
        socket.send_fds(server, [json.dumps(request).encode()], ends)
        self.pid = int(server.recv(100))
        prctl(_ADOPT, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(args: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    with Forked(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(args, process.returncode, out, err)


@cache
def _server() -> socket.socket:
    """Starts the server, which ends when this process closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(ours.close)  # Otherwise, Python warns at exit.
    paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}  # NumPy starts no threads, so forks are safe.
    with theirs:
        theirs.set_inheritable(True)
        os.posix_spawn(sys.executable, [sys.executable, __file__, str(theirs.fileno())], environment, setsid=True)
    return ours


def _serve(server: socket.socket) -> dict[str, Any]:
    """Forks a process per request. The forked process waits until the process of the tests is its parent, and returns the request."""
    while True:
        message, ends, *_ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            os._exit(0)
        numbers, number = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if child := os.fork():
                os.write(number, str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for own, end in enumerate(ends):
                os.dup2(end, own)
            for end in (*ends, numbers, number):
                os.close(end)
            server.close()
            return json.loads(message)
        os.waitpid(between, 0)
        server.send(os.read(numbers, 100))
        for end in (*ends, numbers, number):
            os.close(end)


def _become(args: list[str], env: dict[str, str], new_session: bool) -> None:
    """Runs the script of a request as the main module."""
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in env)
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(args[0]).parent))
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    for module in _USED:
        import_module(module)
    import_module("rank_process").program_of("matmul_rs_flat", 2, "cpu")[1].source  # noqa: B018  # prepares compilation
    gc.freeze()  # Otherwise, garbage collections would copy the server's memory in each fork.
    _become(**_serve(socket.socket(fileno=int(sys.argv[1]))))
