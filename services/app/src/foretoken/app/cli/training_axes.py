"""The axes of a space of training strategies as words: `tp=1,2,4`, `recompute=none,full`."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.app.cli.call_words import parse_values
from foretoken.app.cli.search_options import split_list
from foretoken.app.cli.state import parse_assignments
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, find_near
from foretoken.domain.training_search import TrainingSpace

# As a scenario calls what varies, and as people do, by the space's name for it.
AXES: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "cp", "ep", "virtual_stages", "sequence_parallel")},
    **{name: name for name in ("recompute", "weight_parallel", "num_devices")},
    "device": "devices",
    "micro_batch_size": "micro_batch_sizes",
    "global_batch_size": "global_batch_sizes",
    "zero_stage": "zero_stages",
    "overlap": "overlaps",
    "weight_degree": "weight_degrees",
    "pipeline_schedule": "pipeline_schedules",
    "vpp": "virtual_stages",
}
# Of these a scenario's own value is not read: a search that is not told tries all that is sensible.
SEARCHED_AXES = frozenset(
    ("tp", "pp", "cp", "ep", "virtual_stages", "micro_batch_size", "sequence_parallel")
) | {"zero_stage", "recompute", "weight_parallel", "weight_degree"}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Stands for no weight parallelism, which has no name.
_NO_NAME = {"none": ""}


def parse_axes(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return values by the name of `TrainingSpace`; ranges of numbers may be `1:8`, doubling.

    Raises:
        InvalidRequestError: no such axis, no values, or one that is not of its kind.

    """
    return dict(_parse_axis(name, text) for name, text in parse_assignments(words).items())


def _parse_axis(name: str, text: str) -> tuple[str, tuple[Any, ...]]:
    axis = AXES.get(name, name if name in AXES.values() else "")
    if not axis:
        near = find_near(name, AXES)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise InvalidRequestError.of_field("--vary", f"{name!r} is none of {', '.join(AXES)}{hint}")
    if not split_list(text):
        raise InvalidRequestError.of_field("--vary", f"{name} has no values: {name}=1,2")
    (kind, _) = typing.get_args(schema.field_types(TrainingSpace)[axis])
    parse: Callable[[str, str], tuple[Any, ...]] = {int: parse_values, bool: _parse_truths}.get(
        kind, _parse_names
    )
    values = parse(f"--vary {name}", text)
    if axis == "weight_parallel":
        values = tuple(_NO_NAME.get(value, value) for value in values)
    return axis, values


def _parse_truths(name: str, text: str) -> tuple[bool, ...]:
    words = [word.lower() for word in split_list(text)]
    if wrong := [word for word in words if word not in _TRUTHS]:
        raise InvalidRequestError.of_field(name, f"expected true or false, got {wrong[0]!r}")
    return tuple(dict.fromkeys(_TRUTHS[word] for word in words))


def _parse_names(_: str, text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split_list(text)))
