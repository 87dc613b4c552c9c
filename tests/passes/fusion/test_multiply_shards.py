"""The pass multiply_shards: matmuls that process gathered shards one after another, and epilogues of the matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusion_properties import computes
from fusion_text import check
from random_fusions import Generator

import hostweave as hw
from hostweave.fusion_ir.choice import Choice
from hostweave.options import Options
from hostweave.passes.fusion.multiply_shards import multiply_shards
from hostweave.pipeline import lower
from hostweave.types.machine import H200

# A machine with slow links and slow matmuls. On this machine, the cost model overlaps even gathers of small matrices.
LINKS = tuple(replace(link, points=((0, 1e-6), (1e6, 20e-3))) for link in H200.links)
SLOW = replace(H200, name="slow", multiprocessors=1, flops=2e9, wave=0.0, launch=1e-6, links=LINKS)
INPUTS = "%x: bf16[M@x, K], %w: bf16[K, N@x], %v: bf16[N@x, K], %r: bf16[M@x, N], %b: bf16[N]"
PUT = "choice %wg of @f predicted: put(8) 18.7 us, put(1) 33.2 us, none 91.2 us"
IN_ONE = "choice %wg of @f predicted: put(1) 18.7 us, put(8) 33.2 us, none 91.2 us"
TWO_SIDED = "choice %wg of @f predicted: all_gather(8) 33.2 us, none 91.2 us"
GATHER = "%wg: bf16[K, N] async one_sided = all_gather(%w, dim=1, axes=(x))"
TURNED = "%vg: bf16[N, K] async one_sided = all_gather(%v, dim=0, axes=(x))\n%vt: bf16[K, N] = permute_dims(%vg, axes=(1, 0))"
LOOP = "loop 8 chunks by_shard local_first of"
# For each name: the ops before and after the pass.
CASES = {
    "columns": (
        f"{GATHER}\n%y: bf16[M@x, N] = matmul(%x, %wg)\n{PUT}",
        f"{GATHER}\n{LOOP} %wg {{\n%y: bf16[M@x, N] stream(N) = matmul(%x, %wg)\n}}\n{PUT}",
    ),
    "by collectives": (
        f"{GATHER.replace(' one_sided', '')}\n%y: bf16[M@x, N] = matmul(%x, %wg)\n{TWO_SIDED}",
        f"{GATHER.replace(' one_sided', '')}\n{LOOP} %wg {{\n%y: bf16[M@x, N] stream(N) = matmul(%x, %wg)\n}}\n{TWO_SIDED}",
    ),
    "a transposed weight": (
        f"{TURNED}\n%y: bf16[M@x, N] = matmul(%x, %vt)\n{PUT.replace('wg', 'vg')}",
        f"{TURNED}\n{LOOP} %vg {{\n%y: bf16[M@x, N] stream(N) = matmul(%x, %vt)\n}}\n{PUT.replace('wg', 'vg')}",
    ),
    "the epilogue of the matmul joins the loop": (
        f"""{GATHER}
        %h: bf16[M@x, N] = matmul(%x, %wg)
        %z: bf16[M@x, K] = exp(%x)
        %a: bf16[M@x, N] = add(%r, %h)
        %c: bf16[M@x, N] = add(%a, %b)
        %y: bf16[M@x, N] = relu(%c)
        %s: bf16[M@x, N] = negative(%y)
        {PUT}""",
        f"""{GATHER}
        {LOOP} %wg {{
          %h: bf16[M@x, N] stream(N) = matmul(%x, %wg)
          %a: bf16[M@x, N] stream(N) = add(%r, %h)
          %c: bf16[M@x, N] stream(N) = add(%a, %b)
          %y: bf16[M@x, N] stream(N) = relu(%c)
        }}
        %z: bf16[M@x, K] = exp(%x)
        %s: bf16[M@x, N] = negative(%y)
        {PUT}""",
    ),
    "an op that reads a later value does not join the loop": (
        f"""{GATHER}
        %h: bf16[M@x, N] = matmul(%x, %wg)
        %z: bf16[M@x, N] = exp(%r)
        %y: bf16[M@x, N] = add(%z, %h)
        {PUT}""",
        f"""{GATHER}
        {LOOP} %wg {{
          %h: bf16[M@x, N] stream(N) = matmul(%x, %wg)
        }}
        %z: bf16[M@x, N] = exp(%r)
        %y: bf16[M@x, N] = add(%z, %h)
        {PUT}""",
    ),
}
SAME = {
    "the choice is one matmul": f"{GATHER}\n%y: bf16[M@x, N] = matmul(%x, %wg)\n{IN_ONE}",
    "there is no choice": f"{GATHER}\n%y: bf16[M@x, N] = matmul(%x, %wg)",
}


@pytest.mark.parametrize("case", CASES)
def test_matmuls_by_shard(case: str) -> None:
    check(multiply_shards, INPUTS, *CASES[case])


@pytest.mark.parametrize("case", SAME)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    check(multiply_shards, INPUTS, SAME[case], SAME[case])


# --- choices ----------------------------------------------------------------------------------------------------------


def choice_of(ranks: int, columns: bool, transport: str = "auto", use: str = "once") -> Choice | None:
    """Choice for a weight of 4096 x 8192, or for the transposed weight. The gather overlaps with another matmul of 1408 rows per rank."""
    rows = 1408 * ranks
    stored = hw.bf16[4096, "8192@dp"] if columns else hw.bf16["8192@dp", 4096]

    @hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.bf16[f"{rows}@dp", 4096], v=hw.bf16[4096, 4096], w=stored)
    def f(x: hw.Tensor, v: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        whole = hw.reshard(w, *w.shape).named("whole")
        factor = whole if columns else whole.T
        first = hw.matmul(x, v)
        return (hw.matmul(first, factor), *((hw.exp(whole),) if use == "twice" else ()))

    options = Options(transport=transport, machine=H200)
    return next((choice for choice in lower(f, options).choices if choice.value == "whole"), None)


def names_of(choice: Choice | None) -> list[str]:
    return [one.name for one in choice.alternatives] if choice else []


def test_the_model_decides() -> None:
    """A single matmul needs copies that put the shards together. A matmul per shard uses fewer multiprocessors. The cost model chooses."""
    assert names_of(choice_of(2, columns=True)) == ["put(2)", "put(1)", "none"]
    assert names_of(choice_of(2, columns=False)) == ["put(2)", "put(1)", "none"]
    assert names_of(choice_of(8, columns=False)) == ["put(1)", "put(8)", "none"]
    assert names_of(choice_of(2, columns=True, transport="two_sided")) == ["all_gather(2)", "none"]
    assert names_of(choice_of(2, columns=False, transport="two_sided")) == ["none", "all_gather(2)"]


def test_only_weights_with_one_use_are_multiplied_by_shards() -> None:
    assert names_of(choice_of(2, columns=True, use="twice")) == ["put(1)", "none"]
    assert not choice_of(2, columns=True, use="twice", transport="two_sided")


# --- results ----------------------------------------------------------------------------------------------------------


def multiplies_right(seed: int) -> bool:
    """True if a matmul can process shards one after another, and layers with random epilogues give right results. The shards are blocks of
    columns, or are transposed."""
    generator = Generator(seed)
    random, mesh = generator.random, hw.Mesh(x=generator.random.choice([2, 3, 4]))
    generator.mesh, generator.sizes = mesh, {"M": random.choice([1, 2]) * mesh.size, "N": 6 * mesh.size}
    turned = [random.random() < 0.5 for _ in range(random.randint(1, 3))]
    outer = random.choice([(), (2,)])
    weights = {f"w{i}": hw.f64["N@x", "N"] if turn else hw.f64["N", "N@x"] for i, turn in enumerate(turned)}

    @hw.fusion(mesh=mesh, x=hw.f64[(*outer, "M@x", "N")], u=hw.f64["N", "N"], b=hw.f64["N"], **weights)
    def layers(x: hw.Tensor, u: hw.Tensor, b: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        x = first = hw.matmul(x, u)
        for turn, (name, w) in zip(turned, weights.items(), strict=True):
            w = hw.relu(w) if random.random() < 0.3 else w
            whole = hw.reshard(w, "N", "N").named(f"{name}_whole")
            x = hw.matmul(x, whole.T if turn else whole)
            for end in random.sample([lambda y: y + first, lambda y: b + y, hw.relu, hw.negative], random.randint(0, 3)):
                x = end(x)
        return x * 2

    options = Options(sizes=generator.sizes, transport=random.choice(["auto", "two_sided"]), machine=SLOW)
    stated = {choice.name: one.name for choice in lower(layers, options).choices for one in choice.alternatives if one.chunks == mesh.size}
    return bool(stated) and computes(generator, layers, seed, replace(options, choices=stated))


def test_random_layers() -> None:
    assert sum(map(multiplies_right, range(40))) > 30  # The remaining programs have no matmul of shards, or were not compared.
