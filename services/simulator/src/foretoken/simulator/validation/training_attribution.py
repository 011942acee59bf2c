"""Which component a step's error comes from: how much the step changes with each."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.training_comparison import ComponentComparison
from foretoken.simulator.validation.training_run import ALL_STAGES

REST = "not measured"

_PASSES = (("stage_fwd", "encoder_fwd"), ("stage_bwd", "encoder_bwd"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What the error of a component adds to that of the step.

    `error_ms` adds up to the step's error over all contributions; `share_ratio` is that over the
    sum of all without their signs.
    """

    name: str
    error_ms: float
    share_ratio: float


def attribute_error(
    step: ComponentComparison,
    rows: Sequence[ComponentComparison],
    report: TrainingReport,
    scenario: TrainingScenario,
) -> tuple[Contribution, ...]:
    """Return the contributions, the largest first; none without scored components.

    Taken as small errors of a pipeline filled once: the slowest stage runs every micro batch on the
    critical path, each other stage one, and each boundary is crossed once forward and once back.
    Of a reduction and a gathering counts what no computation hides. The rest is what no scored
    component explains.
    """
    scored = {(row.name, row.stage): row for row in rows if row.is_scored}
    parts = _passes(scored, report, scenario)
    pp = scenario.layout.pp
    sends = [row.error_ms for (name, _), row in scored.items() if name == "pp_p2p"]
    if sends and pp > 1:
        parts["pp_p2p"] = 2 * (pp - 1) * statistics.fmean(sends)
    exposed = _exposed_ratio(report)
    for name in ("dp_allreduce", "dp_allgather"):
        row = _at(scored, name, 0)
        if row is not None:
            parts[name] = row.error_ms * exposed
    update = _at(scored, "optimizer", 0)
    if update is not None:
        # It contains the gathering of parameters.
        parts["optimizer"] = update.error_ms - parts.get("dp_allgather", 0.0)
    if not parts:
        return ()
    parts[REST] = step.error_ms - sum(parts.values())
    whole = sum(map(abs, parts.values())) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -abs(item[1]))
    return tuple(
        Contribution(name=name, error_ms=error_ms, share_ratio=abs(error_ms) / whole)
        for name, error_ms in ordered
    )


def _passes(
    scored: Mapping[tuple[str, int], ComponentComparison],
    report: TrainingReport,
    scenario: TrainingScenario,
) -> dict[str, float]:
    """Return what the passes add: of whole stages where those were measured, else of layers."""
    num_stages, num_micro_batches = scenario.layout.pp, report.num_micro_batches
    calls = {(item.name, item.stage): item.num_calls for item in report.components}
    parts = {}
    errors: dict[str, list[float]] = {}
    measured = [0.0] * num_stages
    for whole, layer in _PASSES:
        name = whole if any(found == whole for found, _ in scored) else layer
        found = [_at(scored, name, stage) for stage in range(num_stages)]
        if not any(found):
            continue
        errors[name] = []
        for stage, row in enumerate(found):
            # A layer occurs as often in a pass as the stage has layers.
            per_pass = calls.get((name, stage), num_micro_batches) / max(num_micro_batches, 1)
            errors[name].append(row.error_ms * per_pass if row else 0.0)
            measured[stage] += row.measured_ms * per_pass if row else 0.0
    slowest = max(range(num_stages), key=lambda stage: measured[stage])
    for name, values in errors.items():
        others = sum(values) - values[slowest]
        fill = others / max(scenario.virtual_stages, 1)
        parts[name] = num_micro_batches * values[slowest] + fill
    return parts


def _at(
    scored: Mapping[tuple[str, int], ComponentComparison], name: str, stage: int
) -> ComponentComparison | None:
    """Return what was measured of the stage, of all stages, or of the nearest one before it."""
    for number in (stage, ALL_STAGES):
        if (name, number) in scored:
            return scored[name, number]
    before = [number for found, number in scored if found == name and 0 <= number < stage]
    return scored[name, max(before)] if before else None


def _exposed_ratio(report: TrainingReport) -> float:
    whole = report.communication_ms_by_axis.get("dp", 0.0)
    return min(report.exposed_ms_by_axis.get("dp", 0.0) / whole, 1.0) if whole else 1.0
