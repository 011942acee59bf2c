"""The formulas of the pipeline, worked by hand."""

import pytest

from foretoken.domain.errors import UnknownPluginError
from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules
from foretoken.simulator.steps.pipelines.formulas import PipelineShape, bound_pipeline_us


def _shape(
    num_ranks: int, num_micro_batches: int, *, num_chunks: int, transfers: str = "rendezvous"
) -> PipelineShape:
    times = ChunkTimes(
        forward_us=10.0, backward_input_us=12.0, backward_weight_us=8.0, send_forward_us=1.0
    )
    return PipelineShape(
        chunk_times=[times] * num_chunks,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        rules=LinkRules(transfers=transfers),
    )


def test_gpipe_is_a_flow_shop_there_and_back() -> None:
    """Forward: two passes and a transfer, then three passes more; backward four passes."""
    found = bound_pipeline_us("gpipe", _shape(2, 4, num_chunks=2, transfers="buffered"))
    assert 2 * 10.0 + 1.0 + 3 * 10.0 + 5 * 20.0 == found


def test_a_rank_alone_only_works() -> None:
    for schedule in ("gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved"):
        assert 3 * 30.0 == bound_pipeline_us(schedule, _shape(1, 3, num_chunks=1))
    for schedule in ("interleaved", "zero_bubble_v"):
        assert 6 * 30.0 == bound_pipeline_us(schedule, _shape(1, 3, num_chunks=2))


def test_an_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UnknownPluginError, match="one_f_one_b"):
        bound_pipeline_us("1f1b", _shape(2, 4, num_chunks=2))
