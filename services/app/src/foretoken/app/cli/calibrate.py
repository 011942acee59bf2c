"""`foretoken calibrate`: correct estimates by what was observed end to end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from typer.core import TyperGroup

from foretoken.app.cli.calibrate_serving import serving
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    ItemColumns,
    build_table,
    check_output_path,
    format_ratio,
    item_table,
    note,
    open_services,
    scenario_changes,
    show_progress,
    stack,
)
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import (
    Correction,
    CorrectionRequest,
    Observation,
    ObservedCall,
)
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.text_file import read_json
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.training.calibration import CalibrationResult, calibrate_training
from foretoken.simulator.training.calibration_fit import PARAMETERS
from foretoken.simulator.training.measured_file import MeasuredTime, read_measured
from foretoken.simulator.validation import training_run

_DEFAULT = "operators"


class _Group(TyperGroup):
    """The commands under `calibrate`; words that name none of them go to the default one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before words that name no command."""
        named = (*self.commands, *ctx.help_option_names)
        if args and args[0] not in named:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    help="Correct estimates by what was observed end to end.",
    no_args_is_help=True,
)


app.command()(serving)


@app.command(_DEFAULT)
@with_option_groups
def calibrate(context: typer.Context, request: CorrectionRequest) -> None:
    """Learn factors from times observed end to end, and what the calls in them are estimated at.

    `operators` may be left out: `foretoken calibrate NAME FILE`.

    The file is a list of observations:
    `[{"name": "decode, batch 32", "observed_us": 9000, "calls": [{"operator": "gemm",
    "dtype": "bf16", "dims": {"m": 32, "n": 4096, "k": 4096}, "count": 32}]}]`.
    `phase` ("backward") and `count` may be left out. Then ask with `correction=NAME`.

    Example: `foretoken calibrate my-cluster observations.json --device a30 --by-group`
    """
    with open_services(context) as (state, services):
        correction = services.foretoken("predictor").calibrate(request)
    state.print_object(correction, lambda: _correction_table(correction))


def list_corrections(context: typer.Context) -> None:
    """List the corrections that were learned, newest first."""
    with open_services(context) as (state, services):
        rows = [
            (
                found.name,
                found.device,
                found.created_at,
                _num_observed(found),
                _say_learned(found),
                *_mean_errors(found),
            )
            for found in services.predictor.list_corrections()
        ]
    columns = ("correction", "device", "created", "observations", "factors")
    errors = ("raw error", "corrected", "left out")
    state.print_rows("Corrections", (*columns, *errors), rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CallEntry:
    operator: str
    dtype: DType
    dims: Mapping[str, int]
    phase: Phase = Phase.FORWARD
    count: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _ObservationEntry:
    observed_us: float
    calls: tuple[_CallEntry, ...]
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationFile:
    """What the file holds, under the name that messages call it by."""

    observations: tuple[_ObservationEntry, ...]


def read_observed(_: str, path: Path) -> tuple[Observation, ...]:
    """Return the observations of an option's file; see `read_observations`."""
    return read_observations(path)


def read_observations(path: Path) -> tuple[Observation, ...]:
    """Return the observations of a file.

    Raises:
        InvalidRequestError: it is no JSON, or a key is missing, unknown or of the wrong type.

    """
    content = read_json(path, "observations")
    entries = schema.decode(ObservationFile, {"observations": content}).observations
    return tuple(
        Observation(
            name=entry.name or f"observation {number}",
            observed_us=entry.observed_us,
            calls=tuple(_read_call(call) for call in entry.calls),
        )
        for number, entry in enumerate(entries, start=1)
    )


def _read_call(entry: _CallEntry) -> ObservedCall:
    call = OperatorCall(
        operator=entry.operator, dtype=entry.dtype, phase=entry.phase, dims=entry.dims
    )
    return ObservedCall(call=call, count=entry.count)


