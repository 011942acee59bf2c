"""What the devices of a pipeline's stages hold at their peaks, as bars and as tables."""

from collections.abc import Mapping, Sequence
from typing import Literal

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column
from foretoken.page.chart import GREY, Plot, Rule
from foretoken.page.curve import draw_parts
from foretoken.page.section import Cell, DataTable, Section
from foretoken.simulator.report.palette import OF_MEMORY

# What the allocator, the driver and communicators take besides tensors.
_RESERVE = "allocator and headroom"
_COLORS = {**OF_MEMORY, _RESERVE: GREY}
_CAPTION = (
    "At the moment each stage holds most. Activations are those of all micro batches it then has in"
    " flight; temporary is what lives within an operator, often the logits. Headroom is what"
    " driver, context and communicators hold of the device."
)


def memory_chart(stages: Mapping[str, StageMemory], title: str, cut: str = "") -> Chart:
    """Draw a stacked bar for every named stage, with the memory of the smallest device marked.

    `cut` says which stages are drawn. Where devices differ, bars say which is theirs.
    """
    sizes = sorted({stage.device_bytes / GIB for stage in stages.values() if stage.device_bytes})
    rows = {
        f"{name} (of {format_number(stage.device_bytes / GIB)} GiB)"
        if len(sizes) > 1
        else name: _parts_gib(stage)
        for name, stage in stages.items()
    }
    plot = Plot(title=title, caption=_CAPTION + cut, colors=_COLORS, rules=device_rules(sizes, "x"))
    return draw_parts(plot, rows, Column(title="GiB"))


def device_rules(sizes_gib: Sequence[float], axis: Literal["x", "y"]) -> list[Rule]:
    """Return the mark of the smallest of these devices; none where there is none."""
    if not sizes_gib:
        return []
    least = min(sizes_gib)
    which = "smallest device" if len(set(sizes_gib)) > 1 else "device"
    return [Rule(axis, least, f"{which}: {format_number(least)} GiB")]


def fullest_of(stages: Sequence[StageMemory]) -> StageMemory:
    """Return the stage with the least room."""
    return min(stages, key=lambda stage: stage.margin_bytes)


def peak_table(stages: Sequence[StageMemory], *, has_advice: bool = False) -> DataTable:
    """Return the peaks of stages, with when they are where it is known; advice if it is wanted."""
    has_peaks = any(stage.peak_ms for stage in stages)
    rows = [
        [
            str(stage.stage),
            _gib(stage.total_bytes),
            _gib(stage.reserved_bytes),
            _gib(stage.headroom_bytes),
            _gib(stage.device_bytes),
            _margin(stage),
            *([format_number(stage.peak_ms)] if has_peaks else []),
            format_number(stage.num_in_flight),
            stage.largest,
            *([stage.advice] if has_advice else []),
        ]
        for stage in stages
    ]
    headers = ["stage", "allocated (GiB)", "reserved (GiB)", "headroom (GiB)", "device (GiB)"]
    headers += ["margin (GiB)", *(["peak at (ms)"] if has_peaks else []), "in flight"]
    words = ["largest part", *(["advice"] if has_advice else [])]
    texts = range(len(headers), len(headers) + len(words))
    return DataTable(headers=[*headers, *words], rows=rows, text_columns=texts)


def parts_section(stages: Sequence[StageMemory]) -> Section:
    """Return what holds the memory of every stage at its peak."""
    rows = [
        [str(stage.stage), *(_gib(getattr(stage, f"{name}_bytes")) for name in OF_MEMORY)]
        for stage in stages
    ]
    return Section(
        title="Memory by part",
        intro="Of one device of every stage at its peak, in GiB. The parts add up to the allocated"
        " memory.",
        table=DataTable(headers=("stage", *OF_MEMORY), rows=rows),
    )


def _margin(stage: StageMemory) -> Cell | str:
    text = _gib(stage.margin_bytes)
    return Cell(text=f"{text}, too little", tone="alert") if stage.margin_bytes < 0 else text


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _parts_gib(stage: StageMemory) -> Mapping[str, float]:
    parts = {name: getattr(stage, f"{name}_bytes") / GIB for name in OF_MEMORY}
    besides = stage.reserved_bytes + stage.headroom_bytes - stage.total_bytes
    return {**parts, _RESERVE: max(besides, 0.0) / GIB}
