"""The strategies of a training search as rows, and how tables and pictures write them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.question import OBJECTIVE_WORDS
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    StrategyColumns,
    StrategyFinalist,
    StrategySensitivity,
    TieCall,
    TrainingSearchReport,
)
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import MS_PER_S, S_PER_DAY
from foretoken.simulator.report.search_candidates import Row, first_of_each, list_rows, name_place
from foretoken.simulator.report.what_if import percent

_WORDS = frozenset(
    {"name", "device", "overlap", "recompute", "weight_parallel", "pipeline_schedule"}
) | {"placement", "stage_layers"}
# What makes a layout; all else is how its work is cut in time, and what is kept where.
_LAYOUT = (
    *("device", "num_devices", "global_batch_size", "placement"),
    *("tp", "pp", "dp", "cp", "ep"),
)
_VERDICT_NAMES = {
    "memory": "out of memory",
    "memory, simulated": "out of memory when simulated",
    "devices": "devices not divided",
    "batch": "batch not divided",
    "global_batch_size": "batch not divided",
    "layers": "more stages than layers",
    "virtual_stages": "nothing to interleave",
    "virtual_stages: unequal chunks": "interleaved chunks are unequal",
    "virtual_stages: unequal rounds": "interleaved rounds are unequal",
    "heads": "heads not divided",
    "mlp_width": "MLP width not divided",
    "sequence": "sequence not divided",
    "experts": "experts not divided",
    "weight_parallel": "weights cannot be split so",
    "shards": "states cannot be split so",
    "recompute_layers": "fewer layers than are recomputed",
    "pipeline_schedule": "the schedule has no order for it",
    "num_micro_batches": "the schedule has no order for it",
    "trainer": "the framework cannot do it",
}

# Where the time of a step goes, in the order of `split_step`.
STEP_PARTS = ("computation", "exposed communication", "bubble", "optimizer")


def strategy_rows(columns: StrategyColumns) -> list[Row]:
    """Return a mapping per strategy in the order of the columns; numbers are plain."""
    return list_rows(columns, _WORDS)


def ranked_rows(columns: StrategyColumns) -> list[Row]:
    """Return a mapping per strategy that has a rank, best first.

    What did not fit once it was simulated has none.
    """
    rows = [row for row in strategy_rows(columns) if row["rank"] > 0]
    return sorted(rows, key=lambda row: row["rank"])


def report_rows(report: TrainingSearchReport) -> list[Row]:
    """Return the ranked rows of a report; `place` is the rank in words, which tie with the best."""
    rows = ranked_rows(report.candidates)
    tied = {find_best(report, rows)["name"], *report.ties} if rows and report.ties else set()
    return [{**row, "place": name_place(row, is_tie=row["name"] in tied)} for row in rows]


def find_best(report: TrainingSearchReport, rows: Sequence[Row]) -> Row:
    """Return the row that is the best by what the request ranks by, else the first."""
    objective = read_request(report).get("objective", "")
    name = report.best.get(objective, "")
    return next((row for row in rows if row["name"] == name), rows[0])


def other_ties(report: TrainingSearchReport, best: Row) -> list[str]:
    """Return the names of those that tie with the best."""
    return [name for name in report.ties if name != best["name"]]


def best_of_layouts(rows: Sequence[Row]) -> list[Row]:
    """Return the best of each layout: others differ in micro batches, ZeRO, overlap and such."""
    return first_of_each(rows, _LAYOUT)


def best_by_objective(report: TrainingSearchReport, rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Return what each row is the best by, and the row; cost only where it is priced.

    A row that is the best by several objectives is there once.
    """
    by_name = {row["name"]: row for row in rows}
    found: dict[str, list[str]] = {}
    for objective in TRAINING_OBJECTIVES:
        name = report.best.get(objective, "")
        if name in by_name and (objective != "cost" or by_name[name]["usd_per_step"] > 0):
            found.setdefault(name, []).append(describe_objective(objective))
    return [(", ".join(measures), by_name[name]) for name, measures in found.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """A run of many steps with one strategy, without failures; `usd` is 0 where it has no price."""

    num_steps: int
    days: float
    usd: float


def make_whole_run(row: Row, num_tokens: float, sequence_length: int) -> WholeRun:
    """Return what a run to so many tokens takes; the last step is a whole one."""
    num_steps = ceil(num_tokens / (row["global_batch_size"] * sequence_length))
    return WholeRun(
        num_steps=num_steps,
        days=num_steps * row["step_time_ms"] / MS_PER_S / S_PER_DAY,
        usd=num_steps * row["usd_per_step"],
    )


def read_sequence_length(report: TrainingSearchReport) -> int:
    """Return the tokens of a sample; requests say it, as all their defaults are filled in."""
    return int(read_request(report)["scenario"]["sequence_length"])


def throughput_bounds(row: Row) -> tuple[float, float]:
    """Return the bounds of a row's tokens/s per GPU; both are the value where it has none."""
    value = row["tokens_per_s_per_gpu"]
    if row["step_time_low_ms"] <= 0 or row["step_time_high_ms"] <= 0:
        return value, value
    step_ms = row["step_time_ms"]
    return value * step_ms / row["step_time_high_ms"], value * step_ms / row["step_time_low_ms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedFigure:
    """What strategies are ranked by: the column, its name with its unit, and a word for it.

    A figure of `grows_with_step` is the larger the longer a step takes, else the smaller.
    """

    column: str
    name: str
    word: str
    grows_with_step: bool = True

    def bounds(self, row: Row) -> tuple[float, float, float]:
        """Return a row's lower bound, estimate and upper bound."""
        value, step_ms = row[self.column], row["step_time_ms"]
        low_ms, high_ms = row["step_time_low_ms"], row["step_time_high_ms"]
        if not self.grows_with_step:
            low, high = throughput_bounds(row)
            return low, value, high
        if low_ms <= 0 or high_ms <= 0:
            return value, value, value
        return value * low_ms / step_ms, value, value * high_ms / step_ms


def _ranked(column: str, word: str, *, grows_with_step: bool = True) -> RankedFigure:
    name = METRICS[column].title
    return RankedFigure(column=column, name=name, word=word, grows_with_step=grows_with_step)


_THROUGHPUT = _ranked("tokens_per_s_per_gpu", "throughput", grows_with_step=False)
_RANKED_FIGURES = {
    "cost": _ranked("usd_per_billion_tokens", "cost"),
    "step_time": _ranked("step_time_ms", "step time"),
}


def find_ranked_figure(report: TrainingSearchReport) -> RankedFigure:
    """Return what the estimates of a report are ranked by; throughput, if it is no time."""
    return _RANKED_FIGURES.get(read_request(report).get("objective", ""), _THROUGHPUT)


def describe_bounds(row: Row) -> str:
    """Return the bounds of a row's tokens/s per GPU: `2,900 to 3,400`."""
    return " to ".join(format_number(bound) for bound in throughput_bounds(row))


def describe_objective(objective: str) -> str:
    """Return what ranks, in words."""
    return OBJECTIVE_WORDS.get(objective, objective.replace("_", " "))


def describe_verdict(verdict: str) -> str:
    """Return what rules strategies out, in words."""
    kind, has_rule, rule = verdict.partition(": ")
    if has_rule and kind == "redundant":
        return f"the same as another: {rule.replace('_', ' ')}"
    return _VERDICT_NAMES.get(verdict, verdict.replace("_", " "))


def describe_choices(row: Row) -> str:
    """Return what a strategy chooses besides its degrees, in words."""
    count = row["num_micro_batches"]
    words = [
        f"{count:,} micro batch{'es' * (count != 1)} of {row['micro_batch_size']:,}",
        f"{row['virtual_stages']} chunks a rank" if row["virtual_stages"] > 1 else "",
        row["pipeline_schedule"] if row["pp"] > 1 else "",
        "sequence parallel" if row["sequence_parallel"] else "",
        _describe_zero(row),
        f"overlap {row['overlap']}" if row["overlap"] else "",
        f"recompute {row['recompute']}" if row["recompute"] else "",
        _describe_weights(row),
    ]
    return ", ".join(word for word in words if word)


def _describe_zero(row: Row) -> str:
    if not row["zero_stage"]:
        return ""
    over = f" over {row['shard_degree']} ranks" if row["shard_degree"] else ""
    return f"ZeRO {row['zero_stage']}{over}"


def _describe_weights(row: Row) -> str:
    over = f" over {row['weight_degree']} ranks" if row["weight_degree"] else ""
    return f"{row['weight_parallel']}{over}"


def describe_devices(row: Row) -> str:
    """Return on how many of which devices a strategy runs: `128 a100_sxm_80`."""
    if row["placement"]:
        # Its device names the nodes.
        return f"{row['num_devices']:,} devices in nodes: {row['device']}"
    return f"{row['num_devices']:,} {row['device']}"


def split_step(report: TrainingReport) -> Mapping[str, float]:
    """Return the ms of the critical stage by `STEP_PARTS`; together they are the step."""
    groups = report.step_time_ms_by_group
    parts = {
        "exposed communication": sum(report.exposed_ms_by_axis.values()),
        "bubble": groups.get("bubble", 0.0),
        "optimizer": groups.get("optimizer", 0.0),
    }
    computation = max(report.step_time_ms - sum(parts.values()), 0.0)
    return {"computation": computation, **parts}


def closed_form_error(finalist: StrategyFinalist) -> float:
    """Return by how much of the simulated step the closed form was off; 0 where one is unknown."""
    simulated_ms = finalist.report.step_time_ms
    if simulated_ms <= 0 or finalist.closed_form_ms <= 0:
        return 0.0
    return finalist.closed_form_ms / simulated_ms - 1


def strategies_per_s(report: TrainingSearchReport) -> float:
    """Return the points that were counted in a second of the closed form; 0 where none was."""
    return report.num_points / report.closed_form_s if report.closed_form_s > 0 else 0.0


def read_request(report: TrainingSearchReport) -> Mapping[str, Any]:
    """Return the request that a report answers; empty where it does not say."""
    content: Mapping[str, Any] = json.loads(report.request_json) if report.request_json else {}
    return content


def describe_search(report: TrainingSearchReport) -> str:
    """Return what was searched for: `llama-2-7b on 128 a100_sxm_80`."""
    request = read_request(report)
    scenario, space = request.get("scenario", {}), request.get("space", {})
    model = scenario.get("model", {}).get("name", "")
    groups = space.get("node_groups") or []
    if groups:
        return f"{model} on {' + '.join(_describe_group(group) for group in groups)}"
    devices = ", ".join(space.get("devices") or [scenario.get("device", "")])
    degrees = scenario.get("layout", {})
    of_layout = 1
    for degree in (degrees.get(axis, 1) for axis in ("tp", "pp", "dp", "cp")):
        of_layout *= degree
    counts = space.get("num_devices") or [of_layout]
    return f"{model} on {', '.join(f'{count:,}' for count in counts)} {devices}"


def _describe_group(group: Mapping[str, Any]) -> str:
    each = group.get("devices_per_node") or 0
    nodes = group.get("num_nodes", 1)
    return f"{nodes} x {each} {group['device']}" if each else f"{nodes} nodes {group['device']}"


# What the commands of ties are for; a simulation may rank others first.
TO_TELL_APART = "to tell the first two by the estimates apart, measure"


def describe_ties(report: TrainingSearchReport, rows: Sequence[Row]) -> list[str]:
    """Return how many tie, and which of them to take for another reason; nothing without ties."""
    best = find_best(report, rows)
    names = set(other_ties(report, best))
    if not names:
        return []
    tied = [best, *(row for row in rows if row["name"] in names)]
    simplest = min(tied, key=lambda row: len(str(row["name"]).split()))
    roomiest = max(tied, key=METRICS["margin_bytes"].value)
    figure = find_ranked_figure(report)
    most_free = f"{METRICS['margin_bytes'].words(roomiest)} GiB"
    others = "strategies tie" if len(names) > 1 else "strategy ties"
    meaning = "behind by less than the error of the difference, so each may be as good"
    count = f"{len(names):,} other {others} with {best['name']}"
    return [
        f"{count}: {meaning}; take one for another reason, or measure",
        f"simplest of them: {_compared_with(simplest, best, figure)}",
        f"most free memory: {_compared_with(roomiest, best, figure)}, {most_free}",
    ]


def list_tie_commands(report: TrainingSearchReport) -> list[tuple[str, str]]:
    """Return what to measure to tell the first two apart: a command, and what it moves."""
    return [
        (_command(call), f"{call.difference_ratio:.2%} of the step") for call in report.tie_calls
    ]


def describe_same(item: StrategySensitivity) -> str:
    """Return what today's best makes of a change, or that it cannot be used then."""
    ratio = item.same_throughput_ratio
    if item.is_same_best:
        return "the same"
    return percent(ratio) if ratio else "cannot"


def _compared_with(row: Row, best: Row, figure: RankedFigure) -> str:
    if row is best:
        return f"{row['name']} itself"
    ratio = row[figure.column] / best[figure.column] - 1 if best[figure.column] else 0.0
    return f"{row['name']} ({ratio:+.2%} {figure.word})"


def _command(call: TieCall) -> str:
    links = f" --topology {call.topology}" if call.topology else ""
    return f"foretoken plan {call.operator} {call.words} --device {call.device}{links}"
