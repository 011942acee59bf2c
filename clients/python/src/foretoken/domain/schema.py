"""Turn plain mappings (YAML, JSON) into frozen dataclasses, strictly, and back.

An unknown key, a missing key or a wrong type is an error that names its path:
`engine.max_num_seqs`.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, Union

from foretoken.domain.errors import FieldViolation, InvalidRequestError, find_near

T = TypeVar("T")

# Metadata of a field whose items, dataclasses, are many: they are written by columns.
BY_COLUMNS: Mapping[str, bool] = {"by_columns": True}

_SHOWN_BITS = 256
# Of integers that 64 bits hold.
_LEAST, _MOST = -(2**63), 2**63 - 1
_PLAIN = frozenset({type(None), bool, int, float, str})


def decode(cls: type[T], value: Any, path: str = "") -> T:
    """Build `cls` from plain data.

    Raises:
        InvalidRequestError: with one violation for every key that cannot be used.

    """
    violations: list[FieldViolation] = []
    decoded = _decode_value(cls, value, path, violations)
    if violations:
        raise InvalidRequestError.of_violations(violations, f"invalid {cls.__name__}")
    return typing.cast("T", decoded)


def encode(value: Any) -> Any:
    """Turn a dataclass into plain data that JSON and YAML can hold; enums by lower-case name."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: (_encode_columns if BY_COLUMNS.keys() <= f.metadata.keys() else encode)(
                getattr(value, f.name)
            )
            for f in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value) if _PLAIN.issuperset(map(type, value)) else list(map(encode, value))
    # A column of numbers, which the domain knows by no other name.
    return value.tolist() if hasattr(value, "tolist") else value


def _encode_columns(items: Sequence[Any]) -> Any:
    """Return the columns of items of one dataclass, without those that are what they are unsaid."""
    if not items:
        return []
    columns = {
        field: [getattr(item, field.name) for item in items]
        for field in dataclasses.fields(items[0])
    }
    return {
        field.name: encode(column)
        for field, column in columns.items()
        if any(value != field.default for value in column)
    }


