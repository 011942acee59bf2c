"""The part of a training search's page that shows stages placed on devices that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.search_candidates import Row, first_of_each
from foretoken.simulator.report.training_search_rows import describe_bounds

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
        table=DataTable(
            headers=("strategy", "devices", "layers", "step", "tokens/s per GPU", "90 % interval"),
            rows=[
                (
                    row["name"],
                    row["placement"],
                    row["stage_layers"],
                    describe_step(row["step_time_ms"]),
                    format_number(row["tokens_per_s_per_gpu"]),
                    describe_bounds(row),
                )
                for row in shown
            ],
            text_columns=(1, 2),
        ),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage on a device; `width` is its layers, or one where a placement does not name them."""

    kind: str
    width: int


def _chart(stages: Mapping[str, Sequence[Stage]]) -> Chart:
    columns = [
        Column.words("strategy"),
        Column(title="first layer", name="start"),
        Column(title="layers up to", name="end"),
        Column.words("device"),
        Column(title="stage"),
    ]
    rows = []
    for name, found in stages.items():
        ends = list(accumulate(stage.width for stage in found))
        rows += [
            (name, end - stage.width, end, stage.kind, place)
            for place, (stage, end) in enumerate(zip(found, ends, strict=True))
        ]
    plot = Plot(
        title="Stages and their layers",
        table=Table(columns=columns, rows=rows),
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
