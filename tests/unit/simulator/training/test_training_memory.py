"""What a rank of the pipeline holds over a step."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_memory_graphs import chunk_graphs, follow, measure_states, memory_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.results.training_report import SPAN_KINDS, SpanColumns, StageMemory
from foretoken.domain.units import GIB
from foretoken.simulator.steps.pipelines.schedule import all_schedules

_MEGATRON = TrainerSpec(profile="megatron-core")


def _fullest(**changes: object) -> StageMemory:
    stages, _ = follow(memory_scenario(**changes))  # type: ignore[arg-type]
    return max(stages, key=lambda stage: stage.total_bytes)


@pytest.mark.parametrize("name", sorted(all_schedules()))
def test_a_step_gives_back_all_activations(name: str) -> None:
    """Every schedule ends with the states alone, and never holds less than them."""
    schedule = all_schedules()[name]
    scenario = memory_scenario(
        pp=2, pipeline_schedule=name, virtual_stages=schedule.virtual_stages or 2
    )
    stages, columns = follow(scenario)
    for stage in stages:
        held = np.asarray(columns.bytes)[np.asarray(columns.stage) == stage.stage]
        assert pytest.approx(held[0]) == held[-1]
        assert held.min() >= held[0] - 1
        assert pytest.approx(held.max()) == stage.total_bytes


@given(st.integers(1, 8), st.integers(1, 8))
def test_one_forward_one_backward_holds_as_many_as_ranks_follow(pp: int, num: int) -> None:
    stages, _ = follow(memory_scenario(pp=pp, global_batch_size=num))
    assert [round(stage.num_in_flight) for stage in stages] == [
        min(pp - rank, num) for rank in range(pp)
    ]


def test_gpipe_holds_every_micro_batch() -> None:
    stages, _ = follow(memory_scenario(pp=2, pipeline_schedule="gpipe"))
    assert [round(stage.num_in_flight) for stage in stages] == [16, 16]


@given(st.sampled_from(("llama-3.2-1b", "gpt-neox-20b", "mixtral-8x7b", "deepseek-v3")))
@settings(max_examples=4)
def test_sharding_more_states_never_needs_more(model: str) -> None:
    held = [[_fullest(model=model, dp=8, zero_stage=zero), zero] for zero in range(4)]
    kept = [
        stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes for stage, _ in held
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[3] < kept[2] < kept[1] < kept[0]


@given(st.integers(1, 3), st.integers(1, 4))
def test_more_tokens_and_larger_micro_batches_need_more(doublings: int, micro_batch: int) -> None:
    few = _fullest(sequence_length=512, micro_batch_size=micro_batch, global_batch_size=48)
    more = _fullest(
        sequence_length=512 * 2**doublings, micro_batch_size=micro_batch, global_batch_size=48
    )
    assert more.activations_bytes == 2**doublings * few.activations_bytes
    assert more.temporary_bytes > few.temporary_bytes


def test_recomputation_trades_activations_for_a_moment() -> None:
    whole, selective, full = (
        _fullest(recompute=mode, recompute_modules=modules)
        for mode, modules in (("none", ()), ("selective", ("mlp", "layernorm")), ("full", ()))
    )
    assert whole.activations_bytes > selective.activations_bytes > full.activations_bytes
    assert whole.total_bytes > selective.total_bytes > full.total_bytes
    assert full.temporary_bytes >= whole.temporary_bytes


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    whole, split = (_fullest(tp=4, sequence_parallel=flag) for flag in (False, True))
    assert split.activations_bytes < whole.activations_bytes
    assert split.weights_bytes == whole.weights_bytes


def test_states_of_one_parameter_take_eighteen_bytes() -> None:
    """Weights of 2, gradients of 4 and an optimizer of 12 bytes, on a rank alone."""
    graphs = chunk_graphs(memory_scenario(trainer=_MEGATRON))
    num_params = sum(int(node.num_weights) for node in graphs[0].forward)
    states = measure_states(memory_scenario(trainer=_MEGATRON))
    assert states.weights == 2 * num_params
    assert states.gradients == 4 * num_params
    assert states.optimizer == 12 * num_params


_NARROW_STATES = {"moment_dtype": "bf16", "gradient_dtype": "bf16"}


def test_moments_of_16_bit_take_four_bytes_less_and_masters_two() -> None:
    """An optimizer that reads any format makes no copy of gradients, but of its moments."""
    trainer = dataclasses.replace(_MEGATRON, rules=_NARROW_STATES)
    states = measure_states(memory_scenario(trainer=trainer))
    num_params = states.weights / 2
    assert (2 * num_params, 6 * num_params) == (states.gradients, states.optimizer)
    assert 8 * num_params == states.update


def test_an_optimizer_that_reads_moments_of_16_bit_copies_nothing() -> None:
    rules = {**_NARROW_STATES, "converts_moments": "false", "keeps_remainders": "false"}
    trainer = dataclasses.replace(_MEGATRON, rules=rules)
    states = measure_states(memory_scenario(trainer=trainer))
    assert (4 * states.weights, 0) == (states.optimizer, states.update)


def test_weights_in_8_bit_have_whole_masters_and_copies_of_gradients() -> None:
    trainer = dataclasses.replace(_MEGATRON, rules=_NARROW_STATES)
    states = measure_states(memory_scenario(trainer=trainer, dtype=DType.FP8))
    num_params = states.gradients / 2
    assert (8 * num_params, (4 + 8) * num_params) == (states.optimizer, states.update)


def test_moments_are_converted_by_one_optimizer_after_the_other() -> None:
    """Of eight ranks each has an eighth of the experts, and updates an eighth of all else."""
    trainer = dataclasses.replace(_MEGATRON, rules=_NARROW_STATES)
    scenario = memory_scenario(model="mixtral-8x7b", dp=8, ep=8, zero_stage=1, trainer=trainer)
    graphs = chunk_graphs(scenario)
    experts = sum(
        int(node.num_weights) for node in graphs[0].forward if node.operator == "grouped_gemm"
    )
    assert pytest.approx(8 * experts) == measure_states(scenario).update


def test_experts_are_sharded_over_the_ranks_that_hold_the_same() -> None:
    """With as many ranks for experts as for data, no rank has another's experts to share."""
    scenario = memory_scenario(model="mixtral-8x7b", dp=8, ep=8, zero_stage=1)
    graphs = chunk_graphs(scenario)
    experts = sum(
        int(node.num_weights) for node in graphs[0].forward if node.operator == "grouped_gemm"
    )
    others = sum(int(node.num_weights) for node in graphs[0].forward) - experts
    states = measure_states(scenario)
    assert pytest.approx(12 * experts + 12 * others / 8) == states.optimizer


