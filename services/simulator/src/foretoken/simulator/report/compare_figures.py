"""The figures of several runs side by side, with their ratios to the first one's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.domain.number_text import format_number
from foretoken.domain.report import ServingReport
from foretoken.domain.result import AnyReport
from foretoken.domain.search import CapacityReport, ServingSearchReport
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_run import TrainingRunReport
from foretoken.domain.training_search import TrainingSearchReport
from foretoken.domain.units import GIB
from foretoken.simulator.report.search_candidates import Row, list_rows

Better = Literal["lower", "higher", ""]
_Figure = tuple[str, str, Better, Callable[[Any], float | None]]

# (percentiles of, what they are called)
_LATENCIES = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "ITL"),
    ("tpot_ms", "TPOT"),
    ("e2e_latency_ms", "end-to-end latency"),
    ("queueing_ms", "queueing"),
)
# Closer to 1 than this, a ratio is none; within this, it is told to three digits after the point.
_SAME_RATIO, _NEAR_RATIO = 0.0005, 0.1
_STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    """One figure of every run; None where a run has it not. `unit` "share" is from 0 to 1."""

    label: str
    unit: str
    values: tuple[float | None, ...]
    better: Better = ""

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Every value over the first one's; None where one is missing or not positive."""
        first = self.values[0] or 0.0
        return tuple(
            value / first if value is not None and value >= 0 and first > 0 else None
            for value in self.values
        )

    def describe_ratio(self, place: int) -> str:
        """Return a run's ratio to the first one in words: `0.8x, better`."""
        ratio = self.ratios[place]
        if ratio is None:
            return "-"
        if abs(ratio - 1) < _SAME_RATIO:
            return "same"
        # Near 1 the third digit after the point still matters.
        text = f"{ratio:.3f}x" if abs(ratio - 1) < _NEAR_RATIO else f"{format_number(ratio)}x"
        if not self.better:
            return text
        is_better = (ratio < 1) == (self.better == "lower")
        return f"{text}, {'better' if is_better else 'worse'}"


def compare_figures(reports: Sequence[AnyReport]) -> tuple[ComparedFigure, ...]:
    """Return the figures of reports of one kind, without those that are 0 in all of them."""
    found = [
        ComparedFigure(label=label, unit=unit, better=better, values=tuple(map(read, reports)))
        for label, unit, better, read in _list_figures(reports)
    ]
    return tuple(figure for figure in found if any(figure.values))


def best_row(report: ServingSearchReport | TrainingSearchReport) -> Row | None:
    """Return the candidate that a search ranks first; None where none qualifies."""
    columns = report.candidates
    ranked = [row for row in list_rows(columns, ("name",)) if row["rank"] > 0]
    return min(ranked, key=lambda row: row["rank"], default=None)


