"""The part of a search's page that says why points were ruled out."""

from collections import Counter
from collections.abc import Mapping, Sequence

from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Plot
from foretoken.page.curve import draw_counts
from foretoken.page.section import Section
from foretoken.simulator.report.search_candidates import Row, describe_verdict

_OF_VERDICT = {
    "ok": GREEN,
    "memory": PURPLE,
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


def rejections_section(counts: Mapping[str, int], rows: Sequence[Row]) -> Section:
    """Return how many points each reason rules out, and where in the space they are."""
    ordered = dict(sorted(counts.items(), key=lambda item: -item[1]))
    colors = _verdict_colors([*ordered, *(row["verdict"] for row in rows)])
    named = {describe_verdict(name): count for name, count in ordered.items()}
    caption = "A point is counted once, by the first reason that rules it out."
    plot = Plot(title="What rules points out", caption=caption, colors=colors)
    pictures = [draw_counts(plot, named, Column(title="points"))]
    for mode in sorted({row["mode"] for row in rows}):
        of_mode = [row for row in rows if row["mode"] == mode]
        if all(row["rank"] for row in of_mode):
            continue
        pictures.append(_crossing(mode, of_mode, colors))
    examples = {row["verdict"]: row for row in reversed(rows) if not row["rank"]}

    def example(verdict: str, name: str) -> str:
        return str(examples[verdict][name]) if verdict in examples else ""

    table = Table.of(
        ordered,
        Column.words("ruled out", read=describe_verdict),
        Column(title="points", read=ordered.__getitem__),
        Column.words("for example", read=lambda verdict: example(verdict, "name")),
        Column.words("because", read=lambda verdict: example(verdict, "reason")),
    )
    return Section(title="Where points failed", pictures=pictures, table=table)


def _crossing(mode: str, rows: Sequence[Row], colors: Mapping[str, str]) -> Chart:
    """Return boxes by degrees and batch sizes, coloured by what most of their points become."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    order: dict[tuple[str, str], tuple[int, ...]] = {}
    for row in rows:
        box = _batch_range(row["batch_size"]), _degree_of(row)
        order[box] = (row["batch_size"], *(row[axis] for axis in ("pp", "ep", "tp")))
        counts.setdefault(box, Counter())[describe_verdict(row["verdict"])] += 1
    what = "degrees of a replica" + (" (decode)" if mode == "disaggregated" else "")
    boxes = sorted(counts, key=order.__getitem__)
    table = Table.of(
        boxes,
        Column.words("batch size", "batch").part(0),
        Column.words(what, "degrees").part(1),
        Column.words("most of its points", "verdict", lambda box: counts[box].most_common(1)[0][0]),
        Column(title="points", read=lambda box: counts[box].total()),
        Column.words("all of its points", "counts", lambda box: _describe_counts(counts[box])),
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


def _describe_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def _degree_of(row: Row) -> str:
    return " ".join(
        f"{axis}{row[axis]}" for axis in ("tp", "pp", "ep") if axis == "tp" or row[axis] > 1
    )


def _batch_range(batch_size: int) -> str:
    """Return the batch sizes it is drawn with: from one power of two to before the next."""
    if batch_size <= 0:
        return "none"
    low = 1 << (batch_size.bit_length() - 1)
    return f"{low}" if low == 1 else f"{low:,} to {2 * low - 1:,}"


def _verdict_colors(verdicts: Sequence[str]) -> dict[str, str]:
    """Return a colour per verdict in words, those that are not known here after the others."""
    others = [name for name in dict.fromkeys(verdicts) if name not in _OF_VERDICT]
    colors = {describe_verdict(name): color for name, color in _OF_VERDICT.items()}
    return colors | {
        describe_verdict(name): _OTHER_VERDICTS[place % len(_OTHER_VERDICTS)]
        for place, name in enumerate(others)
    }
