from dataclasses import replace

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, OperatorNode, PrefillShape
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.latency_surfaces import (
    fetch_surfaces,
    replica_ranks,
    serving_options,
    surface_spec,
)
from foretoken.simulator.cost.rank_waiting import slowest_ratio
from foretoken.simulator.cost.tables import StepShape, shared_us, stage_us
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.step_cost import LAUNCH_GROUP, SurfaceCost

_PLAIN = EngineSpec(profile="plain")
_SCENARIOS = {
    "dense": build_scenario(engine=_PLAIN),
    "fused": build_scenario(engine=EngineSpec(profile="plain", rules={"fuses_add_norm": "true"})),
    "tensor parallel": build_scenario(
        device="a100_sxm_80", layout=ParallelLayout(tp=2, dp=3), engine=_PLAIN
    ),
    "pipeline": build_scenario(device="a100_sxm_80", layout=ParallelLayout(pp=3), engine=_PLAIN),
    "experts": build_scenario(
        model=find_model("mixtral-8x7b"),
        device="h100_sxm",
        layout=ParallelLayout(tp=2, pp=2),
        engine=_PLAIN,
    ),
    "fp8": build_scenario(device="h100_sxm", quantization="fp8", engine=_PLAIN),
}
# A step and its prefills: (new tokens, context). Token counts are whole tiles.
_Step = tuple[StepShape, tuple[tuple[int, int], ...]]
_STEPS: dict[str, _Step] = {
    "decodes": (StepShape(7, 7, 7, 7 * 811, 1300, 0), ()),
    "one": (StepShape(1, 1, 1, 33, 33, 0), ()),
    "chunk": (StepShape(336, 0, 0, 0, 0, 1), ((336, 700),)),
    "mixed": (StepShape(512, 6, 5, 5000, 2100, 1), ((507, 55),)),
}
_SEVERAL: _Step = (StepShape(512, 8, 5, 5000, 2100, 3), ((100, 0), (400, 55), (7, 900)))


def _cost(scenario: ServingScenario) -> SurfaceCost:
    return SurfaceCost(fetch_surfaces(surface_spec(scenario, 4000), RooflinePredictor()))


def _stages_us(cost: SurfaceCost, step: _Step) -> list[float]:
    shape, prefills = step
    pairs = np.array(prefills, dtype=np.int64).reshape(-1, 2)
    tokens, contexts = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    return [
        stage_us(cost.tables, stage, shape, tokens, contexts) for stage in range(cost.num_stages)
    ]


def _record(steps: list[_Step]) -> StepRecord:
    shapes = [shape for shape, _ in steps]
    prefills = [(i, n, c) for i, (_, parts) in enumerate(steps) for n, c in parts]
    owner, tokens, context = np.array(prefills, dtype=np.int64).reshape(-1, 3).T
    zeros = np.zeros(len(steps), dtype=np.int64)
    columns = {
        name: np.array([getattr(s, name) for s in shapes], dtype=np.int64)
        for name in StepShape._fields
    }
    others = ("scheduled_ns", "start_ns", "end_ns", "num_running", "num_waiting")
    return StepRecord(
        **columns,
        **dict.fromkeys(others, zeros),
        num_used_blocks=zeros,
        num_preempted=zeros,
        prefill_step=owner,
        prefill_tokens=tokens,
        prefill_context=context,
        prefill_request=0 * owner,
    )


def _direct_us(scenario: ServingScenario, step: _Step) -> list[float]:
    """Add up the roofline of every operator of exactly this step, prefills one by one."""
    shape, pairs = step
    decode = DecodeShape(
        num_seqs=shape.num_decodes,
        kv_tokens=shape.decode_kv_tokens,
        kv_tokens_max=shape.decode_kv_tokens_max,
    )
    parts = [decode] if shape.num_decodes else []
    prefills = [PrefillShape(**prefill_dims(1, n, context)) for n, context in pairs]
    stages = []
    for rank in replica_ranks(surface_spec(scenario, 4000)):
        total_us = 0.0
        for number, part in enumerate([None, *parts, *prefills]):
            batch = BatchShape(
                num_tokens=shape.num_tokens,
                num_output_rows=max(shape.num_rows, 1),
                prefill=part if isinstance(part, PrefillShape) else None,
                decode=part if isinstance(part, DecodeShape) else None,
            )
            for node in lower_rank(batch, serving_options(scenario), rank):
                is_attention = node.operator.startswith("attention")
                has_rows = shape.num_rows > 0 or not (
                    node.role.startswith("lm_head") or node.operator == "sampler"
                )
                if has_rows and is_attention == (number > 0):
                    total_us += node.repeat * _roofline_us(scenario.device, node)
        stages.append(total_us)
    return stages


