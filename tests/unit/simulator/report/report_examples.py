"""Serving reports as the simulator gives them, small enough to read."""

from foretoken.domain.results.report import (
    ITL_QUANTILES,
    Percentiles,
    RequestColumns,
    ServingReport,
)


def percentiles(p50: float) -> Percentiles:
    """Return percentiles that spread around `p50`."""
    return Percentiles(
        mean=p50, p50=p50, p90=1.5 * p50, p95=1.7 * p50, p99=2.0 * p50, max=2.5 * p50
    )


def build_serving(rate_rps: float) -> ServingReport:
    """Return a report of five requests arriving at `rate_rps`."""
    arrivals = tuple(index / rate_rps for index in range(5))
    return ServingReport(
        ttft_ms=percentiles(80.0 * rate_rps),
        itl_ms=percentiles(20.0),
        itl_ms_quantiles=tuple(15.0 + 0.1 * place for place in range(len(ITL_QUANTILES))),
        tpot_ms=percentiles(21.0),
        e2e_latency_ms=percentiles(3000.0),
        num_requests=5,
        num_completed=5,
        num_serving_steps=100,
        duration_s=5 / rate_rps + 3,
        offered_rps=rate_rps,
        request_throughput_rps=rate_rps,
        output_throughput_tps=200 * rate_rps,
        output_throughput_tps_per_gpu=100 * rate_rps,
        goodput_rps=0.8 * rate_rps,
        slo_attainment_ratio=0.8,
        utilization_ratio=0.5,
        mfu_ratio=0.21,
        step_time_s_by_group={"gemm": 1.4, "attention": 0.5, "elementwise": 0.1},
        step_time_ratio_by_provenance={"measured": 0.25, "interpolated": 0.75},
        step_time_low_ratio=0.93,
        step_time_high_ratio=1.08,
        requests=RequestColumns(
            arrival_s=arrivals,
            scheduled_s=arrivals,
            first_token_s=tuple(0.1 * (i + 1) + at for i, at in enumerate(arrivals)),
            finished_s=tuple(3.0 + at for at in arrivals),
            num_prefill_tokens=(300, 200, 400, 100, 500),
            num_decode_tokens=(100, 120, 1, 90, 80),
        ),
        scenario_json=(
            '{"name": "chat", "slo": {"ttft_ms": 300.0},'
            ' "workload": {"rate_rps": 1.0, "trace_requests": {"arrival_s": [1, 2]}}}'
        ),
    )
