"""`foretoken calibrate training`: host gaps and a factor from measured training steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.training.calibration import CalibrationResult, calibrate_training
from foretoken.simulator.training.calibration_fit import PARAMETERS
from foretoken.simulator.training.measured_file import MeasuredTime, read_measured
from foretoken.simulator.validation import training_truth_table


def _check_parameters(names: list[str] | None) -> list[str] | None:
    """Return what `--fit` names; refused now rather than after the simulations."""
    for name in names or []:
        if name not in PARAMETERS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(PARAMETERS)}")
    return names


def training(
    context: typer.Context,
    scenarios: Annotated[
        list[Path], typer.Argument(help="Scenario files (YAML) of the runs that were measured.")
    ],
    measured: Annotated[
        Path,
        typer.Option(
            help="Measured times: a CSV with `scenario,component,stage,time_ms`, or a list"
            " `times` of the same in YAML or JSON, or GPUModeling25's `truth.csv`.",
            exists=True,
            dir_okay=False,
        ),
    ],
    fit: Annotated[
        list[str] | None,
        typer.Option(
            help="What to fit: `gap` (per layer), `step_gap`, `factor`. Repeatable; left out, what"
            " predicts steps best that were left out.",
            callback=_check_parameters,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the calibration here (YAML).", callback=check_output_path),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of every scenario. Repeatable."),
    ] = None,
) -> None:
    """Learn what hosts add to simulated training steps, from a few steps that were measured.

    Prints every step raw beside calibrated, and as predicted from the others. The file written goes
    into scenarios of the same cluster and software: `calibration: learned.yaml`.

    Example: `foretoken calibrate training a.yaml b.yaml --measured steps.csv --out learned.yaml`
    """
    state = state_of(context)
    with open_composition(state) as services:
        runs = _read_runs(scenarios, scenario_changes(change))
        simulator = services.foretoken("simulator")

        def simulate(scenario: TrainingScenario) -> TrainingReport:
            return simulator.simulate_training(scenario)

        with show_progress(f"calibrate on {len(runs)} scenario{'s' * (len(runs) > 1)}"):
            times = _read_times(measured, runs)
            result = calibrate_training(runs, times, simulate, fit or (), measured.name)
        state.print_object(result, lambda: _table(result))
        if out is not None:
            out.write_text(_to_yaml(result), encoding="utf-8")
            note(f"calibration written to {out}")


def _read_runs(paths: Sequence[Path], changes: dict[str, Any]) -> dict[str, TrainingScenario]:
    runs: dict[str, TrainingScenario] = {}
    for path in paths:
        scenario = read_training_scenario(path, changes)
        if scenario.name in runs:
            reason = f"two scenarios are named {scenario.name}"
            raise InvalidRequestError.of_field("scenarios", reason)
        runs[scenario.name] = scenario
    return runs


def _read_times(path: Path, names: Iterable[str]) -> tuple[MeasuredTime, ...]:
    """Return the measured times in a file; of GPUModeling25's table, those of named scenarios."""
    if not training_truth_table.recognises(path):
        return read_measured(path)
    found = {name: training_truth_table.read_truth(path, name) for name in names}
    return tuple(
        MeasuredTime(
            scenario=name,
            component=part.name,
            stage=part.stage,
            time_ms=part.time_ms,
            flags=part.flags,
        )
        for name, run in found.items()
        for part in (run.step, *run.components)
        if part.time_ms > 0
    )


def _table(result: CalibrationResult) -> Table:
    parts: list[Table | str] = []
    if result.components:
        rows = [
            (
                pair.name,
                pair.component,
                pair.measured_us / US_PER_MS,
                pair.simulated_us / US_PER_MS,
                (pair.measured_us - pair.simulated_us) / US_PER_MS,
            )
            for pair in result.components
        ]
        columns = ("layers of", "component", "measured (ms)", "simulated (ms)", "gap (ms)")
        parts.append(build_table("Layers", columns, rows))
    if result.steps:
        steps = [
            (
                step.name,
                step.measured_ms,
                step.raw_ms,
                f"{step.raw_ms / step.measured_ms - 1:+.1%}",
                step.calibrated_ms,
                f"{step.calibrated_ms / step.measured_ms - 1:+.1%}",
                f"{step.left_out_ms / step.measured_ms - 1:+.1%}" if step.left_out_ms else "-",
            )
            for step in result.steps
        ]
        columns_of_steps = (
            *("step", "measured (ms)", "raw (ms)", "error", "calibrated (ms)", "error"),
            "error, left out",
        )
        parts.append(build_table("Steps", columns_of_steps, steps))
    parts += _lines(result)
    return stack(*parts)


def _lines(result: CalibrationResult) -> list[str]:
    """Return what was fitted, how well, and what to know of it."""
    found = result.calibration
    fitted = ", ".join(result.parameters) or "nothing else"
    summary = (
        f"gap per layer: {found.forward_gap_us / US_PER_MS:.3g} ms forward,"
        f" {found.backward_gap_us / US_PER_MS:.3g} ms backward; per step:"
        f" {found.step_gap_us / US_PER_MS:.3g} ms; factor: {found.step_factor:.4g}"
        f" (fitted to steps: {fitted})"
    )
    lines = [summary]
    if result.steps:
        left_out = result.left_out_error_ratio
        expected = f"{left_out:.1%}" if left_out >= 0 else "unknown, the steps are too few"
        lines.append(
            f"mean error: raw {result.raw_error_ratio:.1%}, calibrated"
            f" {result.calibrated_error_ratio:.1%}; to expect of another step: {expected}"
        )
    return [*lines, *(f"note: {line}" for line in result.notes)]


def _to_yaml(result: CalibrationResult) -> str:
    content = schema.encode(result.calibration)
    head = (
        "# Learned by `foretoken calibrate training`; for the cluster and software measured only.\n"
    )
    return head + yaml.safe_dump(content, sort_keys=False)