def _roofline_us(device: str, node: OperatorNode) -> float:
    spec = find_operator(node.operator)
    if spec.is_collective:
        nodes = int(node.dims["num_nodes"])
        terms = collective_terms(spec, node.dims, nodes, topology_of_device(device))
    else:
        terms = compute_terms(spec, node.dims, node.dtype, node.phase, find_device(device))
    return float(max(terms.compute_us, terms.memory_us) + terms.floor_us)


@pytest.mark.parametrize("step", _STEPS.values(), ids=_STEPS)
@pytest.mark.parametrize("scenario", _SCENARIOS.values(), ids=_SCENARIOS)
def test_a_step_costs_the_sum_of_its_operators(scenario: ServingScenario, step: _Step) -> None:
    """Interpolation between grid points costs under a hundredth of the step."""
    assert _stages_us(_cost(scenario), step) == pytest.approx(_direct_us(scenario, step), rel=0.01)


@pytest.mark.parametrize("name", ["dense", "pipeline", "experts"])
def test_an_account_is_the_sum_of_its_steps(name: str) -> None:
    cost, steps = _cost(_SCENARIOS[name]), [*_STEPS.values(), _SEVERAL] * 2
    account = cost.account(_record(steps))
    stages_us = np.array([_stages_us(cost, step) for step in steps])
    assert account.stage_busy_s == pytest.approx(stages_us.sum(axis=0) / 1e6)
    assert account.busy_s == pytest.approx(stages_us.sum() / 1e6)
    assert sum(account.time_s_by_provenance.values()) == pytest.approx(account.busy_s)
    assert account.low_s == pytest.approx(0.8 * account.busy_s)
    assert account.high_s == pytest.approx(1.5 * account.busy_s)


def test_a_breakdown_adds_up_to_every_step() -> None:
    cost, steps = _cost(_SCENARIOS["pipeline"]), [*_STEPS.values(), _SEVERAL]
    by_group = cost.breakdown(_record(steps))
    stages_us = np.array([_stages_us(cost, step) for step in steps])
    stages = [by_group[f"stage_{stage}"] for stage in range(3)]
    groups = [us for name, us in by_group.items() if not name.startswith("stage_")]
    assert np.transpose(stages) == pytest.approx(stages_us)
    assert sum(groups) == pytest.approx(stages_us.sum(axis=1))
    assert by_group["sampler"][2] == 0.0


def test_an_account_of_no_steps_is_empty() -> None:
    cost = _cost(_SCENARIOS["dense"])
    assert cost.account(_record([])).busy_s == 0.0
    assert len(cost.breakdown(_record([]))["gemm"]) == 0


def test_a_step_outside_a_graph_takes_at_least_its_launches() -> None:
    rules = {"launch_us": "1000", "graph_mode": "full", "graph_capture_sizes": "[1, 8]"}
    cost = _cost(build_scenario(engine=EngineSpec(profile="plain", rules=rules)))
    captured, eager = _STEPS["decodes"], _STEPS["mixed"]
    account = cost.account(_record([captured, eager]))
    launches = cost.tables.floor_us[0, 1, 512]
    assert _stages_us(cost, eager) == [launches]
    assert _stages_us(cost, captured)[0] < launches
    assert account.time_s_by_group[LAUNCH_GROUP] > 0
    assert account.busy_s == pytest.approx((launches + _stages_us(cost, captured)[0]) / 1e6)
    assert cost.breakdown(_record([captured, eager]))[LAUNCH_GROUP][0] == 0.0


