"""Why a strategy does not fit, and what would help most: each alternative is tried."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.simulator.steps.sharding import ZERO_STAGES
from foretoken.simulator.steps.trainer_limit import check_trainer

MeasureScenario = Callable[[TrainingScenario], Sequence[StageMemory]]
_MAX_NAMED = 3


def judge_memory(
    memory: Sequence[StageMemory], scenario: TrainingScenario, measure: MeasureScenario
) -> tuple[Feasibility, tuple[StageMemory, ...]]:
    """Return whether all stages fit, and the stages, with advice where one does not.

    `measure` returns the memory of a changed scenario; it is asked only where something does not
    fit, and an alternative that it refuses is left out.
    """
    fullest = min(memory, key=lambda stage: stage.margin_bytes)
    if fullest.margin_bytes >= 0:
        return Feasibility(), tuple(memory)
    advice = _advise(fullest, scenario, measure)
    part = fullest.largest.partition(":")[0]
    reason = (
        f"stage {fullest.stage} needs {fullest.reserved_bytes / GIB:.1f} GiB per device, which has "
        f"{fullest.device_bytes / GIB:.1f} GiB less {fullest.headroom_bytes / GIB:.1f} for driver, "
        f"context and communicators; most of it is {fullest.largest} "
        f"({getattr(fullest, f'{part}_bytes') / GIB:.1f} GiB); {advice}"
    )
    advised = tuple(
        stage if stage.margin_bytes >= 0 else replace(stage, advice=advice) for stage in memory
    )
    return Feasibility(is_feasible=False, reason=reason), advised


def _advise(fullest: StageMemory, scenario: TrainingScenario, measure: MeasureScenario) -> str:
    tried: list[tuple[float, bool, str]] = []
    for name, changed in _alternatives(scenario):
        try:
            worst = min(measure(changed), key=lambda stage: stage.margin_bytes)
            check_trainer(changed)
        except InvalidRequestError:
            continue
        saving = fullest.reserved_bytes - worst.reserved_bytes
        if saving > 0:
            tried.append((saving, worst.margin_bytes >= 0, name))
    if not tried:
        return "no single change of recomputation, sharding or layout needs less"
    best = sorted(tried, reverse=True)[:_MAX_NAMED]
    return "what would help most: " + ", ".join(
        f"{name} (-{saving / GIB:.1f} GiB, {'fits' if fits else 'not enough alone'})"
        for saving, fits, name in best
    )


def _alternatives(scenario: TrainingScenario) -> Iterator[tuple[str, TrainingScenario]]:
    """Yield single changes that could need less memory, with as many samples per step."""
    layout = scenario.layout
    if scenario.recompute != "full" or scenario.recompute_layers:
        yield "recompute full", replace(scenario, recompute="full", recompute_layers=0)
    if scenario.recompute == "none":
        yield "recompute selective", replace(scenario, recompute="selective")
    if layout.tp > 1 and not scenario.sequence_parallel:
        yield "sequence_parallel", replace(scenario, sequence_parallel=True)
    for stage in ZERO_STAGES[scenario.zero_stage + 1 :]:
        if layout.dp * layout.cp > 1:
            yield f"zero_stage {stage}", replace(scenario, zero_stage=stage)
    half = scenario.micro_batch_size // 2
    if half:
        yield f"micro_batch_size {half}", replace(scenario, micro_batch_size=half)
    for axis in ("tp", "pp"):
        degree = 2 * layout.degree(axis)
        degrees: dict[str, Any] = {axis: degree}
        changed = replace(layout, **degrees)
        # Chunks given one by one are those of the old pipeline.
        stage_layers = () if axis == "pp" else scenario.stage_layers
        yield (
            f"{axis} {degree}",
            replace(scenario, layout=changed, stage_layers=stage_layers),
        )
