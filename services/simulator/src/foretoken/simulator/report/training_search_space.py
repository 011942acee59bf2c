"""A training search's space on its page: what is ruled out, where the best are, placements."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.requests.training_search import SpaceCell, TrainingSearchReport
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, ORANGE, PURPLE, SKY, Plot
from foretoken.page.curve import draw_counts, draw_spans
from foretoken.page.section import Section
from foretoken.simulator.report import training_search_rows as strategies
from foretoken.simulator.report.search_candidates import Row, first_of_each

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


def counts_section(report: TrainingSearchReport) -> Section:
    """Return how many strategies are left after each question, and what rules the others out."""
    unit, counts = Column(title="strategies"), Counter[str]()
    left = (report.num_points, report.num_legal, report.num_fitting, report.num_simulated)
    caption = f"All that can run are answered in closed form, of {report.num_shapes:,} shapes."
    plot = Plot(title="What is left of the space", caption=caption, colors=_OF_STAGE)
    named = dict(zip(_OF_STAGE, left, strict=True))
    pictures = [draw_counts(plot, named, unit, total=report.num_points)]
    for item in sorted(report.ruled_out, key=lambda item: -item.num_strategies):
        counts[strategies.describe_verdict(item.verdict)] += item.num_strategies
    plot = Plot(
        title="What rules strategies out",
        caption="A strategy is counted once, by the first rule that it breaks; then those that say"
        " the same as another, of which the other counts; memory last.",
        colors={strategies.describe_verdict("memory"): PURPLE},
    )
    if counts:
        pictures.append(draw_counts(plot, counts, unit))
    return Section(
        title="Every strategy, counted",
        pictures=pictures,
        table=strategies.ruled_out_table(report) if counts else None,
    )


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
    placed = sorted(
        (cell for cell in cells if cell.num_legal > 0),
        key=lambda cell: (_place(cell.row), _place(cell.column)),
    )
    table = Table.of(
        placed,
        Column.words(row_label, "row"),
        Column.words(column_label, "column"),
        replace(
            Column.of("tokens_per_s_per_gpu"),
            read=lambda cell: cell.tokens_per_s_per_gpu if cell.num_fitting > 0 else None,
        ),
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


def _place(value: str) -> tuple[float, str]:
    """Return where a value stands: numbers by size, words in their order."""
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
    return Section(
        title="Placements",
        intro="Which devices hold which stages of the pipeline, and how many layers each stage has;"
        f" the {len(shown)} best of {len(placed)} listed placements.",
        pictures=[_chart(shown)],
        table=Table.of(
            shown,
            Column.words("strategy", "name"),
            Column.words("devices", "placement"),
            Column.words("layers", "stage_layers"),
            Column(title="step", read=lambda row: describe_step(row["step_time_ms"])),
            Column.of("tokens_per_s_per_gpu"),
            Column(
                title="90 % interval",
                read=lambda row: " to ".join(
                    format_number(bound) for bound in strategies.figure_bounds(row)
                ),
            ),
        ),
    )


def _chart(rows: Sequence[Row]) -> Chart:
    placed = []
    for row in rows:
        devices, widths = zip(*placed_stages(row), strict=True)
        ends = accumulate(widths)
        placed += [
            (row["name"], end - width, end, device, place)
            for place, (device, width, end) in enumerate(zip(devices, widths, ends, strict=True))
        ]
    columns = (
        *(Column.words("strategy"), Column(title="first layer", name="start")),
        *(Column(title="layers up to", name="end"), Column.words("device"), Column(title="stage")),
    )
    caption = "From the first stage to the last; a stage is as wide as it has layers."
    plot = Plot(title="Stages and their layers", caption=caption)
    return draw_spans(plot, Table(columns=columns, rows=placed))


def placed_stages(row: Row) -> list[tuple[str, int]]:
    """Return the device and the layers of each stage; one layer where it does not name them."""
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
    return list(zip(devices, widths, strict=True))
