"""One optimizer step, composed of operators priced by their roofline."""

import dataclasses
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain import schema
from foretoken.domain.errors import CancelledJobError, InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import SPAN_KINDS, TrainingReport
from foretoken.domain.units import GIB
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.training.step import share_step_time, simulate_training


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
    # Every operator may take 0.8 to 1.5 of its estimate, and families err on their own.
    assert 0.8 * report.step_time_ms < report.step_time_low_ms < report.step_time_ms
    assert report.step_time_ms < report.step_time_high_ms < 1.5 * report.step_time_ms
    assert 0 < report.mfu_ratio < 1
    assert 0 <= report.bubble_ratio < 1
    assert pytest.approx(16 * 4096 / report.step_time_ms * 1e3) == report.tokens_per_s
    assert pytest.approx(report.step_time_ms) == max(report.spans.end_ms)
    assert report.step_time_ms == report.step_time_raw_ms
    assert pytest.approx(report.step_time_ms) == report.step_spread_ms.p99
    for axis, exposed_ms in report.exposed_ms_by_axis.items():
        assert 0 <= exposed_ms <= report.step_time_ms, axis


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


def _trained_by(profile: str, **rules: str) -> TrainerSpec:
    return TrainerSpec(profile=profile, rules=rules)


_MIXTRAL = find_model("mixtral-8x7b")


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (ParallelLayout(pp=4), {"pipeline_schedule": "gpipe"}),
        (ParallelLayout(pp=4), {"pipeline_schedule": "interleaved", "virtual_stages": 4}),
        (ParallelLayout(pp=4), {"pipeline_schedule": "zero_bubble_h1"}),
        (ParallelLayout(pp=4), {"pipeline_schedule": "zero_bubble_v"}),
        (ParallelLayout(tp=2, pp=4), {"pipeline_schedule": "dualpipe"}),
        (ParallelLayout(pp=2, dp=2), {"stage_layers": (18, 14), "zero_stage": 1}),
        (ParallelLayout(dp=8), {"zero_stage": 3, "trainer": _trained_by("torchtitan")}),
        (ParallelLayout(dp=8), {"zero_stage": 3, "shard_degree": 4}),
        (ParallelLayout(dp=4, pp=2), {"zero_stage": 3, "trainer": _trained_by("torchtitan")}),
        (
            ParallelLayout(pp=4),
            {
                "pipeline_schedule": "dualpipe",
                "trainer": _trained_by("megatron-core", can="{}"),
            },
        ),
        (ParallelLayout(tp=4), {"weight_parallel": "isp", "trainer": _trained_by("internevo")}),
        (ParallelLayout(cp=4), {"trainer": _trained_by("megatron-core")}),
        (ParallelLayout(cp=4), {"context_parallel": "all_to_all"}),
        (ParallelLayout(dp=8, ep=8), {"model": _MIXTRAL, "moe_imbalance_ratio": 1.3}),
        (ParallelLayout(tp=2, pp=2), {"recompute": "selective", "sequence_parallel": True}),
        (ParallelLayout(tp=2, pp=2), {"recompute": "full", "partitions_activations": True}),
        (
            ParallelLayout(tp=2, pp=2, dp=2),
            {"trainer": _trained_by("gpt-neox"), "zero_stage": 1, "dtype": DType.FP16},
        ),
        (ParallelLayout(tp=8), {"trainer": _trained_by("plain", launch_us="200")}),
        (
            ParallelLayout(pp=4),
            {
                "pipeline_schedule": "zero_bubble_h1",
                "trainer": _trained_by("megatron-core", can="{}"),
            },
        ),
    ],
)
def test_every_strategy_is_accounted_for(layout: ParallelLayout, changes: dict[str, Any]) -> None:
    """All parts of the busiest stage add up, and nothing exposed was not communicated."""
    report = _simulate(build_scenario(layout, global_batch_size=32, **changes))
    assert pytest.approx(report.step_time_ms, rel=1e-6) == sum(
        report.step_time_ms_by_group.values()
    )
    assert pytest.approx(report.step_time_ms) == max(report.spans.end_ms)
    assert report.step_time_low_ms <= report.step_time_ms <= report.step_time_high_ms
    assert 0 < report.mfu_ratio <= report.hfu_ratio < 1
    assert min(report.step_time_ms_by_group.values()) >= 0
    for axis, exposed_ms in report.exposed_ms_by_axis.items():
        carried_ms = report.communication_ms_by_axis[axis]
        # A transfer of the pipeline holds a rank while it shares its link with another.
        assert -1e-9 <= exposed_ms <= carried_ms * (2 if axis == "pp" else 1 + 1e-9), axis


