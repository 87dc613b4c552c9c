"""Models that are split into stages and compiled as pipelines. Loss and gradients are compared with torch on one device. Also tests the
order of the passes of each schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402
from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.torch.schedules import SCHEDULES, Action, schedule_of  # noqa: E402

WIDTH, WORDS, BATCHES = 8, 11, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """If the model is split into two stages, the last stage takes two results of the first stage."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Any) -> Any:
        x = first = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


def cross_entropy(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def expect_gradients(module: Any, want: Any) -> None:
    for (name, one), other in zip(module.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def chain(stages: int, schedule: str, ranks: int) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Returns the modules, a copy of them, the compiled pipeline, and its arguments."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(stages)))
    given = torch.randn(2 * BATCHES, WIDTH), torch.randn(2 * BATCHES, WIDTH)
    loss, want = nn.functional.mse_loss, copy.deepcopy(model)
    step = hostweave.torch.compile(list(model), hw.Mesh(pp=ranks), {}, given, schedule=schedule, microbatches=BATCHES, loss=loss)
    return model, want, step, given


def expect_chain(stages: int, schedule: str, ranks: int) -> None:
    model, want, step, (x, target) = chain(stages, schedule, ranks)
    for _ in range(2):  # Gradients accumulate.
        wanted = nn.functional.mse_loss(want(x), target)
        wanted.backward()
        torch.testing.assert_close(step(x, target), wanted.detach())
        expect_gradients(model, want)


@pytest.mark.extra
def test_stages_of_a_list() -> None:
    expect_chain(2, "1f1b", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "schedule", "ranks"),
    [(2, "gpipe", 2), (4, "gpipe", 2), (4, "interleaved", 2), (2, "zero_bubble", 2), (4, "zero_bubble", 2), (4, "1f1b", 4), (4, "auto", 4)],
)
def test_schedules(stages: int, schedule: str, ranks: int) -> None:
    expect_chain(stages, schedule, ranks)


PLANS = {
    "tp": {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"},
    "dp": {"ids": "dp, -", "target": "dp, -"},
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's pipeline() causes this warning.
@pytest.mark.parametrize(
    ("axis", "schedule"),
    [
        pytest.param("tp", "zero_bubble", marks=pytest.mark.extra),
        *(pytest.param(axis, name, marks=pytest.mark.slow) for axis, name in (("dp", "1f1b"), ("dp", "zero_bubble"), ("tp", "1f1b"))),
    ],
)
def test_a_pipe_of_torch_with_another_axis(axis: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = Model(2)
    want = copy.deepcopy(model)
    ids, target = torch.randint(0, WORDS, (8, 3)), torch.randint(0, WORDS, (8, 3))
    pipe = pipeline(model, (ids[:4],), split_spec={"layers.1": SplitPoint.BEGINNING})
    mesh = hw.Mesh(pp=2, **{axis: 2})
    step = hostweave.torch.compile(pipe, mesh, PLANS[axis], (ids, target), schedule=schedule, microbatches=2, loss=cross_entropy)
    wanted = cross_entropy(want(ids), target)
    wanted.backward()
    torch.testing.assert_close(step(ids, target=target), wanted.detach())
    expect_gradients(model, want)


@pytest.mark.extra
def test_ranks_of_a_group_have_the_parameters_of_their_stages() -> None:
    model, want, step, (x, target) = chain(2, "zero_bubble", 2)
    wanted = nn.functional.mse_loss(want(x), target)
    wanted.backward()
    threads, losses = hw.Threads(2), dict[int, Any]()

    def on_rank(rank: int) -> None:
        hw.init(threads)
        losses[rank] = step(*((x, None) if rank == 0 else (None, target)))

    threads.run(on_rank)
    assert losses[0] is None
    torch.testing.assert_close(losses[1], wanted.detach())
    expect_gradients(model, want)


# --- whole steps ------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda of: torch.optim.AdamW(of, lr=1e-2, eps=1e-3),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),  # The state of SGD does not count steps.
}


def expect_steps(name: str, schedule: str, mesh: hw.Mesh, clip: float | None, in_threads: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    want, loss = copy.deepcopy(model), nn.functional.mse_loss
    mine, theirs = (OPTIMIZERS[name](one.parameters()) for one in (model, want))
    x, target = torch.randn(2, 2 * BATCHES, WIDTH)
    plan = PLANS["tp"] if mesh.size > 2 else {}
    how = {"schedule": schedule, "microbatches": BATCHES, "loss": loss, "optimizer": mine, "clip_grad_norm": clip}
    step = hostweave.torch.compile(list(model), mesh, plan, (x, target), **how)
    threads, losses = hw.Threads(2), dict[int, Any]()

    def on_rank(rank: int) -> None:
        hw.init(threads)
        for number in range(3):
            made = step(*((x, None) if rank == 0 else (None, target)))
            losses.update({number: made} if rank else {})

    if in_threads:
        threads.run(on_rank)
    for number in range(3):
        wanted = loss(want(x), target)
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(want.parameters(), clip or 1e9)
        torch.testing.assert_close(losses[number] if in_threads else step(x, target), wanted.detach())
        if clip and (number == 2 or not in_threads):
            assert norm > clip
            torch.testing.assert_close(step.grad_norm, norm)
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        assert one.grad is None
        states = mine.state[one], theirs.state[other]
        assert list(states[0]) == list(states[1])
        for key, value in states[0].items():
            torch.testing.assert_close(value, states[1][key])
    theirs.load_state_dict(mine.state_dict())  # torch continues where the program ended.
    theirs.step()


@pytest.mark.extra
def test_an_optimizer_steps_on_ranks_of_a_group() -> None:
    expect_steps("adamw", "1f1b", hw.Mesh(pp=2), clip=0.5, in_threads=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "mesh", "clip", "in_threads"),
    [
        ("momentum", "zero_bubble", {"pp": 2}, None, True),
        ("momentum", "gpipe", {"pp": 2, "tp": 2}, 0.5, False),
        ("adamw", "interleaved", {"pp": 1}, 0.5, False),
        ("adamw", "auto", {"pp": 2}, None, False),
    ],
)
def test_an_optimizer_steps(name: str, schedule: str, mesh: dict[str, int], clip: float | None, in_threads: bool) -> None:
    expect_steps(name, schedule, hw.Mesh(**mesh), clip, in_threads)


# --- schedules --------------------------------------------------------------------------------------------------------


def by_place(actions: list[Action], places: int) -> list[str]:
    return [" ".join(f"{a.kind[0]}{a.stage}.{a.microbatch}" for a in actions if a.stage % places == place) for place in range(places)]


def test_order_of_1f1b() -> None:
    assert by_place(schedule_of("1f1b", 2, 2, 3), 2) == ["f0.0 f0.1 b0.0 f0.2 b0.1 b0.2", "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"]


def test_order_of_zero_bubble() -> None:
    """In the last stage, the gradients of parameters are computed one micro-batch after the gradients of the input."""
    assert by_place(schedule_of("zero_bubble", 2, 2, 3), 2) == [
        "f0.0 f0.1 i0.0 w0.0 f0.2 i0.1 w0.1 i0.2 w0.2",
        "f1.0 i1.0 f1.1 i1.1 w1.0 f1.2 i1.2 w1.1 w1.2",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "places", "microbatches"), [(1, 1, 1), (2, 2, 1), (4, 4, 8), (4, 2, 2), (12, 4, 8), (8, 8, 3)])
def test_actions_follow_the_actions_they_depend_on(schedule: str, stages: int, places: int, microbatches: int) -> None:
    if schedule in ("1f1b", "interleaved"):
        schedule = "interleaved" if stages > places else "1f1b"
    actions = schedule_of(schedule, stages, places, microbatches)
    kinds = ("forward", "input", "weight") if schedule == "zero_bubble" else ("forward", "backward")
    assert sorted(actions) == sorted(Action(kind, s, m) for kind in kinds for s in range(stages) for m in range(microbatches))
    at = {action: number for number, action in enumerate(actions)}
    for kind, stage, one in actions:
        back = kinds[1]
        needed = {
            "forward": Action("forward", stage - 1, one) if stage else None,
            "weight": Action(back, stage, one),
            back: Action(back, stage + 1, one) if stage + 1 < stages else Action("forward", stage, one),
        }[kind]
        assert needed is None or at[needed] < at[Action(kind, stage, one)]


def test_1f1b_keeps_few_micro_batches() -> None:
    """At stage s of S, at most S - s micro-batches are between forward and backward pass."""
    kept, most = [0] * 4, [0] * 4
    for kind, stage, _ in schedule_of("1f1b", 4, 4, 16):
        kept[stage] += 1 if kind == "forward" else -1
        most[stage] = max(most[stage], kept[stage])
    assert most == [4, 3, 2, 1]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedule": "1f1"}, "there is no schedule='1f1'; did you mean 1f1b"),
        ({"stages": 3}, "3 stages cannot be divided evenly among the 2 parts of the mesh; cut the module into a multiple of 2"),
        ({"stages": 4, "schedule": "1f1b"}, 'each part of the mesh has 2 stages, but 1f1b supports one; use schedule="interleaved"'),
        ({"schedule": "interleaved"}, 'each part of the mesh has only one stage; use schedule="1f1b"'),
        (
            {"stages": 4, "microbatches": 3, "rows": 3},
            "each part of the mesh runs micro-batches in groups of 2, but there are 3; use a multiple of 2",
        ),
        ({"microbatches": 3}, r"x has 4 rows; pass a tensor whose first dim is a multiple of microbatches=3"),
        ({"mesh": {"tp": 2, "pp": 2}}, "pp is not the first axis"),
        ({"mesh": {"dp": 2, "tp": 2}}, "has no axis pp for the stages"),
        ({"plan": {"nothing": "-, -"}}, '"nothing" matches none of the parameters, inputs or modules of a stage'),
        ({"tied": True}, "up.weight of stage 1 is up.weight of stage 0, but each parameter must belong to one stage"),
        ({"module": nn.Dropout()}, "draws random numbers, as dropout does, which is not supported in a pipeline"),
        ({"module": nn.BatchNorm1d(WIDTH)}, "writes to .* in forward, which is not supported in a pipeline"),
    ],
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    modules: list[Any] = [Block() for _ in range(changed.get("stages", 2))]
    if changed.get("tied"):
        modules[1].up.weight = modules[0].up.weight
    if "module" in changed:
        modules[0] = nn.Sequential(modules[0], changed["module"])
    x = torch.zeros(changed.get("rows", 4), WIDTH)
    options = {"microbatches": changed.get("microbatches", 2), "schedule": changed.get("schedule", "auto"), "loss": nn.functional.mse_loss}
    with pytest.raises(ProgramError, match=message):
        hostweave.torch.compile(modules, hw.Mesh(**changed.get("mesh", {"pp": 2})), changed.get("plan", {}), (x, x), **options)


def test_options_of_pipelines_need_stages() -> None:
    with pytest.raises(ProgramError, match="schedule=, microbatches= and loss= are for pipelines; pass a Pipe"):
        hostweave.torch.compile(Block(), hw.Mesh(), {}, (torch.zeros(2, WIDTH),), microbatches=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accumulate": 2}, "accumulate= is not supported for a pipeline, .*; pass more microbatches="),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler= is not supported for a pipeline; omit it"),
        ({"optimizer": None, "clip_grad_norm": 1.0}, "clip_grad_norm=, accumulate= and scaler= need optimizer=; pass optimizer= too"),
        ({}, r"optimizer: \S+ requires grad, but is not in the optimizer; add it, or freeze it"),
    ],
)
def test_mistakes_with_optimizers(changed: dict[str, Any], message: str) -> None:
    stages, x = [Block(), Block()], torch.zeros(2, WIDTH)
    options = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD(stages[0].parameters()), **changed}
    with pytest.raises(ProgramError, match=message):
        hostweave.torch.compile(stages, hw.Mesh(pp=2), {}, (x, x), **options)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.scale.exp()


def test_a_write_to_a_buffer_after_compilation() -> None:
    stages, x = [Scaled(), Scaled()], torch.ones(4, WIDTH)
    step = hostweave.torch.compile(stages, hw.Mesh(pp=2), {}, (x, x), microbatches=2, loss=nn.functional.mse_loss)
    stages[1].scale.zero_()
    message = r"pipeline: stage 1: stage.scale has changed, but the program holds values .*; compile it again"
    with pytest.raises(ArgumentError, match=message):
        step(x, x)


def test_changes_after_compilation() -> None:
    model, _, step, given = chain(2, "1f1b", 2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=r"pipeline: stage 0: torch.autocast is torch.bfloat16"):
        step(*given)
    model[1].norm = nn.LayerNorm(WIDTH)
    with pytest.raises(ArgumentError, match="pipeline: stage 1: norm was replaced after compilation; compile it again"):
        step(*given)
    model[0].eval()
    with pytest.raises(ArgumentError, match=r"pipeline: stage 0: the mode has changed from train\(\); compile it again"):
        step(*given)
