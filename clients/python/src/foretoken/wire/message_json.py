"""Messages as JSON and back: the names of the protos, numbers as numbers.

As protobuf's own JSON, but for integers of 64 bits, which are numbers here: spreadsheets and `jq`
reckon with them. Both are read.
"""

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from foretoken.domain.errors import InvalidRequestError, find_near
from foretoken.wire.codec import proto_field_name

# protobuf has two implementations of what describes messages, of no common type.
MessageType: TypeAlias = Any
Field: TypeAlias = Any
_BYTES, _ENUM = FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_ENUM
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_UNKNOWN_FIELD = re.compile(r'has no field named "(?P<name>[^"]*)"(?: at "(?P<place>[^"]*)")?')
_WRONG_VALUE = re.compile(r"Failed to parse (?P<place>\S+) field: (?P<problem>.*)", re.DOTALL)
_SEGMENT = re.compile(r"(?P<name>[^\[\].]+)(?P<index>\[.*\])?")


def message_to_json(message: Message) -> dict[str, Any]:
    """Return plain data of a message: a field without presence always, one with it where set."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if _is_map(field):
            entry = cast("MessageType", field.message_type).fields_by_name["value"]
            found[field.name] = {str(key): _plain(entry, value[key]) for key in value}
        elif field.is_repeated:
            found[field.name] = [_plain(field, item) for item in value]
        else:
            found[field.name] = _plain(field, value)
    return found


def read_message(text: bytes, message_class: type[Message]) -> Message:
    """Return the message that a JSON text stands for; nothing is an empty one.

    Raises:
        InvalidRequestError: it is no JSON, or does not fit the message; it names the field.

    """
    message = message_class()
    try:
        return json_format.Parse(text.decode() if text.strip() else "{}", message)
    except json_format.ParseError as err:
        raise _refusal(str(err), message.DESCRIPTOR) from err
    except (ValueError, RecursionError) as err:
        raise InvalidRequestError(f"the body is no JSON: {err}") from err


def fields_to_message(given: Mapping[str, list[str]], message_class: type[Message]) -> Message:
    """Return the message of a query string's fields, `selection.device=h200_sxm`.

    Raises:
        InvalidRequestError: a field that the message does not have, or cannot hold.

    """
    content: dict[str, Any] = {}
    for path, values in given.items():
        place, descriptor = content, message_class.DESCRIPTOR
        *parents, last = path.split(".")
        for name in parents:
            field = _find(descriptor, name)
            if field is None or field.message_type is None or field.is_repeated:
                raise _unknown(path, name, descriptor)
            place, descriptor = place.setdefault(name, {}), field.message_type
        field = _find(descriptor, last)
        if field is None or field.message_type is not None:
            raise _unknown(path, last, descriptor)
        read = [_read_scalar(field, value) for value in values]
        place[last] = read if field.is_repeated else read[-1]
    return read_message(json.dumps(content).encode(), message_class)


def name_as_written(path: str, descriptor: MessageType) -> str:
    """Return the path of a violation with the names of the message that a caller wrote.

    `engine.max_num_seqs` is `engine.max_seq_count`; what the message does not have stays.
    """
    first = _SEGMENT.match(path)
    if first is not None and _find_domain(descriptor, first["name"]) is None:
        # What a call takes in a field of its request is checked for itself.
        for field in descriptor.fields:
            if field.message_type and _find_domain(field.message_type, first["name"]):
                path = f"{field.name}.{path}"
                break
    names: list[str] = []
    place: MessageType | None = descriptor
    for segment in path.split("."):
        match = _SEGMENT.fullmatch(segment)
        field = _find_domain(place, match["name"]) if place is not None and match else None
        names.append(f"{field.name}{match['index'] or ''}" if field and match else segment)
        place = field.message_type if field is not None else None
    return ".".join(names)


def _find_domain(descriptor: MessageType, name: str) -> Field | None:
    """Return the field by the domain's name of it, whose type is not known here."""
    for candidate in (name, proto_field_name(name, int), proto_field_name(name, bool)):
        if (field := descriptor.fields_by_name.get(candidate)) is not None:
            return field
    return None


def _find(descriptor: MessageType, name: str) -> Field | None:
    return descriptor.fields_by_name.get(name) or descriptor.fields_by_camelcase_name.get(name)


def _is_map(field: Field) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _plain(field: Field, value: Any) -> Any:
    if field.message_type is not None:
        return message_to_json(value)
    if field.type == _ENUM:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    if field.type == _BYTES:
        return base64.b64encode(value).decode()
    return float_to_json(value) if field.type in _FLOATS else value


def float_to_json(value: float) -> float | str:
    """Return a number as JSON can have it: one that is not finite as protobuf's word for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def _read_scalar(field: Field, text: str) -> Any:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text


def _refusal(said: str, descriptor: MessageType) -> InvalidRequestError:
    """Return the error of what protobuf says of a text."""
    if (match := _UNKNOWN_FIELD.search(said)) is not None:
        place = _below_root(match["place"] or "")
        inner = _descend(descriptor, place)
        path = ".".join(part for part in (place, match["name"]) if part)
        return _unknown(path, match["name"], inner)
    if (match := _WRONG_VALUE.search(said)) is not None:
        # Each level says it of its field, the innermost last.
        names = [match["place"]]
        problem = match["problem"]
        while (inner_match := _WRONG_VALUE.match(problem)) is not None:
            names.append(inner_match["place"])
            problem = inner_match["problem"]
        return InvalidRequestError.of_field(".".join(names), problem.rstrip("."))
    return InvalidRequestError(f"the body does not fit: {said}")


def _below_root(place: str) -> str:
    return place.partition(".")[2]


def _descend(descriptor: MessageType, place: str) -> MessageType:
    for segment in filter(None, place.split(".")):
        field = _find(descriptor, segment.partition("[")[0])
        if field is None or field.message_type is None:
            return descriptor
        descriptor = field.message_type
    return descriptor


def _unknown(path: str, name: str, descriptor: MessageType) -> InvalidRequestError:
    known = [field.name for field in descriptor.fields]
    near = find_near(name, known)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    said = f"known fields are {', '.join(known)}" if known else "the request has no fields"
    return InvalidRequestError.of_field(path, f"unknown field; {hint}{said}")
