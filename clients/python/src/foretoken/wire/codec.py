"""Domain dataclasses to protobuf messages and back, by reflection over both.

A message mirrors its dataclass field by field. The names differ by three rules, all in
`proto_field_name`. A field whose default is not protobuf's zero has presence in the proto, and not
set means the domain's default; an unspecified enum likewise. Mappings keyed by an enum travel keyed
by its name in lower case. A model may be named instead of sent: `model_ref`, next to `model`.
"""

import dataclasses
import enum
import re
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, ForetokenError, InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport

T = TypeVar("T")
M = TypeVar("M", bound=Message)

# Columns that travel as Arrow, outside the message's fields, with the names of their tables.
ARROW_FIELDS: Mapping[tuple[type, str], str] = {
    (ServingReport, "requests"): "requests",
    (ServingReport, "series"): "series",
    (ServingSearchReport, "candidates"): "candidates",
    (TrainingReport, "spans"): "spans",
    (TrainingReport, "memory_timeline"): "memory",
    (TrainingReport, "traffic"): "traffic",
    (TrainingSearchReport, "candidates"): "candidates",
}

# What the names of fields end with that name what the field without that holds.
NAMED = "_ref"

_BOOLEAN_PREFIX = re.compile(r"^(is|has|was)_")
_COUNT = re.compile(r"^(|.*_)num_(.*)$")


def encode(value: object, message_class: type[M]) -> M:
    """Return the message that mirrors a dataclass.

    Raises:
        InvalidRequestError: a value does not fit its field (an int beyond 64 bits, text in a
            number).

    """
    message = message_class()
    _fill(value, message)
    return message


def decode(message: Message, cls: type[T]) -> T:
    """Return the dataclass that a message mirrors.

    Raises:
        InvalidRequestError: with one violation per required field that is not set, value the
            domain does not know, or rule of the dataclass that is broken.

    """
    violations: list[FieldViolation] = []
    value = _build(message, cls, "", violations)
    if violations:
        raise InvalidRequestError.of_violations(violations, f"invalid {cls.__name__}")
    return typing.cast("T", value)


def proto_field_name(name: str, hint: Any) -> str:
    """Return the proto's name of a domain field.

    `num_layers` is `layer_count`, `max_num_seqs` is `max_seq_count`, and booleans drop `is_`,
    `has_` and `was_`.
    """
    if hint is bool:
        return _BOOLEAN_PREFIX.sub("", name)
    counted = _COUNT.match(name)
    return f"{counted[1]}{_singular(counted[2])}_count" if counted else name


def label_prefix(descriptor: EnumDescriptor) -> str:
    """Return what the names of a proto enum's values begin with ("JOB_STATE_")."""
    return str(descriptor.values_by_number[0].name).removesuffix("UNSPECIFIED")


