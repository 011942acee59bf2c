"""A measured serving run against its simulation: figures, where the error sits, what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport, describe_shares
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.grid import Floats
from foretoken.simulator.validation.decode_steps import (
    DecodeComparison,
    StepRange,
    compare_decode,
    fit_robust,
)
from foretoken.simulator.validation.finding import NOTABLE_RATIO, Finding, find_estimates
from foretoken.simulator.validation.serving_comparison import (
    MetricComparison,
    Pair,
    RateComparison,
    RequestComparison,
    compare_metrics,
    compare_rates,
    compare_requests,
    find_worst,
    pair_up,
)

FRONT_END = "front end"
QUEUEING = "queueing"
PREFILL = "prefill"
DECODE = "decode"
UNEXPLAINED = "unexplained"

# A part of the error below this share is not spoken of.
_NOTABLE_SHARE = 0.1
# Neighbouring ranges of a feature are one finding where they are off alike: by so much more or
# less, and so much of what they are off.
_ALIKE_RATIO = 0.02
_ALIKE_SHARE = 0.15
# A constant below this is within what a client's clock and network can be off.
_NOTABLE_MS = 1.0
STEP_FEATURES = {"batch": "requests in the batch", "prefill_tokens": "prompt tokens next to them"}
_ADVICE = {
    FRONT_END: (
        "Set engine.rules.frontend_ms and frontend_us_per_token to what your server adds before"
        " the engine: tokenizing, HTTP, a proxy."
    ),
    QUEUEING: (
        "Requests wait as long as the ones before them take: mend decode and prefill first, then"
        " check max_num_seqs, max_num_batched_tokens and the KV blocks against the server's log."
    ),
    PREFILL: (
        "Measure gemm and attention with as many tokens as a step has"
        " (max_num_batched_tokens), and see whether the server cached more of the prompts."
    ),
    DECODE: (
        "Measure attention and gemm at these batches on this device (`foretoken profile`), or"
        " correct the estimates by observed steps (`foretoken calibrate`)."
    ),
    UNEXPLAINED: (
        "Record when the engine scheduled each request, or single tokens' times: the run says no"
        " more of what happened before the first token."
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentError:
    """One part of the time of a mean request, in ms.

    `share_ratio` is its part of the error: its mean error per request without the sign, over that
    of all parts; `ttft_share_ratio` the same of the parts before the first token. Where the run
    does not say when a request was scheduled, the parts before the first token are estimated.
    """

    name: str
    measured_ms: float
    simulated_ms: float
    share_ratio: float
    ttft_share_ratio: float
    is_estimated: bool

    @property
    def error_ms(self) -> float:
        """Simulated less measured."""
        return self.simulated_ms - self.measured_ms


def split_residual(pair: Pair) -> tuple[ComponentError, ...]:
    """Return the parts of a request's time: front end, queueing, prefill, decode.

    Front end is from sending to the engine's queue, queueing from there to the first step, prefill
    from there to the first token, decode the rest.
    """
    is_known = pair.measured.has_schedule
    before = _observed_parts(pair) if is_known else _estimated_parts(pair)
    measured, simulated = pair.measured, pair.simulated
    decode = measured.latency_ms("decode_ms"), simulated.latency_ms("decode_ms")
    sizes = {name: float(np.abs(theirs - ours).mean()) for name, (ours, theirs) in before.items()}
    before_total = sum(sizes.values()) or 1.0
    sizes[DECODE] = float(np.abs(decode[1] - decode[0]).mean())
    total = sum(sizes.values()) or 1.0
    return tuple(
        ComponentError(
            name=name,
            measured_ms=float(ours.mean()),
            simulated_ms=float(theirs.mean()),
            share_ratio=sizes[name] / total,
            ttft_share_ratio=0.0 if name == DECODE else sizes[name] / before_total,
            is_estimated=not is_known and name != DECODE,
        )
        for name, (ours, theirs) in {**before, DECODE: decode}.items()
    )


def _parts(pair: Pair) -> tuple[Floats, Floats, Floats]:
    """Return the simulated front end, queueing and prefill of each request, in ms."""
    timing = pair.simulated
    queued_s = np.where(timing.queued_s >= 0, timing.queued_s, timing.arrival_s)
    return (
        (queued_s - timing.arrival_s) * MS_PER_S,
        (timing.scheduled_s - queued_s) * MS_PER_S,
        (timing.first_token_s - timing.scheduled_s) * MS_PER_S,
    )


def _observed_parts(pair: Pair) -> dict[str, tuple[Floats, Floats]]:
    front, queueing, prefill = _parts(pair)
    timing = pair.measured
    queued_s = np.where(timing.queued_s >= 0, timing.queued_s, timing.arrival_s)
    return {
        FRONT_END: ((queued_s - timing.arrival_s) * MS_PER_S, front),
        QUEUEING: ((timing.scheduled_s - queued_s) * MS_PER_S, queueing),
        PREFILL: ((timing.first_token_s - timing.scheduled_s) * MS_PER_S, prefill),
    }


def _estimated_parts(pair: Pair) -> dict[str, tuple[Floats, Floats]]:
    """Regress the error of TTFT on what the simulation says queueing and prefill took.

    What neither explains is a constant, which is put down to the front end, and a rest.
    """
    front, queueing, prefill = _parts(pair)
    ttft_ms = pair.measured.latency_ms("ttft_ms")
    error = ttft_ms - pair.simulated.latency_ms("ttft_ms")
    design = np.column_stack([np.ones_like(error), queueing, prefill])
    constant, per_queueing, per_prefill = fit_robust(design, error, np.ones_like(error)).tolist()
    # A part cannot have taken less than no time.
    measured_queueing = queueing * max(1.0 + per_queueing, 0.0)
    measured_prefill = prefill * max(1.0 + per_prefill, 0.0)
    measured_front = np.maximum(front + constant, 0.0)
    rest = (
        pair.measured.latency_ms("ttft_ms") - measured_front - measured_queueing - measured_prefill
    )
    return {
        FRONT_END: (measured_front, front),
        QUEUEING: (measured_queueing, queueing),
        PREFILL: (measured_prefill, prefill),
        UNEXPLAINED: (rest, np.zeros_like(rest)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingValidation:
    """How a simulation compares with a measured run.

    `num_failed` requests were not answered in the run, `num_unfinished` not in the simulation;
    both are left out. `worst` are the requests furthest off.
    """

    run_name: str
    source: str
    num_compared: int
    num_failed: int
    num_unfinished: int
    metrics: tuple[MetricComparison, ...]
    rates: tuple[RateComparison, ...]
    components: tuple[ComponentError, ...]
    decode: DecodeComparison | None
    findings: tuple[Finding, ...]
    worst: tuple[RequestComparison, ...]
    requests: tuple[RequestComparison, ...]


def validate_serving(run: ServingRun, report: ServingReport) -> ServingValidation:
    """Compare a run with the report of the simulation of `scenario_of_run`.

    Raises:
        InvalidRequestError: the simulation is infeasible or of other requests.

    """
    pair = pair_up(run, report)
    metrics, rates = compare_metrics(pair, report), compare_rates(pair)
    components, decode = split_residual(pair), compare_decode(pair)
    requests = compare_requests(pair)
    estimates = find_estimates(
        report.step_time_ratio_by_provenance,
        "The simulated step times rest on estimates:"
        f" {describe_shares(report.step_time_ratio_by_provenance)}",
        report.step_time_low_ratio,
        report.step_time_high_ratio,
    )
    findings = (
        _overall(metrics, rates),
        *estimates,
        *_of_components(components),
        *_of_decode(decode),
        *_of_server(run, report),
    )
    return ServingValidation(
        run_name=run.name,
        source=run.source,
        num_compared=len(requests),
        num_failed=run.num_failed,
        num_unfinished=pair.num_unfinished,
        metrics=metrics,
        rates=rates,
        components=components,
        decode=decode,
        findings=findings,
        worst=find_worst(requests),
        requests=requests,
    )


def _of_decode(decode: DecodeComparison | None) -> Iterator[Finding]:
    for feature in STEP_FEATURES:
        ranges = decode.ranges if decode is not None else ()
        yield from _of_ranges(feature, [item for item in ranges if item.feature == feature])


def _of_server(run: ServingRun, report: ServingReport) -> Iterator[Finding]:
    """Yield what the server itself reports: KV blocks, preemptions; and failed requests."""
    if run.num_kv_blocks > 0:
        yield from _of_kv_blocks(run, report)
    if run.num_preemptions >= 0 and run.num_preemptions != report.num_preemptions:
        counts = f"{run.num_preemptions} measured, {report.num_preemptions} simulated"
        yield Finding(
            component="KV cache",
            text=f"Preemptions: {counts}.",
            advice="Too few or many come of other KV blocks, or of steps that take longer.",
        )
    elif run.num_preemptions < 0 and report.num_preemptions:
        text = f"The simulation preempted {report.num_preemptions} times; the run does not tell."
        yield Finding(
            component="KV cache",
            text=text,
            advice="Compare with vllm:num_preemptions_total, or the server's log.",
        )
    if run.num_failed:
        text = f"{run.num_failed} requests failed; they loaded the server and are left out here."
        yield Finding(component="run", text=text, advice="Repeat the run without failures.")
    if run.is_interrupted:
        yield Finding(component="run", text="The run was interrupted before its end.")


def _overall(metrics: Sequence[MetricComparison], rates: Sequence[RateComparison]) -> Finding:
    said = [
        f"{METRICS[item.name].label} {item.error_ratio('mean'):+.1%}"
        f" (p99 {item.error_ratio('p99'):+.1%})"
        for item in metrics
    ]
    throughput = next(item for item in rates if item.name == "output_throughput_tps")
    said.append(f"output throughput {throughput.error_ratio:+.1%}")
    return Finding(component="all", text="Simulated against measured, means: " + ", ".join(said))


def _of_components(components: Sequence[ComponentError]) -> Iterator[Finding]:
    total_ms = sum(item.measured_ms for item in components) or 1.0
    ranked = sorted(components, key=lambda item: -item.share_ratio)
    for item in ranked:
        is_small = abs(item.error_ms) < NOTABLE_RATIO * total_ms
        if item.share_ratio < _NOTABLE_SHARE and item.ttft_share_ratio < _NOTABLE_SHARE:
            continue
        if is_small and item.ttft_share_ratio < _NOTABLE_SHARE:
            continue
        if abs(item.error_ms) < _NOTABLE_MS and item.name in (FRONT_END, UNEXPLAINED):
            continue
        yield Finding(component=item.name, text=_say(item), advice=_ADVICE[item.name])


def _say(item: ComponentError) -> str:
    if item.name == UNEXPLAINED:
        return f"{item.ttft_share_ratio:.0%} of TTFT's error is in no part the run can tell apart."
    where = f"{item.share_ratio:.0%} of the end-to-end error is {item.name}"
    if item.name != DECODE:
        where = f"{item.ttft_share_ratio:.0%} of TTFT's error is {item.name}"
        where += f" ({item.share_ratio:.0%} of the end-to-end one)"
    measured, simulated = format_number(item.measured_ms), format_number(item.simulated_ms)
    means = f"{measured} ms measured, {simulated} ms simulated"
    estimated = "; estimated, as the run does not tell when requests were scheduled"
    return f"{where}: {means}{estimated if item.is_estimated else ''}."


def _of_ranges(feature: str, ranges: Sequence[StepRange]) -> Iterator[Finding]:
    unit, groups = STEP_FEATURES[feature], _group(ranges)
    # Prompts next to the steps are spoken of only where they make a difference.
    if feature != "batch" and len(groups) == 1:
        return
    for group in groups:
        share = sum(item.share_ratio for item in group)
        error = sum(item.error_ratio * item.share_ratio for item in group) / share
        if abs(error) < NOTABLE_RATIO or share < _NOTABLE_SHARE:
            continue
        # The simulated step is the shorter one where the error is negative.
        word = "faster" if error < 0 else "slower"
        low, high = group[0].low, group[-1].high
        if feature == "batch":
            low = max(low, 1.0)  # the request whose step it is
        where = f"at {low:.0f} to {high:.0f} {unit}"
        if high <= 1:
            where = "with one request alone" if feature == "batch" else f"with no {unit}"
        text = f"Decode steps are {abs(error):.1%} {word} than measured {where}"
        text += f" ({share:.0%} of tokens)."
        yield Finding(component=DECODE, text=text, advice=_ADVICE[DECODE])


def _group(ranges: Sequence[StepRange]) -> list[list[StepRange]]:
    """Put neighbours together that are off by about the same."""
    groups: list[list[StepRange]] = []
    for item in ranges:
        first = groups[-1][0].error_ratio if groups else 0.0
        if groups and abs(item.error_ratio - first) <= _ALIKE_RATIO + _ALIKE_SHARE * abs(first):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _of_kv_blocks(run: ServingRun, report: ServingReport) -> Iterator[Finding]:
    block_tokens = max(run.kv_block_tokens, 0) or report.kv_block_size
    measured = run.num_kv_blocks * block_tokens
    simulated = report.num_kv_blocks * report.kv_block_size
    error = simulated / measured - 1.0 if measured else 0.0
    if abs(error) >= NOTABLE_RATIO:
        yield Finding(
            component="KV cache",
            text=f"KV cache: {measured:,} tokens on the server, {simulated:,} simulated"
            f" ({error:+.1%}).",
            advice=f"Set engine.num_kv_blocks to {measured // max(report.kv_block_size, 1)},"
            " or engine.memory_utilization_ratio to the server's.",
        )
