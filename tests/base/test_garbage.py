"""`hostweave.base` can pause Python's garbage collector."""

import gc

import pytest

from hostweave.base.garbage import without_garbage_collection


@without_garbage_collection()
def _fail() -> None:
    raise ValueError(f"wrong, {gc.isenabled()=}")


def test_the_collector_is_paused_and_runs_again_after_an_error():
    with pytest.raises(ValueError, match=r"gc.isenabled\(\)=False"):
        _fail()
    assert gc.isenabled()


def test_a_collector_that_was_disabled_stays_disabled():
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
