"""What a simulated deployment did, and the report of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering import lower_forward
from foretoken.domain.report import ServingReport
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.latency_surfaces import serving_options
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.serving.metrics import (
    RequestTimes,
    collect_times,
    count_attaining,
    summarize_token_gaps,
)
from foretoken.simulator.serving.percentile import summarize
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.step_log import StepColumns
from foretoken.simulator.step_cost import StepAccount, SurfaceCost


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOutcome:
    """Requests in order of arrival and the steps of each replica."""

    requests: Sequence[SimRequest]
    steps: Sequence[StepColumns]
    num_kv_blocks: int


def build_report(
    report: ServingReport,
    scenario: ServingScenario,
    outcome: ServingOutcome,
    model_version: str,
    cost: SurfaceCost,
) -> ServingReport:
    """Return the report with everything the outcome tells."""
    step_ends_ns = [steps.end_ns for steps in outcome.steps]
    times = collect_times(outcome.requests, step_ends_ns)
    num_attaining = count_attaining(times, scenario.slo, outcome.requests, step_ends_ns)
    tpot_ns = times.tpot_ns
    is_scheduled = times.scheduled_ns >= 0
    queueing_ns = (times.scheduled_ns - times.arrival_ns)[is_scheduled]
    report = replace(
        report,
        ttft_ms=summarize(times.ttft_ns / NS_PER_MS),
        itl_ms=summarize_token_gaps(outcome.requests, step_ends_ns),
        tpot_ms=summarize(tpot_ns[~np.isnan(tpot_ns)] / NS_PER_MS),
        e2e_latency_ms=summarize(times.e2e_ns / NS_PER_MS),
        queueing_ms=summarize(queueing_ns / NS_PER_MS),
        num_completed=int(times.is_completed.sum()),
        num_preemptions=int(times.num_preemptions.sum()),
        slo_attainment_ratio=num_attaining / len(outcome.requests),
        requests=times.columns(),
        model_version=model_version,
    )
    report = _with_rates(report, scenario, times, num_attaining)
    accounts = [cost.account(steps) for steps in outcome.steps]
    return _with_steps(report, scenario, outcome, accounts)


def _with_rates(
    report: ServingReport, scenario: ServingScenario, times: RequestTimes, num_attaining: int
) -> ServingReport:
    done = times.is_completed
    if not done.any():
        return report
    duration_s = float(times.finished_ns.max() - times.arrival_ns.min()) / NS_PER_S
    num_devices = scenario.layout.num_devices
    output_tps = float(times.num_decode_tokens[done].sum()) / duration_s
    peak_flops = find_device(scenario.device).peak_flops(scenario.dtype) * num_devices
    return replace(
        report,
        duration_s=duration_s,
        request_throughput_rps=float(done.sum()) / duration_s,
        input_throughput_tps=float(times.num_prefill_tokens[done].sum()) / duration_s,
        output_throughput_tps=output_tps,
        output_throughput_tps_per_gpu=output_tps / num_devices,
        goodput_rps=num_attaining / duration_s,
        mfu_ratio=_model_flops(scenario, times) / (peak_flops * duration_s),
    )


def _with_steps(
    report: ServingReport,
    scenario: ServingScenario,
    outcome: ServingOutcome,
    accounts: Sequence[StepAccount],
) -> ServingReport:
    num_steps = sum(len(steps.end_ns) for steps in outcome.steps)
    busy_s = sum(account.busy_s for account in accounts)
    report = replace(report, num_serving_steps=num_steps, num_kv_blocks=outcome.num_kv_blocks)
    if busy_s == 0 or report.duration_s == 0:
        return report
    num_used = np.concatenate([steps.num_used_blocks for steps in outcome.steps])
    num_seqs = np.concatenate([steps.num_seqs for steps in outcome.steps])
    layout = scenario.layout
    return replace(
        report,
        utilization_ratio=busy_s / (report.duration_s * layout.dp * layout.pp),
        kv_utilization_ratio_mean=float(num_used.mean()) / outcome.num_kv_blocks,
        kv_utilization_ratio_max=float(num_used.max()) / outcome.num_kv_blocks,
        batch_size_mean=float(num_seqs.mean()),
        step_time_s_by_group=_sum_by_key([a.time_s_by_group for a in accounts]),
        step_time_ratio_by_provenance={
            name: time_s / busy_s
            for name, time_s in _sum_by_key([a.time_s_by_provenance for a in accounts]).items()
        },
        step_time_low_ratio=sum(account.low_s for account in accounts) / busy_s,
        step_time_high_ratio=sum(account.high_s for account in accounts) / busy_s,
    )


def _sum_by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _model_flops(scenario: ServingScenario, times: RequestTimes) -> float:
    """Return the FLOPs that all completed requests need once: recomputation is not counted.

    FLOPs are linear in these sums, so one batch of everything has those of all steps.
    """
    done = times.is_completed
    prompts, answers = times.num_prefill_tokens[done], times.num_decode_tokens[done]
    num_decodes = int((answers - 1).sum())
    kv_tokens = int(((answers - 1) * prompts + answers * (answers - 1) // 2).sum())
    shape = BatchShape(
        num_tokens=int(prompts.sum()) + num_decodes,
        num_output_rows=int(answers.sum()),
        prefill=PrefillShape(
            num_seqs=int(done.sum()),
            q_tokens=int(prompts.sum()),
            kv_tokens=int(prompts.sum()),
            score_pairs=int((prompts * (prompts + 1) // 2).sum()),
        ),
        decode=DecodeShape(num_seqs=num_decodes, kv_tokens=kv_tokens, kv_tokens_max=kv_tokens),
    )
    options = serving_options(scenario.dtype, scenario.engine.fuses_add_norm)
    return count_model_flops(lower_forward(scenario.model, shape, options))
