"""torch's own op database, op_db, against eager: each entry is computed as torch does, or is on the docs' page of those that are refused.

A third of the batches runs by default, on 2 ranks, with `-m slow` the rest, also on 1 and 4 ranks.
`python -m pytest tests/pytorch/test_op_db.py --update-golden -k page -m slow` writes the page anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("expecttest", reason="torch.testing needs it: pip install expecttest")

from op_entries import Entry, Several, entries, fresh  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402

BATCHES = 44
PAGE = Path(__file__).parents[2] / "docs" / "pytorch-ops.md"
CASES = [
    pytest.param(number, ranks, marks=() if ranks == 2 and number % 3 == 0 else pytest.mark.slow)
    for number in range(BATCHES)
    for ranks in (1, 2, 4)
]
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about its own samples
NOT_INITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


def refused_entries() -> set[str]:
    return set(re.findall(r"^\| `(\S+)` \|", PAGE.read_text(), re.MULTILINE))


def plan_of(given: list[Any], ranks: int) -> dict[str, str]:
    """The first dim that has an element for each rank is sharded."""
    found = {}
    for number, one in enumerate(given):
        dim = next((dim for dim, size in enumerate(one.shape) if size >= ranks), None)
        if ranks > 1 and dim is not None:
            found[f"given_{number}"] = ", ".join("tp" if i == dim else "-" for i in range(one.ndim))
    return found


def expect_as_torch(batch: list[Entry], ranks: int) -> None:
    given = [one.detach() for entry in batch for one in entry.given]
    module = Several(batch).eval()
    with torch.no_grad():
        made = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan_of(given, ranks), tuple(given))(*fresh(given))
        want = module(*fresh(given))
    for entry, mine, theirs in zip(batch, made, want, strict=True):

        def message(why: str, name: str = entry.name) -> str:
            return f"{name}: {why}"

        if entry.name in NOT_INITIALIZED:
            kept = [[(one.shape, one.dtype) for one in tree_leaves(of)] for of in (mine, theirs)]
            assert kept[0] == kept[1], entry.name
            continue
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True, check_stride=False, msg=message)


@pytest.mark.parametrize(("number", "ranks"), CASES)
def test_entries(number: int, ranks: int) -> None:
    refused = refused_entries()
    batch = list(entries(number, BATCHES))
    expect_as_torch([entry for entry in batch if entry.name not in refused], ranks)
    for entry in batch if ranks == 1 else ():
        if entry.name in refused:
            with pytest.raises(ProgramError):
                expect_as_torch([entry], ranks)


@pytest.mark.slow
def test_page(request: pytest.FixtureRequest) -> None:
    """States how many entries there are, and those that are refused."""
    every = [entry for number in range(BATCHES) for entry in entries(number, BATCHES)]
    reasons: dict[str, str] = {}
    for entry in every:
        try:
            given = [one.detach() for one in entry.given]
            with torch.no_grad():
                hostweave.torch.compile(Several([entry]).eval(), hw.Mesh(tp=1), {}, tuple(given))
        except ProgramError as error:
            reasons[entry.name] = str(error)
    text = page(len(every), reasons)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def page(count: int, reasons: dict[str, str]) -> str:
    rows = "".join(f"| `{name}` | {_short(why)} |\n" for name, why in sorted(reasons.items()))
    return (
        "# Ops of PyTorch\n\n"
        f"`op_db`, PyTorch's own op database, has {count} entries that can be compared in float32, forward.\n"
        f"{count - len(reasons)} of them give what PyTorch gives, on 1, 2 and 4 ranks. {len(reasons)} are refused with an error.\n\n"
        f"| refused | why |\n|---|---|\n{rows}"
    )


def _short(why: str) -> str:
    if ops := re.findall(r"aten\.([\w.]+), \d+ times", why):
        return f"`{'`, `'.join(dict.fromkeys(ops))}`"
    return re.sub(r"\s+", " ", re.sub(r"^\S+:\d+: ", "", why)).partition(";")[0][:100].replace("|", " ")
