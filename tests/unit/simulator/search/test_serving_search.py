"""A search over deployments: what it counts, rules out, ranks, sizes and simulates."""

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.hardware_change import HARDWARE_CHANGES
from foretoken.simulator.search.serving.points import PAIR_TTFT_ERROR_RATIO, TTFT_ERROR_RATIO
from foretoken.simulator.search.serving.search import (
    ServingSearch,
    candidate_scenario,
    count_points,
)

_DEVICE = "h100_sxm"


class _Roofline:
    """Answers twice the roofline, give or take `error_ratio`; counts how often it was asked."""

    def __init__(self, error_ratio: float = 0.1) -> None:
        self.error_ratio = error_ratio
        self.num_queries = 0

    def list_models(self) -> tuple[ModelVersion, ...]:
        return (
            ModelVersion(
                version="roofline", created_at="", snapshot_hash="", num_rows=0, is_active=True
            ),
        )

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.num_queries += 1
        tables = tuple(self._answer(query, table) for table in query.tables)
        return LatencyReply(model_version="roofline", tables=tables)

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        spec = find_operator(table.operator)
        dims = {name: np.asarray(column) for name, column in table.columns.items()}
        if spec.is_collective:
            terms = collective_terms(spec, dims, 1, topology_of_device(query.device))
        else:
            device = find_device(query.device)
            terms = compute_terms(spec, dims, table.dtype, table.phase, device)
        roofline = np.maximum(terms.compute_us, terms.memory_us) + np.zeros(table.num_rows)
        latency_us = 2.0 * roofline + terms.floor_us
        return LatencyColumns(
            latency_us=latency_us,
            low_us=latency_us * (1 - self.error_ratio),
            high_us=latency_us * (1 + self.error_ratio),
            provenance=np.full(table.num_rows, Provenance.ANALYTICAL.value),
        )


def _request(**changes: Any) -> ServingSearchRequest:
    workload = WorkloadSpec(
        num_requests=8, prefill=LengthSpec(mean=200), decode=LengthSpec(mean=20)
    )
    request = ServingSearchRequest(
        scenario=ServingScenario(
            model=find_model("llama-3.1-8b"), device=_DEVICE, workload=workload
        ),
        space=ServingSpace(
            max_devices=4, tp=(1, 2), max_num_seqs=(1, 8, 32), max_num_batched_tokens=(2048,)
        ),
        num_finalists=0,
    )
    return replace(request, **changes)


def _limits(ttft_ms: float, tpot_ms: float) -> ServingTargets:
    return ServingTargets(
        limits=(
            LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=ttft_ms),
            LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=tpot_ms),
        )
    )


def _search(predictor: _Roofline) -> ServingSearch:
    # A search queries a predictor for no more than this.
    return ServingSearch(cast("PredictorPort", predictor))


def _run(request: ServingSearchRequest, error_ratio: float = 0.1) -> ServingSearchReport:
    return _search(_Roofline(error_ratio)).run(request, InlineContext())


def _best(report: ServingSearchReport) -> float:
    table = report.candidates
    qualifies = np.asarray(table.rank) > 0
    return float(np.asarray(table.output_throughput_tps_per_gpu)[qualifies].max(initial=0.0))


def test_every_distinct_point_is_a_candidate_or_counted() -> None:
    """Candidates and pairs ruled out by a pool add up; verdicts count all that do not qualify."""
    request = _request(targets=_limits(1000, 8))

    report = _run(request)

    qualified = int((np.asarray(report.candidates.rank) > 0).sum())
    assert report.num_points == count_points(request)
    assert report.num_distinct <= report.num_points
    assert sum(report.num_ruled_out_by_verdict.values()) + qualified == report.num_distinct
    assert len(set(report.candidates.name)) == len(report.candidates.name)


def test_candidates_are_in_order_of_their_objective() -> None:
    """Behind the ties that share the first place throughput only falls; others have no rank."""
    report = _run(_request())

    rank = np.asarray(report.candidates.rank)
    value = np.asarray(report.candidates.output_throughput_tps_per_gpu)[rank > 1]
    assert report.best == report.candidates.name[0]
    assert (np.diff(value) <= 1e-9).all()
    assert (np.diff(rank[rank > 0]) >= 0).all()