def test_tensor_collectives_hide_behind_the_products_beside_them() -> None:
    shown = _simulate(build_scenario(ParallelLayout(tp=8), sequence_parallel=True))
    trainer = _trained_by("plain", overlaps_tensor_collectives="true")
    hidden = _simulate(
        build_scenario(ParallelLayout(tp=8), sequence_parallel=True, trainer=trainer)
    )
    assert hidden.exposed_ms_by_axis["tp"] < 0.7 * shown.exposed_ms_by_axis["tp"]
    saved_ms = shown.exposed_ms_by_axis["tp"] - hidden.exposed_ms_by_axis["tp"]
    assert pytest.approx(shown.step_time_ms - saved_ms) == hidden.step_time_ms


def test_fsdp2_in_a_pipeline_exchanges_states_as_often_as_there_are_steps() -> None:
    def exchanged_ms(layout: ParallelLayout, num_samples: int) -> float:
        scenario = build_scenario(
            layout, zero_stage=3, global_batch_size=num_samples, trainer=_trained_by("torchtitan")
        )
        return _simulate(scenario).communication_ms_by_axis["dp"]

    cut, whole = ParallelLayout(dp=4, pp=2), ParallelLayout(dp=4)
    assert pytest.approx(exchanged_ms(cut, 16)) == exchanged_ms(cut, 32)
    assert pytest.approx(2 * exchanged_ms(whole, 16), rel=1e-3) == exchanged_ms(whole, 32)


def test_hidden_communication_is_drawn_beside_its_pass() -> None:
    trainer = _trained_by("torchtitan")
    spans = _simulate(build_scenario(ParallelLayout(dp=8), zero_stage=3, trainer=trainer)).spans
    rows = zip(spans.kind, spans.micro_batch, spans.start_ms, spans.end_ms, strict=True)
    drawn = {
        (SPAN_KINDS[kind], micro_batch): (start, end) for kind, micro_batch, start, end in rows
    }
    exchanged = [key for key in drawn if key[0] == "exchange"]
    assert exchanged
    (start_ms, end_ms), (_, backward_end_ms) = drawn[exchanged[0]], drawn["backward", 0]
    assert 0 <= start_ms < end_ms <= backward_end_ms


def test_recomputation_is_in_hardware_utilization_alone() -> None:
    report = _simulate(build_scenario(ParallelLayout(tp=8), recompute="full"))
    # A forward pass more, without head and embedding.
    assert 1.3 < report.hfu_ratio / report.mfu_ratio < 4 / 3


def test_what_nobody_measured_is_noted() -> None:
    report = _simulate(build_scenario(ParallelLayout(tp=2)))
    of_trainer, note = report.notes
    assert "`foretoken list trainers`" in of_trainer
    assert "gemm" in note


def test_whose_measurements_stand_in_for_the_trainers_is_noted() -> None:
    predictor = RooflinePredictor("vllm 0.24.0")
    scenario = build_scenario(trainer=_trained_by("megatron-core"))
    report = simulate_training(scenario, predictor, None)
    assert {"pytorch"} == {query.preferred_framework for query in predictor.queries}
    [note] = [note for note in report.notes if "vllm" in note]
    assert "gemm" in note
    assert note.endswith(": measured under vllm 0.24.0, not pytorch (wider interval)")


def test_a_format_the_device_lacks_is_noted() -> None:
    expected = "v100_pcie_16 has no bf16: products of bf16 take as long as in a wider format"
    notes = _simulate(build_scenario(dtype=DType.BF16, device="v100_pcie_16")).notes
    assert expected in notes
    assert expected not in _simulate(build_scenario(dtype=DType.BF16)).notes


@pytest.mark.parametrize("changes", [{}, {"stage_devices": ("h100_sxm", "a100_sxm_80")}])
def test_fp8_on_a_device_that_does_not_multiply_in_it_is_refused(changes: dict[str, Any]) -> None:
    scenario = build_scenario(ParallelLayout(pp=2), dtype=DType.FP8, device="h100_sxm")
    assert _simulate(scenario).step_time_ms > 0
    wrong = dataclasses.replace(scenario, **(changes or {"device": "a100_sxm_80"}))
    with pytest.raises(InvalidRequestError, match=r"dtype: a100_sxm_80 \(ampere\) has no fp8"):
        _simulate(wrong)


