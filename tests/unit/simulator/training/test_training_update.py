"""What follows the pipeline: gradient reduction, the update, the gather of parameters."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.results.training_report import SPAN_KINDS, TrainingReport
from foretoken.simulator.training.step import simulate_training

_DP = ParallelLayout(dp=8)


def _simulate(
    layout: ParallelLayout = _DP, rules: Mapping[str, str] | None = None, **changes: object
) -> TrainingReport:
    trainer = TrainerSpec(rules=rules or {})
    fields = {"global_batch_size": 16, "trainer": trainer, **changes}
    return simulate_training(build_scenario(layout, **fields), RooflinePredictor(), None)


def _component(report: TrainingReport, name: str, stage: int = 0) -> float:
    (found,) = [
        item.time_ms for item in report.components if (item.name, item.stage) == (name, stage)
    ]
    return found


def _spans(report: TrainingReport, kind: str) -> list[tuple[float, float]]:
    chosen = np.asarray(report.spans.kind) == SPAN_KINDS.index(kind)
    starts, ends = np.asarray(report.spans.start_ms), np.asarray(report.spans.end_ms)
    return list(zip(starts[chosen], ends[chosen], strict=True))


def test_a_step_without_overlap_is_its_pipeline_reduction_and_update() -> None:
    """But for the forward pass of the loss, which is not the stage's."""
    report = _simulate()
    parts = [
        2 * (_component(report, "stage_fwd") + _component(report, "stage_bwd")),
        _component(report, "dp_allreduce"),
        _component(report, "optimizer"),
    ]
    assert pytest.approx(report.step_time_ms, rel=1e-3) == sum(parts)


