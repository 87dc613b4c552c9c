"""Training steps that are one program, with optimizers of torch and of users. The steps are compared with the same steps in torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.torch.bound import BoundProgram  # noqa: E402
from hostweave.torch.optimizer import RecordedStep, Shadow  # noqa: E402

Make = Callable[[Iterable[nn.Parameter]], Any]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, arXiv:2302.06675), as users write it. The optimizer updates `.data`, and counts steps by an int."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.start = torch.zeros_like  # This attribute is not in checkpoints.

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state, (first, second) = self.state[p], group["betas"]
                if len(state) == 0:
                    state["step"], state["exp_avg"] = 0, self.start(p)
                state["step"] += 1
                m = state["exp_avg"]
                p.add_(m.clone().mul_(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                m.mul_(second).add_(p.grad, alpha=1 - second)


OF_TORCH: dict[str, Make] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda of: torch.optim.Adam(of, lr=1e-2, eps=1e-3),
    "lr in a tensor": lambda of: torch.optim.Adam(of, lr=torch.tensor(1e-2), eps=1e-3),
    "amsgrad": lambda of: torch.optim.AdamW(of, lr=1e-2, eps=1e-3, amsgrad=True, maximize=True),
    "adafactor": lambda of: torch.optim.Adafactor(of, lr=0.1),
    "muon": lambda of: torch.optim.Muon(of, lr=0.02),
    "rmsprop": lambda of: torch.optim.RMSprop(of, lr=1e-2, momentum=0.9, centered=True, eps=1e-3),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda of: torch.optim.Adadelta(of),
    "adamax": lambda of: torch.optim.Adamax(of, lr=0.01, eps=1e-3),
    "nadam": lambda of: torch.optim.NAdam(of, lr=0.01, eps=1e-3),
    "rprop": lambda of: torch.optim.Rprop(of),
    "of a user": lambda of: Lion(of, lr=0.01, weight_decay=0.1),
}
MORE = ("sgd", "nesterov", "adam", "adagrad", "adadelta", "adamax", "nadam")  # optimizers that `CASES` tests only with -m slow
MORE_RANKS = [("adafactor", 4), ("muon", 1), ("momentum", 4)]


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias), nn.Linear(12, 8, bias)

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.gelu(self.up(x))).square().mean()


PLAN = {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}


def compiled(module: nn.Module, optimizer: Any, ranks: int = 2, **options: Any) -> Any:
    plan = {name: dims for name, dims in PLAN.items() if name in dict(module.named_parameters())}
    return hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, (torch.randn(4, 8),), optimizer=optimizer, **options)


def expect_steps(make: Make, ranks: int, tolerance: float = 1e-4, schedule: Any = None, calls: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Mlp(bias="Muon" not in type(make([nn.Parameter(torch.ones(2, 2))])).__name__)
    want = copy.deepcopy(module)
    mine, theirs = make(module.parameters()), make(want.parameters())
    step = compiled(module, mine, ranks, **options)
    schedules = [schedule(one) for one in (mine, theirs)] if schedule else []
    for _ in range(6):
        for _ in range(calls):
            x = torch.randn(4, 8)
            loss = want(x)
            loss.backward()
            torch.testing.assert_close(step(x), loss.detach(), rtol=tolerance, atol=tolerance / 10)
        if "clip_grad_norm" in options:
            norm = nn.utils.clip_grad_norm_(want.parameters(), options["clip_grad_norm"])
            torch.testing.assert_close(step.grad_norm, norm, rtol=tolerance, atol=tolerance / 10)
        theirs.step()
        theirs.zero_grad()
        for one in schedules:
            one.step()
    for parameter, other in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=10 * tolerance, atol=tolerance)
        states = mine.state[parameter], theirs.state[other]
        assert list(states[0]) == [key for key, value in states[1].items() if value is not None]
        for key, value in states[0].items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(states[1][key]), rtol=10 * tolerance, atol=tolerance)
    theirs.load_state_dict(mine.state_dict())  # torch continues where the program ended.
    theirs.step()
    return step


CASES = [pytest.param(name, 2, marks=pytest.mark.slow if name in MORE else ()) for name in OF_TORCH]


@pytest.mark.parametrize(("name", "ranks"), [*CASES, *MORE_RANKS])
def test_steps_are_those_of_torch(name: str, ranks: int) -> None:
    tolerance = 2e-2 if name == "muon" else 1e-4  # torch's Muon multiplies in bf16.
    expect_steps(OF_TORCH[name], ranks, tolerance)


def test_options_that_schedules_change() -> None:
    """The learning rate and betas are not constants of the program, so they may change. The first learning rate of LambdaLR is 0."""
    expect_steps(OF_TORCH["nesterov"], 2, schedule=lambda one: LambdaLR(one, lambda at: at / 3))
    expect_steps(OF_TORCH["adam"], 2, schedule=lambda one: OneCycleLR(one, 0.1, total_steps=9))


def test_clipped_and_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    called, call = list[str](), BoundProgram.__call__
    monkeypatch.setattr(BoundProgram, "__call__", lambda part, *given: called.append(part.program.name) or call(part, *given))
    expect_steps(OF_TORCH["momentum"], 2, clip_grad_norm=0.1, accumulate=3, calls=3)
    assert ["accumulate" in name for name in called] == [True, True, False] * 6
    expect_steps(OF_TORCH["adam"], 1, clip_grad_norm=1e3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: Any) -> None:
    """The state has the same dtypes as in torch."""
    torch.manual_seed(0)
    module = Mlp().to(dtype)
    want, x = copy.deepcopy(module), torch.randn(4, 8, dtype=dtype)
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (module, want))
    step = hostweave.torch.compile(module, hw.Mesh(tp=2), PLAN, (x,), optimizer=mine)
    for _ in range(4):
        want(x).backward()
        step(x)
        theirs.step()
        theirs.zero_grad()
    tolerance = 1e-6 if dtype == torch.float64 else 3e-2
    for parameter, other in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=tolerance, atol=tolerance)
        assert {key: value.dtype for key, value in mine.state[parameter].items()} == {
            key: value.dtype for key, value in theirs.state[other].items()
        }


def test_mixed_precision() -> None:
    """Weights and moments are f32, and matmuls are 16-bit, as in torch.autocast."""
    torch.manual_seed(0)
    module = Mlp()
    want = copy.deepcopy(module)
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (module, want))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = compiled(module, mine)
    for _ in range(5):
        x = torch.randn(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = want(x)
            torch.testing.assert_close(step(x), loss.detach(), rtol=2e-2, atol=1e-3)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
    for parameter, other in zip(module.parameters(), want.parameters(), strict=True):
        assert mine.state[parameter]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(parameter, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("name", "line"), [("adam", r"adam\.py:\d+.*denom"), ("of a user", r"test_optimizers\.py:\d+.*m\.mul_\(second\)")])
def test_lines_of_an_update_are_those_of_the_optimizer(name: str, line: str) -> None:
    module = Mlp()
    step = compiled(module, OF_TORCH[name](module.parameters()))
    assert re.search(line, step.program.source)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, {"clip_grad_norm": 0.1, "accumulate": 2})],
    ids=["plain", "clipped"],
)
def test_a_scaled_loss(ranks: int, options: dict[str, Any]) -> None:
    """A step with gradients that are not finite changes no parameter and no state, even if it is the first step. The scale of the loss
    changes as in torch."""
    torch.manual_seed(0)
    module = Mlp()
    want, calls = copy.deepcopy(module), options.get("accumulate", 1)
    optimizers = [OF_TORCH["adam"](one.parameters()) for one in (module, want)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2)]
    step = compiled(module, optimizers[0], ranks, scaler=scalers[0], **options)
    for number in range(7):
        for call in range(calls):
            x = torch.randn(4, 8) * (1e30 if number in (0, 4) and call == 0 else 1)  # The squares of such values are infinite.
            loss = want(x)
            scalers[1].scale(loss).backward()
            torch.testing.assert_close(step(x), loss.detach(), rtol=1e-4, atol=1e-5)
        if "clip_grad_norm" in options:
            scalers[1].unscale_(optimizers[1])
            nn.utils.clip_grad_norm_(want.parameters(), options["clip_grad_norm"])
        for does in (scalers[1].step, lambda one: one.zero_grad()):
            does(optimizers[1])
        scalers[1].update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert len(optimizers[0].state) == len(optimizers[1].state), number
        for one, other in zip(module.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dict(optimizers[0].state[one]), dict(optimizers[1].state[other]), rtol=1e-3, atol=1e-5)
    assert scalers[0].get_scale() == 2.0**14  # Two steps were skipped, and the scale has grown twice.
    with pytest.raises(ProgramError, match=r"scaler: 2\.0 is not a torch\.amp\.GradScaler; pass one, or omit scaler="):
        compiled(module, optimizers[0], ranks, scaler=2.0)


def test_state_from_before() -> None:
    """A compiled step continues from torch's state, even if the first step of the optimizer differs from later steps."""
    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ProgramError, match="the first step of SGD uses different ops from later steps; run one step, and then compile"):
        compiled(module, optimizer)
    module(torch.randn(4, 8)).backward()
    optimizer.step()
    want = copy.deepcopy(module)
    theirs = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = compiled(module, optimizer)
    for _ in range(3):
        x = torch.randn(4, 8)
        theirs.zero_grad()
        want(x).backward()
        step(x)
        theirs.step()
    for parameter, other in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)


