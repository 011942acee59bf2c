"""What a comparison says in words, and what to do about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport, describe_shares
from foretoken.simulator.validation.comparison import MetricComparison, RateComparison
from foretoken.simulator.validation.decode_step import DecodeComparison, StepRange
from foretoken.simulator.validation.residual import (
    DECODE,
    FRONT_END,
    PREFILL,
    QUEUEING,
    UNEXPLAINED,
    ComponentError,
)

# Runs of one server on one workload differ by about this much.
_NOTABLE_RATIO = 0.02
# A part of the error below this share is not spoken of.
_NOTABLE_SHARE = 0.1
# Ranges of one feature are told of together that are off alike: by so much more or less, and so
# much of what they are off.
_ALIKE_RATIO = 0.02
_ALIKE_SHARE = 0.15
# Estimates that rest on measurements for less than this share of the time are spoken of.
_WELL_MEASURED_SHARE = 0.9
# A constant below this is within what a client's clock and network can be off.
_NOTABLE_MS = 1.0
_STEP_FEATURES = {
    "batch": ("requests in the batch", "Decode steps are"),
    "prefill_tokens": ("prompt tokens beside them", "Decode steps are"),
}
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
        "Record when the engine scheduled each request, or single tokens' times: the run tells no"
        " more of what happened before the first token."
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to know, most important first: what, and what to do about it (may be empty)."""

    component: str
    text: str
    advice: str = ""


def find_all(
    metrics: Sequence[MetricComparison],
    rates: Sequence[RateComparison],
    components: Sequence[ComponentError],
    decode: DecodeComparison | None,
) -> Iterator[Finding]:
    """Yield what the comparison shows: overall, first tokens, decode steps."""
    yield _overall(metrics, rates)
    yield from _of_components(components)
    if decode is not None:
        for feature in _STEP_FEATURES:
            yield from _of_ranges(
                feature, [item for item in decode.ranges if item.feature == feature]
            )


def find_of_server(run: ServingRun, report: ServingReport) -> Iterator[Finding]:
    """Yield what the server itself told: KV blocks, preemptions, cached tokens; failed requests."""
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


def find_of_estimates(report: ServingReport) -> Iterator[Finding]:
    """Yield what the simulated times rest on, where that is not measurements."""
    shares = report.step_time_ratio_by_provenance
    measured = sum(shares.get(name, 0.0) for name in ("measured", "interpolated"))
    if shares and measured < _WELL_MEASURED_SHARE:
        low, high = report.step_time_low_ratio - 1.0, report.step_time_high_ratio - 1.0
        yield Finding(
            component="estimates",
            text=f"The simulated step times rest on estimates: {describe_shares(shares)}, which may"
            f" be off by {low:+.0%} to {high:+.0%}.",
            advice="Measure or import the operators of this device before anything else:"
            " `foretoken plan` says which, `foretoken profile` measures them.",
        )


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
        is_small = abs(item.error_ms) < _NOTABLE_RATIO * total_ms
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
    unit, subject = _STEP_FEATURES[feature]
    groups = _group(ranges)
    # Prompts beside the steps are spoken of only where they make a difference.
    if feature != "batch" and len(groups) == 1:
        return
    for group in groups:
        share = sum(item.share_ratio for item in group)
        error = sum(item.error_ratio * item.share_ratio for item in group) / share
        if abs(error) < _NOTABLE_RATIO or share < _NOTABLE_SHARE:
            continue
        # The simulated step is the shorter one where the error is negative.
        word = "faster" if error < 0 else "slower"
        low, high = group[0].low, group[-1].high
        if feature == "batch":
            low = max(low, 1.0)  # the request whose step it is
        where = f"at {low:.0f} to {high:.0f} {unit}"
        if high <= 1:
            where = "with one request alone" if feature == "batch" else f"with no {unit}"
        text = f"{subject} {abs(error):.1%} {word} than measured {where} ({share:.0%} of tokens)."
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
    if abs(error) >= _NOTABLE_RATIO:
        yield Finding(
            component="KV cache",
            text=f"KV cache: {measured:,} tokens on the server, {simulated:,} simulated"
            f" ({error:+.1%}).",
            advice=f"Set engine.num_kv_blocks to {measured // max(report.kv_block_size, 1)},"
            " or engine.memory_utilization_ratio to the server's.",
        )
