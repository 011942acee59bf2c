"""Who sends how much to whom in a training step, as a heat map."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.results.training_report import TrafficColumns, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.picture import write_picture
from foretoken.page.section import Section

_Matrix = NDArray[np.float64]
# What is smaller than this share of the largest, such as the norms that all agree on, is white.
_LEAST_SHARE = 1e-6
# All axes together.
_ALL = "all"


def traffic_map(traffic: TrafficColumns, num_devices: int) -> tuple[int, dict[str, _Matrix]]:
    """Return how many devices a cell has, and the bytes from cell to cell by axis.

    Those along all axes come first, then those of the axis along which most is sent.
    """
    cell = int(max(traffic.num_devices, default=1))
    side = -(-num_devices // cell)
    axes = np.asarray(traffic.axis, dtype=str)
    source = np.asarray(traffic.source, dtype=np.int64) // cell
    target = np.asarray(traffic.target, dtype=np.int64) // cell
    sent = np.asarray(traffic.bytes, dtype=np.float64)
    matrices: dict[str, _Matrix] = {}
    for axis in (_ALL, *dict.fromkeys(axes.tolist())):
        chosen = (axes == axis) | (axis == _ALL)
        matrix = np.zeros((side, side))
        np.add.at(matrix, (source[chosen], target[chosen]), sent[chosen])
        matrices[axis] = matrix
    order = sorted(matrices, key=lambda axis: -matrices[axis].sum())
    return cell, {axis: matrices[axis] for axis in order}


def traffic_section(report: TrainingReport) -> Section | None:
    """Return the section of a page about a step's traffic, None where devices send nothing."""
    cell, sent = traffic_map(report.traffic, report.num_devices)
    total, *by_axis = sent.items()
    if not by_axis:
        return None
    caption = "Rows send, columns receive. Devices are numbered with tp fastest, then cp, dp and pp"
    if cell > 1:
        caption += f"; {cell} neighbours share a cell"
    pictures = [_chart(cell, total[1], "", f"{caption}. No box: nothing, or next to nothing.")]
    if len(by_axis) > 1:
        pictures += [_chart(cell, matrix, f" along {axis}", "") for axis, matrix in by_axis]
    intro = (
        "Bytes of one step, of the collectives and transfers that are timed: rings in the order of"
        " the devices, exchanges between all, transfers between the stages of the pipeline."
    )
    return Section(
        title="Traffic between devices",
        intro=intro,
        pictures=pictures,
        table=Table.of(
            [*by_axis, total],
            Column.words("along").part(0),
            _sent("all send (GiB)", np.sum),
            _sent("a device sends (GiB)", lambda sent: np.sum(sent) / report.num_devices),
            _sent("busiest pair (GiB)", np.max),
            Column(title="pairs that communicate", read=np.count_nonzero).part(1),
        ),
    )


def _sent(title: str, measure: Callable[[_Matrix], float]) -> Column:
    """Return the column of a measure of what is sent, of an axis and its matrix."""
    return Column(title=title, read=lambda of: float(measure(of[1] / GIB)))


def _chart(cell: int, matrix: _Matrix, along: str, caption: str) -> Chart:
    whom = "each device sends" if cell == 1 else f"{cell} devices together send"
    title = f"What {whom} in one step{along}"
    columns = [Column(title="sending device", name="source")]
    columns += [Column(title="receiving device", name="target"), Column(title="GiB", name="gib")]
    sent = np.argwhere(matrix >= _LEAST_SHARE * max(float(matrix.max()), 1.0))
    rows = [(int(s) * cell, int(t) * cell, float(matrix[s, t]) / GIB) for s, t in sent]
    table = Table(columns=columns, rows=rows)
    return Plot(title=title, table=table, x="target", y="source", caption=caption).heat_map("gib")


def write_traffic_figure(path: Path, report: TrainingReport) -> None:
    """Write the heat map of a step as a picture of its own, in the format of the path's ending."""
    cell, sent = traffic_map(report.traffic, report.num_devices)
    write_picture(path, [_chart(cell, sent[_ALL], "", "")])
