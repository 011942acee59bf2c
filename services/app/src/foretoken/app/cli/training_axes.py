"""The axes of a space of training strategies as words: `tp=1,2,4`, `recompute=none,full`."""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.app.cli.call_words import parse_values
from foretoken.app.cli.option_text import read_names
from foretoken.app.cli.state import parse_assignments
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, find_near
from foretoken.domain.requests.option import options_of
from foretoken.domain.requests.training_search import TrainingSpace

# As a scenario calls what varies, and as people do, by the space's name for it.
AXES: Mapping[str, str] = {
    name: field for field, said in options_of(TrainingSpace).items() for name in said.axis
}
# Of these the scenario's own value is searched where no other is named. That of the others is not
# read, as a search that names none tries all that is sensible.
_KEPT_AXES = ("device", "num_devices", "global_batch_size", "overlap", "pipeline_schedule", "vpp")
SEARCHED_AXES = frozenset(AXES).difference(_KEPT_AXES)
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
    if not read_names(name, text):
        raise InvalidRequestError.of_field("--vary", f"{name} has no values: {name}=1,2")
    (kind, _) = typing.get_args(schema.field_types(TrainingSpace)[axis])
    parse: Callable[[str, str], tuple[Any, ...]] = {int: parse_values, bool: _parse_truths}.get(
        kind, read_names
    )
    values = parse(f"--vary {name}", text)
    if axis == "weight_parallel":
        values = tuple(_NO_NAME.get(value, value) for value in values)
    return axis, values


def _parse_truths(name: str, text: str) -> tuple[bool, ...]:
    words = [word.lower() for word in read_names(name, text)]
    if wrong := [word for word in words if word not in _TRUTHS]:
        raise InvalidRequestError.of_field(name, f"expected true or false, got {wrong[0]!r}")
    return tuple(dict.fromkeys(_TRUTHS[word] for word in words))