def largest_first(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of all mappings that have a value above 0, the largest of any first."""
    largest: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return sorted((name for name in largest if largest[name] > 0), key=lambda name: -largest[name])


def _list_figures(reports: Sequence[AnyReport]) -> Iterator[_Figure]:
    first = reports[0]
    if isinstance(first, TrainingReport):
        yield from _TRAINING
        yield from _parts(reports, "step_time_ms_by_group", "{} in the step", "ms")
        yield from _parts(reports, "communication_ms_by_axis", "communication of {}", "ms")
        yield from _parts(reports, "exposed_ms_by_axis", "exposed communication of {}", "ms")
    elif isinstance(first, TrainingRunReport):
        yield from _TRAINING_RUN
    elif isinstance(first, ServingReport):
        yield from _latencies()
        yield from _SERVING
        yield from _parts(reports, "step_time_s_by_group", "{} in all steps", "s")
    elif isinstance(first, CapacityReport):
        yield from _CAPACITY
    elif isinstance(first, ServingSearchReport):
        yield from _of_best(_BEST_DEPLOYMENT)
        yield from _SERVING_SEARCH
    else:
        yield from _of_best(_BEST_STRATEGY)
        yield from _TRAINING_SEARCH


def _field(label: str, unit: str, better: Better, name: str) -> _Figure:
    def read(report: Any) -> float | None:
        is_answer = not hasattr(report, "feasibility") or report.feasibility.is_feasible
        return float(getattr(report, name)) if is_answer else None

    return label, unit, better, read


def _of_chance(label: str, statistic: str) -> _Figure:
    """Return a quantile of a run's days by the chance of its failures; None without failures."""

    def read(report: TrainingRunReport) -> float | None:
        value = float(getattr(report.days_spread, statistic))
        return value if report.num_failures else None

    return label, "days", "lower", read


def _lost(label: str, ratio: str) -> _Figure:
    """Return the expected days that a run spends on something else than new steps."""
    return label, "days", "lower", lambda report: report.days * float(getattr(report, ratio))


def _latencies() -> Iterator[_Figure]:
    for name, label in _LATENCIES:
        for statistic in _STATISTICS:

            def read(report: Any, name: str = name, statistic: str = statistic) -> float | None:
                value = float(getattr(getattr(report, name), statistic))
                return value if report.num_completed else None

            yield f"{label} {statistic}", "ms", "lower", read


def _parts(reports: Sequence[AnyReport], name: str, label: str, unit: str) -> Iterator[_Figure]:
    """Return a figure for every part of a mapping, the largest of all runs first."""
    for part in largest_first(getattr(report, name) for report in reports):

        def read(report: Any, part: str = part) -> float:
            return float(getattr(report, name).get(part, 0.0))

        yield label.format(part.replace("_", " ")), unit, "", read


def _of_best(names: Sequence[tuple[str, str, Better, str, float]]) -> Iterator[_Figure]:
    for label, unit, better, name, scale in names:

        def read(report: Any, name: str = name, scale: float = scale) -> float | None:
            row = best_row(report)
            return None if row is None else float(row[name]) / scale

        yield f"best: {label}", unit, better, read


def _fullest_gib(name: str) -> Callable[[TrainingReport], float | None]:
    def read(report: TrainingReport) -> float | None:
        fullest = min(report.memory, key=lambda stage: stage.margin_bytes, default=None)
        return None if fullest is None else float(getattr(fullest, name)) / GIB

    return read


_TRAINING: Sequence[_Figure] = (
    _field("step time", "ms", "lower", "step_time_ms"),
    _field("step time, operators at their lower bound", "ms", "lower", "step_time_low_ms"),
    _field("step time, operators at their upper bound", "ms", "lower", "step_time_high_ms"),
    ("step time, 99 of 100 steps", "ms", "lower", lambda report: report.step_spread_ms.p99),
    _field("tokens/s", "tokens/s", "higher", "tokens_per_s"),
    _field("tokens/s per device", "tokens/s", "higher", "tokens_per_s_per_gpu"),
    _field("MFU", "share", "higher", "mfu_ratio"),
    _field("HFU, with recomputation", "share", "", "hfu_ratio"),
    _field("pipeline bubble", "share", "lower", "bubble_ratio"),
    _field("exposed communication", "share", "lower", "exposed_communication_ratio"),
    _field("devices", "", "", "num_devices"),
    _field("micro batches", "", "", "num_micro_batches"),
    ("fullest device, reserved", "GiB", "lower", _fullest_gib("reserved_bytes")),
    ("fullest device, margin", "GiB", "higher", _fullest_gib("margin_bytes")),
)
_TRAINING_RUN: Sequence[_Figure] = (
    _field("days, expected", "days", "lower", "days"),
    _field("days, operators at their lower bound", "days", "lower", "days_low"),
    _field("days, operators at their upper bound", "days", "lower", "days_high"),
    _of_chance("days, half of the runs", "p50"),
    _of_chance("days, 90 of 100 runs", "p90"),
    _of_chance("days, 99 of 100 runs", "p99"),
    _field("days without interruptions", "days", "lower", "ideal_days"),
    _field("cost", "USD", "lower", "usd"),
    _field("cost of a step", "USD", "lower", "usd_per_step"),
    _field("price of a device", "USD/h", "lower", "usd_per_hour"),
    _field("energy", "kWh", "lower", "energy_kwh"),
    _field("cost of the energy", "USD", "lower", "energy_usd"),
    _field("goodput", "share", "higher", "goodput_ratio"),
    _lost("waiting for checkpoints", "checkpoint_ratio"),
    _lost("steps done again", "repeated_ratio"),
    _lost("restarts", "restart_ratio"),
    _lost("waiting for other sites", "sites_ratio"),
    _field("failures, expected", "", "lower", "num_failures"),
    _field("training between checkpoints", "s", "", "checkpoint_interval_s"),
    _field("time to write a checkpoint", "s", "lower", "checkpoint_s"),
    _field("tokens", "", "", "num_tokens"),
    _field("steps", "", "", "num_steps"),
    _field("step time", "ms", "lower", "step_time_ms"),
    _field("devices", "", "", "num_devices"),
    _field("device hours", "h", "lower", "device_hours"),
    _field("fewest devices by the target date", "", "lower", "target_devices"),
)
_SERVING: Sequence[_Figure] = (
    _field("offered requests/s", "1/s", "", "offered_rps"),
    _field("requests completed", "", "higher", "num_completed"),
    _field("completed requests/s", "1/s", "higher", "request_throughput_rps"),
    _field("goodput", "1/s", "higher", "goodput_rps"),
    _field("SLO attainment", "share", "higher", "slo_attainment_ratio"),
    _field("prompt tokens/s", "tokens/s", "higher", "input_throughput_tps"),
    _field("output tokens/s", "tokens/s", "higher", "output_throughput_tps"),
    _field("output tokens/s per device", "tokens/s", "higher", "output_throughput_tps_per_gpu"),
    _field("devices", "", "", "num_devices"),
    _field("devices busy", "share", "", "utilization_ratio"),
    _field("MFU", "share", "higher", "mfu_ratio"),
    _field("MBU", "share", "higher", "mbu_ratio"),
    _field("batch size, mean", "", "", "batch_size_mean"),
    _field("KV in use, mean", "share", "", "kv_utilization_ratio_mean"),
    _field("prefix cache hits", "share", "higher", "prefix_cache_hit_ratio"),
    _field("preemptions", "", "lower", "num_preemptions"),
    _field("serving steps", "", "", "num_serving_steps"),
    _field("cost per million output tokens", "USD", "lower", "usd_per_million_output_tokens"),
    _field("energy per output token", "J", "lower", "energy_j_per_output_token"),
)
_CAPACITY: Sequence[_Figure] = (
    _field("capacity", "1/s", "higher", "capacity_rps"),
    _field("capacity, lower bound", "1/s", "higher", "low_rps"),
    _field("capacity, upper bound", "1/s", "higher", "high_rps"),
    _field("capacity per device", "1/s", "higher", "capacity_rps_per_gpu"),
    _field("devices", "", "", "num_devices"),
    _field("cost per million output tokens", "USD", "lower", "usd_per_million_output_tokens"),
    *(
        (f"at capacity: {label}", unit, better, lambda report, read=read: read(report.at_capacity))
        for label, unit, better, read in (*_latencies(), *_SERVING)
        if not label.startswith(("cost", "devices", "offered"))
    ),
)
_BEST_DEPLOYMENT: Sequence[tuple[str, str, Better, str, float]] = (
    ("output tokens/s per GPU", "tokens/s", "higher", "output_throughput_tps_per_gpu", 1.0),
    ("tokens/s per user", "tokens/s", "higher", "tps_per_user", 1.0),
    ("TTFT", "ms", "lower", "ttft_ms", 1.0),
    ("TPOT", "ms", "lower", "tpot_ms", 1.0),
    ("cost per million output tokens", "USD", "lower", "usd_per_million_output_tokens", 1.0),
    ("GPUs", "", "", "num_devices", 1.0),
)
_SERVING_SEARCH: Sequence[_Figure] = (
    _field("fewest GPUs for the rate", "", "lower", "min_devices"),
    _field("least cost for the rate", "USD/h", "lower", "min_usd_per_hour"),
    _field("points", "", "", "num_points"),
    _field("points that differ", "", "", "num_distinct"),
    _field("answered in closed form", "", "", "num_evaluated"),
    _field("simulated", "", "", "num_simulated"),
)
_BEST_STRATEGY: Sequence[tuple[str, str, Better, str, float]] = (
    ("tokens/s per GPU", "tokens/s", "higher", "tokens_per_s_per_gpu", 1.0),
    ("tokens/s", "tokens/s", "higher", "tokens_per_s", 1.0),
    ("step time", "ms", "lower", "step_time_ms", 1.0),
    ("MFU", "share", "higher", "mfu_ratio", 1.0),
    ("pipeline bubble", "share", "lower", "bubble_ratio", 1.0),
    ("exposed communication", "share", "lower", "exposed_communication_ratio", 1.0),
    ("fullest device, reserved", "GiB", "lower", "reserved_bytes", GIB),
    ("fullest device, margin", "GiB", "higher", "margin_bytes", GIB),
    ("cost of a step", "USD", "lower", "usd_per_step", 1.0),
    ("GPUs", "", "", "num_devices", 1.0),
)
_TRAINING_SEARCH: Sequence[_Figure] = (
    _field("strategies", "", "", "num_points"),
    _field("can run", "", "", "num_legal"),
    _field("have the memory", "", "", "num_fitting"),
    _field("simulated", "", "", "num_simulated"),
)
