"""The part of a training search's page that says how good the space is where two axes meet."""

from collections.abc import Sequence

from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import SpaceCell, TrainingSearchReport
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.section import Section

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
    columns = [
        Column.words(row_label, "row"),
        Column.words(column_label, "column"),
        Column.of(METRICS["tokens_per_s_per_gpu"]),
        Column(title="strategies that fit", name="num_fitting"),
        Column(title="strategies that can run", name="num_legal"),
        Column.words("best"),
    ]
    order = _ordered([cell.row for cell in cells]), _ordered([cell.column for cell in cells])
    placed = sorted(
        (cell for cell in cells if cell.num_legal > 0),
        key=lambda cell: (order[0].index(cell.row), order[1].index(cell.column)),
    )
    rows = [
        (
            cell.row,
            cell.column,
            cell.tokens_per_s_per_gpu if cell.num_fitting > 0 else None,
            cell.num_fitting,
            cell.num_legal,
            cell.best,
        )
        for cell in placed
    ]
    num_legal = sum(cell.num_legal for cell in cells)
    plot = Plot(
        title=f"Best tokens/s per GPU by {row_label} and {column_label}",
        table=Table(columns=columns, rows=rows),
        x="column",
        y="row",
        caption=f"All {num_legal:,} legal strategies. Point at a box for its best and its counts.",
    )
    return plot.heat_map("tokens_per_s_per_gpu")


def _ordered(values: Sequence[str]) -> list[str]:
    """Return the values once each, numbers by size, words in their order."""
    return sorted(dict.fromkeys(values), key=_place)


def _place(value: str) -> tuple[float, str]:
    if value in _WORD_ORDER:
        return float(_WORD_ORDER.index(value)), ""
    return (float(value), "") if value.isdigit() else (float(len(_WORD_ORDER)), value)
