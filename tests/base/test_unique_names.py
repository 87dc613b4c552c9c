"""Unique names: the number that a repeated name gets."""

from hostweave.base.names import claim_unique


def test_numbers_of_names() -> None:
    """A number that a user wrote, such as in `w_1`, is part of the name."""
    used = {"w_1", "_3"}
    assert [claim_unique(name, used) for name in ("y", "y", "y_2", "y_2", "y", "w_1", "w_1", "_3")] == [
        *("y", "y_2", "y_3", "y_4", "y_5", "w_1_2", "w_1_3", "_3_2")
    ]
