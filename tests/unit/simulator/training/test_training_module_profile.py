"""Measured times of modules in place of estimates of operators."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fakes import build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Overlap,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import (
    LoweringOptions,
    Nodes,
    TrainingOptions,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.module_profile import (
    MeasuredPrices,
    check_module_layout,
    check_module_times,
    measure_nodes,
)
from foretoken.simulator.training.module_slot import read_times

_NUM_LAYERS = 32
_COLUMNS_US = {
    "embed": 50.0,
    "attn_q": 300.0,
    "attn_k": 100.0,
    "attn_v": 100.0,
    "attn_o": 250.0,
    "mlp_gate": 500.0,
    "mlp_act_fn": 40.0,
    "mlp_up": 200.0,
    "mlp_down": 310.0,
    "lm_head": 900.0,
}
_LAYER_US = sum(_COLUMNS_US.values()) - 950.0


def _estimate_us(node: OperatorNode) -> float:
    """Return an estimate that differs between operators; collectives are a fifth of a GEMM."""
    if find_operator(node.operator).is_collective:
        return 20.0
    return node.share * (100.0 if node.operator == "gemm" else 7.0)


def _fasop(tp: int = 2, **changes: object) -> ModuleTimes:
    fields: dict[str, object] = {
        "source": "made up",
        "tp": tp,
        "has_communication": tp > 1,
        "measures": "intervals",
        "times": tuple(
            ModuleTime(
                module=name, micro_batch_size=1, forward_us=time_us, is_whole=name == "lm_head"
            )
            for name, time_us in _COLUMNS_US.items()
        ),
    }
    return ModuleTimes(**{**fields, **changes})  # type: ignore[arg-type]


def _modules(*times: ModuleTime, **changes: object) -> ModuleTimes:
    return ModuleTimes(source="made up", times=times, **changes)  # type: ignore[arg-type]


def _module(module: str, forward_us: float, **changes: object) -> ModuleTime:
    return ModuleTime(module=module, micro_batch_size=1, forward_us=forward_us, **changes)  # type: ignore[arg-type]


def _lower(scenario: TrainingScenario) -> tuple[Nodes, Nodes]:
    length = 2048
    training = TrainingOptions(
        trainer=find_trainer(scenario.trainer.profile),
        micro_batch_size=scenario.micro_batch_size,
        sequence_length=length,
        sequence_parallel=scenario.sequence_parallel,
    )
    options = LoweringOptions(dtype=DType.BF16, has_loss=True, training=training)
    rank = RankContext(model=scenario.model, layout=scenario.layout, devices_per_node=8)
    shape = BatchShape(
        num_tokens=length,
        num_output_rows=length,
        prefill=PrefillShape(**prefill_dims(1, length, 0)),
    )
    forward = lower_rank(shape, options, rank)
    return forward, lower_backward(forward, options)


def _scenario(times: ModuleTimes, tp: int = 2, **changes: object) -> TrainingScenario:
    return build_scenario(ParallelLayout(tp=tp), module_times=times, **changes)


def _sum_us(measured: MeasuredPrices, nodes: Nodes, section: Section = Section.LAYER) -> float:
    """Return what all repetitions of a section's nodes cost: measured, else as estimated."""
    times = [
        (measured.find(node), _estimate_us(node), node.repeat)
        for node in nodes
        if node.section is section
    ]
    return sum((found if found is not None else other) * count for found, other, count in times)


@pytest.mark.parametrize("trainer", ["plain", "gpt-neox", "megatron-core"])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_layers_take_what_their_intervals_took_and_no_sum_is_added(
    trainer: str, is_parallel: bool
) -> None:
    scenario = _scenario(_fasop(), sequence_parallel=is_parallel)
    scenario = dataclasses.replace(
        scenario, trainer=dataclasses.replace(scenario.trainer, profile=trainer)
    )
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert measured.covers_layers
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * _LAYER_US)
    sums = [node for node in forward if node.section is Section.LAYER and node.axis == "tp"]
    assert sums
    assert all(measured.find(node) is not None for node in sums)
    computed = [node for node in backward if node.section is Section.LAYER and not node.axis]
    assert all(measured.find(node) is not None for node in computed)
    # Twice the computation and once the communication is less than twice the forward pass.
    assert _NUM_LAYERS * _LAYER_US < _sum_us(measured, backward) < 2 * _NUM_LAYERS * _LAYER_US


def test_without_tensor_parallelism_the_backward_pass_takes_twice_as_long() -> None:
    scenario = _scenario(_fasop(tp=1), tp=1)
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * _LAYER_US)
    assert _sum_us(measured, backward) == pytest.approx(2 * _NUM_LAYERS * _LAYER_US)
    assert _sum_us(measured, forward, Section.EMBEDDING) == pytest.approx(50.0)
    head = [node for node in forward if node.role in ("final_norm", "lm_head")]
    assert _sum_us(measured, tuple(head), Section.HEAD) == pytest.approx(900.0)
    loss = next(node for node in forward if node.role == "loss")
    assert measured.find(loss) is None


