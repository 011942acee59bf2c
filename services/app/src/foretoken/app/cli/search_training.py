"""`foretoken search training`: rank every layout of a training run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.state import (
    build_table,
    note,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.report import Feasibility
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.training_report import MemoryColumns, SpanColumns, TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.search.space import training_space


def training(
    context: typer.Context,
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file (YAML); of its layout cp and ep are kept.")
    ],
    devices: Annotated[int, typer.Option(min=1, help="Devices to train on.")] = 8,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `zero_stage=1`. Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 20,
) -> None:
    """Simulate every tp x pp x dp, micro batch size and recompute mode; rank by step time.

    Strategies that cannot run or do not fit are counted, with the reasons.

    Example: `foretoken search training docs/examples/training.yaml --devices 8 --top 5`
    """
    state = state_of(context)
    with open_composition(state) as services:
        resolved = read_training_scenario(scenario, scenario_changes(change))
        foretoken = services.foretoken("simulator")
        candidates = tuple(training_space(resolved, devices))
        if not candidates:
            reason = (
                f"no layout of {devices} devices has cp {resolved.layout.cp} and divides the"
                f" global batch size, {resolved.global_batch_size}"
            )
            raise InvalidRequestError.of_field("--devices", reason)
        found = _simulate_training(candidates, foretoken.simulate_training)
        fitting = [item for item in found if item[1].feasibility.is_feasible]
        fitting.sort(key=lambda item: item[1].step_time_ms)
        note(f"{len(found)} strategies: {len(fitting)} fit, {len(found) - len(fitting)} do not")
        for kind, count in Counter(_kind_of(report) for _, report in found).most_common():
            if kind:
                note(f"  {count} x {kind}")
        if not fitting:
            _tell_closest(found)
        best = {name: _without_columns(report) for name, report in fitting[:top]}
        title = f"{resolved.model.name} on {devices} {resolved.device}"
        state.print_object(best, lambda: _training_table(title, best))


def _simulate_training(
    candidates: Sequence[TrainingScenario], simulate: Callable[[TrainingScenario], TrainingReport]
) -> list[tuple[str, TrainingReport]]:
    """Return a report of every candidate; of those that are refused, the reason.

    Raises:
        InvalidRequestError: every candidate is refused, so it is the scenario.

    """
    refusals: list[InvalidRequestError] = []

    def simulate_or_refuse(candidate: TrainingScenario) -> TrainingReport:
        try:
            return simulate(candidate)
        except InvalidRequestError as err:
            refusals.append(err)
            return TrainingReport(feasibility=Feasibility(is_feasible=False, reason=err.message))

    found = list(_evaluate(candidates, simulate_or_refuse))
    if len(refusals) == len(found):
        raise refusals[0]
    return found


def _kind_of(report: TrainingReport) -> str:
    """Return a reason without its numbers and advice, which differ by strategy."""
    reason, _, _ = report.feasibility.reason.partition("; what would help")
    return re.sub(r"\d[\d.]*", "_", reason)


def _tell_closest(found: Sequence[tuple[str, TrainingReport]]) -> None:
    """Say which strategy lacks the least memory, and what would help it."""
    measured = [item for item in found if item[1].memory]
    if measured:
        name, report = max(
            measured, key=lambda item: min(stage.margin_bytes for stage in item[1].memory)
        )
        note(f"closest is {name}: {report.feasibility.reason}")


def _without_columns(report: TrainingReport) -> TrainingReport:
    """Return a report without its spans and its memory over time, which are long."""
    return replace(report, spans=SpanColumns(), memory_timeline=MemoryColumns())


def _training_table(title: str, reports: Mapping[str, TrainingReport]) -> Table:
    columns = ("strategy", "step (ms)", "low", "high", "MFU", "tokens/s per device")
    rows = [
        (
            name,
            report.step_time_ms,
            report.step_time_low_ms,
            report.step_time_high_ms,
            f"{report.mfu_ratio:.1%}",
            report.tokens_per_s_per_gpu,
            max(stage.reserved_bytes for stage in report.memory) / GIB,
        )
        for name, report in reports.items()
    ]
    return build_table(title, (*columns, "reserved (GiB)"), rows)


def _evaluate(
    candidates: Sequence[TrainingScenario],
    simulate: Callable[[TrainingScenario], TrainingReport],
) -> Iterator[tuple[str, TrainingReport]]:
    with show_progress(f"simulate {len(candidates)} candidates") as bar:
        for index, candidate in enumerate(candidates):
            bar.set(index / len(candidates), candidate.name)
            yield candidate.name, simulate(candidate)
