"""Steps of many strategies by formula against the event simulator, strategy by strategy."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import CONTEXT_PARALLELS, TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.memory import measure_strategies
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer, StepTimes
from foretoken.simulator.steps.call_prices import PricedTable
from foretoken.simulator.steps.error_parts import bound_cases, price_cases
from foretoken.simulator.steps.legality import LEGAL, judge_legality
from foretoken.simulator.steps.pipelines.schedule import (
    PipelineSchedule,
    all_schedules,
    find_schedule,
)
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.training.memory_plan import measure_stages
from foretoken.simulator.training.step import simulate_training

_EXACT = ("gpipe", "one_f_one_b")
# Dense, tied, parallel branches, experts, latent attention after dense layers; with few layers.
_MODELS = (
    replace(find_model("llama-2-7b"), num_layers=6),
    replace(find_model("llama-3.2-1b"), num_layers=5),
    replace(find_model("phi-2"), num_layers=4),
    replace(find_model("mixtral-8x7b"), num_layers=4),
    replace(find_model("deepseek-v3"), num_layers=6),
)
_TRAINERS = (
    *("plain", "megatron-core", "torchtitan", "internevo", "transformers"),
    *("megatron-deepspeed", "gpt-neox", "deepspeed-zero3-2021", "megatron-lm-2021"),
)


def _legal(scenario: TrainingScenario, space: TrainingSpace) -> Strategies:
    resolved = resolve_space(TrainingSearchRequest(scenario=scenario, space=space))
    points = resolved.piece(0, resolved.num_points)
    return points.take(np.flatnonzero(judge_legality(points) == LEGAL))


def _unbounded(profile: str, rules: Mapping[str, str] | None = None) -> TrainerSpec:
    """Return the rules of a framework for all strategies, those included that it cannot run."""
    return TrainerSpec(profile=profile, rules={**(rules or {}), "can": "{}"})


def _base(**changes: object) -> TrainingScenario:
    fields: dict[str, object] = {
        "layout": ParallelLayout(dp=16),
        "sequence_length": 1024,
        "global_batch_size": 32,
        **changes,
    }
    return build_scenario(**fields)


def _steps_ms(strategies: Strategies, rows: np.ndarray) -> list[list[float]]:
    """Return what the event simulator says: estimate, low and high."""
    reports = [
        simulate_training(strategies.scenario(int(row)), RooflinePredictor(), None) for row in rows
    ]
    return [
        [report.step_time_ms, report.step_time_low_ms, report.step_time_high_ms]
        for report in reports
    ]


def _found_ms(times: StepTimes, rows: np.ndarray) -> np.ndarray:
    """Return the estimate, low and high of steps by `price_cases`."""
    cases_us = times.variants_us[:, rows]
    bounds_us = [bound_cases(of_step_us) for of_step_us in cases_us.T]
    return np.column_stack((cases_us[0], bounds_us)) / 1e3


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(_MODELS),
    st.sampled_from(_TRAINERS),
    st.fixed_dictionaries(
        {
            "context_parallel": st.sampled_from(CONTEXT_PARALLELS),
            "dtype": st.sampled_from([DType.BF16, DType.FP16]),
            "partitions_activations": st.booleans(),
            "shard_degree": st.sampled_from([0, 0, 2]),
        }
    ),
    st.integers(0, 2**32 - 1),
)
def test_formulas_are_near_below_the_simulators_step(
    model: ModelArchitecture, trainer: str, changes: dict[str, object], seed: int
) -> None:
    """GPipe and 1F1B, whatever varies: never above, and one query prices all strategies."""
    base = _base(model=model, trainer=_unbounded(trainer), **changes)
    strategies = _legal(base, TrainingSpace(pipeline_schedules=_EXACT))
    rows = np.random.default_rng(seed).choice(len(strategies), 3)
    predictor, chosen = RooflinePredictor(), strategies.take(rows)
    everything = np.arange(len(chosen))
    found = _found_ms(StepTimer(base, predictor, price_cases).time(chosen), everything)
    expected = np.array(_steps_ms(chosen, everything))
    assert 1 == len(predictor.queries)
    # Bounds are differences from the estimate, which may be a little early.
    assert np.all(found[:, 0] <= expected[:, 0] * (1 + 1e-4))
    np.testing.assert_allclose(found, expected, rtol=0.04)


@pytest.mark.parametrize("schedule", _EXACT)
@pytest.mark.parametrize("trainer", ["plain", "megatron-core", "torchtitan"])
def test_even_stages_take_what_the_simulator_says(schedule: str, trainer: str) -> None:
    base = _base(model=replace(find_model("llama-2-7b"), num_layers=8), trainer=_unbounded(trainer))
    strategies = _legal(base, TrainingSpace(pipeline_schedules=(schedule,), pp=(1, 2, 4)))
    chosen = strategies.take(np.random.default_rng(2).choice(len(strategies), 8, replace=False))
    everything = np.arange(len(chosen))
    found = _found_ms(StepTimer(base, RooflinePredictor(), price_cases).time(chosen), everything)
    np.testing.assert_allclose(found, _steps_ms(chosen, everything), rtol=2e-3)


_SENT_ONCE = {"sends_tokens_once": "true", "nodes_per_token": "1", "dispatch_dtype": "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        {**_SENT_ONCE, "overlaps_expert_exchange": "true"},
        {**_SENT_ONCE, "overlaps_expert_exchange": "false"},
        {"expert_call_us": "2000", "expert_hook_us": "500"},
        {"launch_us": "100", "module_call_us": "200", "waits_for_counts": "true"},
    ],
)
def test_experts_take_what_the_simulator_says(rules: Mapping[str, str]) -> None:
    """Over one node and over two, out in 8 bit to one node alone and back in 16; called slowly."""
    base = _base(
        model=replace(find_model("mixtral-8x7b"), num_layers=8),
        trainer=_unbounded("megatron-core", rules),
    )
    space = TrainingSpace(pipeline_schedules=_EXACT, pp=(1, 2), ep=(2, 4, 8))
    strategies = _legal(base, space)
    chosen = strategies.take(np.random.default_rng(3).choice(len(strategies), 8, replace=False))
    everything = np.arange(len(chosen))
    found = _found_ms(StepTimer(base, RooflinePredictor(), price_cases).time(chosen), everything)
    np.testing.assert_allclose(found, _steps_ms(chosen, everything), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "tolerance"),
    [
        ("interleaved", 0.08),
        ("zero_bubble_h1", 0.06),
        ("zero_bubble_v", 0.25),
        ("dualpipe", 0.15),
    ],
)
def test_other_schedules_are_near_the_simulator(schedule: str, tolerance: float) -> None:
    base = _base(model=replace(find_model("llama-2-7b"), num_layers=8))
    strategies = _legal(
        base, TrainingSpace(pipeline_schedules=(schedule,), pp=(2, 4), recompute=("none", "full"))
    )
    rows = np.random.default_rng(1).choice(len(strategies), 8, replace=False)
    chosen = strategies.take(rows)
    found = StepTimer(base, RooflinePredictor(), price_cases).time(chosen)
    everything = np.arange(len(chosen))
    expected = _steps_ms(chosen, everything)
    np.testing.assert_allclose(_found_ms(found, everything), expected, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [14, 15])
def test_chunks_with_the_ends_counted_are_near_the_simulator(num_layers: int) -> None:
    """Two, four or eight chunks a rank, which is 8 or 16 of all: some have no layer at all.

    What is sent holds no stage, so that some wait for links, which the closed form does not count.
    """
    model = replace(find_model("llama-2-7b"), num_layers=num_layers)
    base = _base(model=model, trainer=_unbounded("megatron-core"))
    space = TrainingSpace(
        pipeline_schedules=("interleaved",), pp=(2, 4), cp=(1,), virtual_stages=(2, 4, 8)
    )
    strategies = _legal(base, space)
    num_chunks = strategies.pp * strategies.virtual_stages
    strategies = strategies.take(np.flatnonzero(np.isin(num_chunks, (8, 16))))
    chosen = strategies.take(np.random.default_rng(5).choice(len(strategies), 8, replace=False))
    everything = np.arange(len(chosen))
    found = _found_ms(StepTimer(base, RooflinePredictor(), price_cases).time(chosen), everything)
    np.testing.assert_allclose(found, _steps_ms(chosen, everything), rtol=0.11)
    reserved = [
        max(stage.reserved_bytes for stage in measure_stages(chosen.scenario(row)))
        for row in range(len(chosen))
    ]
    np.testing.assert_allclose(measure_strategies(chosen).reserved_bytes, reserved, rtol=1e-12)


def test_a_strategy_takes_the_same_alone_and_among_others() -> None:
    base = _base()
    strategies = _legal(
        base,
        TrainingSpace(tp=(1, 2), pp=(1, 4), cp=(1,), micro_batch_sizes=(1, 2), recompute=("none",)),
    )
    timer = StepTimer(base, RooflinePredictor())
    together = timer.time(strategies)
    rows = np.random.default_rng(0).choice(len(strategies), 5, replace=False)
    alone = [timer.time(strategies.take(np.array([row]))) for row in rows]
    assert together.step_us[rows] == pytest.approx([times.step_us[0] for times in alone])
    assert together.shape[rows].tolist() == [int(times.shape[0]) for times in alone]


def test_ratios_are_those_of_the_simulator_without_a_pipeline() -> None:
    base = _base()
    strategies = _legal(base, TrainingSpace(pp=(1,), tp=(2,), cp=(1,), recompute=("none",)))
    strategies = strategies.take(np.arange(0, len(strategies), 29))
    times = StepTimer(base, RooflinePredictor()).time(strategies)
    rows = range(len(strategies))
    reports = [
        simulate_training(strategies.scenario(row), RooflinePredictor(), None) for row in rows
    ]
    found = np.stack([times.bubble_ratio, times.exposed_ratio, times.mfu_ratio], axis=1)[rows]
    expected = [
        [report.bubble_ratio, report.exposed_communication_ratio, report.mfu_ratio]
        for report in reports
    ]
    assert np.array(expected) == pytest.approx(found, abs=2e-3)


def test_a_calibration_scales_steps_and_adds_gaps() -> None:
    plain = _base()
    calibrated = replace(
        plain,
        calibration=TrainingCalibration(
            step_factor=1.25, forward_gap_us=3.0, backward_gap_us=5.0, step_gap_us=700.0
        ),
    )
    space = TrainingSpace(tp=(2,), pp=(2,), cp=(1,), virtual_stages=(1,), micro_batch_sizes=(1,))
    strategies = _legal(calibrated, space)
    strategies = strategies.take(np.arange(0, len(strategies), 40))
    rows = np.arange(len(strategies))
    found = _found_ms(
        StepTimer(calibrated, RooflinePredictor(), price_cases).time(strategies), rows
    )
    np.testing.assert_allclose(found, _steps_ms(strategies, rows), rtol=1e-6)


def test_some_layers_of_a_chunk_are_recomputed() -> None:
    base = _base(recompute="full", recompute_layers=1)
    space = TrainingSpace(tp=(1,), pp=(4,), cp=(1,), virtual_stages=(1,), recompute=("full",))
    strategies = _legal(base, space)
    strategies = strategies.take(np.arange(0, len(strategies), 25))
    rows = np.arange(len(strategies))
    found = _found_ms(StepTimer(base, RooflinePredictor(), price_cases).time(strategies), rows)
    np.testing.assert_allclose(found, _steps_ms(strategies, rows), rtol=1e-6)


def test_a_schedule_without_a_formula_is_bounded_by_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exact without a pipeline, and with one as long as its busiest rank works at least."""
    orders = find_schedule("gpipe").orders
    monkeypatch.setitem(all_schedules(), "own", PipelineSchedule(name="own", orders=orders))
    base = _base(model=replace(find_model("llama-2-7b"), num_layers=4))
    space = TrainingSpace(pipeline_schedules=("own",), pp=(1, 2), micro_batch_sizes=(1, 2))
    strategies = _legal(base, space)
    chosen = strategies.take(np.random.default_rng(3).choice(len(strategies), 12, replace=False))
    everything = np.arange(len(chosen))
    found = _found_ms(StepTimer(base, RooflinePredictor(), price_cases).time(chosen), everything)
    expected = np.array(_steps_ms(chosen, everything))
    alone = chosen.pp == 1
    assert {1, 2} == set(chosen.pp.tolist())
    assert len(set(chosen.num_micro_batches.tolist())) > 1
    np.testing.assert_allclose(found[alone], expected[alone], rtol=1e-4)
    assert np.all(found <= expected * (1 + 1e-4))
    assert np.all(found[~alone] >= expected[~alone] / 2)


