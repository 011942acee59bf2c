"""Search over a cluster of several kinds of node."""

import json
from dataclasses import replace

import numpy as np
import pytest
from placement_fakes import GROUPS, SheetPredictor, build_request

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    NodeGroup,
    StrategyColumns,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.training.search import count_points, search_training
from foretoken.simulator.training.step import simulate_training
from foretoken.wire import ipc


def _search(request: TrainingSearchRequest) -> TrainingSearchReport:
    return search_training(request, SheetPredictor(), InlineContext())


@pytest.fixture(scope="module")
def of_subsets() -> TrainingSearchReport:
    """Return the answer for the cluster and all smaller ones."""
    return _search(_of_subsets())


def _of_subsets() -> TrainingSearchRequest:
    return build_request(has_subsets=True, tp=(4,), objective="cost")


def test_every_point_is_counted_once(of_subsets: TrainingSearchReport) -> None:
    request, report = _of_subsets(), of_subsets
    ruled_out = sum(item.num_strategies for item in report.ruled_out)
    assert count_points(request) == report.num_points == report.num_fitting + ruled_out
    assert report.num_fitting == len(report.candidates.name) == len(set(report.candidates.name))
    assert report.num_fitting <= report.num_legal <= report.num_points


def test_columns_hang_together(of_subsets: TrainingSearchReport) -> None:
    table = of_subsets.candidates
    tokens = np.asarray(table.global_batch_size) * 4096
    seconds = np.asarray(table.step_time_ms) / 1e3
    assert np.allclose(table.tokens_per_s, tokens / seconds)
    assert np.allclose(np.asarray(table.tokens_per_s_per_gpu) * table.num_devices, tokens / seconds)
    layout = np.asarray(table.tp) * table.pp * np.asarray(table.dp) * np.asarray(table.cp)
    assert np.array_equal(layout, table.num_devices)
    prices = {"a100_sxm_80": 4.0, "a40": 1.0}
    for row, device in enumerate(table.device):
        nodes = [part.split(" ") for part in str(device).split(" + ")]
        usd = sum(8 * int(count) * prices[name] for count, name in nodes)
        assert table.usd_per_step[row] == pytest.approx(usd * seconds[row] / 3600)
        layers = [int(count) for count in str(table.stage_layers[row]).split(",")]
        assert sum(layers) == 32
        assert len(layers) == table.pp[row] * table.virtual_stages[row]
        stages = [part.split(" x ") for part in str(table.placement[row]).split(",")]
        assert table.pp[row] == sum(int(count) for count, _ in stages)
    assert np.all(np.asarray(table.step_time_low_ms) <= table.step_time_ms)
    assert np.all(np.asarray(table.step_time_high_ms) >= table.step_time_ms)
    assert np.all((np.asarray(table.mfu_ratio) > 0) & (np.asarray(table.mfu_ratio) < 1))


def test_candidates_travel_as_a_table(of_subsets: TrainingSearchReport) -> None:
    table = of_subsets.candidates
    found = ipc.table_to_record(ipc.record_to_table(table), StrategyColumns)
    assert table == found


def test_the_front_of_cost_is_what_none_beats_in_both(of_subsets: TrainingSearchReport) -> None:
    table = of_subsets.candidates
    speed, usd = np.asarray(table.tokens_per_s), np.asarray(table.usd_per_billion_tokens)
    for row in range(len(speed)):
        beaten = (speed >= speed[row]) & (usd <= usd[row])
        beaten &= (speed > speed[row]) | (usd < usd[row])
        assert table.is_pareto_cost[row] == (not beaten.any())


@pytest.mark.parametrize(
    ("objective", "column", "sign"),
    [
        ("step_time", "step_time_ms", 1),
        ("throughput_per_gpu", "tokens_per_s_per_gpu", -1),
        ("cost", "usd_per_billion_tokens", 1),
        ("memory_headroom", "margin_bytes", -1),
    ],
)
def test_the_best_is_named(
    of_subsets: TrainingSearchReport, objective: str, column: str, sign: int
) -> None:
    """By every objective; the best by the one that is asked for has the first rank."""
    asked = _search(build_request(objective=objective, tp=(2,), micro_batch_sizes=(1,)))
    for report in (of_subsets, asked):
        values = sign * np.asarray(getattr(report.candidates, column))
        best = list(report.candidates.name).index(report.best[objective])
        assert values[best] == values.min()
    assert asked.candidates.rank[best] == 1


@pytest.mark.slow
def test_the_best_cut_is_no_slower_than_the_even_one() -> None:
    """Cuts whose longest stage is as long differ by less than 2 %: in what the others wait for."""
    steps = []
    for partition in ("even", "min_max", "dynamic"):
        table = _search(build_request(partition=partition, micro_batch_sizes=(1,))).candidates
        steps.append(dict(zip(table.name, table.step_time_ms, strict=True)))
    even, filled, best = steps
    assert set(even) <= set(filled) == set(best)
    for name, step_ms in best.items():
        assert step_ms <= 1.02 * min(even.get(name, np.inf), filled[name])
    assert sum(best[name] for name in even) < 0.9 * sum(even.values())


def test_finalists_are_simulated_as_the_scenario_says() -> None:
    context = InlineContext()
    request = build_request(num_finalists=2, objective="step_time")
    report = search_training(request, SheetPredictor(), context)
    assert [1, 2] == [item.rank for item in report.finalists]
    assert report.num_simulated == len(context.finalists) == 2
    for item in report.finalists:
        assert item.name == report.candidates.name[item.candidate]
        content = json.loads(item.scenario_json)
        scenario = schema.decode(TrainingScenario, content, "scenario")
        assert {"a100_sxm_80", "a40"} == set(scenario.stage_devices)
        again = simulate_training(scenario, SheetPredictor(), None)
        assert again.step_time_ms == item.report.step_time_ms
        assert item.closed_form_ms == pytest.approx(item.report.step_time_ms, rel=1e-9)


@pytest.mark.slow
def test_what_was_left_out_is_said() -> None:
    groups = tuple(replace(group, num_nodes=4) for group in GROUPS)
    report = _search(build_request(node_groups=groups, tp=(4,), micro_batch_sizes=(1,)))
    assert any("orders of stages were not tried" in note for note in report.notes)


def test_strategies_without_memory_are_counted_with_a_reason() -> None:
    groups = (NodeGroup(device="a40", num_nodes=1),)
    report = _search(build_request(node_groups=groups, recompute="none", tp=(1,)))
    (verdict,) = [item for item in report.ruled_out if item.verdict == "memory"]
    assert verdict.num_strategies > 0
    assert "layers" in verdict.reason or "cut" in verdict.reason


def test_batches_and_degrees_that_do_not_divide_are_counted() -> None:
    report = _search(build_request(global_batch_sizes=(31,), tp=(2,), virtual_stages=(1,)))
    assert {"global_batch_size"} == {item.verdict for item in report.ruled_out} - {"memory"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"objective": "cost", "node_groups": (NodeGroup(device="a40"),)}, "price a40"),
        ({"overlaps": ("all",)}, "not searched over overlaps"),
        ({"devices": ("a40",)}, "not searched over devices"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        _search(build_request(**changes))


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(UnknownDeviceError):
        count_points(build_request(node_groups=(NodeGroup(device="a41"),)))
