import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.lowering import lower_rank
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operator import find_operator
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.scenario import EngineSpec, ServingScenario
from foretoken.simulator.grid import grid_weights, spaced_integers
from foretoken.simulator.latency_surfaces import (
    fetch_surfaces,
    replica_ranks,
    serving_options,
    surface_spec,
)
from foretoken.simulator.serving.batch import StepShape
from foretoken.simulator.serving.step_log import StepLog
from foretoken.simulator.step_cost import SurfaceCost

_SCENARIOS = {
    "dense": build_scenario(),
    "fused": build_scenario(engine=EngineSpec(fuses_add_norm=True)),
    "tensor parallel": build_scenario(device="a100_sxm_80", layout=ParallelLayout(tp=2, dp=3)),
    "pipeline": build_scenario(device="a100_sxm_80", layout=ParallelLayout(pp=3)),
    "experts": build_scenario(
        model=find_model("mixtral-8x7b"), device="h100_sxm", layout=ParallelLayout(tp=2, pp=2)
    ),
}
_SHAPES = {
    "decodes": StepShape(7, 7, 7, 7 * 811, 1300),
    "one": StepShape(1, 1, 1, 33, 33),
    "chunk": StepShape(333, 0, 0, 0, 0, ((333, 700),)),
    "mixed": StepShape(505, 6, 5, 5000, 2100, ((400, 0), (100, 55))),
}


def _cost(scenario: ServingScenario) -> SurfaceCost:
    surfaces = fetch_surfaces(surface_spec(scenario, 4000), RooflinePredictor())
    return SurfaceCost(surfaces, scenario.engine.max_num_batched_tokens)


def _direct_stage_us(scenario: ServingScenario, shape: StepShape) -> list[float]:
    """Add up the roofline of every operator of exactly this step, prefills one by one."""
    decode = DecodeShape(
        num_seqs=shape.num_decodes,
        kv_tokens=shape.decode_kv_tokens,
        kv_tokens_max=shape.decode_kv_tokens_max,
    )
    parts = [decode] if shape.num_decodes else []
    prefills = [PrefillShape(**prefill_dims(1, n, context)) for n, context in shape.prefills]
    stages = []
    for rank in replica_ranks(scenario):
        total_us = 0.0
        for number, part in enumerate([None, *parts, *prefills]):
            batch = BatchShape(
                num_tokens=shape.num_tokens,
                num_output_rows=max(shape.num_rows, 1),
                prefill=part if isinstance(part, PrefillShape) else None,
                decode=part if isinstance(part, DecodeShape) else None,
            )
            options = serving_options(scenario.dtype, scenario.engine.fuses_add_norm)
            for node in lower_rank(batch, options, rank):
                is_attention = node.operator.startswith("attention")
                has_rows = shape.num_rows > 0 or not (
                    node.role.startswith("lm_head") or node.operator == "sampler"
                )
                if has_rows and is_attention == (number > 0):
                    total_us += node.repeat * _roofline_us(scenario.device, node)
        stages.append(total_us)
    return stages


def _roofline_us(device: str, node: object) -> float:
    spec = find_operator(node.operator)  # type: ignore[attr-defined]
    dims, dtype, phase = node.dims, node.dtype, node.phase  # type: ignore[attr-defined]
    if spec.is_collective:
        terms = collective_terms(spec, dims, dims["num_nodes"], topology_of_device(device))
    else:
        terms = compute_terms(spec, dims, dtype, phase, find_device(device))
    return float(max(terms.compute_us, terms.memory_us) + terms.floor_us)


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
@pytest.mark.parametrize("scenario", _SCENARIOS.values(), ids=_SCENARIOS)
def test_a_step_costs_the_sum_of_its_operators(scenario: ServingScenario, shape: StepShape) -> None:
    """Interpolation between grid points costs under a hundredth of the step."""
    expected = _direct_stage_us(scenario, shape)
    assert _cost(scenario).stage_us(shape) == pytest.approx(expected, rel=0.01)


def test_a_decoding_step_costs_the_same_on_both_ways() -> None:
    cost = _cost(build_scenario())
    shape = _SHAPES["decodes"]
    decode_us = cost.decode_us(7, shape.decode_kv_tokens, shape.decode_kv_tokens_max)
    assert [decode_us] == cost.stage_us(shape)


