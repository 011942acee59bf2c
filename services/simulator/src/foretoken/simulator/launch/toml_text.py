"""Nested tables as TOML. The standard library reads the format, and writes none."""

import json
from collections.abc import Iterator, Mapping


def render_toml(content: Mapping[str, object]) -> str:
    """Return tables of numbers, texts, booleans and lists of them as TOML."""
    return "\n".join(_lines(content, ())).strip("\n") + "\n"


def _lines(content: Mapping[str, object], path: tuple[str, ...]) -> Iterator[str]:
    values = {name: value for name, value in content.items() if not isinstance(value, Mapping)}
    if path and values:
        yield ""
        yield f"[{'.'.join(path)}]"
    for name, value in values.items():
        yield f"{name} = {_value(value)}"
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, name))


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        return "[\n" + "".join(f"  {_value(item)},\n" for item in value) + "]"
    # A text, a number, a boolean and a list of them are written alike in JSON and TOML.
    return json.dumps(list(value) if isinstance(value, tuple) else value)
