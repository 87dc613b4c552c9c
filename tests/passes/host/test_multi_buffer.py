"""The pass multi_buffer: one slot per stream replaces a buffer if each chunk of the buffer is used on only one stream."""

from __future__ import annotations

from fusions_from_files import all_fusions, pipelines
from stages_of_passes import changes

from hostweave.options import Options
from hostweave.passes.host.multi_buffer import multi_buffer

TWO_STREAMS = Options(streams=2)


def test_a_chunk_that_is_used_in_two_iterations_gets_slots() -> None:
    """Each chunk arrives one iteration before the matmul that reads it."""
    assert (
        changes(multi_buffer, pipelines(4, 4)["two_stages_streamed"], TWO_STREAMS)
        == """\
- %arrived = allocate bf16[M, K]
+ %arrived = allocate bf16[2, M/4, K]
- %arrived_first = chunk %arrived[0: 0 of 4]
+ %arrived_first = select %arrived[0: 0]
- %arrived_next = chunk %arrived[0: %i + 1 of 4]
+ %arrived_next = select %arrived[0: (%i + 1) % 2]
- %arrived_i = chunk %arrived[0: %i of 4]
+ %arrived_i = select %arrived[0: %i % 2]
"""
    )


def test_as_many_streams_as_chunks_save_nothing() -> None:
    assert changes(multi_buffer, pipelines(4, 4)["two_stages_streamed"]) == ""


def test_a_buffer_of_one_stream_block_is_left_to_privatize_per_stream() -> None:
    assert changes(multi_buffer, all_fusions(2, 4)["ag_matmul"], TWO_STREAMS) == ""
