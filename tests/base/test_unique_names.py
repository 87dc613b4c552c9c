"""Unique names: the number that a repeated name gets."""

from hostweave.base.names import claim_unique


def test_numbers_of_names() -> None:
    """If `w` is not used, the number in `w_1` is a part of the name, and the next name is `w_1_2`."""
    used = {"w_1", "_3"}
    assert [claim_unique(name, used) for name in ("y", "y", "y_2", "y_2", "y", "w_1", "w_1", "_3")] == [
        *("y", "y_2", "y_3", "y_4", "y_5", "w_1_2", "w_1_3", "_3_2")
    ]
