"""Programs for ranges of sizes. If overlap is predicted to be faster, calls use a program with overlap once this program is compiled."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.torch.ranges import Ranges  # noqa: E402
from hostweave.types.machine import H200  # noqa: E402

LINKS = tuple(replace(link, points=tuple((size, 1000 * seconds) for size, seconds in link.points)) for link in H200.links)
SLOW = replace(H200, flops=1e11, links=LINKS)  # On this machine, even small transfers and matmuls take long.


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(self.norm(x))))


PLAN = {"norm": "tp, -", "up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Ranges]:
    """The ranges of all modules that the test compiles."""
    found, init = list[Ranges](), Ranges.__init__
    monkeypatch.setattr(Ranges, "__init__", lambda ranges, *given: found.append(ranges) or init(ranges, *given))
    return found


@pytest.mark.extra
def test_calls_of_two_ranges(made: list[Ranges]) -> None:
    module, x = Mlp().eval(), torch.randn(64, 32)
    options = hw.Options(machine=SLOW)
    sizes = {"x": {0: Dim("rows", min=0, max=65536)}}
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), PLAN, (x,), options=options, dynamic_shapes=sizes)
    (ranges,) = made
    with torch.no_grad():
        for rows in (4096, 4, 4096, 4, 5000, 0):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-5)
            ranges.wait()
    large, small = (ranges.program_for({"x": torch.empty(rows, 32)}, None) for rows in (6000, 4))
    assert large.program.choices[0].chosen.name == "put(2)"
    assert small is None
    assert all(choice.chosen.name == "none" for choice in model.program.choices)


class Attention(nn.Module):
    """Attention in which each key is repeated for two heads of queries."""

    def forward(self, x: Any) -> Any:
        keys = x.view(-1, 2, 4, 4)
        k = keys[:, :, None].expand(-1, 2, 2, 4, 4).reshape(-1, 4, 4, 4)
        return nn.functional.scaled_dot_product_attention(k * 2, k, k).flatten(1)


def test_a_range_is_compiled_while_another_module_is_traced(made: list[Ranges], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's tracing modes are global. The graph of one thread must not contain operations of another thread."""
    failed: list[str] = []
    monkeypatch.setattr("hostweave.torch.ranges.warnings.warn", lambda why, *_, **__: failed.append(str(why)))
    monkeypatch.setattr(hw.Program, "build", lambda _: None)
    x, sizes = torch.randn(64, 32), {"x": {0: Dim("rows", min=2, max=65536)}}
    hostweave.torch.compile(Attention(), hw.Mesh(tp=2), {}, (x,), dynamic_shapes=sizes)
    (ranges,) = made

    class Calling(nn.Module):
        def forward(self, y: Any) -> Any:
            ranges.program_for({"x": x}, None)
            for thread in threading.enumerate():
                if thread.name.startswith("compiles for"):
                    thread.join(3)
            return y * 2

    hostweave.torch.compile(Calling().eval(), hw.Mesh(tp=1), {}, (x,))
    ranges.wait()
    assert [why for why in failed if "stay sequential" in why] == []


def of_ranks(ready: list[threading.Event]) -> list[list[bool]]:
    """For each rank and call, True if the call runs the program for its range of sizes.

    A rank compiles this program until the rank's event in `ready` is set, or until the fourth call.
    """
    graph: Any = SimpleNamespace(input_types={"x": hw.f32["s0", 8]})
    threads = hw.Threads(2)

    def rank_main(rank: int) -> list[bool]:
        group = hw.init(threads)
        choice = SimpleNamespace(chosen=SimpleNamespace(name="put(2)"))

        def compile(_: Any) -> Any:
            ready[rank].wait(30)
            return SimpleNamespace(program=SimpleNamespace(choices=[choice], build=lambda: None))

        ranges = Ranges(graph, compile)
        found = []
        for call in range(1, 9):
            if call == 4:
                ready[rank].set()
                ranges.wait()
            found.append(ranges.program_for({"x": torch.empty(100, 8)}, group) is not None)
        return found

    return threads.run(rank_main)


def test_ranks_change_at_the_same_call() -> None:
    """The program of rank 0 is ready early, and the program of rank 1 at the fourth call. Both are used from the fourth call on."""
    ready = [threading.Event(), threading.Event()]
    ready[0].set()
    assert of_ranks(ready) == [[False] * 3 + [True] * 5] * 2
