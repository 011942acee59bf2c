"""Metrics of a training step and of a whole training run."""

from collections.abc import Callable
from dataclasses import dataclass

from foretoken.domain.metrics.metric import EVERYWHERE, SHARE, Metric
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.results.report import ServingReport, describe_shares
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB, S_PER_HOUR, US_PER_S, Quantity

_BILLION = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """What a training step comes to, one or columns of them, which its rates are made from.

    `flops` are those of the model, `recomputed_flops` what is computed again on top;
    `peak_flops_per_s` is of all devices, `usd_per_hour` the price of one. A formula reads no more
    than it needs.
    """

    step_us: Quantity
    num_tokens: Quantity = 0.0
    num_devices: Quantity = 0
    flops: Quantity = 0.0
    recomputed_flops: Quantity = 0.0
    peak_flops_per_s: Quantity = 0.0
    usd_per_hour: Quantity = 0.0


def tokens_per_s(step: StepTotals) -> Quantity:
    """Return the tokens per second of all devices."""
    return step.num_tokens / (step.step_us / US_PER_S)


def tokens_per_s_per_gpu(step: StepTotals) -> Quantity:
    """Return the tokens per second of a device."""
    return tokens_per_s(step) / step.num_devices


def mfu_ratio(step: StepTotals) -> Quantity:
    """Return the model's FLOPs over what the devices could do in the step."""
    return step.flops / (step.peak_flops_per_s * step.step_us / US_PER_S)


def hfu_ratio(step: StepTotals) -> Quantity:
    """Return the same with what is computed again."""
    return (step.flops + step.recomputed_flops) / (step.peak_flops_per_s * step.step_us / US_PER_S)


def usd_per_step(step: StepTotals) -> Quantity:
    """Return what a step costs."""
    return step.usd_per_hour * step.num_devices / S_PER_HOUR * step.step_us / US_PER_S


def usd_per_billion_tokens(step: StepTotals) -> Quantity:
    """Return what a billion tokens cost."""
    return usd_per_step(step) / step.num_tokens * _BILLION


def fullest_stage(report: TrainingReport) -> StageMemory | None:
    """Return the stage whose devices have the least left; None where memory was not counted."""
    return min(report.memory, key=lambda stage: stage.margin_bytes, default=None)


def _of_fullest(name: str) -> Callable[[TrainingReport], float | None]:
    def read(report: TrainingReport) -> float | None:
        stage = fullest_stage(report)
        return None if stage is None else float(getattr(stage, name))

    return read


def _lost(ratio: str) -> Callable[[TrainingRunReport], float]:
    """Return the expected days that a run spends on something else than new steps."""
    return lambda report: report.days * float(getattr(report, ratio))


def _by_chance(statistic: str) -> Callable[[TrainingRunReport], float | None]:
    """Return a quantile of a run's days by the chance of its failures; None without failures."""

    def read(report: TrainingRunReport) -> float | None:
        return float(getattr(report.days_spread, statistic)) if report.num_failures else None

    return read


# A table: every metric in as few lines as it needs.
# fmt: off
STEP_RATES = (
    Metric("step_time_ms", "step time", "ms", "lower",
        "an optimizer step at the estimates of its operators, calibrated where the scenario has a"
        " calibration; the median where steps are spread", shown=("comparison", "ranking")),
    Metric("step_time_raw_ms", "step time, not calibrated", "ms", "lower",
        "the same without calibration"),
    Metric("step_time_low_ms", "step time, lower bound", "ms", "lower",
        "lower end of its 90 % interval: families of operators err on their own",
        shown=("comparison",)),
    Metric("step_time_high_ms", "step time, upper bound", "ms", "lower",
        "upper end of its 90 % interval", shown=("comparison",)),
    Metric("step_spread_ms.p99", "step time p99", "ms", "lower",
        "99 of 100 steps take at most this, by stragglers, network and skipped updates",
        of=(TrainingReport,), read=lambda report: report.step_spread_ms.p99, shown=("comparison",)),
    Metric("tokens_per_s", "tokens/s", "tokens/s", "higher",
        "tokens of the global batch / step time", formula=tokens_per_s,
        shown=(*EVERYWHERE, "ranking")),
    Metric("tokens_per_s_per_gpu", "tokens/s per GPU", "tokens/s", "higher",
        "tokens of the global batch / step time / GPUs", formula=tokens_per_s_per_gpu,
        shown=(*EVERYWHERE, "ranking")),
)

