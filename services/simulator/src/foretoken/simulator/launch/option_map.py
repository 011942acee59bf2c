"""Options of a framework and the fields that they say: one map, to write them and to read them."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.domain.errors import InvalidRequestError

Fields = Mapping[str, Any]
Options = Mapping[str, Any]


def _says_nothing(_: "Options") -> "Fields":
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Some options and the fields that they say.

    `write` returns options of all fields (`None` or `False` leaves one out, `True` is the bare
    option), `read` fields of the options there are: without those that options leave to the
    framework. It raises `LookupError` or `ValueError` where a value has no counterpart. `aliases`
    are other names of an option. Of a command `flags` are those that the link knows.
    """

    write: Callable[[Fields], Options] = _says_nothing
    read: Callable[[Options], Fields] = _says_nothing
    flags: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionMap:
    """The options of a framework at some versions, in the order they are written.

    `source` says where they were looked up.
    """

    name: str
    versions: str
    source: str
    links: tuple[Link, ...]

    def write(self, fields: Fields) -> dict[str, object]:
        """Return options of fields."""
        return {flag: value for link in self.links for flag, value in link.write(fields).items()}

    def read(self, options: Options) -> tuple[dict[str, Any], list[str]]:
        """Return the fields that options say, and the options that say nothing we know."""
        aliases = {alias: flag for link in self.links for alias, flag in link.aliases.items()}
        given = {aliases.get(name, name): value for name, value in options.items()}
        fields: dict[str, Any] = {}
        read: set[str] = set()
        for link in self.links:
            try:
                fields |= link.read(given)
            except (LookupError, ValueError):
                continue
            read.update(link.flags)
        return fields, [name for name in given if name not in read]


def value(
    name: str,
    flag: str,
    kind: Callable[[Any], Any] = int,
    *,
    default: Any = None,
    always: bool = False,
    aliases: Sequence[str] = (),
) -> Link:
    """Link a field with an option of one value, whose absence means the default.

    The default is left out, unless the option is `always` there.
    """

    def read(options: Options) -> Fields:
        if flag not in options:
            return {} if default is None else {name: default}
        return {name: kind(options[flag])}

    return Link(
        flags=(flag,),
        write=lambda fields: {flag: fields[name] if always or fields[name] != default else None},
        read=read,
        aliases=dict.fromkeys(aliases, flag),
    )


def word(
    name: str,
    flag: str,
    words: Mapping[Any, Any],
    *,
    default: Any = None,
    aliases: Sequence[str] = (),
) -> Link:
    """Link a field with an option that has a word for each value; the default is left out."""
    values = {text: found for found, text in words.items()}

    def read(options: Options) -> Fields:
        return {name: values[options[flag]] if flag in options else default}

    return Link(
        flags=(flag,),
        write=lambda fields: {flag: words.get(fields[name])},
        read=read,
        aliases=dict.fromkeys(aliases, flag),
    )


def switch(name: str, on: str = "", off: str = "") -> Link:
    """Link a boolean field with a bare option that sets it, one that clears it, or both.

    With one of them its absence says the other.
    """
    flags = tuple(flag for flag in (on, off) if flag)

    def write(fields: Fields) -> Options:
        return {flag: fields[name] if flag == on else not fields[name] for flag in flags}

    def read(options: Options) -> Fields:
        if any(options.get(flag, True) is not True for flag in flags):
            raise ValueError(name)
        if on in options or off in options:
            return {name: on in options}
        return {} if on and off else {name: not on}

    return Link(flags=flags, write=write, read=read)


def constant(**options: object) -> Link:
    """Link options that are always the same with no field."""
    return Link(flags=tuple(options), write=lambda _: options)


def split_words(text: str) -> list[str]:
    """Return the words of shell text, without comments.

    Raises:
        InvalidRequestError: a quotation is not closed.

    """
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as err:
        raise InvalidRequestError.of_field("command", str(err)) from err


def group_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words before options, and the options by their names.

    An option's value is `True` without words, a text of one word, else a tuple of them.
    `--name=value` is read as well; names have dashes where they may have underscores.
    """
    first: list[str] = []
    found: dict[str, list[str]] = {}
    values = first
    for name, said in _name_options(words):
        if name:
            found[name] = values = []
        values += said
    options = {
        name: True if not said else said[0] if len(said) == 1 else tuple(said)
        for name, said in found.items()
    }
    return first, options


def _name_options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for text in words:
        stripped = text.lstrip("-")
        if stripped == text or not stripped or not stripped[0].isalpha():
            yield "", [text]
            continue
        name, separator, said = stripped.partition("=")
        yield name.replace("_", "-"), [said] if separator else []