def test_buckets_hide_behind_the_last_backward_pass_but_for_the_last() -> None:
    rules = {"overlaps_gradient_reduction": "true", "bucket_elements": "250_000_000"}
    shown, hidden = _simulate(), _simulate(rules=rules)
    exposed_ms = hidden.exposed_ms_by_axis["dp"]
    num_buckets = -(-6738415616 // 250_000_000)
    assert exposed_ms < 2 * _component(hidden, "dp_allreduce") / num_buckets
    assert hidden.step_time_ms < shown.step_time_ms
    ((start_ms, end_ms),) = _spans(hidden, "gradient_reduction")
    (_, (_, last_backward_ms)) = _spans(hidden, "backward")
    assert start_ms < last_backward_ms < end_ms
    assert pytest.approx(exposed_ms) == end_ms - last_backward_ms


def test_one_bucket_cannot_begin_before_all_is_computed() -> None:
    shown = _simulate()
    hidden = _simulate(rules={"overlaps_gradient_reduction": "true", "bucket_elements": "0"})
    assert pytest.approx(shown.step_time_ms) == hidden.step_time_ms


def test_reducing_beside_computation_slows_it_down() -> None:
    rules = {"overlaps_gradient_reduction": "true", "bucket_elements": "250_000_000"}
    quick = _simulate(rules=rules)
    slow = _simulate(rules={**rules, "overlap_slowdown_ratio": "1.2"})
    added_ms = slow.step_time_ms_by_group["overlap_slowdown"]
    assert 0 < added_ms < 0.2 * _component(slow, "dp_allreduce")
    assert pytest.approx(quick.step_time_ms + added_ms, rel=1e-3) == slow.step_time_ms


@settings(max_examples=15)
@given(
    st.sampled_from([_DP, ParallelLayout(pp=2, dp=4), ParallelLayout(tp=2, dp=4)]),
    st.integers(0, 3),
    st.integers(0, 10**9),
)
def test_overlap_never_costs_time_where_it_slows_down_nothing(
    layout: ParallelLayout, zero_stage: int, bucket_elements: int
) -> None:
    rules = {"bucket_elements": str(bucket_elements)} if bucket_elements >= 10**7 else {}
    overlaps = {"overlaps_gradient_reduction": "true", "overlaps_parameter_gather": "true"}
    shown = _simulate(layout, rules, zero_stage=zero_stage)
    hidden = _simulate(layout, {**rules, **overlaps}, zero_stage=zero_stage)
    assert hidden.step_time_ms <= shown.step_time_ms * (1 + 1e-9)
    assert pytest.approx(shown.communication_ms_by_axis) == hidden.communication_ms_by_axis


def test_sums_over_replicas_of_shards_hide_behind_the_last_backward_pass() -> None:
    """HSDP: two replicas of eight shards; a layer is summed as soon as it is scattered."""
    rules = {"overlaps_gradient_reduction": "true", "overlaps_parameter_gather": "true"}
    changes = {"layout": ParallelLayout(dp=16), "zero_stage": 3}
    whole = _simulate(rules=rules, **changes)
    shared = _simulate(rules=rules, **changes, shard_degree=8)
    shown = _simulate(**changes, shard_degree=8)
    sums_ms = _component(shared, "dp_allreduce")
    assert pytest.approx(sums_ms) == _component(shown, "dp_allreduce")
    # The last layer's sum and the embedding's scatter are left.
    assert shared.exposed_ms_by_axis["dp"] < whole.exposed_ms_by_axis["dp"] + 0.1 * sums_ms
    last_ms = max(end for _, end in _spans(shared, "gradient_reduction"))
    assert last_ms > max(end for _, end in _spans(shared, "backward"))


def test_gathered_parameters_hide_behind_the_next_forward_pass() -> None:
    shown = _simulate(zero_stage=1)
    hidden = _simulate(zero_stage=1, rules={"overlaps_parameter_gather": "true"})
    saved_ms = shown.step_time_ms - hidden.step_time_ms
    assert pytest.approx(_component(shown, "dp_allgather")) == saved_ms
    assert _component(shown, "dp_allgather") == _component(hidden, "dp_allgather")


def test_sharded_states_are_updated_by_shards() -> None:
    whole, sharded = _simulate(), _simulate(zero_stage=1)
    assert pytest.approx(_component(whole, "update") / 8, rel=1e-3) == _component(sharded, "update")


def test_the_asked_for_share_of_steps_skips_update_and_gather() -> None:
    report, never = _simulate(zero_stage=1, overflow_ratio=0.1), _simulate(zero_stage=1)
    skipped_ms = (
        never.step_time_ms - _component(never, "update") - _component(never, "dp_allgather")
    )
    expected_ms = (181 * never.step_time_ms + 20 * skipped_ms) / 201
    assert pytest.approx(expected_ms) == report.step_spread_ms.mean
    assert pytest.approx(never.step_time_ms) == report.step_time_ms == report.step_spread_ms.p99


def test_the_median_of_mostly_skipped_steps_updates_nothing() -> None:
    report = _simulate(overflow_ratio=0.8)
    names = {item.name for item in report.components}
    assert {"update"} == {"update", "optimizer"} - names


def test_a_calibration_adds_gaps_and_a_factor_beside_the_raw_step() -> None:
    calibration = TrainingCalibration(
        forward_gap_us=100, backward_gap_us=200, step_gap_us=5000, step_factor=1.1
    )
    raw, report = _simulate(), _simulate(calibration=calibration)
    assert pytest.approx(raw.step_time_ms) == report.step_time_raw_ms
    # Two micro batches over 32 layers.
    expected_ms = 1.1 * (raw.step_time_ms + 2 * 32 * 0.3 + 5)
    assert pytest.approx(expected_ms) == report.step_time_ms
    assert pytest.approx(1.1 * (2 * 32 * 0.3 + 5)) == report.step_time_ms_by_group["host"]
    assert pytest.approx(expected_ms) == max(report.spans.end_ms)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("dualpipe", ParallelLayout(tp=2, pp=4)),
        ("zero_bubble_v", ParallelLayout(pp=4, dp=2)),
        ("one_f_one_b", ParallelLayout(pp=2, dp=4)),
    ],
)
def test_the_median_step_is_accounted_for(schedule: str, layout: ParallelLayout) -> None:
    report = _simulate(
        layout, pipeline_schedule=schedule, straggler_ratio=0.1, network_spread_ratio=0.3
    )
    assert pytest.approx(report.step_time_ms) == sum(report.step_time_ms_by_group.values())
    assert "median" in report.notes[-1]


def test_stragglers_and_the_network_spread_a_step() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    calm = _simulate(layout)
    report = _simulate(layout, straggler_ratio=0.05, network_spread_ratio=0.3)
    spread = report.step_spread_ms
    assert calm.step_time_ms < spread.p50 < spread.p90 < spread.p99 <= spread.max
    assert pytest.approx(spread.p50) == report.step_time_ms
    assert report.step_time_low_ms < report.step_time_ms < report.step_time_high_ms
    assert pytest.approx(report.step_time_ms) == sum(report.step_time_ms_by_group.values())
    assert report == _simulate(layout, straggler_ratio=0.05, network_spread_ratio=0.3)