class Chooses(Lion):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad.sum() > 0:
                p.data.sub_(p.grad)


REFUSED: dict[str, tuple[Make, str]] = {
    "closure": (lambda of: torch.optim.LBFGS(of), "step of LBFGS is not recorded: TypeError: .*closure.*; omit optimizer="),
    "by values": (lambda of: Chooses(of), "the step of Chooses is not recorded: .*; omit optimizer="),
    "several": (lambda of: 0.1, "0.1 is not a torch.optim.Optimizer; pass an optimizer of the parameters"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_optimizers_that_are_refused(make: Make, message: str) -> None:
    module = Mlp()
    with pytest.raises(ProgramError, match=message):
        compiled(module, make(list(module.parameters())))


def test_options_of_a_step() -> None:
    module = Mlp()
    with pytest.raises(ProgramError, match="clip_grad_norm=, accumulate= and scaler= need optimizer=; pass optimizer= too"):
        compiled(module, None, training=True, clip_grad_norm=1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ProgramError, match="accumulate=0 is not a number of calls; pass an int of at least 1"):
        compiled(module, optimizer, accumulate=0)
    with pytest.raises(ProgramError, match="clip_grad_norm=-1 is not a norm; pass a number above 0"):
        compiled(module, optimizer, clip_grad_norm=-1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ProgramError, match="hooks on the step of the optimizer are not supported; remove"):
        compiled(module, optimizer)


def test_changes_of_the_optimizer_after_compile() -> None:
    module = Mlp()
    optimizer = torch.optim.Adam(module.parameters())
    step, x = compiled(module, optimizer), torch.randn(4, 8)
    step(x)
    optimizer.param_groups[0]["eps"] = 1e-3
    with pytest.raises(ArgumentError, match=r"eps of parameter group 0 is 0.001, and was 1e-08 at compile time; compile it again"):
        step(x)
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.state[module.up.weight]["step"] += 3
    with pytest.raises(ArgumentError, match=r"optimizer.state: .* is at another step than .*; give both the same state"):
        step(x)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "NAdam", "RMSprop"])
