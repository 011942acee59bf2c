import json
from dataclasses import replace
from typing import Any

import pytest
from serving_fakes import (
    RooflinePredictor,
    SilentProgress,
    build_scenario,
    plain_engine,
    simulate,
)

from foretoken.domain import schema
from foretoken.domain.errors import (
    CancelledJobError,
    InvalidRequestError,
    UnknownDeviceError,
    UnknownPluginError,
)
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, Request, WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.serving.simulation import simulate_serving

_LIGHT = WorkloadSpec(arrival="constant", rate_rps=0.2, num_requests=3)


def _offline(num_requests: int, num_prefill: int, num_decode: int) -> WorkloadSpec:
    request = Request(arrival_s=0.0, num_prefill_tokens=num_prefill, num_decode_tokens=num_decode)
    return WorkloadSpec(arrival="trace", trace_requests=(request,) * num_requests)


def _poisson(rate_rps: float, num_requests: int = 60) -> WorkloadSpec:
    return WorkloadSpec(
        rate_rps=rate_rps,
        num_requests=num_requests,
        prefill=LengthSpec(kind="uniform", minimum=20, maximum=900),
        decode=LengthSpec(kind="uniform", minimum=1, maximum=200),
    )


def test_an_idle_machine_serves_a_request_in_its_prefill_and_decode_steps() -> None:
    report = simulate(build_scenario(workload=_LIGHT))
    assert (report.num_requests, report.num_completed) == (3, 3)
    assert report.num_serving_steps == 3 * 128
    assert report.ttft_ms.p50 == pytest.approx(report.ttft_ms.max)
    assert report.queueing_ms.max == 0.0
    # The weights of a 7B model in bf16 cross 933 GB/s once per step.
    assert 15.0 < report.itl_ms.p50 < 20.0
    assert report.tpot_ms.mean == pytest.approx(report.itl_ms.mean)
    assert report.e2e_latency_ms.mean == pytest.approx(
        report.ttft_ms.mean + 127 * report.tpot_ms.mean
    )
    assert report.duration_s == pytest.approx(10.0 + report.e2e_latency_ms.mean / 1000)


def test_the_report_is_consistent_with_itself() -> None:
    report = simulate(build_scenario(workload=_poisson(4.0), layout=ParallelLayout(dp=2)))
    columns = report.requests
    assert report.num_completed == report.num_requests == len(columns.arrival_s) == 60
    assert report.request_throughput_rps == pytest.approx(60 / report.duration_s)
    assert report.output_throughput_tps == pytest.approx(
        sum(columns.num_decode_tokens) / report.duration_s
    )
    assert report.output_throughput_tps_per_gpu == report.output_throughput_tps / 2
    assert report.input_throughput_tps == pytest.approx(
        sum(columns.num_prefill_tokens) / report.duration_s
    )
    assert report.duration_s == pytest.approx(max(columns.finished_s) - min(columns.arrival_s))
    busy_s = sum(report.step_time_s_by_group.values())
    assert report.utilization_ratio == pytest.approx(busy_s / report.duration_s / 2)
    assert 0 < report.mfu_ratio < report.utilization_ratio < 1
    assert sum(report.step_time_ratio_by_provenance.values()) == pytest.approx(1.0)
    assert report.step_time_ratio_by_provenance["measured"] == pytest.approx(
        report.step_time_s_by_group["gemm"] / busy_s
    )
    assert report.step_time_low_ratio == pytest.approx(0.8)
    assert report.step_time_high_ratio == pytest.approx(1.5)
    assert 0 < report.kv_utilization_ratio_mean < report.kv_utilization_ratio_max < 1
    assert 1 <= report.batch_size_mean <= 256
    assert report.model_version == "roofline"
    assert report.slo_attainment_ratio == 1.0
    assert report.goodput_rps == report.request_throughput_rps


@pytest.mark.parametrize(
    ("framework", "software"), [("", "vllm 0.28-0.31"), ("vllm 0.20", "vllm 0.20")]
)
def test_whose_measurements_stand_in_for_the_engines_is_a_remark(
    framework: str, software: str
) -> None:
    others = {"add_rms_norm": "trtllm 1.0", "gemm": "trtllm 1.0", "all_reduce": "nccl 2.29.2"}
    predictor = RooflinePredictor(frameworks=others)
    scenario = build_scenario(
        workload=_LIGHT, engine=EngineSpec(), framework=framework, layout=ParallelLayout(tp=2)
    )
    notes = simulate(scenario, predictor).notes
    assert [
        f"add_rms_norm, gemm: measured under trtllm 1.0, not {software} (wider interval)",
        f"all_reduce: measured under nccl 2.29.2, not {software} (wider interval)",
    ] == sorted(notes)
    [query] = predictor.queries
    assert (framework, "vllm 0.28-0.31") == (query.framework, query.preferred_framework)


