"""A reshape needs no communication if each rank has the same elements before and after, even if several dims are sharded."""

from __future__ import annotations

import pytest
from fusion_text import communications

import hostweave as hw
from hostweave.options import Options
from hostweave.pipeline import lower


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("8@y,x",), ("2@y", "4@x")),
        (("2@y", "4@x"), ("8@y,x",)),
        (("8@y,x", "K"), ("2@y", "4@x", "K")),
        (("M@y,x",), ("2@y", "M/2@x")),
        (("2@y", "M@x"), ("2*M@y,x",)),
        (("2@y", "2", "4@x"), ("4@y", "4@x")),
    ],
)
def test_reshapes_without_communication(source: tuple[str, ...], target: tuple[str, ...]) -> None:
    @hw.fusion(mesh=hw.Mesh(y=2, x=4), x=hw.f32[source])
    def f(x):
        return hw.reshard(hw.reshape(x, *(dim.partition("@")[0] for dim in target)), *target) * 2

    assert communications(f) == []
    assert str(lower(f, Options()).outputs[0].type) == f"f32[{', '.join(target)}]"


@pytest.mark.parametrize(
    ("source", "target"), [(("8@x,y",), ("2", "4")), (("16@y,x",), ("4", "4")), (("4@y", "M@x"), ("4*M",)), (("1@y", "4@x"), ("4",))]
)
def test_reshapes_with_a_gather(source: tuple[str, ...], target: tuple[str, ...]) -> None:
    """A gather is needed, because no sharding of the result gives each rank the same elements as before."""

    @hw.fusion(mesh=hw.Mesh(y=2, x=4), x=hw.f32[source])
    def f(x):
        return hw.reshape(x, *target) * 2

    assert communications(f) == ["all_gather"]
