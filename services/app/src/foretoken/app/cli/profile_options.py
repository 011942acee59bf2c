"""What to profile, as the options of `foretoken profile` say it."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.asked_option import Answers, Ask
from foretoken.app.cli.call_words import parse_whole
from foretoken.client.single_query import find_member
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.text_file import read_json, read_text

AskedProfile = Annotated[Answers, Ask(ProfileRequest, defaults={"device": "cpu"})]
WrittenRequest = Annotated[
    Path | None,
    typer.Option(
        "--request",
        help="A profile written by another process, as JSON: its fields are ProfileRequest's."
        " The other options of what to time, and how, are left alone then.",
        exists=True,
        dir_okay=False,
    ),
]


def build_request(answers: Answers, written: Path | None) -> ProfileRequest:
    """Return the profile that a file has, or else the one that the options ask for.

    Raises:
        UnknownModelError, UnknownOperatorError: a name there is not.
        InvalidRequestError: a file or a value that is wrong, with its place.

    """
    if written is not None:
        return schema.decode(ProfileRequest, read_json(written, "request"), written.name)
    asked = answers.read()
    if asked.get("models"):
        asked.setdefault("tp_sizes", (1,))
    elif asked.get("has_training"):
        raise InvalidRequestError.of_field("training", "needs --model: what is trained?")
    else:
        asked.pop("tp_sizes", None)
    return schema.decode(ProfileRequest, asked)


def read_calls(_: str, path: Path) -> tuple[OperatorCall, ...]:
    """Return the calls of a CSV file of points; see `read_points`."""
    return tuple(read_points(path))


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
