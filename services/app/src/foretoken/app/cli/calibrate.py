"""`foretoken calibrate`: correct estimates by what was observed end to end.

`calibrate operators NAME FILE`, or `calibrate NAME FILE`, learns factors of operators;
`calibrate training` learns what hosts add to training steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from foretoken.app.cli.calibrate_training import training
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import build_table, format_ratio, open_composition, state_of
from foretoken.domain import schema
from foretoken.domain.measurements.correction import (
    Correction,
    CorrectionRequest,
    Observation,
    ObservedCall,
)
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.text_file import read_json

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
app.command("training")(training)


@app.command(_DEFAULT)
def calibrate(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Its name; one of that name is replaced.")],
    observations: Annotated[
        Path, typer.Argument(help="What was observed (JSON).", exists=True, dir_okay=False)
    ],
    device: Annotated[str, typer.Option(help="Device: see `foretoken list devices`.")],
    topology: Annotated[str, typer.Option(help="Topology, for collectives.")] = "",
    framework: Annotated[str, typer.Option(help="Software whose measurements to use.")] = "",
    by_group: Annotated[
        bool,
        typer.Option(
            "--by-group",
            help="A factor for each group of operators, as far as the observations can tell.",
        ),
    ] = False,
) -> None:
    """Learn factors from times observed end to end, and what the calls in them are estimated at.

    `operators` may be left out: `foretoken calibrate NAME FILE`.

    The file is a list of observations:
    `[{"name": "decode, batch 32", "observed_us": 9000, "calls": [{"operator": "gemm",
    "dtype": "bf16", "dims": {"m": 32, "n": 4096, "k": 4096}, "count": 32}]}]`.
    `phase` ("backward") and `count` may be left out. Then ask with `correction=NAME`.

    Example: `foretoken calibrate my-cluster observations.json --device a30 --by-group`
    """
    state = state_of(context)
    with open_composition(state) as services:
        request = CorrectionRequest(
            name=name,
            device=device,
            observations=read_observations(observations),
            topology=topology,
            framework=framework,
            by_group=by_group,
        )
        correction = services.foretoken("predictor").calibrate(request)
    state.print_object(correction, lambda: _correction_table(correction))


def list_corrections(context: typer.Context) -> None:
    """List the corrections that were learned, newest first."""
    state = state_of(context)
    with open_composition(state) as services:
        rows = [
            (
                found.name,
                found.device,
                found.created_at,
                len(found.observations),
                _say_factors(found.factors),
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


def _say_factors(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{group or 'all'} x{factor:.3g}" for group, factor in sorted(factors.items()))
