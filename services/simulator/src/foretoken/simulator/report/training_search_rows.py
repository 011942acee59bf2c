"""The strategies of a training search as rows, and how tables and pictures write them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.question import OBJECTIVE_WORDS
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    StrategyFinalist,
    StrategySensitivity,
    TrainingSearchReport,
)
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import MS_PER_S, S_PER_DAY
from foretoken.page.block import Column, Table
from foretoken.simulator.report import search_candidates as candidates
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.what_if import percent

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

_THROUGHPUT, _COST = "tokens_per_s_per_gpu", "usd_per_billion_tokens"
_RATIOS = ("mfu_ratio", "bubble_ratio")


def report_rows(report: TrainingSearchReport) -> list[Row]:
    """Return the ranked rows of a report, with `place` and `bounds` as `candidate_rows` has them.

    Ties are with the best. What did not fit once it was simulated has no rank.
    """
    rows = candidates.ranked_rows(candidates.list_rows(report.candidates))
    tied = {find_best(report, rows)["name"], *report.ties} if rows and report.ties else set()
    return [
        {
            **row,
            "place": candidates.name_place(row, is_tie=row["name"] in tied),
            "bounds": figure_bounds(row),
        }
        for row in rows
    ]


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
    return candidates.first_of_each(rows, _LAYOUT)


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


def figure_bounds(row: Row, metric: str = _THROUGHPUT) -> tuple[float, float]:
    """Return the bounds of what a row has of a metric; both are the value where it has none.

    Throughput is the smaller the longer a step takes, all else that ranks is the larger.
    """
    value, step_ms = row[metric], row["step_time_ms"]
    low_ms, high_ms = row["step_time_low_ms"], row["step_time_high_ms"]
    if low_ms <= 0 or high_ms <= 0:
        return value, value
    if metric == _THROUGHPUT:
        return value * step_ms / high_ms, value * step_ms / low_ms
    return value * low_ms / step_ms, value * high_ms / step_ms


def ranked_figure(report: TrainingSearchReport) -> tuple[str, str]:
    """Return the metric that a report ranks by, and a word for it: throughput if it is no time."""
    figures = {"cost": (_COST, "cost"), "step_time": ("step_time_ms", "step time")}
    objective = read_request(report).get("objective", "")
    return figures.get(objective, (_THROUGHPUT, "throughput"))


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
        f"ZeRO {row['zero_stage']}{_over(row['shard_degree'])}" if row["zero_stage"] else "",
        f"overlap {row['overlap']}" if row["overlap"] else "",
        f"recompute {row['recompute']}" if row["recompute"] else "",
        f"{row['weight_parallel']}{_over(row['weight_degree'])}",
    ]
    return ", ".join(word for word in words if word)


def _over(degree: int) -> str:
    return f" over {degree} ranks" if degree else ""


def describe_devices(row: Row) -> str:
    """Return on how many of which devices a strategy runs: `128 a100_sxm_80`."""
    if row["placement"]:
        # Its device names the nodes.
        return f"{row['num_devices']:,} devices in nodes: {row['device']}"
    return f"{row['num_devices']:,} {row['device']}"


def split_step(report: TrainingReport) -> Mapping[str, float]:
    """Return the ms of the critical stage by what they are spent on; together they are the step."""
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
    content: Mapping[str, Any] = json.loads(report.request_json or "{}")
    return content


def describe_search(report: TrainingSearchReport) -> str:
    """Return what was searched for: `llama-2-7b on 128 a100_sxm_80`."""
    request = read_request(report)
    scenario, space = request.get("scenario", {}), request.get("space", {})
    model = scenario.get("model", {}).get("name", "")
    groups = space.get("node_groups") or []
    if groups:
        nodes = (
            f"{group.get('num_nodes', 1)} {f'x {each}' if each else 'nodes'} {group['device']}"
            for group in groups
            for each in (group.get("devices_per_node"),)
        )
        return f"{model} on {' + '.join(nodes)}"
    devices = ", ".join(space.get("devices") or [scenario.get("device", "")])
    degrees = scenario.get("layout", {})
    of_layout = prod(degrees.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    counts = space.get("num_devices") or [of_layout]
    return f"{model} on {', '.join(f'{count:,}' for count in counts)} {devices}"


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
    figure = ranked_figure(report)
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
        (
            f"foretoken plan {call.operator} {call.words} --device {call.device}"
            + (f" --topology {call.topology}" if call.topology else ""),
            f"{call.difference_ratio:.2%} of the step",
        )
        for call in report.tie_calls
    ]


def describe_same(item: StrategySensitivity) -> str:
    """Return what today's best makes of a change, or that it cannot be used then."""
    ratio = item.same_throughput_ratio
    if item.is_same_best:
        return "the same"
    return percent(ratio) if ratio else "cannot"


