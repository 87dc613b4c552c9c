"""Entries of op_db, torch's op database. Entries that Hostweave refuses are listed in docs/pytorch-ops.md.

Entries are tested in batches. By default, every eighth batch runs, on 2 ranks. With `-m slow`, the other batches run on 2 ranks, and
all batches on 1 and 4 ranks. `python -m pytest tests/pytorch/numerics/test_op_db.py --update-golden -k page -m slow` regenerates the page.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("expecttest", reason="needs expecttest: pip install expecttest")

from op_entries import NOT_COMPARED, Entry, Several, entries, fresh  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402

BATCHES = 44
PAGE = Path(__file__).parents[3] / "docs" / "pytorch-ops.md"
KINDS = {
    "float32, forward": torch.float32,
    "float32, backward": torch.float32,
    "bfloat16, forward": torch.bfloat16,
    "int64, forward": torch.int64,
    "bool, forward": torch.bool,
}
ON_PAGE = [kind for kind in KINDS if f"\n## {kind}\n" in PAGE.read_text()]  # kinds that the page has
ONE_WORKER = pytest.mark.xdist_group("op_db")  # One worker runs the marked tests, because the import of the database takes 1.3 s.
CASES = [
    pytest.param(number, ranks, marks=ONE_WORKER if ranks == 2 and number % 8 == 0 else pytest.mark.slow)
    for number in range(BATCHES)
    for ranks in (1, 2, 4)
]
pytestmark = pytest.mark.filterwarnings("ignore")  # Some samples of the database cause warnings.
GRADIENTS_ARE_WRONG_IN_TORCH = ("as_strided_scatter",)  # torch's gradient of elements that are replaced is not 0.


def refused_entries(kind: str) -> set[str]:
    """Entries that the page lists as refused for `kind`, or for "float32, forward"."""
    found = set[str]()
    for section in PAGE.read_text().split("\n## ")[1:]:
        if section.partition("\n")[0] in (kind, "float32, forward"):
            found |= set(re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE))
    return found


def plan_of(given: list[Any], ranks: int) -> dict[str, str]:
    """Plan that shards each tensor along its first dim with at least one element per rank."""
    found = {}
    for number, one in enumerate(given):
        dim = next((dim for dim, size in enumerate(one.shape) if size >= ranks), None)
        if ranks > 1 and dim is not None:
            found[f"given_{number}"] = ", ".join("tp" if i == dim else "-" for i in range(one.ndim))
    return found


def expect_as_torch(batch: list[Entry], ranks: int, rtol: float = 1e-4) -> None:
    given = [one.detach() for entry in batch for one in entry.given]
    module = Several(batch).eval()
    with torch.no_grad():
        made = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan_of(given, ranks), tuple(given))(*fresh(given))
        want = module(*fresh(given))
        wide = [one.float() if one.dtype in (torch.bfloat16, torch.float16) else one for one in given]
        exact = want if all(map(operator.is_, wide, given)) else module(*fresh(wide))
    for entry, mine, theirs, wider in zip(batch, made, want, exact, strict=True):
        if entry.name in NOT_COMPARED:
            kept = [[(one.shape, one.dtype) for one in tree_leaves(of)] for of in (mine, theirs)]
            assert kept[0] == kept[1], entry.name
            continue
        if wider is theirs or not _is_nearer(mine, theirs, wider):
            expect_close(entry.name, mine, theirs, rtol)


def _is_nearer(mine: list[torch.Tensor], theirs: list[torch.Tensor], exact: list[torch.Tensor]) -> bool:
    """True if each 16-bit result of Hostweave is at least as near to the float32 result as torch's result. In some ops, torch rounds more
    often."""
    errors = [
        [max((one.double() - right.double()).abs().flatten().tolist(), default=0.0) for one, right in zip(of, exact, strict=True)]
        for of in (mine, theirs)
    ]
    return all(a <= b for a, b in zip(*errors, strict=True))


def expect_close(name: str, mine: Any, theirs: Any, rtol: float) -> None:
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol, equal_nan=True, check_stride=False, msg=lambda why: f"{name}: {why}")


def expect_gradients(batch: list[Entry]) -> None:
    given = [one for entry in batch for one in entry.given]
    module = Several(batch).eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, tuple(given), training=True)
    found = []
    for one in (model, module):
        taken = fresh(given)
        results = [leaf for leaf in tree_leaves(one(*taken)) if leaf.requires_grad]
        sizes = [leaf.abs() if leaf.is_complex() else leaf for leaf in results]
        torch.autograd.backward([(size * torch.linspace(0.5, 1.5, size.numel()).view(size.shape)).sum() for size in sizes])
        found.append([tensor.grad for tensor in taken])
    gradients = zip(*found, strict=True)
    for entry in batch:
        for tensor in entry.given:
            mine, theirs = (torch.zeros_like(tensor) if one is None else one for one in next(gradients))
            if entry.name not in (*GRADIENTS_ARE_WRONG_IN_TORCH, *NOT_COMPARED):
                expect_close(entry.name, mine, theirs, 1e-3)


@pytest.mark.parametrize(("number", "ranks"), CASES)
def test_entries(number: int, ranks: int) -> None:
    refused = refused_entries("float32, forward")
    batch = list(entries(number, BATCHES))
    expect_as_torch([entry for entry in batch if entry.name not in refused], ranks)
    for entry in batch if ranks == 1 else ():
        if entry.name in refused:
            with pytest.raises(ProgramError):
                expect_as_torch([entry], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(BATCHES))
@pytest.mark.parametrize("kind", [kind for kind in ON_PAGE if kind != "float32, forward"])
def test_entries_of_other_kinds(number: int, kind: str) -> None:
    refused = refused_entries(kind)
    batch = [entry for entry in entries(number, BATCHES, KINDS[kind]) if entry.name not in refused]
    if kind.endswith("backward"):
        expect_gradients([entry for entry in batch if entry.has_gradient])
    elif batch:
        expect_as_torch(batch, 1, 2e-2 if KINDS[kind] == torch.bfloat16 else 1e-4)


def refusals(batch: list[Entry], is_backward: bool) -> dict[str, str]:
    """Refused entries of a batch, with the reasons. If a batch is refused, each half of the batch is tried separately.

    Some entries only return their arguments. A product gives each batch at least one op.
    """
    product = Entry("product", lambda x: [x * x], [torch.ones(2, requires_grad=True)], True)
    given = [one if is_backward else one.detach() for entry in (*batch, product) for one in entry.given]
    try:
        with torch.set_grad_enabled(is_backward):
            hostweave.torch.compile(Several([*batch, product]).eval(), hw.Mesh(tp=1), {}, tuple(given), training=is_backward)
        return {}
    except ProgramError as error:
        if len(batch) == 1:
            return {batch[0].name: str(error)}
    half = len(batch) // 2
    return refusals(batch[:half], is_backward) | refusals(batch[half:], is_backward)


@pytest.mark.slow
def test_page(request: pytest.FixtureRequest) -> None:
    """The page has the number of entries of each kind, and the refused entries."""
    text, known, renews = "", set[str](), request.config.getoption("--update-golden")
    for kind in KINDS if renews else ON_PAGE:
        dtype = KINDS[kind]
        is_backward, count, reasons = kind.endswith("backward"), 0, dict[str, str]()
        for number in range(BATCHES):
            batch = [entry for entry in entries(number, BATCHES, dtype) if entry.has_gradient or not is_backward]
            count += len(batch)
            reasons |= {entry.name: "" for entry in batch if entry.name in known}
            if rest := [entry for entry in batch if entry.name not in known]:
                reasons |= refusals(rest, is_backward)
        text += section(kind, count, reasons)
        known |= set(reasons) if kind == "float32, forward" else set()
    about = "This page lists the entries of `op_db`, PyTorch's own op database, that Hostweave refuses, by dtype and pass."
    equal = "Entries with random numbers or uninitialised memory count as equal if dtypes and shapes are equal."
    text = f"# Ops of PyTorch\n\n{about} {equal}\n{text}"
    if renews:
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def section(kind: str, count: int, reasons: dict[str, str]) -> str:
    rows = "".join(f"| `{name}` | {_short(why)} |\n" for name, why in sorted(reasons.items()) if why)
    others = sum(not why for why in reasons.values())
    which = "All" if others == len(reasons) else others
    also = f" {which} of these are also refused in float32, forward, and have no row here." if others else ""
    table = f"\n| refused | missing ops, or the error |\n|---|---|\n{rows}" if rows else ""
    equal = f"{count - len(reasons)} of {count} entries have the results of PyTorch"
    return f"\n## {kind}\n\n{equal}. {len(reasons)} are refused with an error.{also}\n{table}"


def _short(why: str) -> str:
    if ops := re.findall(r"aten\.([\w.]+), \d+ times", why):
        return f"`{'`, `'.join(dict.fromkeys(ops))}`"
    text = re.sub(r"\s+", " ", re.sub(r"^(?:\S+:\d+: )?(?:Several: )?", "", why)).partition(";")[0].replace("|", " ")
    return text if len(text) <= 100 else f"{text[:100].rpartition(' ')[0]} ..."