def test_reductions_that_run_again_are_counted() -> None:
    def count(recompute: str) -> int:
        report = _simulate(build_scenario(ParallelLayout(tp=2), recompute=recompute))
        (found,) = [item for item in report.components if item.name == "mp_allreduce"]
        return found.num_calls

    # Of each layer and micro batch two forward, two backward and, once more, two forward.
    assert (32 * 8 * 4, 32 * 8 * 6) == (count("none"), count("full"))


def test_components_have_the_names_and_counts_of_measured_steps() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    report = _simulate(build_scenario(layout, global_batch_size=16, zero_stage=1))
    found = {(item.name, item.stage): item for item in report.components}
    names = ("encoder_fwd", "encoder_bwd", "stage_fwd", "stage_bwd", "mp_allreduce")
    names += ("dp_allreduce", "dp_allgather", "optimizer", "update")
    assert {(name, stage) for name in names for stage in (0, 1)} | {("pp_p2p", 0)} == set(found)
    assert 16 * 8 == found["encoder_fwd", 0].num_calls
    assert 8 == found["stage_fwd", 0].num_calls == found["pp_p2p", 0].num_calls
    embedded_ms = found["stage_fwd", 0].time_ms - 16 * found["encoder_fwd", 0].time_ms
    assert 0 < embedded_ms < found["encoder_fwd", 0].time_ms


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


class _ProductsMeasured(RooflinePredictor):
    """Matrix products were measured, all else is transferred."""

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        basis = Provenance.MEASURED if table.operator == "gemm" else Provenance.TRANSFERRED
        answer = super()._answer(query, table)
        return dataclasses.replace(answer, provenance=[basis.value] * table.num_rows)


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (ParallelLayout(tp=2, dp=2), 1e-9),
        # What the pipeline sends is left out.
        (ParallelLayout(pp=4), 0.01),
    ],
)
def test_shares_by_provenance_need_no_composed_step(layout: ParallelLayout, error: float) -> None:
    scenario = build_scenario(layout=layout, global_batch_size=16)
    report = simulate_training(scenario, _ProductsMeasured(), None)
    predictor = _ProductsMeasured()
    shares = share_step_time(scenario, predictor)
    assert len(predictor.queries) == 1
    assert set(shares) == {"measured", "transferred"}
    assert shares == pytest.approx(report.step_time_ratio_by_provenance, abs=error)


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


def test_more_chunks_than_layers_are_a_result_with_a_reason() -> None:
    changes = {"pipeline_schedule": "interleaved", "virtual_stages": 5}
    report = _simulate(build_scenario(ParallelLayout(pp=8), global_batch_size=8, **changes))
    assert "40 chunks of layers are more than the 32 layers" in report.feasibility.reason


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"global_batch_size": 6}, "global_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"recompute": "some"}, "recompute"),
        ({"recompute_layers": 2}, "recompute_layers"),
        ({"recompute": "full", "recompute_layers": 33}, "recompute_layers"),
        ({"dtype": DType.INT8}, "dtype"),
        ({"dtype": DType.INT4}, "dtype"),
        ({"dtype": DType.FP4}, "dtype"),
        ({"recompute": "full", "recompute_modules": ("mlp",)}, "recompute_modules"),
        ({"partitions_activations": True}, "partitions_activations"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"shard_degree": 2}, "shard_degree"),
        ({"shard_degree": 3, "zero_stage": 1}, "shard_degree"),
        ({"virtual_stages": 0}, "virtual_stages"),
        ({"virtual_stages": 2}, "virtual_stages"),
        ({"stage_layers": (16, 16)}, "stage_layers"),
        ({"stage_layers": (31,)}, "stage_layers"),
        ({"context_parallel": "tree"}, "context_parallel"),
        ({"weight_parallel": "zsp"}, "weight_parallel"),
        ({"weight_degree": 2}, "weight_degree"),
        ({"expert_tp": 2}, "expert_tp"),
        ({"moe_imbalance_ratio": 2.0}, "moe_imbalance_ratio"),
        ({"moe_capacity_factor": 1.0}, "moe_capacity_factor"),
        ({"moe_routing": "nosuch"}, "moe_routing"),
        ({"overflow_ratio": 1.0}, "overflow_ratio"),
        ({"straggler_ratio": -0.1}, "straggler_ratio"),
        ({"network_spread_ratio": float("nan")}, "network_spread_ratio"),
        ({"model": find_model("gpt2-xl"), "sequence_length": 4096}, "sequence_length"),
    ],
)
def test_an_impossible_request_names_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _simulate(build_scenario(ParallelLayout(dp=4), **changes))
    assert [field] == [violation.field for violation in caught.value.violations]


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UnknownPluginError) as caught:
        _simulate(build_scenario(pipeline_schedule="one_f_two_b"))
    expected = (
        "pipeline_schedule: unknown pipeline schedule 'one_f_two_b'; did you mean one_f_one_b"
    )
    assert caught.value.message.startswith(expected)


