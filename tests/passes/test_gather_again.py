"""Which gathers are done twice: fusion text in and out."""

from __future__ import annotations

from fusion_text import fusion

from hostweave.options import Options
from hostweave.passes.fusion.gather_again import gather_again
from hostweave.tune.cost import H200

INPUTS = "%dy: bf16[M@x, K], %w: bf16[K, N], %x: bf16[M, N], %a: bf16[N, N]"
OPS = """%g: bf16[M, K] = all_gather(%dy, dim=0, axes=(x))
        %dx: bf16[M, N] = matmul(%g, %w)
        %t: bf16[K, M] = permute_dims(%g, axes=(1, 0))
        %dw: bf16[K, N] = matmul(%t, %x)
        %y: bf16[M, N] = matmul(%dx, %a)"""
TWICE = OPS.replace(
    "%t: bf16[K, M] = permute_dims(%g", "%g_2: bf16[M, K] = all_gather(%dy, dim=0, axes=(x))\n%t: bf16[K, M] = permute_dims(%g_2"
)


def test_products_of_rows_and_others() -> None:
    sizes = {"M": 4096, "K": 8192, "N": 3584}
    once, twice = (fusion(INPUTS, ops, "x=2") for ops in (OPS, TWICE))
    for options, wanted in (
        (Options(sizes=sizes, machine=H200), twice),
        (Options(machine=H200), once),  # of sizes that are not known
        (Options(sizes=sizes | {"M": 256}, machine=H200), once),
        (Options(sizes=sizes, machine=H200.without_puts("here")), once),
        (Options(sizes=sizes, machine=H200, transport="two_sided"), once),
        (Options(sizes=sizes, machine=H200, overlap="off"), once),
    ):
        assert gather_again(once, options) == wanted, options


def test_a_gradient_of_weights_hides_it() -> None:
    before = "%at: bf16[N, N] = permute_dims(%a, axes=(1, 0))\n%da: bf16[N, N] = matmul(%at, %a)\n"
    program = fusion(INPUTS, before + OPS, "x=2")
    assert gather_again(program, Options(sizes={"M": 4096, "K": 8192, "N": 3584}, machine=H200)) == program