@pytest.mark.parametrize(
    ("layout", "num_waiting"),
    [(ParallelLayout(), 1), (ParallelLayout(tp=4), 4), (ParallelLayout(dp=2, ep=2), 2)],
)
def test_ranks_wait_for_the_slowest_to_launch(layout: ParallelLayout, num_waiting: int) -> None:
    def launches_us(spread_ratio: str) -> float:
        rules = {"launch_us": "1000", "launch_spread_ratio": spread_ratio}
        scenario = build_scenario(
            model=find_model("mixtral-8x7b"),
            device="h200_sxm",
            layout=layout,
            engine=EngineSpec(profile="plain", rules=rules),
        )
        return float(_cost(scenario).tables.floor_us[0, 1, 512])

    late_ratio = launches_us("0.1") / launches_us("0")
    assert pytest.approx(slowest_ratio(num_waiting, 0.1)) == late_ratio


@pytest.mark.parametrize("graph_mode", ["piecewise", "full+piecewise"])
def test_a_step_captured_in_pieces_waits_for_each_layer(graph_mode: str) -> None:
    sizes = "[1, 8, 512]"
    rules = {"piece_us": "900", "graph_mode": graph_mode, "graph_capture_sizes": sizes}
    scenario = build_scenario(engine=EngineSpec(profile="plain", rules=rules))
    layers_us = 900 * scenario.model.num_layers
    decode_us, mixed_us = _cost(scenario).tables.floor_us[0]
    assert layers_us == mixed_us[512]
    assert (layers_us if graph_mode == "piecewise" else 0) == decode_us[8]
    assert [0, 0] == [decode_us[513], mixed_us[513]]


def test_what_an_operator_is_made_of_is_launched_kernel_by_kernel() -> None:
    """Four products of a layer of Llama are quantised for in FP8; Mixtral's experts are nine."""
    engine = EngineSpec(profile="plain", rules={"launch_us": "1000"})
    launches = {}
    for name, quantization in (("llama-3.1-8b", ""), ("llama-3.1-8b", "fp8"), ("mixtral-8x7b", "")):
        scenario = build_scenario(
            model=find_model(name), device="h200_sxm", quantization=quantization, engine=engine
        )
        floor_us = _cost(scenario).tables.floor_us[0, 1, 512]
        launches[name, quantization] = round(float(floor_us) / 1000)
    dense = launches["llama-3.1-8b", ""]
    assert 4 * 32 == launches["llama-3.1-8b", "fp8"] - dense
    # With the router, in place of two products and an activation.
    assert (1 + 9 - 3) * 32 == launches["mixtral-8x7b", ""] - dense


def test_experts_are_one_call_of_the_host_by_their_format() -> None:
    """Instead of nine kernels, and on top of what a step has outside its layers."""
    model = find_model("mixtral-8x7b")

    def launches_us(quantization: str, **rules: str) -> float:
        engine = EngineSpec(profile="plain", rules={"launch_us": "1000", **rules})
        scenario = build_scenario(
            model=model, device="h200_sxm", quantization=quantization, engine=engine
        )
        return float(_cost(scenario).tables.floor_us[0, 1, 512])

    calls = "{other: 500, w4a16_mxfp4: 20000}"
    for quantization, call_us in (("", 500), ("experts=w4a16_mxfp4", 20_000)):
        by_kernels_us = launches_us(quantization)
        by_calls_us = launches_us(quantization, expert_call_us=calls, eager_us="7000")
        saved_us = model.num_layers * (9 * 1000 - call_us)
        assert pytest.approx(saved_us - 7000) == by_kernels_us - by_calls_us
    only_named_us = launches_us("", expert_call_us="{w4a16_mxfp4: 20000}")
    assert launches_us("") == only_named_us


def test_no_call_of_experts_takes_less_than_nothing() -> None:
    rules = {"expert_call_us": "{other: -1}"}
    with pytest.raises(InvalidRequestError, match=r"expert_call_us\.other"):
        EngineSpec(profile="plain", rules=rules).resolve()


def test_decodes_are_padded_to_captured_sizes() -> None:
    rules = {"graph_mode": "full", "graph_capture_sizes": "[16, 32]"}
    padded = _cost(build_scenario(engine=EngineSpec(profile="plain", rules=rules)))
    plain = _cost(_SCENARIOS["dense"])
    for num_tokens, paid in ((1, 16), (16, 16), (17, 32), (33, 33)):
        expected = plain.tables.tokens_us[0, 0, paid]
        assert padded.tables.tokens_us[0, 0, num_tokens] == expected
        assert padded.tables.tokens_us[0, 1, num_tokens] == plain.tables.tokens_us[0, 1, num_tokens]