def set_key(content: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `engine.max_num_seqs` in nested plain data, making sections that are absent.

    An entry of a list goes by its place, from 0: `cluster.pools.0.num_replicas`.

    Raises:
        InvalidRequestError: the path leads through something that is no section, or to an entry
            that is not there.

    """
    *parents, last = dotted.split(".")
    place: Any = content
    for key in parents:
        child = (
            place[_entry(place, key, dotted)]
            if isinstance(place, list)
            else place.setdefault(key, {})
        )
        if not isinstance(child, dict | list):
            raise InvalidRequestError.of_field(dotted, f"{key} is not a section")
        place = child
    place[_entry(place, last, dotted) if isinstance(place, list) else last] = value


def _entry(entries: list[Any], key: str, dotted: str) -> int:
    """Return the place of an entry in a list."""
    if not (key.isdigit() and int(key) < len(entries)):
        raise InvalidRequestError.of_field(
            dotted, f"{key} is no entry of a list of {len(entries)}; they count from 0"
        )
    return int(key)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the resolved type of every field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def optional_type(hint: Any) -> Any | None:
    """Return X for `X | None`, else None."""
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return None
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0] if len(members) == 1 else None


def _decode_value(hint: Any, value: Any, path: str, violations: list[FieldViolation]) -> Any:
    inner = optional_type(hint)
    if inner is not None:
        return None if value is None else _decode_value(inner, value, path, violations)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast("type", hint), value, path, violations)
    origin = typing.get_origin(hint)
    if origin in (tuple, Sequence):
        return _decode_sequence(hint, value, path, violations)
    if origin is Mapping:
        return _decode_mapping(hint, value, path, violations)
    return _decode_scalar(hint, value, path, violations)


def _decode_dataclass(
    cls: type, value: Any, path: str, violations: list[FieldViolation]
) -> object | None:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        violations.append(FieldViolation(path, f"expected a mapping, found {_show(value)}"))
        return None
    hints = field_types(cls)
    before = len(violations)
    violations.extend(
        FieldViolation(_join(path, str(key)), _unknown_key(key, hints))
        for key in value
        if key not in hints
    )
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            child = _join(path, field.name)
            arguments[field.name] = _decode_value(
                hints[field.name], value[field.name], child, violations
            )
        elif _is_required(field):
            violations.append(FieldViolation(_join(path, field.name), "required key is missing"))
    if len(violations) > before:
        return None
    try:
        return typing.cast("object", cls(**arguments))
    except InvalidRequestError as err:
        found = err.violations or (FieldViolation("", err.message),)
        violations.extend(FieldViolation(_join(path, v.field), v.description) for v in found)
        return None


def _unknown_key(key: Any, known: Iterable[str]) -> str:
    near = find_near(str(key), known)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return f"unknown key; {hint}known keys are {', '.join(known)}"


def _decode_sequence(hint: Any, value: Any, path: str, violations: list[FieldViolation]) -> Any:
    item_type = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(item_type) and _are_columns(value):
        return _decode_columns(typing.cast("type", item_type), value, path, violations)
    return _decode_items(item_type, value, path, violations)


def _decode_items(item_type: Any, value: Any, path: str, violations: list[FieldViolation]) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        violations.append(FieldViolation(path, f"expected a list, found {_show(value)}"))
        return None
    return tuple(
        _decode_value(item_type, item, f"{path}[{index}]", violations)
        for index, item in enumerate(value)
    )


def _decode_columns(
    cls: type, columns: Mapping[str, Any], path: str, violations: list[FieldViolation]
) -> Any:
    """Return the items that columns describe; see `_encode_columns`."""
    hints, before = field_types(cls), len(violations)
    read = {
        name: column
        if _is_plain(hints.get(name), column)
        else _decode_items(hints.get(name, Any), column, _join(path, name), violations)
        for name, column in columns.items()
    }
    if len({len(column) for column in columns.values()}) > 1:
        violations.append(FieldViolation(path, "expected columns of one length"))
    if len(violations) > before:
        return None
    rows = [dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)]
    # All have the keys of the first.
    num_checked = len(rows) if hasattr(cls, "__post_init__") else 1
    checked = [
        _decode_dataclass(cls, row, f"{path}[{index}]", violations)
        for index, row in enumerate(rows[:num_checked])
    ]
    if len(violations) > before:
        return None
    return (*checked, *(cls(**row) for row in rows[num_checked:]))


def _are_columns(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(column, list | tuple) for column in value.values())
    )


def _is_plain(hint: Any, column: Any) -> bool:
    """Return whether a column can be taken as it is, found at once where it has a million items."""
    if not isinstance(column, list) or set(map(type, column)) != {hint}:
        return False
    return hint is float or (hint is int and _LEAST <= min(column) <= max(column) <= _MOST)


def _decode_mapping(hint: Any, value: Any, path: str, violations: list[FieldViolation]) -> Any:
    if not isinstance(value, Mapping):
        violations.append(FieldViolation(path, f"expected a mapping, found {_show(value)}"))
        return None
    key_type, item_type = typing.get_args(hint)
    return {
        _decode_value(key_type, key, _join(path, str(key)), violations): _decode_value(
            item_type, item, _join(path, str(key)), violations
        )
        for key, item in value.items()
    }


def _decode_scalar(hint: Any, value: Any, path: str, violations: list[FieldViolation]) -> Any:
    if hint is Any:
        return value
    if issubclass(hint, enum.Enum):
        return _decode_enum(hint, value, path, violations)
    is_bool = isinstance(value, bool)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not _can_be_kept(value):
        problem = "does not fit into 64 bits" if isinstance(value, int) else "is no Unicode text"
        violations.append(FieldViolation(path, f"{_show(value)} {problem}"))
        return None
    if hint is float and isinstance(value, int) and not is_bool:
        return float(value)
    if isinstance(value, hint) and (not is_bool or hint is bool):
        return value
    violations.append(FieldViolation(path, f"expected {hint.__name__}, found {_show(value)}"))
    return None


def _decode_enum(
    hint: type[enum.Enum], value: Any, path: str, violations: list[FieldViolation]
) -> enum.Enum | None:
    if isinstance(value, hint):
        return value
    member = hint.__members__.get((value if isinstance(value, str) else _show(value)).upper())
    if member is None:
        names = ", ".join(name.lower() for name in hint.__members__)
        violations.append(FieldViolation(path, f"{_show(value)} is not one of {names}"))
    return member


def _can_be_kept(value: Any) -> bool:
    """Return whether messages, tables and files can hold a value.

    Integers of YAML and JSON have as many digits as one likes; their texts, and arguments, may have
    half of a pair of surrogates.
    """
    if isinstance(value, int):
        return _LEAST <= value <= _MOST
    try:
        return not isinstance(value, str) or value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _show(value: Any) -> str:
    """Return a value as a message shows it; Python refuses to write integers of 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} with an integer of too many digits"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(path: str, key: str) -> str:
    return ".".join(part for part in (path, key) if part)