def test_without_error_only_equals_tie() -> None:
    """A predictor that is sure leaves a winner; one that is not leaves ties with it."""
    sure, unsure = _run(_request(), 0.0), _run(_request(), 0.9)

    assert sure.best == unsure.best
    table = sure.candidates
    tied = np.asarray(table.output_throughput_tps_per_gpu)[np.asarray(table.rank) == 1]
    assert tied.tolist() == pytest.approx([tied[0]] * len(tied))
    assert len(unsure.ties) > len(sure.ties)


def test_ranks_count_the_devices_that_are_owned_or_those_used() -> None:
    """Of five GPUs tp 2 leaves one idle, tp 4 too; what counts decides what is best per GPU."""
    space = replace(_request().space, max_devices=5, tp=(1, 2, 4))
    prices = {_DEVICE: 2.0}
    owned = _run(_request(space=replace(space, usd_per_hour=prices))).candidates
    used = _run(_request(space=replace(space, usd_per_hour=prices), counted_gpus="used")).candidates

    for table, counts_idle in ((owned, True), (used, False)):
        fits = np.asarray(table.verdict != "devices")
        num_used, num_idle = table.num_devices[fits], table.num_idle_devices[fits]
        counted = np.full(len(num_used), 5) if counts_idle else num_used
        each = table.output_throughput_tps[fits] / counted
        assert table.num_counted_devices[fits].tolist() == counted.tolist()
        assert set((num_used + num_idle).tolist()) == {5}
        assert table.output_throughput_tps_per_gpu[fits].tolist() == pytest.approx(each.tolist())
        assert table.usd_per_hour[fits].tolist() == pytest.approx((2.0 * counted).tolist())
        assert set(num_idle) >= {0, 1}


def test_a_sized_deployment_leaves_nothing_idle() -> None:
    """With a rate to carry, GPUs that a deployment does not need count neither way."""
    owned, used = (
        _run(_request(target_rps=20.0, counted_gpus=counted)).candidates
        for counted in ("owned", "used")
    )

    assert not owned.num_idle_devices.any()
    assert owned.name.tolist() == used.name.tolist()
    assert owned.rank.tolist() == used.rank.tolist()


def test_looser_limits_never_lower_the_best() -> None:
    """What meets a limit meets a looser one."""
    found = [_best(_run(_request(targets=_limits(2000, tpot)))) for tpot in (4, 6, 9, 30)]

    assert found == sorted(found)
    assert found[-1] > 0


def test_more_devices_never_carry_less() -> None:
    """All that fits into few devices fits into more."""
    totals = []
    for most in (1, 2, 4, 8):
        space = replace(_request().space, max_devices=most)
        table = _run(_request(space=space)).candidates
        rates = np.asarray(table.request_throughput_rps)[np.asarray(table.rank) > 0]
        totals.append(float(rates.max()))

    assert totals == sorted(totals)


def test_sized_deployments_carry_the_target_with_the_fewest_devices() -> None:
    """Each carries the rate, and none that qualifies has fewer devices than the least."""
    report = _run(_request(target_rps=40.0))

    table = report.candidates
    qualifies = np.asarray(table.rank) > 0
    assert np.asarray(table.request_throughput_rps)[qualifies].tolist() == pytest.approx(
        [40.0] * int(qualifies.sum())
    )
    assert report.min_devices == np.asarray(table.num_devices)[qualifies].min()


def test_prices_rank_by_cost() -> None:
    """The first is the cheapest for a token; without a price there is nothing to rank by."""
    priced = replace(_request().space, usd_per_hour={_DEVICE: 2.5})

    table = _run(_request(space=priced, objective="cost"), 0.0).candidates

    costs = np.asarray(table.usd_per_million_output_tokens)[np.asarray(table.rank) > 0]
    hours = table.usd_per_hour[0] / 3600 / table.output_throughput_tps_per_gpu[0]
    assert costs[0] == costs.min()
    assert costs[0] == pytest.approx(hours / table.num_devices[0] * 1e6)
    with pytest.raises(InvalidRequestError, match="price h100_sxm"):
        _run(_request(objective="cost"))


def test_what_was_answered_is_not_asked_again() -> None:
    """A second search queries its best alone, each time for bursts and for what power slows."""
    predictor = _Roofline()
    search = _search(predictor)
    search.run(_request(), InlineContext())
    assert predictor.num_queries == 2 * 2

    search.run(_request(targets=_limits(2000, 20)), InlineContext())

    assert predictor.num_queries == 3 * 2