def test_a_head_that_ran_unsplit_is_left_to_the_predictor() -> None:
    scenario = _scenario(_fasop(tp=2))
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert all(measured.find(node) is None for node in forward if node.section is Section.HEAD)
    assert any("lm_head ran unsplit" in note for note in measured.notes)


def test_what_is_no_computation_of_an_interval_is_communication() -> None:
    scenario = _scenario(_fasop())
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    by_role = {node.role: measured.find(node) for node in (*forward, *backward)}
    # Rotation, attention, output projection; activation; second projection of the MLP.
    slowness = (250 + 40 + 310) / (7 + 7 + 100 + 7 + 100)
    # mlp_gate and mlp_up hold the sum of attention, its residual, the norm and both projections.
    assert by_role["mlp_up_proj"] == pytest.approx(slowness * 100)
    sent_us = 700 - slowness * (7 + 7 + 100)
    assert by_role["attn_out_proj_all_reduce"] == pytest.approx(sent_us)
    # Without sums, a module's time is shared in proportion to estimates.
    assert by_role["attn_rope"] == pytest.approx(250 * 7 / 114)
    assert by_role["mlp_activation"] == pytest.approx(40)
    # What follows the last module of a layer is in the first one of the next layer.
    assert by_role["mlp_down_proj_all_reduce"] == pytest.approx(500 - slowness * 114)
    # Backward, both compute twice as long and communicate as long.
    assert by_role["mlp_up_proj_dgrad_all_reduce"] == pytest.approx(sent_us)
    assert by_role["mlp_activation_backward"] == pytest.approx(80)


def test_communication_told_apart_is_taken_off_and_stays_ours() -> None:
    layer = _module("layer", 1000.0, communication_us=200.0, backward_us=2500.0)
    scenario = _scenario(_modules(layer, tp=2, has_communication=True))
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    sums_us = 2 * 20.0
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * (800 + sums_us))
    assert _sum_us(measured, backward) == pytest.approx(_NUM_LAYERS * (2300 + sums_us))


def test_a_profile_without_communication_leaves_the_sums_to_the_predictor() -> None:
    scenario = _scenario(_modules(_module("layer", 1000.0), tp=2))
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * (1000 + 2 * 20))
    assert _sum_us(measured, backward) == pytest.approx(_NUM_LAYERS * (2000 + 2 * 20))


def test_halves_of_a_layer_lose_no_sum_and_count_none_twice() -> None:
    times = (_module("self_attn", 450.0), _module("model.layers.0.mlp", 900.0))
    scenario = _scenario(_modules(*times, tp=2, has_communication=True))
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    outside_us = 2 * 7 + 2 * 7  # norms and residual sums
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * (450 + 900 + outside_us))
    attention_share, mlp_share = 20 / (100 + 7 + 7 + 100 + 20), 20 / (100 + 7 + 100 + 20)
    expected = 450 * (2 - attention_share) + 900 * (2 - mlp_share) + outside_us
    assert _sum_us(measured, backward) == pytest.approx(_NUM_LAYERS * expected)
    assert not measured.covers_layers


def test_projections_alone_leave_the_sums_of_gradients_to_the_predictor() -> None:
    times = (_module("o_proj", 120.0), _module("qkv_proj", 100.0))
    scenario = _scenario(_modules(*times, tp=2, has_communication=True))
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    by_role = {node.role: measured.find(node) for node in (*forward, *backward)}
    assert by_role["attn_out_proj"] == pytest.approx(100.0)
    assert by_role["attn_out_proj_all_reduce"] == pytest.approx(20.0)
    assert by_role["attn_qkv_proj_dgrad_all_reduce"] is None
    assert by_role["attn_out_proj_dgrad"] == pytest.approx(100.0)
    assert by_role["attn_qkv_proj_dgrad"] == pytest.approx(100.0)


def test_layers_of_their_own_times_are_summed() -> None:
    times = [_module(f"model.layers.{layer}", 100.0 + layer) for layer in range(_NUM_LAYERS)]
    scenario = _scenario(_modules(*times), tp=1)
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert _sum_us(measured, forward) == pytest.approx(sum(time.forward_us for time in times))
    half = _scenario(_modules(*times[:2]), tp=1)
    measured = measure_nodes(half, forward, backward, _estimate_us)
    assert _sum_us(measured, forward) == pytest.approx(_NUM_LAYERS * 100.5)


def test_modules_inside_of_measured_ones_are_not_counted_again() -> None:
    times = (_module("q_proj", 10.0), _module("k_proj", 5.0), _module("v_proj", 5.0))
    scenario = _scenario(_modules(*times, _module("self_attn", 90.0)), tp=1)
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    inside = [node for node in forward if node.role.startswith(("attn_", "attention_"))]
    inside = [node for node in inside if node.role != "attn_residual"]
    assert _sum_us(measured, tuple(inside)) == pytest.approx(_NUM_LAYERS * 90)
    assert any("q_proj, k_proj, v_proj" in note for note in measured.notes)


