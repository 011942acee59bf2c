"""The candidates of a search as rows, and how tables and pictures write them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import Any, cast

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import ATTAINMENT, METRICS, describe_limit
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.search import (
    CandidateColumns,
    CapacityProbe,
    Finalist,
    LimitOutcome,
    ServingSearchReport,
)
from foretoken.domain.results.report import Columns
from foretoken.page.block import Column

Row = Mapping[str, Any]

_THROUGHPUT, _COST = "output_throughput_tps_per_gpu", "usd_per_million_output_tokens"
_LATENCIES = ("ttft_ms", "tpot_ms")
# What is said of the best under a change.
OF_CHANGES = tuple(Column.of(name) for name in (_THROUGHPUT, *_LATENCIES))

_WORDS = frozenset(
    (
        *("name", "device", "mode", "profile", "quantization", "speculation", "rules", "router"),
        *("kv_tiers", "verdict", "reason", "overlap", "recompute", "weight_parallel"),
        *("pipeline_schedule", "placement", "stage_layers"),
    )
)
# What makes a layout, besides how many replicas there are and how much runs on each.
_LAYOUT = (
    *("device", "mode", "profile", "quantization", "speculation", "rules", "router"),
    *("kv_tiers", "tp", "pp", "dp", "ep", "encoders"),
    *("prefill_tp", "prefill_pp", "prefill_ep"),
)
_VERDICT_NAMES = {
    "ok": "qualifies",
    "memory": "out of memory",
    "context": "requests too long for the model",
    "layout": "impossible layout",
    "engine": "the engine cannot do it",
    "bound": "beyond a bound",
    "devices": "too many GPUs",
    "encoders": "too few encoders",
}


def candidate_rows(columns: CandidateColumns) -> list[Row]:
    """Return a mapping per candidate, in order; numbers are plain, absent columns 0 or empty.

    `place` is the rank in words, empty where there is none; others with the same rank are ties.
    `bounds` are those of the throughput.
    """
    rows = list_rows(columns)
    counts = Counter(row["rank"] for row in rows)
    return [
        {
            **row,
            "place": name_place(row, is_tie=counts[row["rank"]] > 1),
            "bounds": (row["tps_per_gpu_low"], row["tps_per_gpu_high"]),
        }
        for row in rows
    ]


def name_place(row: Row, *, is_tie: bool) -> str:
    """Return a rank in words: with an equals sign where it ties, empty where there is none."""
    return f"{'=' * is_tie}{row['rank']}" if row["rank"] else ""


def list_rows(columns: Columns) -> list[Row]:
    """Return a mapping per candidate of either search, in order.

    Numbers are plain; columns that are absent, where there is a `name`, are 0 or empty.
    """
    names = [item.name for item in fields(cast("Any", columns))]
    length = len(getattr(columns, "name", ()))
    lists = {}
    for name in names:
        column = getattr(columns, name)
        absent = [""] * length if name in _WORDS else [0] * length
        lists[name] = (
            (column.tolist() if hasattr(column, "tolist") else column) if len(column) else absent
        )
    return [{name: lists[name][index] for name in names} for index in range(length)]


NAME, DEVICE = Column.words("deployment", "name"), Column.words("device")
# Where a row stands among all.
PLACE = Column(title="rank", read=lambda row: str(row["place"]))


def bound_columns(metric: str) -> tuple[Column, ...]:
    """Return the columns of a throughput's 90 % interval, empty where there is none."""

    def column(title: str, end: str, place: int) -> Column:
        def read(row: Row) -> float | None:
            return row["bounds"][place] if row["bounds"][1] > 0 else None

        unit = METRICS[metric].unit
        return Column(title=title, name=f"{metric}_{end}", unit=unit, read=read)

    return column("from (90 %)", "low", 0), column("to (90 %)", "high", 1)


def ranking_columns(shown: Sequence[Row]) -> list[Column]:
    """Return the columns; the device and the price only where they tell rows apart."""
    columns = [NAME, PLACE]
    if len({row["device"] for row in shown}) > 1:
        columns.append(DEVICE)
    columns.append(Column.of("num_devices"))
    if any(row["num_idle_devices"] for row in shown):
        columns.append(Column(title="idle GPUs", name="num_idle_devices"))
    columns += [Column.of(_THROUGHPUT), *bound_columns(_THROUGHPUT)]
    columns += [Column.of(name) for name in ("tps_per_user", *_LATENCIES)]
    if any(row[_COST] > 0 for row in shown):
        columns.append(Column.of(_COST))
    return columns


