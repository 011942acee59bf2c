"""The report of a run: counts, rates, use, energy and money."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from serving_records import (
    BLOCK_SIZE,
    MS,
    NUM_BLOCKS,
    TinyRequest,
    TinyRules,
    run_tiny_engines,
    tiny_runs,
)

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.results.report import REQUEST_OUTCOMES, ServingReport, SteadyWindow
from foretoken.simulator.serving.outcome import build_report
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.serving.step_cost import StepAccount

_SCENARIO = ServingScenario(
    model=find_model("llama-3-8b"),
    device="h100_sxm",
    slo=Slo(ttft_ms=30),
    device_idle_w=100,
    device_busy_w=700,
    device_usd_per_hour=3.6,
)
_MEMORY = ServingMemory(
    usable_bytes=70e9,
    weights_bytes=16e9,
    activations_bytes=2e9,
    graphs_bytes=1e9,
    kv_bytes_per_token=131072,
    device_bytes=80e9,
)


def _account(steps_s: float, **groups: float) -> StepAccount:
    return StepAccount(
        time_s_by_group=groups or {"gemm": steps_s},
        time_s_by_provenance={"measured": steps_s / 4, "interpolated": steps_s * 3 / 4},
        low_s=0.9 * steps_s,
        high_s=1.2 * steps_s,
        stage_busy_s=(steps_s,),
    )


def _report(record: ServingRecord, scenario: ServingScenario = _SCENARIO) -> ServingReport:
    accounts = [
        _account(float(np.sum(steps.end_ns - steps.start_ns)) / 1e9) for steps in record.steps
    ]
    return build_report(ServingReport(model_version="v"), scenario, record, accounts, [[_MEMORY]])


def _two_requests() -> ServingRecord:
    """Return a record whose steps end at 13, 24, 35, 46 and 57 ms, each with 10 ms of work."""
    requests = [
        TinyRequest(arrival_ns=2 * MS, prompt=12, answer=3),
        TinyRequest(arrival_ns=3 * MS, prompt=4, answer=1),
    ]
    return run_tiny_engines(requests, TinyRules(max_seqs=1))


def test_rates_count_from_the_first_arrival_to_the_last_completion() -> None:
    report = _report(_two_requests())
    assert report.duration_s == pytest.approx(0.055)
    assert report.num_completed == 2
    assert report.request_throughput_rps == pytest.approx(2 / 0.055)
    assert report.input_throughput_tps == pytest.approx(16 / 0.055)
    assert report.output_throughput_tps == pytest.approx(4 / 0.055)
    assert report.offered_rps == pytest.approx(1000)
    assert report.slo_attainment_ratio == 0.5
    assert report.goodput_rps == pytest.approx(1 / 0.055)
    assert report.model_version == "v"


def test_rates_per_gpu_divide_by_all_devices() -> None:
    layout = ParallelLayout(tp=2)
    report = _report(_two_requests(), replace(_SCENARIO, layout=layout))
    assert report.num_devices == 2
    assert report.output_throughput_tps_per_gpu == pytest.approx(report.output_throughput_tps / 2)
    assert report.request_throughput_rps_per_gpu == pytest.approx(1 / 0.055)


def test_energy_is_idle_power_throughout_and_the_rest_while_busy() -> None:
    report = _report(_two_requests())
    energy_j = 0.055 * 100 + 0.05 * 600
    assert report.energy_wh == pytest.approx(energy_j / 3600)
    assert report.energy_j_per_output_token == pytest.approx(energy_j / 4)
    assert report.power_w_mean == pytest.approx(energy_j / 0.055)
    limited = _report(_two_requests(), replace(_SCENARIO, power_limit_w=500.0))
    assert limited.energy_wh == pytest.approx((0.055 * 100 + 0.05 * 400) / 3600)


def test_cost_is_the_price_of_all_devices_for_the_duration() -> None:
    report = _report(_two_requests(), replace(_SCENARIO, layout=ParallelLayout(tp=2)))
    assert report.cost_usd == pytest.approx(2 * 0.001 * 0.055)
    assert report.usd_per_million_output_tokens == pytest.approx(2 * 0.001 * 0.055 / 4 * 1e6)
    assert report.usd_per_million_tokens == pytest.approx(2 * 0.001 * 0.055 / 20 * 1e6)


def test_without_power_and_price_there_is_no_energy_and_no_cost() -> None:
    scenario = ServingScenario(model=_SCENARIO.model, device="h100_sxm")
    report = _report(_two_requests(), scenario)
    assert (report.energy_wh, report.power_w_mean, report.cost_usd) == (0, 0, 0)


def test_use_of_engine_and_stage() -> None:
    """A step reads the weights once: 15.01 GB at 3.35 TB/s; the devices could do 989 TFLOP/s."""
    report = _report(_two_requests())
    (engine,) = report.engines
    (stage,) = engine.stages
    assert stage.utilization_ratio == pytest.approx(0.05 / 0.055)
    assert stage.mbu_ratio == pytest.approx(5 * 15.01e9 / 3.35e12 / 0.055, rel=1e-3)
    # 16 prompt tokens and 2 more, the head on 4: twice 6.98 and 0.525 billion parameters.
    flops = 2 * (18 * 6.98e9 + 4 * 0.525e9)
    assert stage.mfu_ratio == pytest.approx(flops / 989.5e12 / 0.055, rel=5e-3)
    assert (report.utilization_ratio, report.mfu_ratio) == (
        stage.utilization_ratio,
        stage.mfu_ratio,
    )
    assert (engine.num_requests, engine.num_serving_steps) == (2, 5)


def test_blocks_in_use_are_a_mean_over_time() -> None:
    """2, 3, 4, 4 and 1 blocks stand for 11 ms each, from one schedule to the next."""
    report = _report(_two_requests())
    expected = (2 + 3 + 4 + 4 + 1) * 11 / (NUM_BLOCKS * 55)
    assert report.kv_utilization_ratio_mean == pytest.approx(expected)
    assert report.kv_utilization_ratio_max == pytest.approx(4 / NUM_BLOCKS)
    assert report.num_kv_blocks == NUM_BLOCKS


def test_steps_are_summed_up() -> None:
    report = _report(_two_requests())
    assert report.num_serving_steps == 5
    assert report.batch_size.mean == report.batch_size_mean == 1
    assert report.batch_tokens.max == 8
    assert report.step_ms.p50 == 10
    assert sum(report.batch_tokens_histogram.shares) == pytest.approx(1)
    assert report.running.mean == 1


def test_time_and_what_it_rests_on_add_up_over_engines() -> None:
    requests = [TinyRequest(arrival_ns=i * MS, prompt=5, answer=3) for i in range(4)]
    record = run_tiny_engines(requests, TinyRules(), 2)
    accounts = [_account(2.0, gemm=1.5, attention=0.5), _account(1.0, gemm=0.75, launch=0.25)]
    report = build_report(ServingReport(), _SCENARIO, record, accounts, [[_MEMORY]])
    assert report.step_time_s_by_group == {"gemm": 2.25, "attention": 0.5, "launch": 0.25}
    assert report.step_time_ratio_by_provenance == {"measured": 0.25, "interpolated": 0.75}
    assert report.step_time_low_ratio == pytest.approx(0.9)
    assert report.step_time_high_ratio == pytest.approx(1.2)


def test_memory_has_the_cache_the_run_had() -> None:
    (stage,) = _report(_two_requests()).memory
    assert stage.kv_bytes == NUM_BLOCKS * BLOCK_SIZE * 131072
    assert (stage.device_bytes, stage.weights_bytes, stage.graphs_bytes) == (80e9, 16e9, 1e9)


def test_refused_requests_are_counted_by_reason_and_miss_their_objectives() -> None:
    requests = [TinyRequest(arrival_ns=0, prompt=4, answer=answer) for answer in (1, 0, 0)]
    report = _report(run_tiny_engines(requests, TinyRules()))
    assert report.num_refused_by_reason == {"exceeds_kv_cache": 2}
    assert (report.num_requests, report.num_completed) == (3, 1)
    assert report.slo_attainment_ratio == pytest.approx(1 / 3)


def test_a_run_of_refusals_only_has_no_rates() -> None:
    requests = [TinyRequest(arrival_ns=0, prompt=4, answer=0)]
    report = _report(run_tiny_engines(requests, TinyRules()))
    assert (report.num_requests, report.duration_s, report.goodput_rps) == (1, 0, 0)
    assert report.engines == ()
    assert (report.feasibility.is_feasible, report.was_simulated) == (False, True)
    assert "serves none of the requests" in report.feasibility.reason


def test_figures_of_nothing_are_null_in_data() -> None:
    """Of what was served a zero is a zero: nothing was preempted."""
    refused = _report(
        run_tiny_engines([TinyRequest(arrival_ns=0, prompt=4, answer=0)], TinyRules())
    )
    served = _report(run_tiny_engines([TinyRequest(arrival_ns=0, prompt=4, answer=2)], TinyRules()))

    names = ("ttft_ms", "request_preemptions")
    medians = [[one.to_dict()[name]["p50"] for name in names] for one in (refused, served)]

    assert medians == [[None, None], [served.ttft_ms.p50, 0.0]]
    assert [one.to_dict()["steady"]["ttft_ms"]["p50"] for one in (refused, served)] == [None, None]


def test_a_deployment_that_serves_one_of_its_requests_can_run() -> None:
    requests = [TinyRequest(arrival_ns=0, prompt=4, answer=answer) for answer in (0, 2)]
    assert _report(run_tiny_engines(requests, TinyRules())).feasibility.is_feasible


def test_each_class_is_judged_by_its_own_limits() -> None:
    requests = [
        TinyRequest(arrival_ns=0, prompt=4, answer=2, slo_class=number) for number in (0, 1, 1, -1)
    ]
    classes = (
        SloClass(name="chat", slo=Slo(ttft_ms=1)),
        SloClass(name="batch"),
    )
    report = _report(
        run_tiny_engines(requests, TinyRules(budget=100, max_seqs=9)),
        replace(_SCENARIO, slo_classes=classes),
    )
    chat, batch, other = report.classes
    assert [item.name for item in report.classes] == ["chat", "batch", ""]
    assert [item.num_requests for item in report.classes] == [1, 2, 1]
    assert (chat.is_limited, batch.is_limited, other.is_limited) == (True, False, True)
    assert (chat.slo_attainment_ratio, batch.slo_attainment_ratio) == (0, 1)
    assert batch.goodput_rps == pytest.approx(2 / report.duration_s)
    assert report.slo_attainment_ratio == 0.75
    assert chat.ttft_ms.p50 == 11


def test_a_steady_window_leaves_the_ends_out() -> None:
    requests = [TinyRequest(arrival_ns=i * 100 * MS, prompt=4, answer=4) for i in range(11)]
    report = _report(run_tiny_engines(requests, TinyRules(budget=100)))
    steady = report.steady
    assert (steady.start_s, steady.end_s) == (0.1, 0.9)
    assert steady.num_requests == 8
    assert steady.output_throughput_tps == pytest.approx(32 / 0.8)
    assert steady.request_throughput_rps == pytest.approx(8 / 0.8)
    assert steady.ttft_ms.p50 == 11


def test_a_steady_window_counts_the_tokens_that_left() -> None:
    """Of two tokens sampled from in a step one is refused."""
    requests = [TinyRequest(arrival_ns=i * 100 * MS, prompt=4, answer=4) for i in range(11)]
    record = run_tiny_engines(requests, TinyRules(budget=100))
    [steps] = record.steps
    doubled = replace(steps, num_rows=2 * steps.num_rows, num_output_tokens=steps.num_rows)
    report = _report(replace(record, steps=[doubled]))
    assert report.steady.output_throughput_tps == pytest.approx(32 / 0.8)


def test_requests_that_arrive_at_once_have_a_window_too() -> None:
    steady = _report(_two_requests()).steady
    assert steady != SteadyWindow()
    at_once = [TinyRequest(arrival_ns=0, prompt=4, answer=40) for _ in range(3)]
    report = _report(run_tiny_engines(at_once, TinyRules()))
    assert report.steady.end_s == pytest.approx(0.9 * report.duration_s)
    assert report.offered_rps == 0


@settings(max_examples=25, deadline=None)
@given(run=tiny_runs())
def test_counts_and_ratios_hold_for_any_run(
    run: tuple[Sequence[TinyRequest], ServingRecord],
) -> None:
    requests, record = run
    report = _report(
        record, replace(_SCENARIO, slo_classes=(SloClass(name="a"), SloClass(name="b")))
    )
    assert report.num_completed + sum(report.num_refused_by_reason.values()) == len(requests)
    assert sum(item.num_requests for item in report.classes) == len(requests)
    assert sum(engine.num_requests for engine in report.engines) in (0, report.num_completed)
    for ratio in (
        report.utilization_ratio,
        report.slo_attainment_ratio,
        report.kv_utilization_ratio_mean,
    ):
        assert 0 <= ratio <= 1
    assert report.kv_utilization_ratio_mean <= report.kv_utilization_ratio_max
    assert report.goodput_rps <= report.request_throughput_rps + 1e-9
    assert report.execution_ms.mean + report.preempted_ms.mean == pytest.approx(
        report.service_ms.mean
    )


def test_outcomes_have_the_names_that_users_read() -> None:
    assert REQUEST_OUTCOMES == ("unfinished", *(item.name.lower() for item in RequestOutcome))