class _ProductsMeasured(_Roofline):
    """Matrix products were measured; all else is transferred."""

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        basis = Provenance.MEASURED if table.operator == "gemm" else Provenance.TRANSFERRED
        answer = super()._answer(query, table)
        return replace(answer, provenance=np.full(table.num_rows, basis.value))


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_the_best_that_is_not_simulated_tells_what_its_time_rests_on(mode: str) -> None:
    """The shares of time are those that simulating it finds, within 5 points."""
    space = replace(_request().space, modes=(mode,))
    request = _request(space=space)

    report = _search(_ProductsMeasured()).run(request, InlineContext())
    simulated = _search(_ProductsMeasured()).run(replace(request, num_finalists=1), InlineContext())

    finalist = next(item for item in simulated.finalists if item.name == report.best)
    expected = finalist.report.step_time_ratio_by_provenance
    shares = report.echo.time_ratio_by_provenance
    assert report.echo.basis == f"the best, {report.best}, in closed form"
    assert sum(shares.values()) == pytest.approx(1.0)
    assert 0.5 < shares["measured"] < 1
    assert shares["measured"] == pytest.approx(expected["measured"], abs=0.05)
    assert shares["transferred"] == pytest.approx(expected["transferred"], abs=0.05)
    assert simulated.echo.time_ratio_by_provenance == {}


def test_a_model_too_large_is_ruled_out_by_memory() -> None:
    """One device of 80 GB does not hold 70 billion weights of two bytes."""
    scenario = replace(_request().scenario, model=find_model("llama-3.1-70b"))
    space = replace(_request().space, tp=(1,))

    report = _run(_request(scenario=scenario, space=space))

    assert report.best == ""
    assert set(report.candidates.verdict) == {"memory"}
    assert all("fit" in reason for reason in report.candidates.reason)


def test_faster_hardware_never_lowers_throughput() -> None:
    """More links, bandwidth or arithmetic help or do nothing; half a prompt helps."""
    report = _run(_request(has_sensitivity=True))

    ratios = {item.change: item.throughput_ratio for item in report.sensitivities}
    for change in HARDWARE_CHANGES:
        assert ratios[change] >= 1 - 1e-9
    both = "memory bandwidth and capacity +50 %"
    assert ratios[both] >= max(
        ratios["memory bandwidth +50 %"], ratios["memory capacity +50 %"]
    ) * (1 - 1e-9)
    assert ratios["prompts half as long"] > 1 > ratios["prompts twice as long"]


def test_finalists_are_simulated_at_their_loads() -> None:
    """The best of each mode is simulated; its curve's rates rise with the load."""
    context = InlineContext()
    space = replace(_request().space, tp=(1,), max_num_seqs=(2,), max_devices=2)

    report = _search(_Roofline()).run(_request(space=space, num_finalists=2), context)

    assert report.num_simulated == len(report.finalists) == len(context.finalists) == 2
    for finalist in report.finalists:
        rates = [probe.rate_rps for probe in finalist.load]
        assert finalist.report.feasibility.is_feasible
        assert finalist.name == report.candidates.name[finalist.candidate]
        assert rates[0] < rates[2]
        assert finalist.scenario_json


