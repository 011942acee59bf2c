"""The part of a training search's page that shows stages placed on devices that differ."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.page.figure import SERIES
from foretoken.page.section import DataTable, Picture, Section
from foretoken.simulator.report.search_candidates import Row, first_of_each
from foretoken.simulator.report.stage_plot import Stage, draw_stages
from foretoken.simulator.report.training_search_rows import describe_bounds

_MAX_SHOWN = 12
# `3 x h100_sxm`: three stages on such devices.
_TIMES = " x "


def placements_section(rows: Sequence[Row]) -> Section:
    """Return the devices and the layers of every stage of the best placements."""
    placed = first_of_each([row for row in rows if row["placement"]], ("placement", "stage_layers"))
    shown = placed[:_MAX_SHOWN]
    stages = {row["name"]: placed_stages(row) for row in shown}
    devices = dict.fromkeys(stage.kind for found in stages.values() for stage in found)
    colors: Mapping[str, str] = {
        device: SERIES[place % len(SERIES)] for place, device in enumerate(devices)
    }
    return Section(
        title="Placements",
        intro="Which devices hold which stages of the pipeline, and how many layers each stage has;"
        f" the {len(shown)} best of {len(placed)} listed placements.",
        pictures=[
            Picture(
                svg=draw_stages("training-placements", "Stages and their layers", stages, colors),
                caption="From the first stage to the last; a stage is as wide as it has layers.",
            )
        ],
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
    return [
        Stage(kind=device, width=width, label=str(width) if layers else "")
        for device, width in zip(devices, widths, strict=True)
    ]