def test_replayed_steps_have_the_numbers_of_recorded_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(4, 4))])
    recorded, found = RecordedStep(optimizer, 0, (4, 4), torch.float32, {}), []
    calls, before = recorded.step.calls, {"step": 3.0, **({"mu_product": 0.5} if kind == "NAdam" else {})}
    for recorded.step.calls in ([], calls):  # Without calls, each step is recorded.
        if recorded.step.calls:
            monkeypatch.setattr(Shadow, "step", lambda *_: pytest.fail("the step is recorded"))
        for optimizer.param_groups[0]["lr"] in (0.1, 0.2):
            step = recorded.next(kind, before)
            found.append((step.numbers, step.host))
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    monkeypatch.undo()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ArgumentError, match="maximize of parameter group 0 is True"):
        recorded.next(kind, before)


def test_a_step_that_becomes_another() -> None:
    """From the sixth step on, RAdam uses a different formula, so the sixth call raises an error."""
    module = Mlp()
    optimizer = torch.optim.RAdam(module.parameters())
    step, x = compiled(module, optimizer), torch.randn(4, 8)
    for _ in range(5):
        step(x)
    with pytest.raises(ArgumentError, match="this step of RAdam uses different ops from earlier steps; compile it again"):
        step(x)
    want = copy.deepcopy(module)
    theirs = torch.optim.RAdam(want.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    compiled(module, optimizer)(x)
    want(x).backward()
    theirs.step()
    for parameter, other in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
