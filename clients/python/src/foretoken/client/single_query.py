"""The query for one operator call, from plain words."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Phase
from foretoken.domain.requests.option import flag, option

E = TypeVar("E", bound=enum.Enum)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """What a prediction is of and may rest on; see `OperatorTable` and `LatencyQuery`."""

    variant: str = ""
    kernel: str = ""
    topology: str = option("", "Topology, for collectives.")
    framework: str = ""
    refuse_extrapolation: bool = flag("Fail rather than extrapolate.")
    model_version: str = ""
    prefer_measured: bool = flag(
        "A measured point is its measurement, no model in it.", names=("--as-measured",)
    )
    correction: str = ""


def build_single_query(
    operator: str,
    dims: Mapping[str, int],
    *,
    device: str,
    dtype: DType | str,
    phase: Phase | str,
    options: CallOptions | None,
) -> LatencyQuery:
    """Return the query for one call.

    Raises:
        InvalidRequestError: no number format or phase of that name.

    """
    chosen = options or CallOptions()
    table = OperatorTable(
        operator=operator,
        dtype=find_member(DType, dtype, "dtype"),
        phase=find_member(Phase, phase, "phase"),
        columns={name: [value] for name, value in dims.items()},
        variant=chosen.variant,
        kernel=chosen.kernel,
    )
    return LatencyQuery(
        device=device,
        tables=(table,),
        topology=chosen.topology,
        framework=chosen.framework,
        refuse_extrapolation=chosen.refuse_extrapolation,
        model_version=chosen.model_version,
        prefer_measured=chosen.prefer_measured,
        correction=chosen.correction,
    )


def find_member(cls: type[E], value: E | str, field: str) -> E:
    """Return the member of that name, in any case.

    Raises:
        InvalidRequestError: there is none; the message names those there are.

    """
    if isinstance(value, cls):
        return value
    member = cls.__members__.get(str(value).upper())
    if member is None:
        names = ", ".join(name.lower() for name in cls.__members__)
        raise InvalidRequestError.of_field(field, f"{value!r} is not one of {names}")
    return member