def _compared_with(row: Row, best: Row, figure: tuple[str, str]) -> str:
    if row is best:
        return f"{row['name']} itself"
    name, word = figure
    ratio = row[name] / best[name] - 1 if best[name] else 0.0
    return f"{row['name']} ({ratio:+.2%} {word})"


NAME = Column.words("strategy", "name")
_STEP = Column(
    title=METRICS["step_time_ms"].label,
    name="step_time_ms",
    read=lambda item: describe_step(METRICS["step_time_ms"].value(item)),
)
OF_CHANGES = (
    Column(title="today's best", read=describe_same),
    Column.of(_THROUGHPUT),
    _STEP,
    Column(title="fit", name="num_fitting"),
)


def ranking_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a ranking."""
    return [NAME, candidates.PLACE, *_figures(rows)]


def _figures(rows: Sequence[Row], *, is_whole: bool = True) -> list[Column]:
    """Return the columns; the device, its number and the price only where they tell rows apart.

    Bounds and ratios only if `is_whole`.
    """
    columns: list[Column] = []
    if len({(row["device"], row["num_devices"]) for row in rows}) > 1:
        # Names of placements say the devices.
        title = METRICS["num_devices"].title
        columns.append(
            Column(
                title=title,
                name="devices",
                read=lambda row: (
                    f"{row['num_devices']:,}" if row["placement"] else describe_devices(row)
                ),
            )
        )
    columns.append(Column.of(_THROUGHPUT))
    if is_whole:
        columns += candidates.bound_columns(_THROUGHPUT)
    names = ("step_time_ms", *(_RATIOS if is_whole else ()), "margin_bytes")
    columns += [Column.of(name) for name in names]
    if any(row[_COST] > 0 for row in rows):
        columns.append(Column.of(_COST))
    return columns


def ruled_out_table(report: TrainingSearchReport) -> Table:
    """Return what rules strategies out, by how many it does."""
    return Table.of(
        sorted(report.ruled_out, key=lambda item: -item.num_strategies),
        Column.words("ruled out", read=lambda item: describe_verdict(item.verdict)),
        Column(title="strategies", name="num_strategies"),
        Column.words("for example", "example"),
        Column.words("because", "reason"),
    )


def best_table(report: TrainingSearchReport, rows: Sequence[Row], num_tokens: float = 0.0) -> Table:
    """Return the best by each measure, with what a run to `num_tokens` takes if there are any.

    Such a run is without failures, and its last step is a whole one.
    """
    found = best_by_objective(report, rows)
    measures = {row["name"]: words for words, row in found}
    best_by = Column.words("best by", read=lambda row: measures[row["name"]])
    columns = [NAME, best_by, *_figures(rows, is_whole=False)]
    if num_tokens > 0:
        length = read_request(report)["scenario"]["sequence_length"]

        def num_steps(row: Row) -> int:
            return ceil(num_tokens / float(row["global_batch_size"] * length))

        def days(row: Row) -> float:
            return float(num_steps(row) * row["step_time_ms"]) / MS_PER_S / S_PER_DAY

        columns += [Column(title="steps", name="num_steps", read=num_steps)]
        columns += [Column(title="days", read=days)]
        if any(row["usd_per_step"] > 0 for row in rows):
            usd = Column(title="USD in all", name="usd")
            columns.append(replace(usd, read=lambda row: num_steps(row) * row["usd_per_step"]))
    return Table.of([row for _, row in found], *columns)
