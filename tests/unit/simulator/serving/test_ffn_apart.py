"""Attention and experts on devices of their own: times, memory, devices, and who can have it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import RooflinePredictor, SilentProgress

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.cluster import SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.cost.ffn_apart import count_micro_batches, together_us
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.cost.surface import LatencySurfaces
from foretoken.simulator.cost.tables import StepShape, stage_us, with_shared_us
from foretoken.simulator.launch.deployment import write_deployment
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch
from foretoken.simulator.serving.feasibility import judge_feasibility
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.scenario_check import check_scenario
from foretoken.simulator.serving.simulation import simulate_serving
from foretoken.simulator.serving.step_cost import SurfaceCost

_EXCHANGE = {"expert_exchange": "all_to_all"}
_TIMES = st.floats(0, 1e6)


class SlowLinks(RooflinePredictor):
    """Links on which collectives take so many times as long."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self._times = times

    def _answer(self, device: str, table: OperatorTable) -> LatencyColumns:
        found = super()._answer(device, table)
        if not find_operator(table.operator).is_collective:
            return found
        return replace(
            found,
            latency_us=found.latency_us * self._times,
            low_us=found.low_us * self._times,
            high_us=found.high_us * self._times,
        )


def _scenario(num_apart: int = 0, micro_batches: int = 3, **changes: Any) -> ServingScenario:
    rules = dict(_EXCHANGE)
    if num_apart:
        rules |= {"ffn_devices": str(num_apart), "ffn_micro_batches": str(micro_batches)}
    engine = EngineSpec(profile="plain", rules=rules, max_num_batched_tokens=512, max_num_seqs=64)
    default = ServingScenario(
        model=find_model("deepseek-v3"),
        device="h200_sxm",
        layout=ParallelLayout(dp=16, ep=16),
        engine=engine,
        workload=WorkloadSpec(
            num_requests=512,
            arrival="closed_loop",
            arrival_options={"concurrency": "256"},
            prefill=LengthSpec(mean=200),
            decode=LengthSpec(mean=100),
        ),
    )
    return replace(default, **changes)


def _surfaces(scenario: ServingScenario, times: float = 1.0) -> LatencySurfaces:
    return fetch_surfaces(surface_spec(scenario, 4096), SlowLinks(times))


def _step_us(surfaces: LatencySurfaces, num_seqs: int, own_us: float) -> float:
    return with_shared_us(SurfaceCost(surfaces).tables, 0, own_us, num_seqs * 16)


@given(_TIMES, _TIMES, _TIMES, st.integers(1, 8), st.integers(1, 100))
def test_steps_are_between_the_longest_stage_and_all_in_turn(
    own: float, experts: float, sent: float, num_parts: int, num_layers: int
) -> None:
    times = [np.array(each) for each in (own, experts, sent, float(num_parts), float(num_layers))]
    whole = float(together_us(*times))
    assert max(own, experts, sent / 2) <= whole * (1 + 1e-9)
    assert whole <= (own + experts + sent) * (1 + 1e-9)
    if num_parts == 1:
        assert whole == pytest.approx(own + experts + sent)


_PARTS_US = st.floats(0.1, 100)


@given(_PARTS_US, _PARTS_US, _PARTS_US, st.integers(1, 6), st.integers(1, 12))
def test_steps_take_what_micro_batches_take_one_by_one(
    own: float, experts: float, way: float, num_parts: int, num_layers: int
) -> None:
    """A timetable: attention, the way out, experts and the way back serve one part at a time."""
    stages = (own, way, experts, way)
    free = [0.0] * len(stages)
    back = [0.0] * num_parts
    for _ in range(num_layers):
        for part in range(num_parts):
            now = back[part]
            for stage, time in enumerate(stages):
                now = free[stage] = max(now, free[stage]) + time
            back[part] = now
    count = num_parts * num_layers
    whole = together_us(own * count, experts * count, 2 * way * count, num_parts, num_layers)
    assert float(whole) == pytest.approx(max(back))


@given(st.integers(1, 10**4), st.integers(0, 8))
def test_steps_of_fewer_tokens_than_micro_batches_stay_whole(num_tokens: int, most: int) -> None:
    parts = int(count_micro_batches(np.array(num_tokens), most))
    assert parts == (most if most and num_tokens >= most else 1)


def test_as_many_devices_of_experts_in_one_part_over_free_links_are_the_plain_engine() -> None:
    plain, apart = _surfaces(_scenario(), 0.0), _surfaces(_scenario(16, 1), 0.0)
    for num_seqs in (1, 7, 64):
        assert _step_us(apart, num_seqs, 1000.0) == pytest.approx(_step_us(plain, num_seqs, 1000.0))
    np.testing.assert_allclose(apart.tokens.values, plain.tokens.values)


def test_slower_links_are_never_faster_and_micro_batches_hide_them() -> None:
    for num_parts in (1, 3):
        scenario = _scenario(16, num_parts)
        times = [_step_us(_surfaces(scenario, slow), 64, 5000.0) for slow in (0.0, 0.5, 1.0, 4.0)]
        assert times == sorted(times)
    whole, parts = (_surfaces(_scenario(16, num), 1.0) for num in (1, 3))
    own_us = 20_000.0  # attention over long contexts, behind which all else hides
    assert _step_us(parts, 64, own_us) < _step_us(whole, 64, own_us)


