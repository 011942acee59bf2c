"""The page of a memory plan: whether it fits, its stages and their parts."""

from collections.abc import Sequence
from dataclasses import replace

from page_structure import marked

from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.simulator.report.memory_sections import memory_chart, memory_sections, render_memory

_STAGE = StageMemory(
    stage=0,
    weights_bytes=10 * GIB,
    activations_bytes=30 * GIB,
    reserved_bytes=44 * GIB,
    device_bytes=80 * GIB,
    num_in_flight=4,
    largest="activations: mlp_activation",
)
_REPORT = TrainingMemoryReport(
    memory=(_STAGE, replace(_STAGE, stage=1, reserved_bytes=90 * GIB, advice="use ZeRO")),
    num_devices=8,
    num_params=7e9,
    device_memory_bytes=80 * GIB,
    feasibility=Feasibility(is_feasible=False, reason="stage 1 needs 90.0 GiB"),
)


def _by_name(stages: Sequence[StageMemory]) -> dict[str, StageMemory]:
    return {f"stage {stage.stage}": stage for stage in stages}


def test_a_page_tells_the_fullest_stage_and_what_helps() -> None:
    page = render_memory("plan", _REPORT)
    for text in ("stage 1 needs 90.0 GiB", "90 GiB", "-10.00, too little", "use ZeRO", "7 billion"):
        assert text in page


def test_a_picture_has_what_is_not_in_tensors_and_the_device() -> None:
    chart = memory_chart(_by_name(_REPORT.memory), "memory")
    parts = {"allocator and headroom", "weights", "activations"}
    assert parts == set(chart.table.values("part"))
    assert ["device: 80 GiB"] == marked(chart)


def test_devices_that_differ_are_told_of_every_stage() -> None:
    stages = (_STAGE, replace(_STAGE, stage=1, device_bytes=24 * GIB))
    chart = memory_chart(_by_name(stages), "memory")
    assert {"stage 0 (of 80 GiB)", "stage 1 (of 24 GiB)"} == set(chart.table.values("row"))
    assert ["smallest device: 24 GiB"] == marked(chart)


def test_many_stages_are_drawn_by_the_fullest() -> None:
    stages = tuple(replace(_STAGE, stage=number) for number in range(40))
    (section,) = (
        item for item in memory_sections(replace(_REPORT, memory=stages)) if item.title == "Stages"
    )
    assert "the 32 fullest of 40 stages" in section.pictures[0].caption
    assert section.table is not None
    assert len(section.table.rows) == 40


def test_a_layout_that_does_not_divide_has_its_reason_alone() -> None:
    report = replace(_REPORT, memory=(), feasibility=Feasibility(is_feasible=False, reason="tp 3"))
    titles = [section.title for section in memory_sections(report)]
    assert "Stages" not in titles
    assert "does not fit: tp 3" in render_memory("plan", report)
