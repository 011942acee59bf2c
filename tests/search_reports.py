"""Reports of searches as the simulator gives them, from a made-up rule instead of a model."""

import json
from dataclasses import replace
from typing import Any

from foretoken.domain import schema
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CandidateColumns,
    CapacityProbe,
    CapacityReport,
    Finalist,
    LatencyLimit,
    LimitOutcome,
    Sensitivity,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.results.report import (
    ITL_QUANTILES,
    Feasibility,
    Percentiles,
    RequestColumns,
    ServingReport,
)

_TTFT_LIMIT_MS, _TPOT_LIMIT_MS = 2000.0, 30.0
_USD_PER_HOUR = 3.5
_NUM_DEVICES = 16


def build_search(name_suffix: str = "") -> ServingSearchReport:
    """Return the report of a search over tp, batch and mode; `name_suffix` ends every name."""
    points = [
        _point(mode, tp, batch, name_suffix)
        for mode in ("aggregated", "disaggregated")
        for tp in (1, 2, 4, 8)
        for batch in (1, 4, 16, 32, 64, 96, 128, 256)
    ]
    ok = sorted(
        (point for point in points if point["verdict"] == "ok"),
        key=lambda point: -point["output_throughput_tps_per_gpu"],
    )
    for place, point in enumerate(ok):
        # The second is within the error of the first.
        point["rank"] = 1 if place < 2 else place + 1
    _mark_fronts(ok)
    rows = [*ok, *(point for point in points if point["verdict"] != "ok")]
    counts: dict[str, int] = {"bound": 120}
    for row in rows:
        if row["verdict"] != "ok":
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    best = ok[0]
    return ServingSearchReport(
        num_points=960,
        num_distinct=len(points) + 120,
        num_evaluated=len(points),
        num_simulated=3,
        num_ruled_out_by_verdict=counts,
        best=best["name"],
        ties=tuple(row["name"] for row in ok[:2]),
        min_devices=8,
        min_devices_by=ok[2]["name"],
        min_usd_per_hour=8 * _USD_PER_HOUR,
        min_usd_per_hour_by=ok[2]["name"],
        finalists=tuple(_finalist(place, row) for place, row in enumerate(ok[:3])),
        sensitivities=_sensitivities(best),
        candidates=_columns(rows),
        cpu_s=4.2,
        wall_s=2.5,
        num_workers=2,
        model_version="v1",
        request_json=json.dumps(schema.encode(build_search_request())),
        job_id="search-1",
    )


def build_search_request() -> ServingSearchRequest:
    """Return the request that `build_search` would answer."""
    return ServingSearchRequest(
        scenario=ServingScenario(model=load_model("llama-3.1-70b"), device="h200_sxm", seed=7),
        space=ServingSpace(max_devices=_NUM_DEVICES, usd_per_hour={"h200_sxm": _USD_PER_HOUR}),
        targets=ServingTargets(
            limits=(
                LatencyLimit(metric="ttft_ms", percentile=99, limit_ms=_TTFT_LIMIT_MS),
                LatencyLimit(metric="tpot_ms", percentile=0, limit_ms=_TPOT_LIMIT_MS),
            )
        ),
        target_rps=20.0,
    )


def build_capacity() -> CapacityReport:
    """Return a capacity of 10 requests/s, its interval 9 to 11."""
    rates = (2.0, 16.0, 8.0, 12.0, 10.0)
    return CapacityReport(
        capacity_rps=10.0,
        first_miss_rps=12.0,
        low_rps=9.0,
        high_rps=11.0,
        sampling_low_rps=9.6,
        sampling_high_rps=10.4,
        limiting="ttft p99",
        capacity_rps_per_gpu=2.5,
        num_devices=4,
        usd_per_million_output_tokens=0.8,
        probes=tuple(_probe(rate, capacity=10.0) for rate in rates),
        at_capacity=_serving(10.0, 29.0),
        cpu_s=1.5,
        model_version="v1",
        scenario_json=json.dumps({"seed": 7}),
    )


