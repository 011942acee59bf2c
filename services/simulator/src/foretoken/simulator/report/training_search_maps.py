"""The part of a training search's page that says how good the space is where two axes meet."""

from collections.abc import Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.training_search import SpaceCell, TrainingSearchReport
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.heat_map import HeatMap, draw_heat_map

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
            "The best tokens/s per GPU of all strategies that fit, whatever else they choose. Grey:"
            " some can run there, but none has the memory. No box: none can run."
        ),
        pictures=[
            _picture([cell for cell in report.cells if (cell.row_axis, cell.column_axis) == pair])
            for pair in pairs
        ],
    )


def _picture(cells: Sequence[SpaceCell]) -> Picture:
    row_axis, column_axis = cells[0].row_axis, cells[0].column_axis
    row_label, column_label = (
        _AXIS_NAMES.get(axis, axis.replace("_", " ")) for axis in (row_axis, column_axis)
    )
    plot = HeatMap(
        title=f"Best tokens/s per GPU by {row_label} and {column_label}",
        row_label=row_label,
        column_label=column_label,
        unit="tokens/s per GPU",
        rows=_ordered([cell.row for cell in cells]),
        columns=_ordered([cell.column for cell in cells]),
        values={
            (cell.row, cell.column): cell.tokens_per_s_per_gpu
            for cell in cells
            if cell.num_fitting > 0
        },
        details={(cell.row, cell.column): _details(cell) for cell in cells if cell.num_legal > 0},
        absent="no memory",
    )
    num_legal = sum(cell.num_legal for cell in cells)
    return Picture(
        svg=draw_heat_map(f"training-map-{row_axis}-{column_axis}", plot),
        caption=f"All {num_legal:,} legal strategies. Point at a box for its best and its counts;"
        " the best of all is framed.",
    )


def _details(cell: SpaceCell) -> str:
    counts = f"{cell.num_fitting:,} of {cell.num_legal:,} legal strategies fit"
    if not cell.best:
        return counts
    return f"{format_number(cell.tokens_per_s_per_gpu)} by {cell.best}; {counts}"


def _ordered(values: Sequence[str]) -> list[str]:
    """Return the values once each, numbers by size, words in their order."""
    return sorted(dict.fromkeys(values), key=_place)


def _place(value: str) -> tuple[float, str]:
    if value in _WORD_ORDER:
        return float(_WORD_ORDER.index(value)), ""
    return (float(value), "") if value.isdigit() else (float(len(_WORD_ORDER)), value)
