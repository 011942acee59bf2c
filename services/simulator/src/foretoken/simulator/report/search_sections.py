"""The sections of a page about the search for a serving deployment."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from operator import itemgetter

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.page.block import Chart, Column, Table, Value
from foretoken.page.chart import GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Plot
from foretoken.page.curve import draw_counts
from foretoken.page.section import Section
from foretoken.simulator.report import search_candidates as candidates
from foretoken.simulator.report.fronts import serving_fronts_section
from foretoken.simulator.report.question import request_sections
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.search_finalists import finalist_sections
from foretoken.simulator.report.what_if import what_if_section

_THROUGHPUT, _COST = "output_throughput_tps_per_gpu", "usd_per_million_output_tokens"
_OF_COSTS = (
    *("num_devices", "usd_per_hour", _COST),
    *("request_throughput_rps", "output_throughput_tps"),
)
_OF_VERDICT = {
    "ok": GREEN,
    "memory": PURPLE,
    "context": "#2f6f62",
    "ttft_ms": ORANGE,
    "tpot_ms": VERMILION,
    "e2e_latency_ms": YELLOW,
    "itl_ms": "#a06a95",
    "bound": GREY,
    "layout": "#8c6d1f",
    "engine": "#4b3f8f",
    "devices": SKY,
}
_OTHER_VERDICTS = ("#5b8f29", "#5f6b7a", "#a8452f", "#e9a3c4")
_CLOSEST = (
    Column.words("closest", "name"),
    Column.words("why not", "reason"),
    Column.words("what helps", "remedy"),
)
# More ties than this are counted.
_MAX_TIES = 5


def search_sections(report: ServingSearchReport) -> list[Section]:
    """Return what a page says of a search: the answer first, what it rests on last."""
    rows = candidates.candidate_rows(report.candidates)
    ranked = candidates.ranked_rows(rows)
    sections = [_overview(report, ranked)]
    if ranked:
        sections.append(_ranking(ranked))
    if rows:
        sections.append(serving_fronts_section(report))
    if report.finalists:
        sections += finalist_sections([(f, report.candidates) for f in report.finalists])
    if report.num_ruled_out_by_verdict:
        sections.append(_rejections(report.num_ruled_out_by_verdict, rows))
    if any(row["usd_per_hour"] > 0 for row in ranked):
        sections.append(_costs(ranked))
    if report.sensitivities:
        sections.append(
            what_if_section(
                "The search again with one thing changed, against the best of today{}.",
                "Output tokens/s per GPU of the best deployment",
                report.sensitivities,
                report.best,
                candidates.OF_CHANGES,
            )
        )
    seed = json.loads(report.request_json or "{}").get("scenario", {}).get("seed", 0)
    origin = f"Seed {seed}, predictor {report.model_version or 'no trained model'}"
    return [*sections, *request_sections(report, "serving", origin)]


def _overview(report: ServingSearchReport, ranked: Sequence[Row]) -> Section:
    counts = (
        f"Of {report.num_points:,} points {report.num_distinct:,} are distinct;"
        f" {report.num_evaluated:,} were answered in closed form and {report.num_simulated:,}"
        f" simulated request by request, in {report.wall_s:.3g} s with {report.cpu_s:.3g} s of CPU"
        " time."
    )
    if report.num_near:
        near = candidates.describe_near(report)
        counts += f" {near[0].upper()}{near[1:]}."
    if not ranked:
        return Section(
            title="The best deployment",
            warning="No deployment of this space meets the targets; see why each failed below.",
            intro=counts,
            table=Table.of(
                candidates.find_closest(candidates.candidate_rows(report.candidates)), *_CLOSEST
            ),
        )
    best = ranked[0]
    tied = candidates.describe_tied(
        [name for name in report.ties if name != report.best], _MAX_TIES
    )
    return Section(
        title="The best deployment",
        intro=f"{report.best or best['name']} ranks first.{tied} {counts}",
        facts=_facts(report, best),
    )


def _facts(report: ServingSearchReport, best: Row) -> list[Value]:
    idle = ""
    if best["num_idle_devices"]:
        verb = "counted" if best["num_counted_devices"] > best["num_devices"] else "not counted"
        idle = f"; {best['num_idle_devices']:,} idle, {verb} per GPU"
    facts = [
        Value.of(_THROUGHPUT, best, low=best["tps_per_gpu_low"], high=best["tps_per_gpu_high"]),
        Value.of("tps_per_user", best, f"{METRICS['tpot_ms'].label} {best['tpot_ms']:.3g} ms"),
        Value.of("ttft_ms", best, low=best["ttft_low_ms"], high=best["ttft_high_ms"]),
        Value.of(
            "num_devices", best, f"{best['device']}, {candidates.describe_replicas(best)}{idle}"
        ),
    ]
    if best[_COST] > 0:
        facts.append(Value.of(_COST, best, f"USD {format_number(best['usd_per_hour'])} an hour"))
    if report.min_devices:
        facts.append(Value.of("min_devices", report, report.min_devices_by))
    if report.min_usd_per_hour:
        facts.append(Value.of("min_usd_per_hour", report, report.min_usd_per_hour_by))
    return facts


def _ranking(ranked: Sequence[Row]) -> Section:
    shown = candidates.best_of_layouts(ranked)
    return Section(
        title="Ranking",
        intro=(
            f"{len(ranked):,} deployments qualify; this is the best of each layout. Equal ranks "
            "are ties: their intervals cannot distinguish them. `2 x` are two replicas; prefill "
            "replicas stand before the plus sign, decode replicas behind. "
            + candidates.explain_names(row["name"] for row in shown)
        ),
        table=Table.of(shown, *candidates.ranking_columns(shown)),
    )


def _costs(ranked: Sequence[Row]) -> Section:
    priced = [row for row in ranked if row["usd_per_hour"] > 0]
    ordered = sorted(priced, key=lambda row: row["usd_per_million_output_tokens"])
    figures = (Column.of(name) for name in _OF_COSTS)
    return Section(
        title="Cost",
        intro=(
            "The cheapest of each layout by its output tokens; devices only, as priced in the "
            "request."
        ),
        table=Table.of(
            candidates.best_of_layouts(ordered),
            candidates.NAME,
            candidates.DEVICE,
            *figures,
            candidates.PLACE,
        ),
    )


def _rejections(counts: Mapping[str, int], rows: Sequence[Row]) -> Section:
    """Return how many points each reason rules out, and where in the space they are."""
    ordered = dict(sorted(counts.items(), key=lambda item: -item[1]))
    verdicts = dict.fromkeys((*ordered, *(row["verdict"] for row in rows)))
    others = zip(
        (name for name in verdicts if name not in _OF_VERDICT), cycle(_OTHER_VERDICTS), strict=False
    )
    colors = {
        candidates.describe_verdict(name): color for name, color in (*_OF_VERDICT.items(), *others)
    }
    named = {candidates.describe_verdict(name): count for name, count in ordered.items()}
    caption = "A point is counted once, by the first reason that rules it out."
    plot = Plot(title="What rules points out", caption=caption, colors=colors)
    pictures = [draw_counts(plot, named, Column(title="points"))]
    for mode in sorted({row["mode"] for row in rows}):
        of_mode = [row for row in rows if row["mode"] == mode]
        if all(row["rank"] for row in of_mode):
            continue
        pictures.append(_crossing(mode, of_mode, colors))
    none = {"name": "", "reason": ""}
    examples = {row["verdict"]: row for row in reversed(rows) if not row["rank"]}
    table = Table.of(
        ((verdict, count, examples.get(verdict, none)) for verdict, count in ordered.items()),
        Column.words("ruled out", read=candidates.describe_verdict).part(0),
        Column(title="points").part(1),
        Column.words("for example", read=itemgetter("name")).part(2),
        Column.words("because", read=itemgetter("reason")).part(2),
    )
    return Section(title="Where points failed", pictures=pictures, table=table)


def _crossing(mode: str, rows: Sequence[Row], colors: Mapping[str, str]) -> Chart:
    """Return boxes by degrees and batch sizes, coloured by what most of their points become."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    order: dict[tuple[str, str], tuple[int, ...]] = {}
    for row in rows:
        box = _batch_range(row["batch_size"]), candidates.name_degrees(row, ("tp", "pp", "ep"))
        order[box] = (row["batch_size"], *(row[axis] for axis in ("pp", "ep", "tp")))
        counts.setdefault(box, Counter())[candidates.describe_verdict(row["verdict"])] += 1
    what = "degrees of a replica" + (" (decode)" if mode == "disaggregated" else "")
    boxes = sorted(counts, key=order.__getitem__)
    table = Table.of(
        boxes,
        Column.words("batch size", "batch").part(0),
        Column.words(what, "degrees").part(1),
        Column.words("most of its points", "verdict", lambda box: counts[box].most_common(1)[0][0]),
        Column(title="points", read=lambda box: counts[box].total()),
        Column.words(
            "all of its points",
            "counts",
            lambda box: ", ".join(f"{num:,} {name}" for name, num in counts[box].most_common()),
        ),
    )
    plot = Plot(
        title=f"What became of the {mode} points",
        table=table,
        x="degrees",
        y="batch",
        by="verdict",
        colors=colors,
        caption="Distinct points by the degrees of a replica and the requests that run on it: how"
        " many there are, and in colour what becomes of most. Point at a box for all.",
    )
    return plot.boxes("points")


def _batch_range(batch_size: int) -> str:
    """Return the batch sizes it is drawn with: from one power of two to before the next."""
    if batch_size <= 0:
        return "none"
    low = 1 << (batch_size.bit_length() - 1)
    return f"{low}" if low == 1 else f"{low:,} to {2 * low - 1:,}"