def _correction_table(correction: Correction) -> Table:
    num_others = len(correction.observations) - 1
    rows = [
        (
            item.name,
            item.observed_us,
            item.raw_us,
            format_ratio(item.raw_us / item.observed_us - 1.0, 1),
            item.corrected_us,
            format_ratio(item.corrected_us / item.observed_us - 1.0, 1),
            format_ratio(item.left_out_us / item.observed_us - 1.0, num_others),
        )
        for item in correction.observations
    ]
    columns = (
        "observation",
        "observed (µs)",
        "raw (µs)",
        "error",
        "corrected (µs)",
        "error",
        "error, left out",
    )
    table = build_table(f"Correction {correction.name} on {correction.device}", columns, rows)
    raw, corrected, left_out = _mean_errors(correction)
    return stack(
        table,
        f"factors: {_say_factors(correction.factors)}",
        f"mean error: raw {raw}, corrected {corrected}; to expect of a new one, as each is"
        f" predicted from the others: {left_out}",
    )


def _mean_errors(correction: Correction) -> tuple[str, str, str]:
    """Return the mean errors raw, corrected and left out, in per cent."""
    num_others = len(correction.observations) - 1
    return (
        format_ratio(correction.raw_error_ratio, 1),
        format_ratio(correction.corrected_error_ratio, 1),
        format_ratio(correction.left_out_error_ratio, num_others),
    )


def _num_observed(correction: Correction) -> int:
    if correction.steps is None:
        return len(correction.observations)
    return sum(each.num_steps for each in correction.steps.kinds)


def _say_learned(correction: Correction) -> str:
    if correction.steps is None:
        return _say_factors(correction.factors)
    kinds = ", ".join(
        f"{each.kind} x{each.ratio:.3g} + {each.constant_us / US_PER_MS:.3g} ms"
        for each in correction.steps.kinds
    )
    scope = (correction.steps.model, correction.steps.engine, correction.steps.layout)
    return f"steps of {' '.join(part for part in scope if part)}: {kinds}"


def _say_factors(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{group or 'all'} x{factor:.3g}" for group, factor in sorted(factors.items()))


def _check_parameters(names: list[str] | None) -> list[str] | None:
    """Return what `--fit` names; refused now rather than after the simulations."""
    for name in names or []:
        if name not in PARAMETERS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(PARAMETERS)}")
    return names


@app.command()
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

    Prints every step raw and calibrated, and as predicted from the others. The file written goes
    into scenarios of the same cluster and software: `calibration: learned.yaml`.

    Example: `foretoken calibrate training a.yaml b.yaml --measured steps.csv --out learned.yaml`
    """
    with open_services(context) as (state, services):
        runs = _read_runs(scenarios, scenario_changes(change))
        simulator = services.foretoken("simulator")

        def simulate(scenario: TrainingScenario) -> TrainingReport:
            return simulator.simulate_training(scenario)

        with show_progress(f"calibrate on {len(runs)} scenario{'s' * (len(runs) > 1)}"):
            times = read_times(measured, runs)
            result = calibrate_training(runs, times, simulate, fit or (), measured.name)
        state.print_object(result, lambda: _table(result))
        if out is not None:
            out.write_text(write_calibration(result), encoding="utf-8")
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


def read_times(path: Path, names: Iterable[str]) -> tuple[MeasuredTime, ...]:
    """Return the measured times in a file; of GPUModeling25's table, those of named scenarios."""
    if not training_run.recognises(path):
        return read_measured(path)
    found = {name: training_run.read_truth(path, name) for name in names}
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
        columns: ItemColumns[Any] = {
            "layers of": "name",
            "component": "component",
            "measured (ms)": lambda pair: pair.measured_us / US_PER_MS,
            "simulated (ms)": lambda pair: pair.simulated_us / US_PER_MS,
            "gap (ms)": lambda pair: (pair.measured_us - pair.simulated_us) / US_PER_MS,
        }
        parts.append(item_table("Layers", result.components, columns))
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
    parts += describe_calibration(result)
    return stack(*parts)


def describe_calibration(result: CalibrationResult) -> list[str]:
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


def write_calibration(result: CalibrationResult) -> str:
    """Return a calibration as the file that scenarios name."""
    content = schema.encode(result.calibration)
    head = (
        "# Learned by `foretoken calibrate training`; for the cluster and software measured only.\n"
    )
    return head + yaml.safe_dump(content, sort_keys=False)
