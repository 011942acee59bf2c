import numpy as np
import pytest

from foretoken.simulator.cost.rank_waiting import slowest_ratio


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 64])
def test_the_slowest_of_ranks_is_as_late_as_the_largest_of_normal_draws(num_ranks: int) -> None:
    drawn = np.random.default_rng(7).normal(1.0, 0.1, (200_000, num_ranks))
    late_ratio = drawn.max(axis=1).mean() - 1
    assert pytest.approx(late_ratio, rel=0.05, abs=0.001) == slowest_ratio(num_ranks, 0.1) - 1