def test_a_cancelled_run_of_the_pipeline_stops_before_its_end() -> None:
    cancelled = threading.Event()
    messages: list[str] = []

    def report(_: float, message: str) -> None:
        messages.append(message)
        if messages.count("run the pipeline") > 1:
            cancelled.set()

    scenario = build_scenario(ParallelLayout(pp=8), global_batch_size=256)
    with pytest.raises(CancelledJobError):
        simulate_training(scenario, RooflinePredictor(), JobProgress(report, cancelled))
    assert 2 == messages.count("run the pipeline")


def test_the_report_carries_its_scenario() -> None:
    scenario = build_scenario(ParallelLayout(tp=2), name="mine")
    report = _simulate(scenario)
    decoded = schema.decode(TrainingScenario, json.loads(report.scenario_json))
    assert scenario == decoded


def test_a_slot_of_two_passes_takes_what_these_two_take_together() -> None:
    """With nothing to hide, a forward pass of one chunk and a backward pass of its mirror image."""
    scenario = build_scenario(
        ParallelLayout(pp=4), pipeline_schedule="dualpipe", stage_layers=(14, 2, 6, 10)
    )
    spans = _simulate(dataclasses.replace(scenario, global_batch_size=16)).spans
    slots: dict[tuple[int, float], dict[tuple[str, int], float]] = {}
    columns = (spans.stage, spans.kind, spans.chunk, spans.start_ms, spans.end_ms)
    for stage, kind, chunk, start, end in zip(*columns, strict=True):
        if chunk >= 0 and not SPAN_KINDS[kind].startswith("send"):
            slots.setdefault((stage, start), {})[SPAN_KINDS[kind], int(chunk)] = end - start
    alone = {key: time for slot in slots.values() if len(slot) == 1 for key, time in slot.items()}
    pair = next(slot for slot in slots.values() if {("forward", 0), ("backward", 3)} == set(slot))
    expected = alone["forward", 0] + alone["backward_input", 3] + alone["backward_weight", 3]
    assert pytest.approx(expected) == pair["forward", 0] == pair["backward", 3]


@pytest.mark.parametrize("form", ["msp", "fsp"])
def test_weights_in_shares_go_with_parallel_weights_of_tensor_parallelism(form: str) -> None:
    scenario = build_scenario(ParallelLayout(tp=4, dp=2), weight_parallel=form, zero_stage=3)
    assert _simulate(scenario).communication_ms_by_axis["dp"] > 0


def test_stages_of_an_interleaved_pipeline_send_as_their_trainer_says() -> None:
    """Whether they are held by that takes time only of stages with several chunks."""

    def time_ms(virtual_stages: int, **rules: str) -> float:
        scenario = build_scenario(
            ParallelLayout(pp=4, dp=2),
            global_batch_size=32,
            pipeline_schedule="interleaved" if virtual_stages > 1 else "one_f_one_b",
            virtual_stages=virtual_stages,
            trainer=TrainerSpec(profile="plain", rules=rules),
        )
        return _simulate(scenario).step_time_ms

    held, free = {"transfers": "rendezvous"}, {"transfers": "buffered"}
    own = {"interleaved_transfers": "buffered"}
    assert time_ms(1, **held, **own) == time_ms(1, **held)
    assert time_ms(4, **held, **own) == time_ms(4, **free) < time_ms(4, **held)