def test_recomputed_operators_cost_what_forward_ones_do() -> None:
    scenario = _scenario(_fasop())
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    again = [dataclasses.replace(node, group="recompute", repeat=1) for node in forward]
    assert [measured.find(node) for node in again] == [measured.find(node) for node in forward]


def test_what_is_measured_hides_behind_nothing() -> None:
    scenario = _scenario(_modules(_module("layer", 1000.0), tp=2, has_communication=True))
    forward, backward = _lower(scenario)
    hidden = tuple(dataclasses.replace(node, overlap=Overlap.DEFERRED) for node in forward)
    measured = measure_nodes(scenario, hidden, backward, _estimate_us)
    shown = {node.role: node.overlap for node in measured.expose(hidden)}
    assert shown["mlp_down_proj_all_reduce"] is Overlap.EXPOSED
    assert shown["loss_all_reduce"] is Overlap.DEFERRED


def test_a_scenario_without_a_profile_is_as_it_was() -> None:
    scenario = build_scenario()
    forward, backward = _lower(scenario)
    measured = measure_nodes(scenario, forward, backward, _estimate_us)
    assert measured == MeasuredPrices()
    assert measured.find(forward[0]) is None
    check_module_times(scenario)


@pytest.mark.parametrize(
    ("profile", "changes", "field"),
    [
        (_fasop(model="llama-3-8b"), {}, "module_times.model"),
        (_fasop(device="a40"), {}, "module_times.device"),
        (_fasop(sequence_length=120), {}, "module_times.sequence_length"),
        (_fasop(dtype=DType.FP32), {}, "module_times.dtype"),
        (_fasop(times=()), {}, "module_times.times"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    profile: ModuleTimes, changes: dict[str, object], field: str
) -> None:
    scenario = build_scenario(
        **{"layout": ParallelLayout(tp=2), "module_times": profile, **changes}
    )  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        check_module_times(scenario)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": ParallelLayout(tp=4)}, "layout.tp"),
        ({"layout": ParallelLayout(tp=2, cp=2)}, "layout.cp"),
        ({"weight_parallel": "isp"}, "weight_parallel"),
    ],
)
def test_a_layout_that_cuts_modules_otherwise_is_refused(
    changes: dict[str, object], field: str
) -> None:
    fields = {"layout": ParallelLayout(tp=2), "module_times": _fasop(), **changes}
    with pytest.raises(InvalidRequestError) as caught:
        check_module_layout(build_scenario(**fields))  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_profile_of_the_scenario_is_accepted_by_any_name_of_the_model() -> None:
    profile = _fasop(model="meta-llama/Llama-2-7b-hf", dtype=DType.BF16, sequence_length=4096)
    check_module_times(_scenario(profile))
    check_module_layout(_scenario(profile))


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        (_module("attn_q", 1.0), "what lacks is k, v"),
        (_module("vision_tower", 1.0), "no module of llama-2-7b"),
        (_module("moe", 1.0), "no module of llama-2-7b"),
    ],
)
def test_a_module_of_another_model_is_refused(time: ModuleTime, reason: str) -> None:
    scenario = _scenario(_modules(time), tp=1)
    forward, backward = _lower(scenario)
    with pytest.raises(InvalidRequestError, match=reason):
        measure_nodes(scenario, forward, backward, _estimate_us)


def test_what_the_source_does_not_say_is_said() -> None:
    scenario = _scenario(_fasop(), micro_batch_size=4)
    forward, backward = _lower(scenario)
    notes = " ".join(measure_nodes(scenario, forward, backward, _estimate_us).notes)
    assert "does not say how long sequences were" in notes
    assert "does not say the number format" in notes
    assert "micro batches of 1 to 1; at 4" in notes


@given(fixed=st.floats(0, 100), each=st.floats(0.1, 100), size=st.integers(2, 16))
def test_between_profiled_micro_batches_a_fixed_and_a_proportional_part_are_exact(
    fixed: float, each: float, size: int
) -> None:
    times = [
        ModuleTime(module="layer", micro_batch_size=known, forward_us=fixed + each * known)
        for known in (16, 2, 8)
    ]
    assert read_times(times, size).forward_us == pytest.approx(fixed + each * size)
    assert read_times(times, 32).forward_us == pytest.approx(2 * fixed + each * 32)
    assert read_times(times, 1).forward_us == pytest.approx(fixed / 2 + each)


def test_a_profile_refuses_times_nothing_can_take() -> None:
    for changes in ({"forward_us": -1.0}, {"communication_us": 2.0}, {"micro_batch_size": 0}):
        time = dataclasses.replace(_module("layer", 1.0), **changes)
        with pytest.raises(InvalidRequestError, match="times"):
            _modules(time)
    with pytest.raises(InvalidRequestError, match="measures"):
        _modules(_module("layer", 1.0), measures="hooks")