def build_no_capacity() -> CapacityReport:
    """Return the report of a deployment that no rate suits."""
    return replace(
        build_capacity(),
        feasibility=Feasibility(is_feasible=False, reason="the model needs 140 GiB of 80 GiB"),
        capacity_rps=0.0,
        probes=(),
    )


def _point(mode: str, tp: int, batch: int, suffix: str) -> dict[str, Any]:
    is_split = mode == "disaggregated"
    tpot_ms = (6.0 + 40.0 / tp + 0.16 * batch) * (0.9 if is_split else 1.0)
    ttft_ms = 200.0 + 1200.0 / tp + 9.0 * batch
    per_gpu = batch * 1000.0 / tpot_ms / tp * (0.8 if is_split else 0.7)
    verdict, reason = "ok", ""
    if tp == 1:
        verdict, reason = "memory", "weights of 131 GiB do not fit in 141 GiB with a KV cache"
    elif ttft_ms > _TTFT_LIMIT_MS:
        verdict, reason = "ttft_ms", f"{ttft_ms:.0f} ms exceed the limit of {_TTFT_LIMIT_MS:.0f} ms"
    elif tpot_ms > _TPOT_LIMIT_MS:
        verdict, reason = "tpot_ms", f"{tpot_ms:.1f} ms exceed the limit of {_TPOT_LIMIT_MS:.0f} ms"
    fits = verdict != "memory"
    replicas = _NUM_DEVICES // tp // (2 if is_split else 1)
    price = _USD_PER_HOUR / 3600.0 / per_gpu * 1e6
    return {
        "name": f"{'2 x tp4 b4 + ' if is_split else ''}{replicas} x tp{tp} b{batch}{suffix}",
        "device": "h200_sxm",
        "mode": mode,
        "profile": "vllm-0.19",
        "quantization": "fp8",
        "speculation": "",
        "kv_tiers": "",
        "rules": "",
        "router": "round_robin",
        "num_devices": _NUM_DEVICES,
        "num_idle_devices": 0,
        "encoders": 0,
        "num_counted_devices": _NUM_DEVICES,
        "replicas": replicas,
        "tp": tp,
        **dict.fromkeys(("pp", "dp", "ep"), 1),
        "batch_size": batch,
        "num_batched_tokens": 8192,
        "prefill_replicas": 2 if is_split else 0,
        "prefill_tp": _NUM_DEVICES // 4 if is_split else 0,
        "prefill_pp": 1 if is_split else 0,
        "prefill_ep": 1 if is_split else 0,
        "prefill_batch_size": 4 if is_split else 0,
        "ttft_ms": fits * ttft_ms,
        "ttft_low_ms": fits * 0.92 * ttft_ms,
        "ttft_high_ms": fits * 1.1 * ttft_ms,
        "tpot_ms": fits * tpot_ms,
        "tpot_low_ms": fits * 0.95 * tpot_ms,
        "tpot_high_ms": fits * 1.06 * tpot_ms,
        "request_throughput_rps": fits * per_gpu * _NUM_DEVICES / 1000.0,
        "output_throughput_tps": fits * per_gpu * _NUM_DEVICES,
        "output_throughput_tps_per_gpu": fits * per_gpu,
        "tps_per_gpu_low": fits * 0.93 * per_gpu,
        "tps_per_gpu_high": fits * 1.05 * per_gpu,
        "tps_per_user": fits * 1000.0 / tpot_ms,
        "usd_per_million_output_tokens": fits * price,
        "usd_per_hour": fits * _USD_PER_HOUR * _NUM_DEVICES,
        "kv_utilization_ratio": fits * 0.6,
        "verdict": verdict,
        "reason": reason,
        "rank": 0,
        "is_pareto_user": False,
        "is_pareto_cost": False,
    }


def _mark_fronts(ok: list[dict[str, Any]]) -> None:
    """Mark those that none beats in throughput and speed; cost falls as throughput rises."""
    for point in ok:
        point["is_pareto_user"] = point["is_pareto_cost"] = not any(
            other["tps_per_user"] > point["tps_per_user"]
            and other["output_throughput_tps_per_gpu"] > point["output_throughput_tps_per_gpu"]
            for other in ok
        )