def test_engines_in_lock_step_share_what_their_experts_take() -> None:
    """What depends on the tokens of all comes once, and an engine alone has none of it."""
    layout = ParallelLayout(dp=2, ep=2)
    scenario = build_scenario(
        model=find_model("mixtral-8x7b"), device="h100_sxm", layout=layout, engine=_PLAIN
    )
    cost, alone = _cost(scenario), _cost(replace(scenario, layout=ParallelLayout(tp=2)))
    shared = [shared_us(cost.tables, 0, n) for n in (2, 256, 4096)]
    assert 0 < shared[0] < shared[1] < shared[2]
    assert shared_us(alone.tables, 0, 256) == 0.0
    record = _record([_STEPS["decodes"]])
    own_us = _stages_us(cost, _STEPS["decodes"])[0]
    expected = (own_us + shared_us(cost.tables, 0, 14)) / 1e6
    assert cost.account(record).busy_s == pytest.approx(expected)
    # The engine next to it had another 249.
    unequal = replace(record, num_group_tokens=np.array([256]))
    expected = (own_us + shared[1]) / 1e6
    assert cost.account(unequal).busy_s == pytest.approx(expected)
    assert sum(cost.breakdown(unequal).values()) == pytest.approx(expected * 1e6)


def test_the_predictor_is_asked_once_and_for_nothing_twice() -> None:
    predictor = RooflinePredictor()
    fetch_surfaces(surface_spec(build_scenario(), 4000), predictor)
    (query,) = predictor.queries
    keys = [
        (table.operator, table.variant, tuple(c.tobytes() for c in table.columns.values()))
        for table in query.tables
    ]
    assert len(set(keys)) == len(keys)
    assert sum(table.num_rows for table in query.tables) < 30_000


def test_replicas_and_nearby_contexts_share_surfaces() -> None:
    one, many = build_scenario(), build_scenario(layout=ParallelLayout(dp=4), seed=9)
    assert surface_spec(one, 3000) == surface_spec(many, 4000)
    assert hash(surface_spec(one, 3000)) == hash(surface_spec(many, 4000))
    assert surface_spec(one, 3000) != surface_spec(one, 5000)
    assert surface_spec(one, 1).max_context == 2
    assert surface_spec(one, 4096).max_context == 4096


@pytest.mark.parametrize(
    ("device", "tp", "largest_tokens"),
    [
        # 2 MiB, 0.5 MiB and 32 MiB of 4096 features in 16 bit.
        ("h100_sxm", 4, 256),
        ("h200_sxm", 8, 64),
        ("b200", 4, 4096),
        ("a100_sxm_80", 4, 0),
        ("h100_sxm", 1, 0),
        ("rtx_pro_6000", 2, 0),
    ],
)
def test_a_norm_takes_no_time_inside_a_small_sum(device: str, tp: int, largest_tokens: int) -> None:
    def tokens_us(fuses: str) -> np.ndarray:
        engine = EngineSpec(
            profile="plain", rules={"fuses_add_norm": "true", "fuses_all_reduce_norm": fuses}
        )
        scenario = build_scenario(
            model=find_model("llama-3.1-8b"),
            device=device,
            layout=ParallelLayout(tp=tp),
            engine=engine,
        )
        return _cost(scenario).tables.tokens_us[0, 1]

    saved_us = tokens_us("false") - tokens_us("true")
    sizes = np.arange(len(saved_us))
    # Time between two measured sizes is taken from both.
    near = np.abs(sizes - largest_tokens) <= 64
    assert (saved_us[(sizes >= 1) & (sizes < largest_tokens) & ~near] > 0).all()
    assert (saved_us[(sizes > largest_tokens) & ~near] == 0).all()


def test_engines_that_share_experts_and_stages_run_sums_and_norms_apart() -> None:
    engine = EngineSpec(profile="vllm-0.28", rules={"fuses_all_reduce_norm": "true"})
    for layout, largest in (
        (ParallelLayout(tp=2), 64 * 2**20),
        (ParallelLayout(tp=2, pp=2), 0),
        (ParallelLayout(tp=2, dp=2), 64 * 2**20),
        (ParallelLayout(tp=2, dp=2, ep=4), 0),
    ):
        model = find_model("mixtral-8x7b")
        scenario = build_scenario(model=model, device="h100_sxm", layout=layout, engine=engine)
        assert surface_spec(scenario, 64).fused_norm_bytes == largest


