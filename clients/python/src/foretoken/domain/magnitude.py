"""Numbers so large, or so small, that nothing is computed with them; products of them are none."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from foretoken.domain.errors import FieldViolation
from foretoken.domain.schema import BY_COLUMNS

# Quantities lie far inside: bytes per s of a cluster, us of a step, dollars of a year.
_LEAST, _MOST = 1e-18, 1e18


def walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield a value and all that it holds, each with the way there.

    Of items that come by columns, of which there may be millions, numbers beyond are all.
    """
    yield path, value
    for below, item in _list_parts(value):
        yield from walk(item, (path + below).removeprefix("."))


def find_beyond(value: object, path: str) -> Iterator[FieldViolation]:
    """Yield a violation where a value is a float that is none, or none to compute with."""
    if isinstance(value, float) and _is_beyond(value):
        problem = f"{value:g} is no number from {_LEAST:g} to {_MOST:g}, of either sign, or 0"
        yield FieldViolation(path, problem)


def _is_beyond(value: float) -> bool:
    # NaN is no more than anything.
    return value != 0 and not _LEAST <= abs(value) <= _MOST


def _list_parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif is_dataclass(value):
        for field in fields(value):
            held = getattr(value, field.name)
            if not BY_COLUMNS.keys() <= field.metadata.keys():
                yield f".{field.name}", held
            elif held:
                names = [item.name for item in fields(held[0]) if item.type in (float, "float")]
                for name in names:
                    yield from (
                        (f".{field.name}[{place}].{name}", number)
                        for place, number in enumerate(getattr(item, name) for item in held)
                        if _is_beyond(number)
                    )