def _columns(rows: list[dict[str, Any]]) -> CandidateColumns:
    return CandidateColumns(**{name: tuple(row[name] for row in rows) for name in rows[0]})


def _finalist(place: int, row: dict[str, Any]) -> Finalist:
    capacity = row["request_throughput_rps"]
    at_rate = _probe(capacity, capacity=capacity * (1.05 if place else 0.95))
    return Finalist(
        candidate=place,
        name=row["name"],
        rank=row["rank"],
        is_met=at_rate.is_met,
        report=_serving(capacity, row["tpot_ms"]),
        outcomes=at_rate.outcomes,
        load=tuple(
            _probe(share * capacity, capacity=capacity) for share in (0.25, 0.5, 0.75, 0.9, 1, 1.1)
        ),
        scenario_json=json.dumps(schema.encode(_scenario(row["name"], row["tp"]))),
    )


def _scenario(name: str, tp: int) -> ServingScenario:
    asked = build_search_request().scenario
    return replace(asked, name=name, layout=ParallelLayout(tp=tp), engine=EngineSpec())


def _serving(rate_rps: float, tpot_ms: float) -> ServingReport:
    return ServingReport(
        num_requests=100,
        num_completed=100,
        offered_rps=rate_rps,
        request_throughput_rps=rate_rps,
        goodput_rps=rate_rps,
        slo_attainment_ratio=0.99,
        output_throughput_tps=1000.0 * rate_rps,
        output_throughput_tps_per_gpu=1000.0 * rate_rps / _NUM_DEVICES,
        ttft_ms=Percentiles(mean=600.0, p50=550.0, p99=1900.0),
        tpot_ms=Percentiles(mean=tpot_ms, p50=tpot_ms, p99=1.2 * tpot_ms),
        itl_ms=Percentiles(mean=tpot_ms, p50=tpot_ms, p99=1.5 * tpot_ms),
        itl_ms_quantiles=tuple(15.0 + 0.1 * place for place in range(len(ITL_QUANTILES))),
        num_serving_steps=100,
        step_time_s_by_group={"gemm": 1.4, "attention": 0.6},
        step_time_ratio_by_provenance={"measured": 0.25, "interpolated": 0.75},
        step_time_low_ratio=0.93,
        step_time_high_ratio=1.08,
        requests=RequestColumns(
            arrival_s=(0.0, 1.0),
            scheduled_s=(0.0, 1.0),
            first_token_s=(0.5, 1.6),
            finished_s=(3.0, 4.0),
            num_decode_tokens=(100, 120),
        ),
        scenario_json=json.dumps({"seed": 7}),
    )


def _probe(rate_rps: float, *, capacity: float) -> CapacityProbe:
    load = min(rate_rps / capacity, 1.2)
    ttft_ms = _TTFT_LIMIT_MS * load**4
    return CapacityProbe(
        rate_rps=rate_rps,
        is_met=load <= 1,
        is_cut_short=load > 1.15,
        num_requests=500,
        output_throughput_tps=1000.0 * min(rate_rps, capacity),
        outcomes=(
            LimitOutcome(
                metric="ttft_ms",
                percentile=99,
                limit=_TTFT_LIMIT_MS,
                value=ttft_ms,
                is_met=ttft_ms <= _TTFT_LIMIT_MS,
            ),
            LimitOutcome(metric="tpot_ms", limit=_TPOT_LIMIT_MS, value=18 + 10 * load),
        ),
    )


def _sensitivities(best: dict[str, Any]) -> tuple[Sensitivity, ...]:
    figures = {"links 2x": 1.04, "memory bandwidth +50 %": 1.3, "prompts half": 1.35}
    today = best["output_throughput_tps_per_gpu"]
    changes = [
        Sensitivity(
            change=change,
            best=best["name"],
            output_throughput_tps_per_gpu=ratio * today,
            throughput_ratio=ratio,
            ttft_ms=900.0,
            tpot_ms=25.0,
        )
        for change, ratio in figures.items()
    ]
    other = replace(
        changes[0],
        change="answers twice as long",
        best="another layout",
        throughput_ratio=0.7,
        output_throughput_tps_per_gpu=0.7 * today,
        is_same_best=False,
    )
    return (*changes, other)
