"""Options of frameworks: the fields that they say, what projects document, the words of commands.

What is written for a project with a file in `options/` is checked against it, so that an option the
project does not have, or a value it does not take, is an error here and not on the cluster.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import load_yaml_folder

Fields = Mapping[str, Any]
Options = Mapping[str, Any]

_KINDS = ("flag", "int", "float", "text", "texts")
_CHOICE = "one of "


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionList:
    """The options of a project that generated files may use.

    `options` says what each takes: a kind (`flag`, `int`, `float`, `text`, `texts`), or `one of`
    and the values to choose from. `versions` are the releases that have all of them; `source` and
    `read_on` say where and when they were looked up. Keys of nested files are paths:
    `training.seq_len`.
    """

    name: str
    project: str
    versions: str
    source: str
    read_on: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a kind there is not."""
        wrong = [
            FieldViolation(name, f"must be {', '.join(_KINDS)}, or `one of` some values")
            for name, kind in self.options.items()
            if kind not in _KINDS and not kind.startswith(_CHOICE)
        ]
        if wrong:
            raise InvalidRequestError.of_violations(wrong, f"options/{self.name}.yaml")

    def check(self, given: Options) -> None:
        """Check options and their values; `None` and `False` of a flag stand for leaving it out.

        Raises:
            InvalidRequestError: the project documents no such option, or takes no such value.

        """
        violations = list(self._violations(given))
        if violations:
            raise InvalidRequestError.of_violations(violations, self.project)

    def _violations(self, given: Options) -> Iterator[FieldViolation]:
        for name, said in given.items():
            kind = self.options.get(name)
            if kind is None:
                yield FieldViolation(name, f"is no documented option of {self.project}")
            elif said is not None and not _takes(kind, said):
                yield FieldViolation(name, f"takes {kind}, not {said!r}")


def find_options(name: str) -> OptionList:
    """Return the options of that file.

    Raises:
        UnknownPluginError: there is no such file.

    """
    return UnknownPluginError.look_up(name, all_options())


@cache
def all_options() -> Mapping[str, OptionList]:
    """Return the options of every project by the name of its file."""
    return load_yaml_folder(OptionList, "foretoken.simulator.launch", "options")


def _takes(kind: str, said: object) -> bool:
    if kind.startswith(_CHOICE):
        return said in kind.removeprefix(_CHOICE).split()
    if kind == "flag":
        return isinstance(said, bool)
    if kind == "texts":
        return isinstance(said, list | tuple)
    if kind == "text":
        return isinstance(said, str)
    is_number = isinstance(said, int) and not isinstance(said, bool)
    return is_number or (kind == "float" and isinstance(said, float))


def _says_nothing(_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Some options and the fields that they say.

    `write` returns options of an object with all fields (`None` or `False` leaves one out, `True`
    is the bare option), `read` fields of the options there are: without those that options leave to
    the framework. It raises `LookupError` or `ValueError` where a value has no counterpart.
    `aliases` are other names of an option. Of a command `flags` are those that the link knows.
    """

    write: Callable[[Any], Options] = _says_nothing
    read: Callable[[Options], Fields] = _says_nothing
    flags: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionMap:
    """The options of a framework in the order they are written, read back by the same links.

    `documented` is the file in `options/` that has them (empty: none is checked).
    """

    links: tuple[Link, ...]
    documented: str = ""

    def write(self, said: Any) -> dict[str, Any]:
        """Return options of an object's fields.

        Raises:
            InvalidRequestError: the project documents no such option, or takes no such value.

        """
        options = {flag: it for link in self.links for flag, it in link.write(said).items()}
        if self.documented:
            find_options(self.documented).check(options)
        return options

    def read(self, options: Options) -> tuple[dict[str, Any], list[str]]:
        """Return the fields that options say, and the options that say nothing we know."""
        aliases = {alias: flag for link in self.links for alias, flag in link.aliases.items()}
        given = {aliases.get(name, name): said for name, said in options.items()}
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

    The default is left out, unless the option is `always` there. A field may be a path: `rules.x`.
    """
    said = attrgetter(name)

    def read(options: Options) -> Fields:
        if flag not in options:
            return {} if default is None else {name: default}
        return {name: kind(options[flag])}

    return Link(
        flags=(flag,),
        write=lambda it: {flag: said(it) if always or said(it) != default else None},
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
    also: Mapping[Any, Any] = MappingProxyType({}),
) -> Link:
    """Link a field with an option that has a word for each value; the default is left out.

    `also` are further words by which values are read.
    """
    values = {**invert(words), **also}
    return Link(
        flags=(flag,),
        write=lambda it: {flag: words.get(getattr(it, name))},
        read=lambda options: {name: values[options[flag]] if flag in options else default},
        aliases=dict.fromkeys(aliases, flag),
    )


def switch(name: str, on: str = "", off: str = "") -> Link:
    """Link a boolean field with a bare option that sets it, one that clears it, or both.

    With one of them its absence says the other.
    """
    said = attrgetter(name)
    flags = tuple(flag for flag in (on, off) if flag)

    def read(options: Options) -> Fields:
        if any(options.get(flag, True) is not True for flag in flags):
            raise ValueError(name)
        if on in options or off in options:
            return {name: on in options}
        return {} if on and off else {name: not on}

    return Link(
        flags=flags,
        write=lambda it: {flag: said(it) if flag == on else not said(it) for flag in flags},
        read=read,
    )


def constant(options: Options) -> Link:
    """Link options that are always the same with no field."""
    return Link(flags=tuple(options), write=lambda _: options)


def invert(words: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what each word stands for."""
    return {said: name for name, said in words.items()}


def flatten(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by their path."""
    leaves: dict[str, object] = {}
    for name, it in content.items():
        path = f"{prefix}{name}"
        leaves |= flatten(it, f"{path}.") if isinstance(it, Mapping) else {path: it}
    return leaves


def nest(leaves: Mapping[str, object]) -> dict[str, Any]:
    """Return nested mappings of leaves by their path."""
    content: dict[str, Any] = {}
    for path, it in leaves.items():
        schema.set_key(content, path, it)
    return content


def argument_words(options: Options) -> list[list[str]]:
    """Return the words of each option that is given: `True` is the bare option."""
    return [
        [f"--{name}"]
        if said is True
        else [f"--{name}", *map(str, said if isinstance(said, tuple) else (said,))]
        for name, said in options.items()
        if said is not None and said is not False
    ]


def text_arguments(options: Options) -> list[str]:
    """Return options as the words of a command."""
    return [text for words in argument_words(options) for text in words]


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
    for text in words:
        name, separator, said = text.lstrip("-").partition("=")
        if text.startswith("-") and name[:1].isalpha():
            found[name.replace("_", "-")] = values = [said] if separator else []
        else:
            values.append(text)
    options = {
        name: True if not said else said[0] if len(said) == 1 else tuple(said)
        for name, said in found.items()
    }
    return first, options
