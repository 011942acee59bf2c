"""The part of a search's page that says why points were ruled out."""

from collections import Counter
from collections.abc import Mapping, Sequence

from foretoken.page.figure import GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from foretoken.page.section import DataTable, Picture, Section
from foretoken.simulator.report.crossing_plot import Crossing, draw_crossing
from foretoken.simulator.report.search_candidates import Row, describe_verdict
from foretoken.simulator.report.search_plots import draw_counts

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
    pictures = [
        Picture(
            svg=draw_counts("search-verdicts", "What rules points out", "points", named, colors),
            caption="A point is counted once, by the first reason that rules it out.",
        )
    ]
    for mode in sorted({row["mode"] for row in rows}):
        of_mode = [row for row in rows if row["mode"] == mode]
        if all(row["rank"] for row in of_mode):
            continue
        crossing = _crossing(mode, of_mode, colors)
        pictures.append(
            Picture(
                svg=draw_crossing(f"search-failed-{mode}", crossing),
                caption=(
                    "Distinct points by the degrees of a replica and the requests that run on it, "
                    "each box divided by what becomes of its points. Point at a box for its counts."
                ),
            )
        )
    examples = {row["verdict"]: row for row in reversed(rows) if not row["rank"]}
    table = DataTable(
        headers=("ruled out", "points", "for example", "because"),
        rows=[
            (
                describe_verdict(name),
                f"{count:,}",
                examples[name]["name"] if name in examples else "",
                examples[name]["reason"] if name in examples else "",
            )
            for name, count in ordered.items()
        ],
        text_columns=(2, 3),
    )
    return Section(title="Where points failed", pictures=pictures, table=table)


def _crossing(mode: str, rows: Sequence[Row], colors: Mapping[str, str]) -> Crossing:
    counts: dict[tuple[str, str], Counter[str]] = {}
    batches: dict[str, int] = {}
    degrees: dict[str, tuple[int, ...]] = {}
    for row in rows:
        batch, degree = _batch_range(row["batch_size"]), _degree_of(row)
        batches[batch] = row["batch_size"]
        degrees[degree] = tuple(row[axis] for axis in ("pp", "ep", "tp"))
        counts.setdefault((batch, degree), Counter())[describe_verdict(row["verdict"])] += 1
    return Crossing(
        title=f"What became of the {mode} points",
        row_label="batch size",
        column_label="degrees of a replica" + (" (decode)" if mode == "disaggregated" else ""),
        rows=sorted(batches, key=batches.__getitem__),
        columns=sorted(degrees, key=degrees.__getitem__),
        counts=counts,
        colors=colors,
    )


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