def test_the_timeline_has_the_times_of_the_passes() -> None:
    scenario = memory_scenario(global_batch_size=1)
    kinds = [SPAN_KINDS.index("forward"), SPAN_KINDS.index("backward")]
    spans = SpanColumns(
        stage=[0, 0],
        chunk=[0, 0],
        micro_batch=[0, 0],
        kind=kinds,
        start_ms=[0.0, 10.0],
        end_ms=[10.0, 30.0],
    )
    stages, columns = follow(scenario, spans)
    assert list(columns.time_ms) == [0.0, 0.0, 10.0, 10.0, 30.0]
    assert stages[0].peak_ms in (0.0, 10.0)


def test_spans_of_no_pass_and_passes_without_a_span_tell_no_time() -> None:
    """What is no pass, such as the optimizer's, has no chunk; of the second micro batch none is."""
    forward, backward = SPAN_KINDS.index("forward"), SPAN_KINDS.index("backward")
    spans = SpanColumns(
        stage=[0, 0, 0],
        chunk=[0, -1, 0],
        micro_batch=[0, -1, 0],
        kind=[forward, forward, backward],
        start_ms=[0.0, 100.0, 10.0],
        end_ms=[10.0, 200.0, 30.0],
    )
    _, columns = follow(memory_scenario(global_batch_size=2), spans)
    assert [0.0, 0.0, 10.0, 10.0, 30.0, 30.0, 30.0, 30.0, 30.0] == list(columns.time_ms)


def test_what_dominates_is_named_by_its_operator() -> None:
    long = _fullest(sequence_length=131072, trainer=_MEGATRON, global_batch_size=1, dp=1)
    assert long.largest == "activations: mlp_activation"
    few = _fullest(sequence_length=512, global_batch_size=1)
    assert few.largest == "optimizer"


