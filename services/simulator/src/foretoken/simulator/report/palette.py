"""Which colour stands for what in the figures of a simulation, and what its times rest on."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.metric import SHARE, largest_first
from foretoken.domain.metrics.number_text import format_number
from foretoken.page.block import Chart, Column
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Plot
from foretoken.page.curve import draw_counts, draw_parts

# Few enough names to give each its own colour wherever it appears.
_OF_GROUP: Mapping[str, str] = {
    "gemm": BLUE,
    "attention": ORANGE,
    "elementwise": SKY,
    "moe": "#4b3f8f",
    "lora": "#b07aa1",
    "draft": "#2a9d8f",
    "collective": VERMILION,
    "stage_transfer": PURPLE,
    "gradient_reduction": "#a8452f",
    "parameter_gather": "#e9a3c4",
    "recompute": "#7fb5a0",
    "gradient_accumulation": "#6f8fb5",
    "overlap_slowdown": "#c9b8a3",
    "optimizer": GREEN,
    "embedding": YELLOW,
    "loss": "#8c6d1f",
    "sampler": "#5b8f29",
    "host": "#5f6b7a",
    "bubble": GREY,
    "other": GREY,
}

OF_PROVENANCE: Mapping[str, str] = {
    "measured": GREEN,
    "interpolated": BLUE,
    "extrapolated": ORANGE,
    "transferred": PURPLE,
    "analytical": GREY,
}

OF_MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "temporary": PURPLE,
}

OF_SERVING_MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "KV cache": GREEN,
    "activations": ORANGE,
    "graphs": PURPLE,
    "reserved": GREY,
}

# How a stage spends the step: what `kind_label` makes of `SPAN_KINDS`, and the rest.
OF_STREAM: Mapping[str, str] = {
    "forward": BLUE,
    "backward": ORANGE,
    "backward input": YELLOW,
    "backward weight": "#8c6d1f",
    "optimizer": GREEN,
    "host": "#5f6b7a",
    "send forward": PURPLE,
    "send backward": "#a06a95",
    "gradient reduction": VERMILION,
    "parameter gather": "#e9a3c4",
    "exchange": SKY,
    "exposed communication": VERMILION,
    "hidden communication": "#f0b48c",
    "waiting": GREY,
}

# Light to dark with load, readable on white and on near-black.
_LOADS = ("#8fc7e8", "#56b4e9", "#2f93cf", "#0072b2", "#7a5195", "#bc5090", "#ef5675", "#d55e00")


def _label(group: str) -> str:
    return {"gemm": "GEMM", "moe": "MoE", "lora": "LoRA"}.get(group, group.replace("_", " "))


def groups_chart(
    title: str, rows: Mapping[str, Mapping[str, float]], unit: Column, caption: str
) -> Chart:
    """Return what operator groups take of each row, the largest group first.

    Of one row without a name every group has a bar, with its share.
    """
    groups = largest_first(rows.values())
    colors = {_label(group): _OF_GROUP.get(group, GREY) for group in groups}
    plot = Plot(title=title, caption=caption, colors=colors)
    if [*rows] == [""]:
        return draw_counts(plot, {_label(group): rows[""][group] for group in groups}, unit)
    named = {
        row: {_label(group): value for group, value in parts.items() if value > 0}
        for row, parts in rows.items()
    }
    return draw_parts(plot, named, unit)


def colors_of_loads(num_loads: int) -> Sequence[str]:
    """Return a colour per load, evenly picked from light to dark."""
    if num_loads == 1:
        return (BLUE,)
    last = len(_LOADS) - 1
    return [_LOADS[round(index * last / (num_loads - 1))] for index in range(num_loads)]


BOUNDS_CAPTION = "A bar's line is its 90 % interval, of the errors of operators."


def describe_interval(low: float, high: float, unit: str) -> str:
    """Return an interval with its unit."""
    return f"{format_number(low)} to {format_number(high)} {unit}".rstrip()


def provenance_chart(rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Return the chart of what the busy time of each row rests on."""
    caption = (
        "Measured: this very operator call was timed on this device. Interpolated: a latency"
        " model inside what was measured. Extrapolated: the same model outside of it."
        " Transferred: from the operator's efficiency on other devices. Analytical: from the"
        " device's data sheet and what other operators make of it."
    )
    plot = Plot(title="What the times rest on", caption=caption, colors=OF_PROVENANCE)
    unit = Column(title="share of the busy time", name="share", unit=SHARE)
    return draw_parts(plot, rows, unit, part="rests on")