def describe_near(report: ServingSearchReport) -> str:
    """Return how many points are near the limit on TTFT, and what simulating them said."""
    ruled = (
        f"{report.num_near_simulated:,} simulated, which ruled {report.num_near_ruled_in:,} in"
        f" and {report.num_near_ruled_out:,} out"
        if report.num_near_simulated
        else "none simulated"
    )
    return (
        "over the limit on TTFT by less than the closed form may be wrong:"
        f" {report.num_near:,}, {ruled}"
    )


def ranked_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a rank, best first."""
    return sorted((row for row in rows if row["rank"] > 0), key=lambda row: row["rank"])


def best_of_layouts(ranked: Sequence[Row]) -> list[Row]:
    """Return the best row of each layout: those that differ in batches and counts alone are one."""
    return first_of_each(ranked, _LAYOUT)


def first_of_each(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Return the first of all rows that are alike in these columns."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), row)
    return list(found.values())


def describe_replicas(row: Row) -> str:
    """Return how many replicas of which degrees: `4 x tp2`, or `3 x tp1 + 5 x tp4` (prefill first).

    Encoders that are apart stand before all, prefill replicas before the decode replicas.
    """
    pools = [f"{row['encoders']} x encoder"] if row["encoders"] else []
    if row["prefill_replicas"]:
        degrees = name_degrees(row, ("tp", "pp", "ep"), "prefill_")
        pools.append(f"{row['prefill_replicas']:,} x {degrees}")
    pools.append(f"{row['replicas']:,} x {name_degrees(row, ('tp', 'pp', 'dp', 'ep'))}")
    return " + ".join(pools)


def describe_deployment(row: Row) -> str:
    """Return how many replicas there are, and what runs on each, in words that need no notation."""
    num, batch = row["replicas"], f"up to {row['batch_size']:,} requests at once"
    if row["prefill_replicas"]:
        prompts = f"{_count(row['prefill_replicas'], 'replica')} for prompts"
        most = f"up to {row['prefill_batch_size']:,} requests at once on each"
        return f"{prompts}, {most}; {num:,} for answers, {batch} on each."
    gpus = f"of {_count(row['num_devices'] // num, 'GPU')}"
    if row["encoders"]:
        gpus = f"and {_count(row['encoders'], 'encoder')}"
    return f"{_count(num, 'replica')} {gpus}; {batch} on {'each' if num > 1 else 'it'}."


def _count(num: int, name: str) -> str:
    return f"{num:,} {name}" if num == 1 else f"{num:,} {name}s"


def name_degrees(row: Row, axes: Sequence[str], pool: str = "") -> str:
    """Return the degrees of a replica of a pool, tp and those above one: `tp4 ep2`."""
    degrees = {axis: row[f"{pool}{axis}"] for axis in axes}
    return " ".join(f"{axis}{n}" for axis, n in degrees.items() if axis == "tp" or n > 1)


def describe_batch(row: Row) -> str:
    """Return the requests that run on a replica: `96`, or `4 + 96` (prefill first)."""
    if row["prefill_replicas"] and row["prefill_batch_size"]:
        return f"{row['prefill_batch_size']:,} + {row['batch_size']:,}"
    return f"{row['batch_size']:,}"


def describe_tied(names: Sequence[str], most: int) -> str:
    """Return which others tie with the best, as a sentence that follows; of many some are named."""
    if not names:
        return ""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    shown = ", ".join(names[:most])
    return f" It ties, within the error of the estimates, with {shown}{more}."


# In the order of names; a number follows each.
_TERMS: Mapping[str, str] = {
    "tp": "tensor parallel: each layer is split over so many GPUs",
    "pp": "pipeline parallel: the layers are cut into so many stages",
    "vpp": "chunks of layers of each stage, run in turn",
    "dp": "data parallel: so many copies share the requests, or the batch",
    "cp": "context parallel: each sequence is split over so many GPUs",
    "ep": "expert parallel: the experts are spread over so many GPUs",
    "wp": "weight parallel: the weights are spread over so many GPUs",
    "b": "requests that run on a replica at once",
    "c": "tokens of a step at most",
    "mbs": "sequences of a micro batch",
    "gbs": "sequences of a step, all GPUs together",
    "zero": "ZeRO stage: what of the optimizer, gradients and weights is spread",
}
_PART = re.compile(r"\b([a-z]+)\d+\b")


def explain_names(names: Iterable[str]) -> str:
    """Return what the parts of names stand for, in a line; empty where there are none.

    `2 x tp4 b64`: two replicas of four GPUs each.
    """
    found = {part for name in names for part in _PART.findall(name)}
    terms = [f"`{part}` {term}" for part, term in _TERMS.items() if part in found]
    return "; ".join(terms) + "." if terms else ""


def describe_verdict(verdict: str) -> str:
    """Return what rules candidates out, in words."""
    if verdict in LIMITED or verdict == ATTAINMENT:
        metric = LIMITED.get(verdict, METRICS["slo_attainment_ratio"])
        return f"{metric.label} over the limit"
    return _VERDICT_NAMES.get(verdict, verdict.replace("_", " "))


def missed_outcomes(outcomes: Sequence[LimitOutcome]) -> list[str]:
    """Return what was not met: `TTFT p99 2,310 > 2,000 ms`."""
    return [_describe_miss(outcome) for outcome in outcomes if not outcome.is_met]


def _describe_miss(outcome: LimitOutcome) -> str:
    what = describe_limit(outcome.metric, outcome.percentile)
    if outcome.metric == ATTAINMENT:
        return f"{what} {outcome.value:.1%} < {outcome.limit:.1%}"
    return f"{what} {format_number(outcome.value, 4)} > {format_number(outcome.limit, 4)} ms"


def proposed_rate(finalist: Finalist) -> float:
    """Return the requests/s that a deployment was served at the load it is proposed for."""
    rates = [probe.rate_rps for probe in finalist.load if probe.outcomes == finalist.outcomes]
    return rates[0] if rates else finalist.report.offered_rps


def steady_figures(
    finalist: Finalist, candidates: CandidateColumns
) -> tuple[float, float, float, float, float]:
    """Return tokens/s of a device, mean and p99 of TTFT and TPOT in ms, once the load is steady.

    Of the whole simulation where no part of it is steady. The devices are those that count.
    """
    report, steady = finalist.report, finalist.report.steady
    each, ttft, tpot = report.output_throughput_tps_per_gpu, report.ttft_ms, report.tpot_ms
    if steady.num_requests:
        each = steady.output_throughput_tps / max(report.num_devices, 1)
        ttft, tpot = steady.ttft_ms, steady.tpot_ms
    if len(candidates.num_counted_devices):
        row = finalist.candidate
        each *= float(candidates.num_devices[row] / candidates.num_counted_devices[row])
    return each, ttft.mean, ttft.p99, tpot.mean, tpot.p99


def curve_of(
    probes: Sequence[CapacityProbe], metric: str, percentile: float
) -> list[tuple[CapacityProbe, float]]:
    """Return the probes with their value of one limit, where they have one."""
    return [
        (probe, outcome.value)
        for probe in probes
        for outcome in probe.outcomes
        if (outcome.metric, outcome.percentile) == (metric, percentile) and isfinite(outcome.value)
    ]


def limits_of(probes: Sequence[CapacityProbe]) -> dict[tuple[str, float], float]:
    """Return the limit of each (metric, percentile) that the probes have; 0 is no limit."""
    return {
        (outcome.metric, outcome.percentile): outcome.limit
        for probe in probes
        for outcome in probe.outcomes
    }


_MAX_SHOWN = 3


_REMEDIES: Mapping[str, str] = {
    "ttft_ms": "a looser limit, shorter prompts, more tensor parallelism or another device",
    "tpot_ms": "a looser limit, more tensor parallelism, fewer bits per weight or another device",
    "itl_ms": "a looser limit, or steps of fewer tokens",
    "e2e_latency_ms": "a looser limit, shorter answers or more tensor parallelism",
    "devices": "more GPUs, or a lower rate",
    "memory": (
        "more GPUs for each replica (tensor or pipeline parallelism), smaller batches or fewer bits"
        " per weight"
    ),
    "context": "shorter requests, or a model that reads longer ones",
    "layout": "other degrees of parallelism",
    "engine": "another engine, or what this one has",
    "bound": "smaller batches, or steps of more tokens",
}


def find_closest(rows: Sequence[Row]) -> list[Row]:
    """Return for each reason the candidate that was nearest; those that got furthest first.

    Of latencies it is the lowest, of GPUs the fewest, of memory the smallest batch on the largest
    replica. `remedy` says what would help it, where that is known.
    """
    found: dict[str, Row] = {}
    for row in rows:
        verdict = row["verdict"]
        if row["rank"] or (verdict in _LATENCIES and row[verdict] <= 0):
            continue
        nearness = _nearness(verdict)
        if verdict not in found or nearness(row) < nearness(found[verdict]):
            found[verdict] = row
    ordered = sorted(found, key=lambda verdict: [*_REMEDIES, verdict].index(verdict))
    return [{**found[of], "remedy": _REMEDIES.get(of, "")} for of in ordered[:_MAX_SHOWN]]


def _nearness(verdict: str) -> Callable[[Row], tuple[float, ...]]:
    """Return what is least for the nearest candidate that this verdict rules out."""
    if verdict in _LATENCIES:
        return lambda row: (row[verdict],)
    if verdict == "memory":
        return lambda row: (-row["tp"] * row["pp"] * row["ep"], row["batch_size"])
    return lambda row: (row["num_devices"], row["batch_size"])