def test_accounts_of_steps_add_up_to_what_they_take() -> None:
    """Sixteen engines decode alike, so that each is charged what the slowest takes."""
    for scenario in (_scenario(16), _scenario(8, 1)):
        cost = SurfaceCost(_surfaces(scenario))
        for num_seqs in (1, 24, 64):
            shape = StepShape(num_seqs, num_seqs, num_seqs, num_seqs * 900, 1000, 0)
            none = np.zeros(0, dtype=np.int64)
            own_us = stage_us(cost.tables, 0, shape, none, none)
            taken_us = with_shared_us(cost.tables, 0, own_us, 16 * num_seqs)
            account = cost.account(_decode_step(num_seqs))
            assert account.busy_s * 1e6 == pytest.approx(taken_us)
            assert account.low_s < account.busy_s < account.high_s


def _decode_step(num_seqs: int) -> StepRecord:
    """Return one step of an engine in which sequences of 900 tokens decode."""
    one, none = np.ones(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    zero = ("scheduled_ns", "start_ns", "num_prefills", "num_waiting", "num_preempted")
    counts = ("num_tokens", "num_rows", "num_decodes", "num_running", "num_used_blocks")
    prefills = ("prefill_step", "prefill_request", "prefill_tokens", "prefill_context")
    return StepRecord(
        **dict.fromkeys(zero, 0 * one),
        **dict.fromkeys(counts, num_seqs * one),
        **dict.fromkeys(prefills, none),
        end_ns=one,
        decode_kv_tokens=900 * num_seqs * one,
        decode_kv_tokens_max=1000 * one,
    )


def test_memory_adds_up_and_only_attention_keeps_requests() -> None:
    plain, apart = _scenario(), _scenario(8)
    [whole], _ = judge_feasibility(plain, plain.resolve_engine())
    (attending, experts), reason = judge_feasibility(apart, apart.resolve_engine())
    assert not reason
    total = 16 * attending.weights_bytes + 8 * experts.weights_bytes
    assert total == pytest.approx(16 * whole.weights_bytes)
    assert experts.kv_bytes_per_token == 0
    assert attending.kv_bytes_per_token == whole.kv_bytes_per_token
    assert attending.kv_bytes > whole.kv_bytes
    few = _scenario(2)
    _, reason = judge_feasibility(few, few.resolve_engine())
    assert reason.startswith("a device of experts: ")


def test_all_devices_count() -> None:
    scenario = _scenario(8, device_usd_per_hour=2.0)
    assert scenario.num_devices == 24
    report = simulate_serving(
        scenario, lambda spec: fetch_surfaces(spec, RooflinePredictor()), SilentProgress()
    ).report
    assert report.num_devices == 24
    assert report.cost_usd == pytest.approx(24 * 2.0 * report.duration_s / 3600)
    assert {memory.pool for memory in report.memory} == {"", "experts"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": find_model("llama-3-8b")}, "has no experts"),
        ({"layout": ParallelLayout(tp=8, ep=8)}, "step together"),
        ({"num_apart": 7}, "does not divide"),
    ],
)
def test_layouts_that_cannot_have_experts_apart_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    scenario = _scenario(**{"num_apart": 8, **changes})
    _, reason = judge_feasibility(scenario, scenario.resolve_engine())
    assert problem in reason


@pytest.mark.parametrize("profile", ["vllm-0.28", "vllm-0.11", "sglang-0.5.20", "trtllm-1.0"])
def test_engines_that_cannot_start_it_are_refused_with_the_rule(profile: str) -> None:
    scenario = _scenario(8)
    scenario = replace(scenario, engine=replace(scenario.engine, profile=profile))
    with pytest.raises(InvalidRequestError) as refused:
        check_scenario(scenario)
    assert "engine.rules.ffn_devices" in {each.field for each in refused.value.violations}


def test_bounds_that_are_lifted_simulate_it_and_write_no_files(tmp_path: Path) -> None:
    scenario = _scenario(8, layout=ParallelLayout(dp=8, ep=8))
    rules = {**scenario.engine.rules, "can": "{}"}
    lifted = replace(scenario, engine=EngineSpec(profile="vllm-0.30", rules=rules))
    check_scenario(lifted)
    with pytest.raises(InvalidRequestError, match="no files are written for attention"):
        write_deployment(lifted, tmp_path)


def test_engines_that_speculate_are_refused() -> None:
    engine = replace(_scenario(8).engine, profile="plain")
    scenario = _scenario(8, engine=engine, speculative=SpeculativeSpec(method="ngram"))
    with pytest.raises(InvalidRequestError) as refused:
        check_scenario(scenario)
    assert "engine.rules.ffn_devices" in {each.field for each in refused.value.violations}


_APART = "expert_exchange=all_to_all+ffn_devices=8"


@pytest.mark.slow
def test_a_search_tries_it_where_it_is_asked_for_and_simulates_what_it_predicts() -> None:
    scenario = _scenario()
    space: dict[str, Any] = {"tp": (1,), "dp": (16,), "ep": (16,), "modes": ("aggregated",)}
    request = ServingSearchRequest(
        scenario=scenario,
        space=ServingSpace(
            max_devices=24,
            max_num_seqs=(256,),
            max_num_batched_tokens=(512,),
            rules=("expert_exchange=all_to_all", _APART),
            **space,
        ),
        num_finalists=2,
    )
    predictor = cast("PredictorPort", RooflinePredictor())
    report = ServingSearch(predictor).run(request, InlineContext())
    columns = report.candidates
    devices = dict(zip(columns.rules, np.asarray(columns.num_devices).tolist(), strict=True))
    assert devices == {"expert_exchange=all_to_all": 16, _APART: 24}
    assert set(columns.verdict) == {"ok"}
    apart = [each for each in report.finalists if columns.rules[each.candidate] == _APART]
    assert len(apart) == 1
    for finalist in apart:
        expected_ms = np.asarray(columns.tpot_ms)[finalist.candidate]
        assert finalist.report.tpot_ms.mean == pytest.approx(float(expected_ms), rel=0.05)