def test_without_other_software_there_is_no_remark() -> None:
    assert () == simulate(build_scenario(workload=_LIGHT)).notes


def test_the_mfu_of_one_long_prefill_is_its_flops_over_the_peak() -> None:
    scenario = build_scenario(
        workload=_offline(1, 2048, 1), engine=plain_engine(max_num_batched_tokens=2048)
    )
    report = simulate(scenario)
    # 7.07 billion parameters outside the embedding tables, the head for one token, attention.
    num_flops = 2 * 2048 * 6.525e9 + 2 * 0.545e9 + 28 * 28 * 128 * 4 * 2048 * 2049 / 2
    assert report.mfu_ratio == pytest.approx(num_flops / (165e12 * report.duration_s), rel=0.005)


def test_more_load_means_more_waiting_and_more_throughput() -> None:
    reports = [simulate(build_scenario(workload=_poisson(rate))) for rate in (0.5, 2.0, 8.0)]
    ttfts = [report.ttft_ms.mean for report in reports]
    assert sorted(ttfts) == ttfts
    throughputs = [report.output_throughput_tps for report in reports]
    assert sorted(throughputs) == throughputs
    assert sorted(r.batch_size_mean for r in reports) == [r.batch_size_mean for r in reports]


def test_a_second_replica_takes_every_other_request() -> None:
    workload = _poisson(6.0)
    one = simulate(build_scenario(workload=workload))
    two = simulate(build_scenario(workload=workload, layout=ParallelLayout(dp=2)))
    assert two.ttft_ms.mean < one.ttft_ms.mean
    assert list(two.requests.arrival_s) == list(one.requests.arrival_s)


def test_stages_raise_throughput_but_not_the_speed_of_one_request() -> None:
    """Two stages hold half the weights each; a lone request passes both one after the other."""
    lone, many = _offline(1, 512, 50), _offline(64, 512, 50)
    engine = plain_engine(max_num_batched_tokens=1024)
    scenario = build_scenario(device="a100_sxm_80", workload=lone, engine=engine)
    staged = replace(scenario, layout=ParallelLayout(pp=2))
    lone_ms = [simulate(s).e2e_latency_ms.mean for s in (scenario, staged)]
    assert lone_ms[0] < lone_ms[1] < 1.1 * lone_ms[0]
    durations = [simulate(replace(s, workload=many)).duration_s for s in (scenario, staged)]
    assert durations[1] < durations[0]


def test_the_next_token_waits_for_the_last_stage() -> None:
    """Asynchronous scheduling hides the host, not the stages that a token has to pass."""
    scenario = build_scenario(device="a100_sxm_80", workload=_offline(1, 512, 50))
    asynchronous = EngineSpec(profile="vllm-0.19")
    one, two = (
        simulate(replace(scenario, engine=asynchronous, layout=ParallelLayout(pp=num_stages)))
        for num_stages in (1, 2)
    )
    assert one.tpot_ms.mean < two.tpot_ms.mean


def test_requests_of_one_instant_share_the_first_step() -> None:
    report = simulate(build_scenario(workload=_offline(3, 100, 2)))
    assert report.num_serving_steps == 2
    assert report.ttft_ms.p50 == report.ttft_ms.max


def test_a_small_cache_preempts_and_serves_everyone_all_the_same() -> None:
    scenario = build_scenario(workload=_offline(8, 100, 100))
    ample = simulate(scenario)
    tight = simulate(replace(scenario, engine=plain_engine(num_kv_blocks=40)))
    assert ample.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert tight.num_completed == 8
    assert tight.num_kv_blocks == 40
    assert tight.kv_utilization_ratio_max > 0.95
    assert tight.mfu_ratio < ample.mfu_ratio