def test_one_replica_stands_for_all_that_are_alike() -> None:
    """Four replicas in a closed loop are four times one of them, to the last token."""
    space = replace(_request().space, tp=(1,), max_num_seqs=(8,), modes=("aggregated",))
    request = _request(space=space, num_finalists=1)

    finalist = _search(_Roofline()).run(request, InlineContext()).finalists[0]

    whole = json.loads(finalist.scenario_json)
    assert finalist.report.num_devices == 1
    assert whole["cluster"]["pools"][0]["num_replicas"] == 4
    assert finalist.load[0].rate_rps == 4 * finalist.report.steady.request_throughput_rps


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_what_a_finalist_was_served_obeys_littles_law(mode: str) -> None:
    """Requests/s times how long each takes are the places of the closed loop it was run with."""
    space = replace(_request().space, tp=(1,), max_num_seqs=(96,), max_devices=2, modes=(mode,))
    lengths = {
        "prefill": LengthSpec(kind="uniform", minimum=50, maximum=350),
        "decode": LengthSpec(kind="uniform", minimum=5, maximum=40),
    }
    scenario = replace(_request().scenario, workload=WorkloadSpec(**lengths))

    finalist = _run(_request(scenario=scenario, space=space, num_finalists=1)).finalists[0]

    options = json.loads(finalist.report.scenario_json)["workload"]["arrival_options"]
    steady = finalist.report.steady
    places = steady.request_throughput_rps * steady.e2e_latency_ms.mean / 1000
    assert places == pytest.approx(int(options["concurrency"]), rel=1e-3)
    assert float(options["ramp_s"]) > 0


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_the_closed_form_is_what_a_steady_simulation_shows(mode: str) -> None:
    """Long answers that are all alike: rate and time per token within 5 %."""
    space = replace(_request().space, tp=(1,), max_num_seqs=(4, 8, 12, 16), modes=(mode,))
    workload = WorkloadSpec(prefill=LengthSpec(mean=1000), decode=LengthSpec(mean=200))
    scenario = replace(_request().scenario, workload=workload)

    report = _run(_request(scenario=scenario, space=space, num_finalists=1))

    table, finalist = report.candidates, report.finalists[0]
    steady, row = finalist.report.steady, finalist.candidate
    each = steady.output_throughput_tps / finalist.report.num_devices
    assert each == pytest.approx(table.output_throughput_tps_per_gpu[row], rel=0.05)
    assert steady.tpot_ms.mean == pytest.approx(table.tpot_ms[row], rel=0.05)


def test_the_winner_meets_its_targets_when_simulated() -> None:
    """Where the closed form's first misses a P99, what is next is simulated, and misses have none.

    The limit is the P99 that the first has without one, less a tenth.
    """
    space = replace(_request().space, tp=(1,), modes=("aggregated",))
    first = _run(_request(space=space, num_finalists=1)).finalists[0]
    steady = first.report.steady
    limit = LatencyLimit(metric="tpot_ms", percentile=99, limit_ms=steady.tpot_ms.p99 * 0.9)

    report = _run(_request(space=space, num_finalists=1, targets=ServingTargets(limits=(limit,))))

    winner = report.finalists[0]
    missed = [item for item in report.finalists if not item.is_met]
    assert report.best == winner.name != first.name
    assert winner.is_met
    assert winner.rank == 1
    assert winner.report.steady.tpot_ms.p99 <= limit.limit_ms
    assert [item.rank for item in missed] == [0] * len(missed)
    assert report.candidates.verdict[list(report.candidates.name).index(first.name)] == "tpot_ms"
    qualified = int((np.asarray(report.candidates.rank) > 0).sum())
    assert sum(report.num_ruled_out_by_verdict.values()) + qualified == report.num_distinct


def _first_miss(report: ServingSearchReport) -> tuple[float, float]:
    """Return the TTFT of a search's one finalist in closed form and as simulated, in ms."""
    finalist = report.finalists[0]
    return float(report.candidates.ttft_ms[finalist.candidate]), finalist.report.steady.ttft_ms.mean


def _late_request(limit_ms: float) -> ServingSearchRequest:
    space = ServingSpace(max_devices=2, tp=(1,), modes=("aggregated",), max_num_seqs=(24, 32, 40))
    limit = LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=limit_ms)
    lengths = {
        "prefill": LengthSpec(kind="lognormal", mean=200, spread=0.6),
        "decode": LengthSpec(kind="lognormal", mean=20, spread=0.6),
    }
    space = replace(space, max_num_batched_tokens=(2048,))
    request = _request(num_finalists=1, space=space, targets=ServingTargets(limits=(limit,)))
    engine = replace(request.scenario.engine, rules={"frontend_ms": "0"})  # called in process
    scenario = replace(request.scenario, engine=engine, workload=WorkloadSpec(**lengths))
    return replace(request, scenario=scenario)


