"""How steps differ among each other by slow devices, the network and skipped updates."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import Provenance
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.steps.error_parts import NUM_CASES
from foretoken.simulator.training.operator_prices import Price
from foretoken.simulator.training.variability import (
    ESTIMATE,
    NUM_DRAWS,
    RAW,
    Spread,
    StepColumns,
    pick_median,
    summarize,
)

_MIXTRAL = find_model("mixtral-8x7b")
_TORCHTITAN = TrainerSpec(profile="torchtitan")


def test_the_answer_has_every_case_of_a_price_and_the_raw_estimate() -> None:
    columns = StepColumns.of_answer(Spread(), 0)
    cases_us = np.arange(2.0, 2 + NUM_CASES)
    price = columns.price(Price(cases_us, Provenance.MEASURED))
    assert [*cases_us.tolist(), 2.0] == price.tolist()
    calibrated = columns.calibrated(5.0, 3.0)
    assert [5.0] * NUM_CASES + [3.0] == calibrated.tolist()
    assert (2.0, 3.0) == (price[ESTIMATE], calibrated[RAW])


def test_without_spread_there_is_one_draw() -> None:
    columns = StepColumns.of_draws(Spread(num_in_step=8, num_replicas=4))
    assert [1.0] == list(columns.constant(1))
    assert 1.0 == columns.slowness(0) == columns.congestion("sum", 1)


@settings(max_examples=20)
@given(st.floats(0.01, 0.3))
def test_one_devices_speed_has_the_asked_for_spread(ratio: float) -> None:
    columns = StepColumns.of_draws(Spread(straggler_ratio=ratio))
    factors = np.concatenate([np.asarray(columns.slowness(stage)) for stage in range(20)])
    assert pytest.approx(1, abs=0.05 * ratio * 3) == factors.mean()
    assert pytest.approx(ratio, rel=0.1) == factors.std()


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        (ParallelLayout(tp=2, dp=4), {"zero_stage": 1}, (2, 4)),
        (ParallelLayout(tp=2, dp=4), {"zero_stage": 3}, (8, 1)),
        (ParallelLayout(tp=2, dp=4), {"zero_stage": 3, "shard_degree": 2}, (4, 2)),
        (ParallelLayout(pp=2, dp=4), {"zero_stage": 3, "trainer": _TORCHTITAN}, (1, 4)),
        (ParallelLayout(tp=2, dp=4), {"weight_parallel": "isp", "weight_degree": 4}, (4, 2)),
        (ParallelLayout(tp=2, cp=2, dp=8, ep=8), {"model": _MIXTRAL}, (8, 4)),
        (ParallelLayout(tp=2, cp=2, dp=8, ep=8), {"model": _MIXTRAL, "expert_tp": 2}, (16, 2)),
    ],
)
def test_devices_that_exchange_in_every_layer_work_in_step(
    layout: ParallelLayout, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    spread = Spread.of_scenario(build_scenario(layout, **changes))
    assert expected == (spread.num_in_step, spread.num_replicas)


def test_more_devices_in_step_wait_for_a_slower_one() -> None:
    means = [
        np.mean(StepColumns.of_draws(Spread(straggler_ratio=0.1, num_in_step=n)).slowness(0))
        for n in (1, 2, 8, 64)
    ]
    assert sorted(means) == means
    assert means[-1] > 1.2


def test_of_many_calls_only_the_mean_counts() -> None:
    columns = StepColumns.of_draws(Spread(network_ratio=0.2))
    once, often = columns.congestion("sum", 1), columns.congestion("sum", 100)
    assert pytest.approx(0.2, rel=0.15) == np.std(once)
    assert pytest.approx(0.02, rel=0.15) == np.std(often)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
def test_the_asked_for_share_of_steps_skips_its_update(ratio: float) -> None:
    columns = StepColumns.of_draws(Spread(overflow_ratio=ratio))
    assert pytest.approx(1 - ratio, abs=0.51 / NUM_DRAWS) == columns.updates.mean()


def test_the_slowest_of_many_replicas_is_later() -> None:
    def lag(num_replicas: int) -> float:
        spread = Spread(straggler_ratio=0.1, num_replicas=num_replicas)
        columns = StepColumns.of_draws(spread)
        return float(np.mean(columns.lag(1000 * np.asarray(columns.slowness(0)))))

    assert 1 == lag(1) < lag(2) < lag(16)


def test_draws_are_the_same_every_time_and_differ_by_stage() -> None:
    spread = Spread(straggler_ratio=0.1, network_ratio=0.1)
    first, second = StepColumns.of_draws(spread), StepColumns.of_draws(spread)
    assert list(np.asarray(first.slowness(1))) == list(np.asarray(second.slowness(1)))
    assert list(np.asarray(first.slowness(1))) != list(np.asarray(first.slowness(2)))


@given(st.lists(st.floats(1, 1e9), min_size=NUM_DRAWS, max_size=NUM_DRAWS))
def test_the_median_is_one_of_the_draws(steps: list[float]) -> None:
    steps_us = np.array(steps)
    summary = summarize(steps_us)
    assert summary.p50 == steps_us[pick_median(steps_us)] / 1e3
    assert summary.p50 <= summary.p90 <= summary.p95 <= summary.p99 <= summary.max


def test_a_single_step_is_all_quantiles() -> None:
    summary = summarize(np.array([2000.0]))
    assert {2.0} == {summary.mean, summary.p50, summary.p90, summary.p99, summary.max}