def test_requests_too_long_for_model_or_cache_are_refused() -> None:
    scenario = build_scenario(
        model=find_model("phi-2"),
        workload=WorkloadSpec(
            arrival="trace",
            trace_requests=tuple(
                Request(arrival_s=0.0, num_prefill_tokens=n, num_decode_tokens=10)
                for n in (100, 3000)
            ),
        ),
        slo=Slo(),
    )
    report = simulate(scenario)
    assert (report.num_requests, report.num_completed) == (2, 1)
    assert report.requests.finished_s[1] == report.requests.scheduled_s[1] == -1.0
    assert report.slo_attainment_ratio == 0.5
    nobody = simulate(replace(scenario, engine=plain_engine(num_kv_blocks=2)))
    assert (nobody.num_completed, nobody.duration_s, nobody.goodput_rps) == (0, 0.0, 0.0)


def test_the_host_gap_makes_steps_longer_and_the_device_idler() -> None:
    plain = simulate(build_scenario(workload=_LIGHT))
    gap = simulate(build_scenario(workload=_LIGHT, engine=plain_engine(rules={"host_us": "1000"})))
    assert gap.itl_ms.p50 == pytest.approx(plain.itl_ms.p50 + 1.0)
    assert gap.step_time_s_by_group == plain.step_time_s_by_group


def test_limits_divide_the_requests() -> None:
    scenario = build_scenario(workload=_poisson(6.0))
    ttft_ms = simulate(scenario).ttft_ms.p50
    report = simulate(replace(scenario, slo=Slo(ttft_ms=ttft_ms)))
    assert report.slo_attainment_ratio == 0.5
    assert report.goodput_rps == pytest.approx(report.request_throughput_rps / 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": find_model("llama-3-70b")}, "does not fit into"),
        ({"layout": ParallelLayout(tp=3), "device": "a100_sxm_80"}, "3 does not divide"),
        ({"layout": ParallelLayout(cp=2), "device": "a100_sxm_80"}, "simulated for training alone"),
    ],
)
def test_what_cannot_run_is_a_result_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    predictor = RooflinePredictor()
    report = simulate(build_scenario(**changes), predictor)
    assert not report.feasibility.is_feasible
    assert reason in report.feasibility.reason
    assert report.num_requests == 100
    assert report.offered_rps > 0
    assert predictor.queries == []


def test_rules_of_the_engine_must_mean_something() -> None:
    engine = plain_engine(rules={"block_size": "0"})
    with pytest.raises(InvalidRequestError, match=r"engine\.rules\.block_size: must be at least 1"):
        simulate(build_scenario(engine=engine))


def test_unknown_names_are_errors() -> None:
    with pytest.raises(UnknownPluginError, match="chunked_prefill"):
        simulate(build_scenario(engine=plain_engine(rules={"scheduler": "chunked"})))
    with pytest.raises(UnknownPluginError, match="vllm"):
        simulate(build_scenario(engine=EngineSpec(profile="vlm")))
    with pytest.raises(UnknownDeviceError, match="a30"):
        simulate(build_scenario(device="a3"))


def test_the_same_scenario_gives_the_same_bytes() -> None:
    def run(seed: int) -> str:
        result = simulate_serving(
            build_scenario(workload=_poisson(3.0), seed=seed),
            lambda spec: fetch_surfaces(spec, RooflinePredictor()),
            SilentProgress(),
        )
        tables = {name: table.to_pydict() for name, table in result.tables.items()}
        return json.dumps([schema.encode(result.report), tables])

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_resolved_scenario_and_the_requests_make_the_report_complete() -> None:
    scenario = build_scenario(workload=_offline(2, 30, 4))
    report = simulate(scenario)
    resolved = schema.decode(ServingScenario, json.loads(report.scenario_json))
    assert resolved == replace(scenario, workload=replace(scenario.workload, trace_requests=()))
    assert list(report.requests.num_prefill_tokens) == [30, 30]


def test_a_cancelled_job_stops() -> None:
    class Cancelled(SilentProgress):
        def update(self, ratio: float, _message: str = "") -> None:
            super().update(ratio)
            if ratio > 0.2:
                raise CancelledJobError("cancelled")

    # More steps than the engine does between two reports.
    progress = Cancelled()
    scenario = build_scenario(workload=_poisson(1.0, num_requests=4000))
    with pytest.raises(CancelledJobError):
        simulate_serving(scenario, lambda spec: fetch_surfaces(spec, RooflinePredictor()), progress)
    assert sorted(progress.updates) == progress.updates
    assert progress.updates[-1] < 0.9
