"""Results that are written into the memory of other values."""

from __future__ import annotations

from fusion_text import flow, names_in_loops

from hostweave.passes.lower.placement import placement_of


def test_operands_are_computed_in_the_result() -> None:
    """If a matmul computes an operand of a concat, all operands are written to slices of the result. A concat of pointwise results is one
    kernel."""
    for first in ("matmul(%x, %x)", "exp(%x)"):
        ops = f"%a: f32[M, M] = negative(%x)\n%b: f32[M, M] = {first}\n%y: f32[2*M, M] = concat(%a, %b, axis=0)"
        placement = placement_of(flow("%x: f32[M, M]", ops))
        parts = {name: (op.result.name, number) for name, (op, number) in placement.parts.items()}
        assert (parts, placement.by_kernel) == (({"a": ("y", 0), "b": ("y", 1)}, set()) if "matmul" in first else ({}, {"y"}))


def test_an_operand_with_another_use_has_separate_memory() -> None:
    joined = flow("%x: f32[M, M]", "%a: f32[M, M] = negative(%x)\n%b: f32[M, M] = matmul(%a, %a)\n%y: f32[2*M, M] = concat(%a, %b, axis=0)")
    assert list(placement_of(joined).parts) == ["b"]


def test_a_returned_view_determines_the_layout_of_its_operand() -> None:
    turned = flow("%x: f32[M, N]", "%h: f32[M, N] = negative(%x)\n%y: f32[N, M] = permute_dims(%h, axes=(1, 0))")
    assert {name: op.result.name for name, op in placement_of(turned).inverse_view.items()} == {"h": "y"}


def test_a_value_used_only_in_its_loop_has_memory_for_one_chunk() -> None:
    streamed = flow("%x: f32[M, N]", "%h: f32[M, N] stream(M, 4) = negative(%x)\n%y: f32[M, N] stream(M, 4) = exp(%h)")
    assert placement_of(streamed).within_loops == {"h"}


def test_a_value_transposed_in_its_loop_has_memory_for_all_chunks() -> None:
    """The transpose is a view of the whole value, so the value is stored for all chunks."""
    ops = """
        %h: f32[M, N] stream(N, 4) = negative(%x)
        %t: f32[N, M] stream(N, 4) = permute_dims(%h, axes=(1, 0))
        %y: f32[N, M] stream(N, 4) = exp(%t)
    """
    turned = flow("%x: f32[M, N]", ops)
    assert names_in_loops(turned) == [["h", "t", "y"]]
    assert placement_of(turned).within_loops == {"t"}