def test_a_late_point_is_simulated_before_it_is_ruled_out() -> None:
    """Between the simulated TTFT and the closed form's a limit is met, and the point ranks."""
    told_ms, simulated_ms = _first_miss(_run(_late_request(1e6)))
    assert simulated_ms < told_ms < TTFT_ERROR_RATIO * simulated_ms

    report = _run(_late_request((told_ms + simulated_ms) / 2))

    winner = report.finalists[0]
    assert report.num_near >= report.num_near_simulated > 0
    assert report.num_near_ruled_in > 0
    assert report.best == winner.name
    assert winner.is_met
    assert report.candidates.verdict[winner.candidate] == "ok"
    assert report.candidates.ttft_ms[winner.candidate] > (told_ms + simulated_ms) / 2


def test_a_late_point_that_simulation_finds_late_is_out() -> None:
    """Where simulations miss the limit too they say so; at most two for each finalist wanted."""
    _, simulated_ms = _first_miss(_run(_late_request(1e6)))

    report = _run(_late_request(simulated_ms * 0.9))

    missed = [item for item in report.finalists if not item.is_met]
    assert report.num_near_simulated <= 2
    assert report.num_near_ruled_out > 0
    assert report.num_near_ruled_in + report.num_near_ruled_out <= report.num_near
    for item in missed:
        assert report.candidates.verdict[item.candidate] == "ttft_ms"
        assert "when simulated" in report.candidates.reason[item.candidate]
    qualified = int((np.asarray(report.candidates.rank) > 0).sum())
    assert sum(report.num_ruled_out_by_verdict.values()) + qualified == report.num_distinct


def test_without_simulations_the_closed_form_holds() -> None:
    """No finalist, no judge: what is late in closed form is ruled out by it."""
    told_ms, simulated_ms = _first_miss(_run(_late_request(1e6)))

    report = _run(replace(_late_request((told_ms + simulated_ms) / 2), num_finalists=0))

    late = np.asarray(report.candidates.ttft_ms) > (told_ms + simulated_ms) / 2
    assert set(np.asarray(report.candidates.verdict)[late]) == {"ttft_ms"}


def _pair_request(limit_ms: float) -> ServingSearchRequest:
    space = ServingSpace(max_devices=2, tp=(1,), modes=("disaggregated",), max_num_seqs=(8,))
    space = replace(space, max_num_batched_tokens=(8192,))
    limit = LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=limit_ms)
    workload = WorkloadSpec(prefill=LengthSpec(mean=1000), decode=LengthSpec(mean=200))
    request = _request(num_finalists=1, space=space, targets=ServingTargets(limits=(limit,)))
    return replace(request, scenario=replace(request.scenario, workload=workload))


def test_prefill_replicas_are_late_by_prompts_that_meet_not_by_full_passes() -> None:
    """Where a pass of 8 is over the limit those that may take 8 are not: at most 2 meet."""
    alone_ms = float(np.min(_run(_pair_request(1e6)).candidates.ttft_ms))

    report = _run(_pair_request(alone_ms * 2))

    winner, table = report.finalists[0], report.candidates
    takes_many = np.asarray(table.prefill_batch_size) == 8
    assert set(np.asarray(table.verdict)[takes_many]) == {"ok"}
    assert winner.is_met
    assert winner.report.steady.ttft_ms.mean <= alone_ms * 2


def test_pairs_over_the_limit_by_less_than_their_error_are_simulated() -> None:
    """Where a prompt alone is late by 2 % a simulation says so; by far more none is needed."""
    alone_ms = float(np.min(_run(_pair_request(1e6)).candidates.ttft_ms))

    near = _run(_pair_request(alone_ms * 0.98))
    far = _run(_pair_request(alone_ms / PAIR_TTFT_ERROR_RATIO * 0.98))

    assert near.num_near >= near.num_near_simulated > 0
    assert near.num_near_ruled_in + near.num_near_ruled_out > 0
    assert far.num_near == far.num_simulated == 0
    assert far.num_ruled_out_by_verdict["ttft_ms"] == far.num_distinct


def test_a_candidate_is_a_scenario_of_its_deployment() -> None:
    """Any row of the table can be made the scenario it stands for."""
    search = _search(_Roofline())
    request = _request()
    table = search.run(request, InlineContext()).candidates

    for row in (0, len(table.name) // 2):
        scenario = candidate_scenario(request, row, search)

        assert scenario.name == table.name[row]
        assert scenario.num_devices == table.num_devices[row]
    with pytest.raises(InvalidRequestError, match="there are"):
        candidate_scenario(request, len(table.name), search)