def test_token_counts_above_the_exact_range_cost_as_much_as_whole_tiles() -> None:
    cost = _cost(build_scenario())
    costs = [cost.stage_us(StepShape(n, 0, 0, 0, 0))[0] for n in (512, 513, 576, 577)]
    assert costs[0] < costs[1] == costs[2] < costs[3]


def test_the_predictor_is_asked_once_and_for_nothing_twice() -> None:
    predictor = RooflinePredictor()
    fetch_surfaces(surface_spec(build_scenario(), 4000), predictor)
    (query,) = predictor.queries
    keys = [
        (table.operator, tuple(column.tobytes() for column in table.columns.values()))
        for table in query.tables
    ]
    assert len(set(keys)) == len(keys)
    assert sum(table.num_rows for table in query.tables) < 20_000


def test_replicas_and_nearby_contexts_share_surfaces() -> None:
    one, many = build_scenario(), build_scenario(layout=ParallelLayout(dp=4), seed=9)
    assert surface_spec(one, 3000) == surface_spec(many, 4000)
    assert surface_spec(one, 3000) != surface_spec(one, 5000)
    assert surface_spec(one, 1).max_context == 2
    assert surface_spec(one, 4096).max_context == 4096


@pytest.mark.parametrize("name", ["dense", "pipeline", "experts"])
def test_an_account_adds_up_to_the_steps(name: str) -> None:
    cost = _cost(_SCENARIOS[name])
    log = StepLog()
    total_us = 0.0
    for shape in _SHAPES.values():
        log.add(shape, 1)
        log.end_ns.append(0)
        log.num_used_blocks.append(0)
        total_us += sum(cost.stage_us(shape))
    account = cost.account(log.columns())
    assert account.busy_s == pytest.approx(total_us / 1e6, rel=1e-9)
    assert sum(account.time_s_by_provenance.values()) == pytest.approx(account.busy_s)
    assert account.low_s == pytest.approx(0.8 * account.busy_s)
    assert account.high_s == pytest.approx(1.5 * account.busy_s)
    assert account.time_s_by_provenance["measured"] == pytest.approx(
        account.time_s_by_group["gemm"]
    )
    assert account.time_s_by_provenance["extrapolated"] == pytest.approx(
        account.time_s_by_group["attention"]
    )


def test_a_run_of_growing_steps_is_logged_as_its_steps() -> None:
    log = StepLog()
    log.add(StepShape(2, 2, 2, 30, 20), 3)
    log.end_ns += [1, 2, 3]
    log.num_used_blocks += [4, 4, 5]
    columns = log.columns()
    assert columns.decode_kv_tokens.tolist() == [30, 32, 34]
    assert columns.decode_kv_tokens_max.tolist() == [20, 21, 22]
    assert columns.num_seqs.tolist() == [2, 2, 2]


def test_grid_weights_interpolate_linear_functions_exactly() -> None:
    axes = (np.array([0, 1, 4]), np.array([2, 3, 7, 9]))
    first, second = np.array([0.5, 2.0, 4.0]), np.array([2.0, 5.5, 8.9])
    points = np.add.outer(3.0 * axes[0], 2.0 * axes[1]).ravel()
    weights = grid_weights(axes, (first, second))
    assert weights @ points == pytest.approx((3 * first + 2 * second).sum())
    assert weights.sum() == pytest.approx(3.0)


def test_spaced_integers_hold_both_ends_and_never_repeat() -> None:
    assert spaced_integers(1, 8, 1).tolist() == [1, 2, 4, 8]
    assert spaced_integers(5, 5, 3).tolist() == [5]
    points = spaced_integers(1, 300, 3).tolist()
    assert (points[0], points[-1]) == (1, 300)
    assert sorted(set(points)) == points


def test_a_dtype_changes_the_surfaces() -> None:
    shape = _SHAPES["one"]
    half = _cost(build_scenario()).stage_us(shape)[0]
    full = _cost(build_scenario(dtype=DType.FP32)).stage_us(shape)[0]
    assert full > 1.8 * half