def test_variants_of_prices_are_timed_as_other_predictors_would_be() -> None:
    """Prices twice as long make passes without host gaps, and so steps, twice as long."""
    base = _base(model=replace(find_model("llama-2-7b"), num_layers=4))
    strategies = _legal(base, TrainingSpace(pp=(1, 2)))
    chosen = strategies.take(np.random.default_rng(4).choice(len(strategies), 20, replace=False))

    def variants(priced: PricedTable) -> list[np.ndarray]:
        return [priced.latency_us, 2 * priced.latency_us]

    once, twice = StepTimer(base, RooflinePredictor(), variants).time(chosen).variants_us
    plain = StepTimer(base, RooflinePredictor()).time(chosen)
    np.testing.assert_allclose(once, plain.step_us, rtol=1e-12)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-12)


@pytest.mark.slow
def test_bounds_of_some_are_those_of_all() -> None:
    """Whoever requests the estimates first, on two kinds of device, and in any order."""
    base = _base(model=replace(find_model("llama-2-7b"), num_layers=4))
    space = TrainingSpace(pp=(1, 2), devices=("a100_sxm_80", "h100_sxm"))
    strategies = _legal(base, space)
    rows = np.random.default_rng(5).choice(len(strategies), 20, replace=False)
    timer = StepTimer(base, RooflinePredictor())
    whole, priced = timer.time(strategies), timer.price(strategies)
    estimates = priced.time(has_bounds=False)
    assert {0, 1} == set(strategies.device[rows].tolist())
    assert (whole.low_us < whole.step_us).all()
    assert (whole.step_us < whole.high_us).all()
    np.testing.assert_array_equal([whole.step_us], estimates.variants_us)
    np.testing.assert_array_equal(whole.exposed_ratio, estimates.exposed_ratio)
    np.testing.assert_array_equal([whole.low_us[rows], whole.high_us[rows]], priced.bound(rows))