def _llama(layers: int, **widths: int) -> ModelArchitecture:
    return dataclasses.replace(
        find_model("llama-3-70b"), name="cut", num_layers=layers, max_position=4096, **widths
    )


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "model", "measured_gib"),
    [
        (2, 1, 4, _llama(12), 60.68),
        (4, 1, 2, _llama(12), 39.07),
        (8, 1, 1, _llama(12), 28.29),
        (
            *(1, 2, 4),
            _llama(4, hidden=16384, intermediate=53248, num_heads=128, num_kv_heads=16),
            87.08,
        ),
    ],
)
def test_peaks_are_those_that_were_measured(
    tp: int, pp: int, dp: int, model: ModelArchitecture, measured_gib: float
) -> None:
    """Peaks of Megatron-LM with Transformer Engine 2.11 on B200, within 0.3 %.

    Source: MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json.
    """
    scenario = dataclasses.replace(
        memory_scenario(
            tp=tp, pp=pp, dp=dp, trainer=_MEGATRON, zero_stage=1, sequence_parallel=tp > 1
        ),
        model=model,
        sequence_length=4096,
        global_batch_size=4 * dp,
    )
    stages, _ = follow(scenario)
    peak = max(stage.total_bytes for stage in stages) / GIB
    assert pytest.approx(measured_gib, rel=0.003) == peak


def test_a_small_step_peaks_in_its_update() -> None:
    """Gradients in 16 bit are flattened to reduce them, and copied to fp32 for the optimizer."""
    scenario = memory_scenario(
        trainer=TrainerSpec(profile="gpt-neox"), global_batch_size=1, sequence_length=16
    )
    stages, columns = follow(scenario)
    graphs = chunk_graphs(scenario)
    states = measure_states(scenario)
    num_params = sum(int(node.num_weights) for node in graphs[0].forward)
    assert states.update == 4 * num_params
    assert pytest.approx(states.kept + states.update) == stages[0].total_bytes
    assert columns.bytes[-1] == columns.bytes[0]


def test_weights_of_8_bit_training_are_there_in_16_bit_and_twice_in_8() -> None:
    wide, narrow = (_fullest(dtype=dtype, device="h100_sxm") for dtype in (DType.BF16, DType.FP8))
    assert 2 * _num_multiplied() == narrow.weights_bytes - wide.weights_bytes
    assert wide.gradients_bytes == narrow.gradients_bytes


@pytest.mark.parametrize(("zero_stage", "saved"), [(1, 2), (3, 1 / 4)])
def test_weights_kept_in_8_bit_alone_have_none_in_16(zero_stage: int, saved: float) -> None:
    """A byte each, which four ranks may split, and where they do not another, transposed."""
    rules = {"keeps_narrow_weights": "true"}
    fields = {"dtype": DType.FP8, "device": "h100_sxm", "dp": 4, "zero_stage": zero_stage}
    wide, narrow = (_fullest(**fields, trainer=TrainerSpec(rules=r)) for r in ({}, rules))
    assert saved * _num_multiplied() == wide.weights_bytes - narrow.weights_bytes


@pytest.mark.parametrize(("keeps", "saved"), [("false", 2), ("true", 1)])
def test_copies_that_are_not_cached_are_no_states(keeps: str, saved: int) -> None:
    """Nor is a transpose, of weights that there are in 8 bit anyhow."""
    found = [
        _fullest(
            dtype=DType.FP8,
            device="h100_sxm",
            trainer=TrainerSpec(
                rules={"keeps_narrow_weights": keeps, "caches_weight_copies": caches}
            ),
        )
        for caches in ("true", "false")
    ]
    assert saved * _num_multiplied() == found[0].weights_bytes - found[1].weights_bytes


def _num_multiplied() -> int:
    """Return the weights that the layers' products multiply."""
    model = find_model("llama-3.2-1b")
    per_layer = 2 * model.hidden * (model.num_heads + model.num_kv_heads) * model.head_dim
    return model.num_layers * (per_layer + 3 * model.hidden * model.intermediate)


def test_msp_keeps_the_inputs_that_fsp_gathers_again() -> None:
    """Those of the projections to queries, keys and values, and of the MLP, in every layer."""
    msp, fsp = (_fullest(tp=4, weight_parallel=form) for form in ("msp", "fsp"))
    model = find_model("llama-3.2-1b")
    gathered = 2 * 1024 * model.hidden * (1 - 1 / 4)
    # The head's input is gathered and kept too.
    expected = (2 * model.num_layers + 1) * gathered
    assert pytest.approx(expected) == msp.activations_bytes - fsp.activations_bytes
