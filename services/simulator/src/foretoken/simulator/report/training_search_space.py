"""A training search's space on its page: what is ruled out, where the best are, placements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.requests.training_search import RuledOut, SpaceCell, TrainingSearchReport
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, Plot
from foretoken.page.curve import draw_counts
from foretoken.page.section import Section
from foretoken.simulator.report.search_candidates import Row, first_of_each
from foretoken.simulator.report.training_search_rows import describe_bounds, describe_verdict
from foretoken.simulator.report.training_search_tables import ruled_out_table

_AXIS_NAMES = {
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "dp": "data parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "micro_batch_size": "micro batch size",
    "recompute": "recompute",
}
# In the order of what they cost, not of the alphabet.
_WORD_ORDER = ("none", "selective", "full")
_OF_STAGE = {
    "points of the space": SKY,
    "can run": BLUE,
    "fit the memory": GREEN,
    "simulated": ORANGE,
}
_MEMORY = "memory"


def counts_section(report: TrainingSearchReport) -> Section:
    """Return how many strategies are left after each question, and what rules the others out."""
    pictures = [_funnel(report)]
    if report.ruled_out:
        pictures.append(_reasons(sorted(report.ruled_out, key=lambda item: -item.num_strategies)))
    return Section(
        title="Every strategy, counted",
        pictures=pictures,
        table=ruled_out_table(report) if report.ruled_out else None,
    )


def _funnel(report: TrainingSearchReport) -> Chart:
    counts = (report.num_points, report.num_legal, report.num_fitting, report.num_simulated)
    caption = f"All that can run are answered in closed form, of {report.num_shapes:,} shapes."
    plot = Plot(title="What is left of the space", caption=caption, colors=_OF_STAGE)
    named = dict(zip(_OF_STAGE, counts, strict=True))
    return draw_counts(plot, named, Column(title="strategies"), total=report.num_points)


def _reasons(ordered: Sequence[RuledOut]) -> Chart:
    counts: dict[str, int] = {}
    for item in ordered:
        name = describe_verdict(item.verdict)
        counts[name] = counts.get(name, 0) + item.num_strategies
    colors = dict.fromkeys(counts, GREY) | {describe_verdict(_MEMORY): PURPLE}
    caption = (
        "A strategy is counted once, by the first rule that it breaks; then those that say the same"
        " as another, of which the other counts; memory last."
    )
    plot = Plot(title="What rules strategies out", caption=caption, colors=colors)
    return draw_counts(plot, counts, Column(title="strategies"))


def maps_section(report: TrainingSearchReport) -> Section:
    """Return a heat map for each pair of axes that the report has cells of."""
    pairs = dict.fromkeys((cell.row_axis, cell.column_axis) for cell in report.cells)
    return Section(
        title="Where the best are",
        intro=(
            "The best tokens/s per GPU of all strategies that fit, whatever else they choose. A box"
            " without a number: some can run there, but none has the memory. No box: none can run."
        ),
        pictures=[
            _picture([cell for cell in report.cells if (cell.row_axis, cell.column_axis) == pair])
            for pair in pairs
        ],
    )


def _picture(cells: Sequence[SpaceCell]) -> Chart:
    row_axis, column_axis = cells[0].row_axis, cells[0].column_axis
    row_label, column_label = (
        _AXIS_NAMES.get(axis, axis.replace("_", " ")) for axis in (row_axis, column_axis)
    )
    order = _ordered([cell.row for cell in cells]), _ordered([cell.column for cell in cells])
    placed = sorted(
        (cell for cell in cells if cell.num_legal > 0),
        key=lambda cell: (order[0].index(cell.row), order[1].index(cell.column)),
    )
    table = Table.of(
        placed,
        Column.words(row_label, "row"),
        Column.words(column_label, "column"),
        replace(Column.of("tokens_per_s_per_gpu"), read=_best_of_cell),
        Column(title="strategies that fit", name="num_fitting"),
        Column(title="strategies that can run", name="num_legal"),
        Column.words("best"),
    )
    num_legal = sum(cell.num_legal for cell in cells)
    plot = Plot(
        title=f"Best tokens/s per GPU by {row_label} and {column_label}",
        table=table,
        x="column",
        y="row",
        caption=f"All {num_legal:,} legal strategies. Point at a box for its best and its counts.",
    )
    return plot.heat_map("tokens_per_s_per_gpu")


def _best_of_cell(cell: SpaceCell) -> float | None:
    return cell.tokens_per_s_per_gpu if cell.num_fitting > 0 else None


def _ordered(values: Sequence[str]) -> list[str]:
    """Return the values once each, numbers by size, words in their order."""
    return sorted(dict.fromkeys(values), key=_place)


def _place(value: str) -> tuple[float, str]:
    if value in _WORD_ORDER:
        return float(_WORD_ORDER.index(value)), ""
    return (float(value), "") if value.isdigit() else (float(len(_WORD_ORDER)), value)


_MAX_SHOWN = 12
# `3 x h100_sxm`: three stages on such devices.
_TIMES = " x "


def placements_section(rows: Sequence[Row]) -> Section:
    """Return the devices and the layers of every stage of the best placements."""
    placed = first_of_each([row for row in rows if row["placement"]], ("placement", "stage_layers"))
    shown = placed[:_MAX_SHOWN]
    stages = {row["name"]: placed_stages(row) for row in shown}
    return Section(
        title="Placements",
        intro="Which devices hold which stages of the pipeline, and how many layers each stage has;"
        f" the {len(shown)} best of {len(placed)} listed placements.",
        pictures=[_chart(stages)],
        table=Table.of(
            shown,
            Column.words("strategy", "name"),
            Column.words("devices", "placement"),
            Column.words("layers", "stage_layers"),
            Column(title="step", read=lambda row: describe_step(row["step_time_ms"])),
            Column.of("tokens_per_s_per_gpu"),
            Column(title="90 % interval", read=describe_bounds),
        ),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage on a device; `width` is its layers, or one where a placement does not name them."""

    kind: str
    width: int


def _chart(stages: Mapping[str, Sequence[Stage]]) -> Chart:
    placed = []
    for name, found in stages.items():
        ends = accumulate(stage.width for stage in found)
        placed += [
            (name, end - stage.width, end, stage.kind, place)
            for place, (stage, end) in enumerate(zip(found, ends, strict=True))
        ]
    columns = (
        *(Column.words("strategy"), Column(title="first layer", name="start")),
        *(Column(title="layers up to", name="end"), Column.words("device"), Column(title="stage")),
    )
    plot = Plot(
        title="Stages and their layers",
        table=Table(columns=columns, rows=placed),
        x="start",
        y="strategy",
        by="device",
        caption="From the first stage to the last; a stage is as wide as it has layers.",
    )
    return plot.spans("end")


def placed_stages(row: Row) -> list[Stage]:
    """Return the stages of a row's placement; equally wide where it does not name their layers."""
    devices: list[str] = []
    for part in row["placement"].split(","):
        count, times, device = part.strip().partition(_TIMES)
        devices += [device] * int(count) if times and count.isdigit() else [part.strip()]
    layers = [int(word) for word in row["stage_layers"].split(",") if word.strip().isdigit()]
    if len(layers) % len(devices) == 0 and layers:
        # Chunks of virtual stages go round the ranks.
        widths = [sum(layers[rank :: len(devices)]) for rank in range(len(devices))]
    else:
        widths = [1] * len(devices)
    return [Stage(device, width) for device, width in zip(devices, widths, strict=True)]
