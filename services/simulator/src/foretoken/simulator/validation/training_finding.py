"""What a comparison of training steps says in words, and what to do about it."""

from collections.abc import Iterator, Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.report import describe_shares
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.finding import Finding
from foretoken.simulator.validation.training_attribution import REST, Contribution
from foretoken.simulator.validation.training_comparison import (
    ComponentComparison,
    ComponentScore,
    Stability,
)

# Steps of one run differ by about this much.
_NOTABLE_RATIO = 0.02
# Contributions below this share of all are not spoken of.
_NOTABLE_SHARE = 0.15
# A component further off than this is spoken of.
_FAR_RATIO = 0.08
# Steps that vary by more than this tell a few per cent of error from chance no longer.
_UNSTEADY_RATIO = 0.05
_WELL_MEASURED_SHARE = 0.9

_WORDS = {
    "encoder_fwd": "the layers' forward passes",
    "encoder_bwd": "the layers' backward passes",
    "stage_fwd": "the forward passes",
    "stage_bwd": "the backward passes",
    "mp_allreduce": "the reductions of tensor parallelism",
    "pp_p2p": "the transfers between stages",
    "dp_allreduce": "the reduction of gradients",
    "dp_allgather": "the gathering of parameters",
    "optimizer": "the optimizer's step",
    "update": "the optimizer's kernels",
    REST: "what no scored component explains (waiting, the host, data loading)",
}
_COMPUTE = (
    "Measure the operators of a layer at these sizes (`foretoken plan` says which), check trainer,"
    " recompute and kernels against the run, or calibrate host gaps (`foretoken calibrate"
    " training`)."
)
_NETWORK = (
    "Measure collectives on this cluster (`foretoken catalog import nccl-tests`), and check the"
    " topology and which ranks share a node."
)
_ADVICE = {
    "encoder_fwd": _COMPUTE,
    "encoder_bwd": _COMPUTE,
    "stage_fwd": _COMPUTE,
    "stage_bwd": _COMPUTE,
    "mp_allreduce": _NETWORK,
    "pp_p2p": _NETWORK + " Measured transfers often contain waiting for the receiver.",
    "dp_allreduce": _NETWORK,
    "dp_allgather": _NETWORK,
    "optimizer": "Check zero_stage, the optimizer's formats and the gathering of parameters.",
    "update": "Check zero_stage and the optimizer's formats; measure the optimizer's kernels.",
    REST: "Check the schedule, the transfers (rendezvous or buffered) and the micro batches.",
}


def find_step(
    step: ComponentComparison, steadiness: Stability, report: TrainingReport
) -> Iterator[Finding]:
    """Yield how far the step is off, whether that is chance, and what the estimate rests on."""
    text = (
        f"Step: {format_number(step.measured_ms)} ms measured,"
        f" {format_number(step.simulated_ms)} ms simulated ({step.error_ratio:+.1%})."
    )
    if 0 < report.step_time_raw_ms != report.step_time_ms:
        raw = report.step_time_raw_ms / step.measured_ms - 1
        text += f" Without calibration {format_number(report.step_time_raw_ms)} ms ({raw:+.1%})."
    yield Finding(component="step", text=text)
    if not report.feasibility.is_feasible:
        yield Finding(
            component="memory",
            text=f"By the simulation this run could not be: {report.feasibility.reason}.",
            advice="Check recompute, zero_stage, the micro batch and the trainer against the run.",
        )
    if steadiness.variation_ratio > _UNSTEADY_RATIO:
        yield Finding(
            component="step",
            text=f"Measured steps vary by {steadiness.variation_ratio:.0%} (standard deviation over"
            f" mean of {steadiness.num_samples}); the middle 80 % take"
            f" {format_number(steadiness.p10_ms)} to {format_number(steadiness.p90_ms)} ms.",
            advice="Set straggler_ratio and network_spread_ratio to simulate the spread, or measure"
            " with the machines to yourself.",
        )
    shares = report.step_time_ratio_by_provenance
    measured = sum(shares.get(name, 0.0) for name in ("measured", "interpolated"))
    if shares and measured < _WELL_MEASURED_SHARE and report.step_time_ms > 0:
        low, high = (
            bound / report.step_time_ms - 1
            for bound in (report.step_time_low_ms, report.step_time_high_ms)
        )
        yield Finding(
            component="estimates",
            text=f"The simulated times rest on {describe_shares(shares)} estimates, which may be"
            f" off by {low:+.0%} to {high:+.0%}.",
            advice="Measure or import the operators of this device before anything else:"
            " `foretoken plan` says which, `foretoken profile` measures them.",
        )


def find_components(
    step: ComponentComparison,
    contributions: Sequence[Contribution],
    scores: Sequence[ComponentScore],
) -> Iterator[Finding]:
    """Yield which components the step's error comes from, which are far off, which are flagged."""
    if not scores:
        yield Finding(
            component="run",
            text="The file has whole steps only, which do not tell where the error comes from.",
            advice="Add times of components: `encoder_fwd`, `stage_fwd`, `dp_allreduce`, ...",
        )
        return
    notable = _notable(contributions) if abs(step.error_ratio) >= _NOTABLE_RATIO else ()
    yield from map(_say_contribution, notable)
    said = {item.name for item in notable}
    for score in scores[:-1]:
        if score.num_scored and score.mape_ratio > _FAR_RATIO and score.name not in said:
            yield Finding(
                component=score.name,
                text=f"{score.name} is {score.mean_error_ratio:+.1%} off on average, over"
                f" {_count(score.num_scored, 'stage')}.",
                advice=_ADVICE.get(score.name, ""),
            )
    flagged = scores[-1].num_flagged
    if flagged:
        yield Finding(
            component="run", text=f"Flagged, so shown and not scored: {_count(flagged, 'row')}."
        )


def _notable(contributions: Sequence[Contribution]) -> Sequence[Contribution]:
    """Return the contributions worth a word: the largest in any case."""
    return [
        item
        for index, item in enumerate(contributions)
        if index == 0 or item.share_ratio >= _NOTABLE_SHARE
    ]


def _say_contribution(item: Contribution) -> Finding:
    word = "long" if item.error_ms > 0 else "short"
    words = _WORDS.get(item.name, item.name)
    amount = f"{format_number(abs(item.error_ms))} ms of the step too {word}"
    return Finding(
        component=item.name,
        text=f"{words[0].upper()}{words[1:]}: {amount} ({item.share_ratio:.0%} of what is off).",
        advice=_ADVICE.get(item.name, ""),
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")
