"""One optimizer step, composed of operators priced by their roofline."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.report import TrainingReport
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import GIB
from foretoken.simulator.training.step import simulate_training


def _simulate(scenario: TrainingScenario) -> TrainingReport:
    return simulate_training(scenario, RooflinePredictor(), None)


_layouts = st.sampled_from(
    [
        ParallelLayout(tp=2, pp=2, dp=2),
        ParallelLayout(pp=4, dp=1),
        ParallelLayout(tp=8),
        ParallelLayout(dp=8),
    ]
)


@settings(max_examples=25)
@given(_layouts, st.sampled_from(("none", "full")), st.integers(0, 3))
def test_the_report_is_consistent(layout: ParallelLayout, recompute: str, zero_stage: int) -> None:
    scenario = build_scenario(
        layout, recompute=recompute, zero_stage=zero_stage, global_batch_size=16
    )
    report = _simulate(scenario)
    assert pytest.approx(report.step_time_ms) == sum(report.step_time_ms_by_group.values())
    assert pytest.approx(1.0) == sum(report.step_time_ratio_by_provenance.values())
    assert pytest.approx(0.8 * report.step_time_ms) == report.step_time_low_ms
    assert pytest.approx(1.5 * report.step_time_ms) == report.step_time_high_ms
    assert 0 < report.mfu_ratio < 1
    assert 0 <= report.bubble_ratio < 1
    assert pytest.approx(16 * 4096 / report.step_time_ms * 1e3) == report.tokens_per_s
    last_end_ms = max(span.end_ms for span in report.pipeline)
    assert pytest.approx(report.step_time_ms) == last_end_ms


@settings(max_examples=20)
@given(_layouts, st.integers(8, 40))
def test_more_layers_never_take_less_time_or_memory(
    layout: ParallelLayout, num_layers: int
) -> None:
    model = find_model("llama-2-7b")
    reports = [
        _simulate(
            build_scenario(
                layout,
                global_batch_size=16,
                model=dataclasses.replace(model, num_layers=num_layers + extra),
            )
        )
        for extra in (0, 1)
    ]
    assert reports[0].step_time_ms < reports[1].step_time_ms
    totals = [sum(stage.total_bytes for stage in report.memory) for report in reports]
    assert totals[0] < totals[1]


def test_the_predictor_is_asked_once_and_no_call_twice() -> None:
    predictor = RooflinePredictor()
    layout = ParallelLayout(tp=2, pp=4, dp=2)
    simulate_training(build_scenario(layout, global_batch_size=16), predictor, None)
    (query,) = predictor.queries
    kinds = [(table.operator, table.dtype, table.phase) for table in query.tables]
    assert len(set(kinds)) == len(kinds)
    for table in query.tables:
        rows = list(zip(*table.columns.values(), strict=True))
        assert len(set(rows)) == len(rows)


def test_model_flops_are_six_per_parameter_and_token() -> None:
    """Within what attention and the embedding, which is looked up, make of it."""
    scenario = build_scenario(sequence_length=128, global_batch_size=32)
    report = _simulate(scenario)
    num_parameters = 6.74e9 - 32000 * 4096
    flops = report.mfu_ratio * 312e12 * report.step_time_ms / 1e3
    assert pytest.approx(6 * num_parameters * 32 * 128, rel=0.01) == flops


def test_recomputation_costs_a_forward_pass_and_saves_memory() -> None:
    saved = _simulate(build_scenario(ParallelLayout(tp=8)))
    recomputed = _simulate(build_scenario(ParallelLayout(tp=8), recompute="full"))
    again_ms = recomputed.step_time_ms_by_group["recompute"]
    assert pytest.approx(recomputed.step_time_ms - again_ms) == saved.step_time_ms
    assert recomputed.memory[0].activations_bytes < 0.2 * saved.memory[0].activations_bytes
    assert recomputed.mfu_ratio < saved.mfu_ratio


def test_each_zero_stage_needs_less_memory_than_the_one_before() -> None:
    reports = [
        _simulate(build_scenario(ParallelLayout(dp=8), zero_stage=stage)) for stage in range(4)
    ]
    totals = [report.memory[0].total_bytes for report in reports]
    assert sorted(totals, reverse=True) == totals
    states = [report.memory[0] for report in reports]
    assert pytest.approx(states[0].optimizer_bytes / 8) == states[1].optimizer_bytes
    assert pytest.approx(states[0].gradients_bytes / 8) == states[2].gradients_bytes
    assert pytest.approx(states[0].weights_bytes / 8) == states[3].weights_bytes


def test_a_stage_holds_activations_of_the_stages_after_it() -> None:
    """Equal stages but for embedding and head: 4, 3, 2, 1 micro batches of a stage's own."""
    report = _simulate(build_scenario(ParallelLayout(pp=4), global_batch_size=8))
    held = [stage.activations_bytes for stage in report.memory]
    assert pytest.approx(held[1] * 4 / 3) == held[0]
    assert pytest.approx(held[1] * 2 / 3) == held[2]


def test_weights_gradients_and_optimizer_take_eighteen_bytes_per_parameter() -> None:
    """2 for bf16 weights, 4 for fp32 gradients, 12 for master weights and moments."""
    memory = _simulate(build_scenario()).memory[0]
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert pytest.approx(18 * 6738415616, rel=1e-6) == states


def test_what_does_not_fit_is_a_result_with_its_numbers() -> None:
    report = _simulate(build_scenario())
    assert not report.feasibility.is_feasible
    assert "stage 0 needs" in report.feasibility.reason
    assert report.step_time_ms > 0
    assert report.memory[0].total_bytes > 80 * GIB


def test_a_layout_that_cannot_cut_the_model_is_a_result_with_a_reason() -> None:
    report = _simulate(build_scenario(ParallelLayout(tp=3)))
    assert not report.feasibility.is_feasible
    assert "3 does not divide the 32 heads" in report.feasibility.reason
    assert (0.0, ()) == (report.step_time_ms, report.memory)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"global_batch_size": 6}, "global_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"recompute": "some"}, "recompute"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"model": find_model("gpt2-xl"), "sequence_length": 4096}, "sequence_length"),
    ],
)
def test_an_impossible_request_names_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _simulate(build_scenario(ParallelLayout(dp=4), **changes))
    assert [field] == [violation.field for violation in caught.value.violations]


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UnknownPluginError):
        _simulate(build_scenario(pipeline_schedule="zero_bubble"))


def test_the_report_carries_its_scenario() -> None:
    scenario = build_scenario(ParallelLayout(tp=2), name="mine")
    report = _simulate(scenario)
    decoded = schema.decode(TrainingScenario, json.loads(report.scenario_json))
    assert scenario == decoded
