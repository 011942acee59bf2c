"""Where schedules put chunks of a model."""

import pytest

from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.pipelines.schedule import find_schedule


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe"]
)
def test_places_are_the_same_whatever_the_micro_batches(name: str, num_ranks: int) -> None:
    schedule = find_schedule(name)
    chunks = schedule.virtual_stages or (2 if name == "interleaved" else 1)
    num_micro_batches = 6 * num_ranks
    expected = ChunkPlaces.of_orders(schedule.orders(num_ranks, num_micro_batches, chunks))
    assert expected == ChunkPlaces.of_schedule(schedule, num_ranks, num_micro_batches, chunks)
