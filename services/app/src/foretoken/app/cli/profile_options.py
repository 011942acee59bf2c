"""What to profile, as the options of `foretoken profile` say it."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.call_words import parse_values, parse_whole
from foretoken.client.single_query import find_member
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.models.load import load_model
from foretoken.domain.operator import find_operator
from foretoken.domain.profiling import ProfileRequest
from foretoken.domain.text_file import read_json, read_text


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """What is timed."""

    device: Annotated[
        str, typer.Option(help="Device, by its catalog name: see `foretoken profile devices`.")
    ] = "cpu"
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Time what serving this model asks for: a preset (`foretoken list models`) or the"
            " path of a Hugging Face `config.json`. Repeatable. Without, each operator's own sweep."
        ),
    ] = None
    tp: Annotated[
        str, typer.Option(help="With --model: tensor-parallel sizes, `1,2,4,8` or `1:8`.")
    ] = "1"
    training: Annotated[
        bool, typer.Option("--training", help="With --model: what training it asks for, too.")
    ] = False
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator. Repeatable.")] = (
        None
    )
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Number format, instead of the device's usual ones. Repeatable."),
    ] = None
    points: Annotated[
        Path | None,
        typer.Option(
            help="Time exactly the points of this CSV file, as `foretoken plan --points-csv` writes"
            " it.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    request: Annotated[
        Path | None,
        typer.Option(
            help="A profile written by another process, as JSON: its fields are ProfileRequest's."
            " The other options of what to time, and how, are left alone then.",
            exists=True,
            dir_okay=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """How much is timed, and how."""

    quick: Annotated[
        bool, typer.Option("--quick", help="Few points, timed less precisely: about a minute.")
    ] = False
    kernels: Annotated[
        str,
        typer.Option(help="`default`: the kernel a framework would choose; `all`: every one here."),
    ] = "default"
    cache: Annotated[
        str,
        typer.Option(help="Inputs come from memory (`cold`), stay in the cache (`warm`), `both`."),
    ] = "cold"
    again: Annotated[
        bool, typer.Option("--again", help="Measure points the catalog already has, too.")
    ] = False
    name: Annotated[
        str,
        typer.Option(help="Name of the profile: one of the same name goes on where it stopped."),
    ] = ""
    seed: Annotated[int, typer.Option(min=0, help="Decides inputs, order and repeats.")] = 0
    time_cap_s: Annotated[
        float,
        typer.Option(
            min=0.0, help="Stop after this many seconds; what is left is counted (0: no cap)."
        ),
    ] = 0.0


def build_request(subject: SubjectOptions, effort: EffortOptions) -> ProfileRequest:
    """Return the profile that the options ask for.

    Raises:
        UnknownModelError, UnknownOperatorError: a name there is not.
        InvalidRequestError: a file or a value that is wrong, with its place.

    """
    if subject.request is not None:
        return _read_request(subject.request)
    if subject.training and not subject.model:
        raise InvalidRequestError.of_field("training", "needs --model: what is trained?")
    return ProfileRequest(
        device=subject.device,
        operators=tuple(subject.operator or ()),
        models=tuple(load_model(model) for model in subject.model or ()),
        tp_sizes=parse_values("tp", subject.tp) if subject.model else (),
        has_training=subject.training,
        dtypes=tuple(find_member(DType, name, "dtype") for name in subject.dtype or ()),
        calls=tuple(read_points(subject.points)) if subject.points else (),
        quick=effort.quick,
        kernels=effort.kernels,
        cache=effort.cache,
        skip_covered=not effort.again,
        name=effort.name,
        seed=effort.seed,
        time_cap_s=effort.time_cap_s,
    )


def _read_request(path: Path) -> ProfileRequest:
    return schema.decode(ProfileRequest, read_json(path, "request"), path.name)


def read_points(path: Path) -> Iterator[OperatorCall]:
    """Yield the calls of a CSV file: columns for operator, dtype and phase, and each dimension.

    Further columns are left alone, but `variant` and `kernel`.

    Raises:
        UnknownOperatorError: an operator there is not.
        InvalidRequestError: a column or a value is missing or wrong, with its line.

    """
    reader = csv.DictReader(io.StringIO(read_text(path, "points")))
    try:
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            yield _call_of_row(row)
    except (InvalidRequestError, csv.Error) as err:
        place = f"{path}, line {reader.line_num}"
        raise InvalidRequestError.of_field("points", f"{place}: {err}") from err


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in ("operator", "dtype") if name not in columns]
    if missing:
        raise InvalidRequestError.of_field(
            "points", f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}"
        )


def _call_of_row(row: dict[str, str]) -> OperatorCall:
    spec = find_operator(row["operator"])
    dims = {name: parse_whole(name, row[name]) for name in spec.dim_names if row.get(name)}
    spec.check_call(dims)
    return OperatorCall(
        operator=spec.name,
        dtype=find_member(DType, row["dtype"], "dtype"),
        phase=find_member(Phase, row.get("phase") or "forward", "phase"),
        dims=dims,
        variant=row.get("variant") or "",
        kernel=row.get("kernel") or "",
    )