@pytest.mark.parametrize("limit_w", [0.0, 500.0])
def test_what_power_can_slow_in_prompts_is_asked_about_for_bursts_and_for_long(
    limit_w: float,
) -> None:
    scenario = build_scenario(device="h100_sxm", engine=_PLAIN, power_limit_w=limit_w)
    predictor = RooflinePredictor()
    fetch_surfaces(surface_spec(scenario, 4000), predictor)
    bursts, lasting = predictor.queries
    assert (False, limit_w) == (bursts.sustained, bursts.power_limit_w)
    assert (True, limit_w) == (lasting.sustained, lasting.power_limit_w)
    assert {"gemm", "attention_prefill"} == {table.operator for table in lasting.tables}


@pytest.mark.parametrize(("limit_w", "num_queries"), [(0.0, 1), (120.0, 2)])
def test_devices_of_whose_power_nothing_is_known_are_asked_about_for_bursts_alone(
    limit_w: float, num_queries: int
) -> None:
    scenario = build_scenario(device="a30", engine=_PLAIN, power_limit_w=limit_w)
    predictor = RooflinePredictor()
    fetch_surfaces(surface_spec(scenario, 4000), predictor)
    assert num_queries == len(predictor.queries)


class _SlowForLong(RooflinePredictor):
    """Answers twice the time for what lasts."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        reply = super().predict(query)
        if not query.sustained:
            return reply
        tables = tuple(
            replace(
                answer,
                latency_us=2.0 * np.asarray(answer.latency_us),
                low_us=2.0 * np.asarray(answer.low_us),
                high_us=2.0 * np.asarray(answer.high_us),
            )
            for answer in reply.tables
        )
        return replace(reply, tables=tables)


def test_the_longer_a_step_with_prompts_lasts_the_more_power_slows_it() -> None:
    engine = EngineSpec(profile="plain", max_num_batched_tokens=65536, max_num_seqs=64)
    scenario = build_scenario(device="h100_sxm", engine=engine)
    spec = surface_spec(scenario, 65536)
    burst, slow = (
        SurfaceCost(fetch_surfaces(spec, predictor))
        for predictor in (RooflinePredictor(), _SlowForLong())
    )

    def ratio(num_tokens: int) -> tuple[float, float]:
        step = (StepShape(num_tokens, 0, 0, 0, 0, 1), ((num_tokens, 0),))
        burst_us, slow_us = (_stages_us(cost, step)[0] for cost in (burst, slow))
        return burst_us, slow_us / burst_us

    decodes = (StepShape(64, 64, 64, 64 * 811, 1300, 0), ())
    assert _stages_us(burst, decodes) == _stages_us(slow, decodes)
    found = [ratio(num_tokens) for num_tokens in (256, 2048, 16384, 65536)]
    assert found == sorted(found)
    for burst_us, slowed in found:
        # The mean of 1 - exp(-t / 0.25 s) over a step, of what is not norms and activations.
        share = 1.0 - 0.25e6 / burst_us * (1.0 - np.exp(-burst_us / 0.25e6))
        assert 0.75 * share < slowed - 1.0 < share


def test_power_slows_what_engines_in_lock_step_share_by_the_tokens_of_one() -> None:
    """An engine's part of the tokens tells whether the step decodes, and how long it lasts."""
    engine = EngineSpec(profile="plain", max_num_batched_tokens=16384, max_num_seqs=64)
    layout = ParallelLayout(dp=4, ep=4)
    model = find_model("mixtral-8x7b")
    scenario = build_scenario(model=model, device="h100_sxm", engine=engine, layout=layout)
    spec = surface_spec(scenario, 16384)
    bursts, slowed = (
        fetch_surfaces(spec, predictor).group for predictor in (RooflinePredictor(), _SlowForLong())
    )
    assert bursts is not None
    assert slowed is not None
    is_prompt = bursts.axes[0] > 4 * 64
    same = (bursts.values == slowed.values).all(axis=(0, 1))
    assert same[~is_prompt].all()
    assert not same[is_prompt].any()
