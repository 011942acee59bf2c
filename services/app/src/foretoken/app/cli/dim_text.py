"""An operator's dimensions as words of a command line, read and put in order."""

from collections.abc import Mapping, Sequence

import typer

from foretoken.app.cli.state import parse_assignments
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.spec.operator import all_operators

# More values of one dimension than this are a slip, not a sweep.
_MAX_VALUES = 10_000
# Of what is wrong, in a message.
_SHOWN = 40


def split_words(
    words: Sequence[str], names: Sequence[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the words of these names, and the others, which are dimensions."""
    said = parse_assignments(words)
    return (
        {name: value for name, value in said.items() if name in names},
        {name: value for name, value in said.items() if name not in names},
    )


def order_dims(operator: str, dims: Mapping[str, int]) -> Mapping[str, int]:
    """Return dimensions in the operator's order, which they lose on their way over a wire."""
    spec = all_operators().get(operator)
    return {name: dims[name] for name in spec.dim_names} if spec else dims


def parse_whole(name: str, text: str) -> int:
    """Return a whole number.

    Raises:
        InvalidRequestError: it is none.

    """
    try:
        value = int(text)
    except ValueError as err:
        raise InvalidRequestError.of_field(
            name, f"expected a whole number, got {text[:_SHOWN]!r}"
        ) from err
    if abs(value) >= 2**63:
        raise InvalidRequestError.of_field(name, f"{text[:_SHOWN]} does not fit into 64 bits")
    return value


def parse_values(name: str, text: str) -> tuple[int, ...]:
    """Return the values that `1,2,4`, `1:4096` (doubling) or `128:1024:128` (in steps) say.

    Ranges include their end, if they meet it, and may stand among other values.

    Raises:
        InvalidRequestError: a part is no number or range.
        typer.BadParameter: a range that never ends or holds too many values.

    """
    found: set[int] = set()
    for part in text.split(","):
        found.update(_expand(name, [parse_whole(name, word) for word in part.split(":")]))
    return tuple(sorted(found))


def _expand(name: str, bounds: Sequence[int]) -> Sequence[int]:
    match bounds:
        case [value]:
            return (value,)
        case [first, last] if 0 < first <= last:
            return [first << power for power in range((last // first).bit_length())]
        case [first, last, step] if step > 0 and first <= last:
            values = range(first, last + 1, step)
            if len(values) <= _MAX_VALUES:
                return values
    text = ":".join(map(str, bounds))
    raise typer.BadParameter(
        f"{name}: {text!r} is not FIRST:LAST (doubling) or FIRST:LAST:STEP"
        f" with at most {_MAX_VALUES:,} values"
    )