STEP_USE = (
    Metric("hfu_ratio", "HFU", SHARE, "",
        "hardware FLOPs utilization: MFU with what is recomputed counted as work",
        formula=hfu_ratio, shown=EVERYWHERE),
    Metric("bubble_ratio", "pipeline bubble", SHARE, "lower",
        "share of the step in which a rank of the pipeline neither computes nor communicates; the"
        " mean of the ranks", shown=(*EVERYWHERE, "ranking")),
    Metric("exposed_communication_ratio", "exposed communication", SHARE, "lower",
        "share of the step in which the critical stage waits for communication that no"
        " computation hides", shown=(*EVERYWHERE, "ranking")),
    Metric("num_micro_batches", "micro batches", "", "",
        "micro batches of one data-parallel replica in a step", shown=EVERYWHERE),
    Metric("reserved_bytes", "reserved memory", "GiB", "lower",
        "what the allocator takes from the fullest device, at the peak", scale=GIB,
        of=(TrainingReport,), read=_of_fullest("reserved_bytes"), shown=("comparison", "ranking")),
    Metric("margin_bytes", "free memory", "GiB", "higher",
        "what is left of the fullest device; negative where the step does not fit", scale=GIB,
        of=(TrainingReport,), read=_of_fullest("margin_bytes"), shown=("comparison", "ranking")),
    Metric("device_memory_bytes", "memory of a GPU", "GiB", "", "all the memory that a device has",
        scale=GIB),
    Metric("usd_per_billion_tokens", "cost per billion tokens", "USD", "lower",
        "cost of a step / its tokens, of a billion of them", neutral=0.0,
        formula=usd_per_billion_tokens, shown=("ranking",)),
    Metric("step_time_ms_by_group", "{} in the step", "ms", "",
        "the critical stage's step by group of operators, the bubble included",
        shown=("comparison",)),
    Metric("communication_ms_by_axis", "communication of {}", "ms", "",
        "all that the critical stage communicates, by axis of parallelism", shown=("comparison",)),
    Metric("exposed_ms_by_axis", "exposed communication of {}", "ms", "",
        "what of that no computation hides", shown=("comparison",)),
    Metric("step_time_ratio_by_provenance", "rests on", "", "",
        "share of the busy time by what its estimates rest on",
        of=(ServingReport, TrainingReport),
        read=lambda report: describe_shares(report.step_time_ratio_by_provenance),
        shown=("terminal",)),
)
# fmt: on

# A table: every metric in as few lines as it needs.
# fmt: off
RUN = (
    Metric("days", "days, expected", "days", "lower",
        "from the first step to the last, by the mean of all courses of failures",
        shown=("comparison",)),
    Metric("days_low", "days, lower bound", "days", "lower",
        "the same with steps at the lower end of their interval", shown=("comparison",)),
    Metric("days_high", "days, upper bound", "days", "lower",
        "the same with steps at the upper end of their interval", shown=("comparison",)),
    *(
        Metric(
            name=f"days_spread.{statistic}",
            label=f"days {statistic}",
            unit="days",
            better="lower",
            definition=f"{words} of all runs end by then, by the chance of failures",
            of=(TrainingRunReport,),
            read=_by_chance(statistic),
            shown=("comparison",),
        )
        for statistic, words in (("p50", "half"), ("p90", "90 of 100"), ("p99", "99 of 100"))
    ),
    Metric("ideal_days", "days without interruptions", "days", "lower", "steps times step time",
        shown=("comparison",)),
    Metric("goodput_ratio", "goodput", SHARE, "higher",
        "share of the expected days that is spent on new steps", shown=("comparison",)),
    *(
        Metric(
            name=name,
            label=label,
            unit="days",
            better="lower",
            definition=f"expected days that go to {label}; the field is their share",
            of=(TrainingRunReport,),
            read=_lost(name),
            shown=("comparison",),
        )
        for name, label in (
            ("checkpoint_ratio", "waiting for checkpoints"),
            ("repeated_ratio", "steps done again"),
            ("restart_ratio", "restarts"),
            ("sites_ratio", "waiting for other sites"),
        )
    ),
    Metric("checkpoint_interval_s", "training between checkpoints", "s", "",
        "from the end of a checkpoint to the start of the next", shown=("comparison",)),
    Metric("checkpoint_s", "time to write a checkpoint", "s", "lower",
        "bytes of a checkpoint over the rate that they are written at", shown=("comparison",)),
    Metric("checkpoint_bytes", "size of a checkpoint", "GB", "",
        "weights and the states of the optimizer", scale=1e9),
    Metric("num_tokens", "tokens", "", "", "tokens that the run trains on", shown=("comparison",)),
    Metric("num_steps", "steps", "", "", "optimizer steps of the run", shown=("comparison",)),
    Metric("usd", "cost", "USD", "lower",
        "price of the devices for the expected days, and of energy priced apart",
        shown=("comparison",)),
    Metric("usd_per_step", "cost of a step", "USD", "lower",
        "price of the devices for a step; of a run, its cost / steps", formula=usd_per_step,
        shown=("comparison", "ranking")),
    Metric("usd_per_hour", "price", "USD/h", "lower",
        "price of a device; of a deployment, of all its devices", shown=("comparison",)),
    Metric("energy_kwh", "energy", "kWh", "lower",
        "power of the devices and the building for the expected days", shown=("comparison",)),
    Metric("energy_usd", "cost of the energy", "USD", "lower",
        "energy times its price, where it is priced apart", shown=("comparison",)),
    Metric("device_hours", "GPU hours", "", "lower", "GPUs times expected days times 24",
        shown=("comparison",)),
    Metric("target_devices", "fewest GPUs by the target date", "", "lower",
        "the fewest with which the expected days end by the target date; 0: none do",
        shown=("comparison",)),
)
# fmt: on