def _singular(plural: str) -> str:
    if plural.endswith("ies"):
        return f"{plural.removesuffix('ies')}y"
    return (
        plural.removesuffix("es") if plural.endswith(("ches", "xes")) else plural.removesuffix("s")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _FieldPlan:
    """How one field travels. `item` is its type within a tuple, a mapping or an optional."""

    name: str
    proto_name: str
    container: type | None
    item: Any
    key: Any
    numbers: Mapping[enum.Enum, int]
    members: Mapping[int, enum.Enum]
    has_presence: bool
    has_default: bool
    is_optional: bool

    @property
    def holds_messages(self) -> bool:
        return dataclasses.is_dataclass(self.item)


@cache
def _plan(cls: type, descriptor: Descriptor) -> tuple[_FieldPlan, ...]:
    hints = schema.field_types(cls)
    return tuple(
        _plan_field(field, hints[field.name], descriptor)
        for field in dataclasses.fields(cls)
        if (cls, field.name) not in ARROW_FIELDS
    )


def _plan_field(field: dataclasses.Field[Any], hint: Any, descriptor: Descriptor) -> _FieldPlan:
    proto_name = proto_field_name(field.name, hint)
    proto_field = descriptor.fields_by_name.get(proto_name)
    if proto_field is None:
        raise TypeError(f"{descriptor.full_name} has no field {proto_name}; add it to the proto")
    optional = schema.optional_type(hint)
    item = hint if optional is None else optional
    origin = typing.get_origin(item)
    arguments = typing.get_args(item)
    key = arguments[0] if origin is Mapping else None
    if origin is not None:
        item = arguments[1] if origin is Mapping else arguments[0]
    numbers: dict[enum.Enum, int] = {}
    if proto_field.enum_type is not None:
        prefix = label_prefix(proto_field.enum_type)
        labels = proto_field.enum_type.values_by_name
        numbers = {member: labels[prefix + member.name].number for member in item}
    return _FieldPlan(
        name=field.name,
        proto_name=proto_name,
        container=origin,
        item=item,
        key=key,
        numbers=numbers,
        members={number: member for member, number in numbers.items()},
        has_presence=proto_field.has_presence,
        has_default=field.default is not dataclasses.MISSING
        or field.default_factory is not dataclasses.MISSING,
        is_optional=optional is not None,
    )


def _fill(value: object, message: Message) -> None:
    cls: type = type(value)
    for plan in _plan(cls, message.DESCRIPTOR):
        item = getattr(value, plan.name)
        if item is None:
            continue
        try:
            _put(plan, item, message)
        except (TypeError, ValueError, OverflowError) as err:
            raise InvalidRequestError.of_field(plan.name, f"cannot be sent: {err}") from err


def _put(plan: _FieldPlan, item: Any, message: Message) -> None:
    if plan.container is Mapping:
        keys = (key.name.lower() if isinstance(key, enum.Enum) else key for key in item)
        getattr(message, plan.proto_name).update(zip(keys, item.values(), strict=True))
    elif plan.container is not None:
        repeated = getattr(message, plan.proto_name)
        if plan.holds_messages:
            for entry in item:
                _fill(entry, repeated.add())
        else:
            repeated.extend(plan.numbers[entry] for entry in item) if plan.numbers else (
                repeated.extend(item)
            )
    elif plan.holds_messages:
        child = getattr(message, plan.proto_name)
        child.SetInParent()
        _fill(item, child)
    else:
        setattr(message, plan.proto_name, plan.numbers[item] if plan.numbers else item)


def _build(message: Message, cls: type, path: str, violations: list[FieldViolation]) -> object:
    before = len(violations)
    arguments: dict[str, Any] = {}
    for plan in _plan(cls, message.DESCRIPTOR):
        if plan.has_presence and not message.HasField(plan.proto_name):
            if named := getattr(message, f"{plan.proto_name}{NAMED}", ""):
                arguments[plan.name] = _find_named(named, _join(path, plan.name), violations)
            elif plan.is_optional and not plan.has_default:
                arguments[plan.name] = None
            elif not plan.has_default:
                violations.append(FieldViolation(_join(path, plan.name), "must be set"))
            continue
        raw = getattr(message, plan.proto_name)
        if plan.numbers and plan.container is None and raw == 0 and plan.has_default:
            continue
        arguments[plan.name] = _take(plan, raw, _join(path, plan.name), violations)
    if len(violations) > before:
        return None
    try:
        return cls(**arguments)
    except InvalidRequestError as err:
        found = err.violations or (FieldViolation("", err.message),)
        violations.extend(FieldViolation(_join(path, v.field), v.description) for v in found)
        return None


def _find_named(text: str, path: str, violations: list[FieldViolation]) -> ModelArchitecture | None:
    """Return the model of a name, or of the text of a `config.json`; no file of this machine."""
    try:
        is_config = text.lstrip().startswith("{")
        return load_model(text) if is_config else find_model(text)
    except ForetokenError as err:
        violations.append(FieldViolation(f"{path}{NAMED}", err.message))
        return None


def _take(plan: _FieldPlan, raw: Any, path: str, violations: list[FieldViolation]) -> Any:
    if plan.container is Mapping:
        return {_take_key(plan, key, path, violations): item for key, item in raw.items()}
    if plan.container is None:
        return _take_item(plan, raw, path, violations)
    if plan.holds_messages or plan.numbers:
        return tuple(
            _take_item(plan, entry, f"{path}[{index}]", violations)
            for index, entry in enumerate(raw)
        )
    return tuple(raw)


def _take_item(plan: _FieldPlan, raw: Any, path: str, violations: list[FieldViolation]) -> Any:
    if plan.holds_messages:
        return _build(raw, plan.item, path, violations)
    if not plan.numbers:
        return raw
    member = plan.members.get(raw)
    if member is None:
        names = ", ".join(choice.name.lower() for choice in plan.numbers)
        violations.append(FieldViolation(path, f"must be one of {names}, not the number {raw}"))
    return member


def _take_key(plan: _FieldPlan, key: Any, path: str, violations: list[FieldViolation]) -> Any:
    if not (isinstance(plan.key, type) and issubclass(plan.key, enum.Enum)):
        return key
    member = plan.key.__members__.get(key.upper())
    if member is None:
        names = ", ".join(choice.lower() for choice in plan.key.__members__)
        violations.append(FieldViolation(path, f"{key!r} is not one of {names}"))
    return member


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
