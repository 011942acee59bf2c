"""Every string field of every request, one after the other, with a value that wants to be a path.

The walk goes by the descriptors of the services, so a field that is added is walked, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

FieldPath = tuple[str, ...]
Parts = Mapping[str, Mapping[str, Any]]


def hostile_values(victim: Path) -> tuple[str, ...]:
    """Return names of the folder `victim`, and others that no file should have."""
    climbs = [f"{'../' * depth}{victim.parent.name}/{victim.name}" for depth in (1, 2, 3, 4)]
    return (
        str(victim),
        *climbs,
        f"x/../../../../{victim.parent.name}/{victim.name}",
        f"..%2f..%2f..%2f{victim.parent.name}%2f{victim.name}",
        f"file://{victim}",
        f"~/{victim.name}",
        f"..\\..\\{victim.parent.name}\\{victim.name}",
        "C:\\windows\\victim",
        "victim\0.txt",
        "victim\n/../victim",
        "..",
        ".",
        "/",
        "*",
        "",
        "-rf",
        "$(touch victim)",
        "v\u0131ctim/\u202e../\u2024\u2024/victim",
        "a" * 100_000,
        f"{'../' * 1_000}victim",
    )


def walk_fields(
    descriptor: Descriptor, seen: FieldPath = (), kind: int = FieldDescriptor.TYPE_STRING
) -> Iterator[FieldPath]:
    """Yield the way to every string in a message; a message inside itself is entered once.

    Of another `kind`, the ways to what is of that type.
    """
    for item in descriptor.fields:
        if item.type == kind:
            yield (item.name,)
        elif item.message_type is not None and item.message_type.full_name not in seen:
            for rest in walk_fields(item.message_type, (*seen, descriptor.full_name), kind):
                yield (item.name, *rest)


def put(message: Message, path: FieldPath, value: str | float, parts: Parts) -> None:
    """Set a value in a message, in the first entry of what is a list or a map on the way.

    What is not there yet on the way begins as `parts` says, by the name of its message.
    """
    name, *rest = path
    item = message.DESCRIPTOR.fields_by_name[name]
    entry = item.message_type
    if entry is not None and entry.GetOptions().map_entry:
        _put_entry(getattr(message, name), entry, rest, value)
    elif item.is_repeated and not rest:
        getattr(message, name).append(value)
    elif item.is_repeated:
        items = getattr(message, name)
        put(items[0] if items else _begun(items.add(), parts), tuple(rest), value, parts)
    elif rest:
        child = getattr(message, name)
        put(child if message.HasField(name) else _begun(child, parts), tuple(rest), value, parts)
    else:
        setattr(message, name, value)


def _begun(message: Message, parts: Parts) -> Message:
    message.SetInParent()
    return json_format.ParseDict(dict(parts.get(message.DESCRIPTOR.name, {})), message)


def _put_entry(entries: Any, entry: Descriptor, rest: Sequence[str], value: str | float) -> None:
    kind = entry.fields_by_name["value"].type
    if rest == ["value"]:
        entries["key"] = value
    else:
        entries[value] = "x" if kind == FieldDescriptor.TYPE_STRING else 1
