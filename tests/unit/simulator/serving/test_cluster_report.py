"""The report and the tables of a cluster whose record was written by hand."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_records import SCENARIO, build_record

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import ReplicaPhase, ServingReport
from foretoken.simulator.cluster.fleet import make_fleet, pool_scenarios
from foretoken.simulator.serving.efficiency import measure_work
from foretoken.simulator.serving.outcome import build_report
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.step_cost import StepAccount
from foretoken.simulator.serving.tables import build_tables

_MEMORY = ServingMemory(
    usable_bytes=70e9,
    weights_bytes=16e9,
    activations_bytes=2e9,
    kv_bytes_per_token=131072,
    device_bytes=80e9,
)


def _account(steps_s: float) -> StepAccount:
    return StepAccount(
        time_s_by_group={"gemm": steps_s},
        time_s_by_provenance={"measured": steps_s},
        low_s=steps_s,
        high_s=steps_s,
        stage_busy_s=(steps_s,),
    )


@pytest.fixture(scope="module")
def report() -> ServingReport:
    """Return the report; the engines were busy for 0.34, 0.06 and 0.05 s."""
    accounts = [_account(0.34), _account(0.06), _account(0.05)]
    return build_report(ServingReport(), SCENARIO, build_record(), accounts, [[_MEMORY]] * 2)


def test_requests_that_are_lost_or_rejected_count_and_attain_nothing(
    report: ServingReport,
) -> None:
    """Three of five requests complete, with a first token after 100 ms each."""
    assert report.num_requests == 5
    assert report.num_completed == 3
    assert report.num_refused_by_reason == {"rejected": 1, "lost": 1}
    assert report.num_retries == 1
    assert report.slo_attainment_ratio == pytest.approx(0.6)
    assert report.goodput_rps == pytest.approx(3 / 0.5)


def test_the_gap_after_a_first_token_begins_where_it_is_handed_out(
    report: ServingReport,
) -> None:
    """Gaps: 100 to 150 and to 180 ms of request 0, 400 to 500 ms of request 4."""
    assert report.ttft_ms.max == report.ttft_ms.p50 == pytest.approx(100)
    assert report.itl_ms.mean == pytest.approx((50 + 30 + 100) / 3)
    assert report.itl_ms.max == pytest.approx(100)
    assert (report.transfer_ms.mean, report.transfer_ms.max) == pytest.approx((35, 50))


def test_a_request_executes_in_the_steps_of_both_engines(report: ServingReport) -> None:
    """Request 0 takes 100 + 30 + 30 ms, request 1 100, request 4 100 + 50."""
    assert report.execution_ms.mean == pytest.approx((160 + 100 + 150) / 3)
    # What is left of 180, 100 and 200 ms is transfer.
    assert report.preempted_ms.max == pytest.approx(50)


def test_pools_cost_what_they_held(report: ServingReport) -> None:
    """In 0.5 s `first` held 1 device throughout, `rest` 2 throughout and 2 for 0.4 s."""
    first, rest = report.pools
    assert (first.device_s, rest.device_s) == pytest.approx((0.5, 2 * (0.5 + 0.4)))
    assert (first.cost_usd, rest.cost_usd) == pytest.approx((0.5 * 0.001, 1.8 * 0.002))
    assert report.cost_usd == pytest.approx(0.0041)
    assert report.usd_per_million_output_tokens == pytest.approx(0.0041 / 6 * 1e6)
    assert report.output_throughput_tps_per_gpu == pytest.approx(6 / (0.5 + 1.8))
    # Idle power for all of it, 600 W more while busy.
    energy_j = 100 * 2.3 + 600 * (0.34 + 2 * (0.06 + 0.05))
    assert report.energy_wh == pytest.approx(energy_j / 3600)


def test_pools_say_what_their_replicas_did(report: ServingReport) -> None:
    first, rest = report.pools
    assert [pool.name for pool in report.pools] == ["first", "rest"]
    assert (first.running_engines_mean, rest.running_engines_mean) == pytest.approx((0.9, 1.6))
    assert (first.num_requests, rest.num_requests) == (3, 2)
    assert (first.num_failures, rest.num_scale_ups) == (1, 1)
    assert (first.num_devices, rest.num_devices) == (1, 4)
    assert first.utilization_ratio == pytest.approx(0.34 / 0.5)
    assert rest.utilization_ratio == pytest.approx((0.06 + 0.05) / 0.9)
    assert report.utilization_ratio == pytest.approx((0.34 + 2 * 0.11) / 2.3)
    # 10 of 200 blocks for 60 and 50 ms of 900.
    assert rest.kv_utilization_ratio_mean == pytest.approx(10 / 200 * 0.11 / 0.9)
    assert first.sent_bytes_per_s == pytest.approx(2e6)
    assert first.port_utilization_ratio == pytest.approx(0.05 / 0.5)
    assert (rest.num_kv_blocks, rest.kv_block_size) == (200, 32)
    assert (report.num_kv_blocks, report.kv_block_size) == (200, 32)
    assert report.num_devices == 5


def test_replicas_say_when_they_ran(report: ServingReport) -> None:
    failed, steady, late = report.engines
    assert [engine.pool for engine in report.engines] == ["first", "rest", "rest"]
    assert failed.phases == (
        ReplicaPhase(state="running", start_s=0.0, end_s=0.25),
        ReplicaPhase(state="restarting", start_s=0.25, end_s=0.3),
        ReplicaPhase(state="running", start_s=0.3, end_s=0.5),
    )
    assert steady.phases == (ReplicaPhase(state="running", start_s=0.0, end_s=0.5),)
    assert late.phases == (
        ReplicaPhase(state="starting", start_s=0.1, end_s=0.2),
        ReplicaPhase(state="running", start_s=0.2, end_s=0.5),
    )
    assert [engine.num_failures for engine in report.engines] == [1, 0, 0]
    assert [engine.running_s for engine in report.engines] == pytest.approx([0.45, 0.5, 0.3])
    assert steady.stages[0].utilization_ratio == pytest.approx(0.06 / 0.5)
    assert late.stages[0].utilization_ratio == pytest.approx(0.05 / 0.4)


def test_memory_is_that_of_each_pool(report: ServingReport) -> None:
    assert [(stage.pool, stage.kv_bytes) for stage in report.memory] == [
        ("first", 131072 * 100 * 16),
        ("rest", 131072 * 200 * 32),
    ]


def test_no_work_is_lost_or_counted_twice_between_pools() -> None:
    """What prefill and decode replicas need together is what one replica of both would."""
    record = build_record()
    fleet = make_fleet(SCENARIO, record)
    split = measure_work(record, fleet, [[_MEMORY]] * 2).flops_s
    whole = _aggregate(record)
    alone = make_fleet(_plain(), whole)
    together = measure_work(whole, alone, [[_MEMORY]]).flops_s
    assert float(split[0].sum() + 2 * split[1].sum() + 2 * split[2].sum()) == pytest.approx(
        float(together[0].sum())
    )
    # A prompt of thousands of tokens is far more work than an answer of three.
    assert split[0].sum() > 100 * split[1].sum() > 0


def _plain() -> ServingScenario:
    return replace(SCENARIO, cluster=None)


def _aggregate(record: ServingRecord) -> ServingRecord:
    """Return the record with all on its first engine."""
    requests = replace(record.requests, engine=np.zeros(5, dtype=np.int64), prefill_engine=None)
    return replace(record, requests=requests, steps=record.steps[:1], pools=())


def test_the_tables_tell_both_engines_and_the_pool() -> None:
    tables = build_tables(build_record(), SCENARIO)
    requests = tables["requests"].to_pydict()
    assert requests["prefill_engine"] == [0, -1, -1, -1, 0]
    assert requests["engine"] == [1, 0, -1, -1, 2]
    assert requests["transferred_s"] == pytest.approx([0.12, -1, -1, -1, 0.45])
    assert requests["num_retries"] == [0, 0, 0, 0, 1]
    assert requests["outcome"] == ["completed", "completed", "lost", "rejected", "completed"]
    assert requests["ttft_ms"] == [pytest.approx(100), pytest.approx(100), None, None, 100]
    steps = tables["steps"].to_pydict()
    assert steps["pool"] == ["first"] * 4 + ["rest"] * 3
    assert steps["kv_utilization_ratio"] == pytest.approx([0.1] * 4 + [0.05] * 3)


def test_the_series_counts_what_ran() -> None:
    """What stands at the end of the run, at 0.5 s, stands to the end of the second."""
    series = build_tables(build_record(), SCENARIO)["series"].to_pydict()
    assert series["replicas_mean"] == pytest.approx([0.95 + 1.0 + 0.8])
    held_device_s = 1.0 + 2 * (1.0 + 0.9)
    busy_device_s = 0.34 + 2 * (0.06 + 0.05)
    assert series["utilization_ratio"] == pytest.approx([busy_device_s / held_device_s])
    assert series["power_w"] == pytest.approx([100 * held_device_s + 600 * busy_device_s])
    held_block_s = 100 * 1.0 + 200 * (1.0 + 0.9)
    assert series["kv_utilization_ratio"] == pytest.approx([10 * (0.34 + 0.11) / held_block_s])
    assert series["num_output_tokens"] == [7]


def test_a_run_without_a_cluster_has_no_pools_and_nothing_moves() -> None:
    record = _aggregate(build_record())
    tokens = replace(record.tokens, engine=np.zeros(5, dtype=np.int64))
    plain = replace(
        record,
        tokens=tokens,
        requests=replace(record.requests, transferred_ns=None, num_retries=None),
        num_kv_blocks=100,
    )
    found = build_report(ServingReport(), _plain(), plain, [_account(0.34)], [[_MEMORY]])
    assert found.pools == ()
    assert [engine.phases for engine in found.engines] == [()]
    assert (found.num_retries, found.transfer_ms.max) == (0, 0.0)
    requests = build_tables(plain, _plain())["requests"].to_pydict()
    assert requests["prefill_engine"] == [-1] * 5
    assert requests["transferred_s"] == [-1.0] * 5
    assert requests["num_retries"] == [0] * 5


def test_a_pool_takes_from_the_scenario_what_it_does_not_set() -> None:
    first, rest = pool_scenarios(SCENARIO)
    assert (first.device, first.layout, first.device_usd_per_hour) == (
        "h100_sxm",
        SCENARIO.layout,
        3.6,
    )
    assert (rest.layout.tp, rest.device_usd_per_hour, rest.device_busy_w) == (2, 7.2, 700)
    assert first.cluster is None
