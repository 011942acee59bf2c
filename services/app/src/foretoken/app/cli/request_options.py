"""Options of a command, made of what the fields of a dataclass say of themselves.

A parameter of a command that is `Annotated[Answers, Ask(SomeRequest)]` becomes an option for every
described field of the request and of its sections; `Answers` gives back what was said, as plain
data that `schema.decode` makes a request of. One that is a frozen dataclass has an option for each
of its `Annotated` fields. `with_option_groups` hands the command the objects.
"""

import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from foretoken.domain import schema
from foretoken.domain.requests.option import Option, options_of

# What makes the object of the options' values, and the options.
_Group = tuple[Callable[[Mapping[str, Any]], Any], list[inspect.Parameter]]


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How the text of an option is read: `reader` is `module:function` of this package.

    The reader takes the option's name and what was given, of the type `kind`.
    """

    kind: Any
    reader: str


_WORDS = list[str] | None
_SYNTAXES = {
    "counts": _Syntax(str, "option_text:parse_values"),
    "names": _Syntax(str, "option_text:read_names"),
    "devices": _Syntax(str, "option_text:read_devices"),
    "formats": _Syntax(str, "option_text:read_formats"),
    "modes": _Syntax(str, "option_text:read_modes"),
    "words": _Syntax(_WORDS, "option_text:read_words"),
    "prices": _Syntax(_WORDS, "option_text:read_prices"),
    "nodes": _Syntax(_WORDS, "option_text:read_nodes"),
    "limits": _Syntax(_WORDS, "option_text:parse_limits"),
    "dtypes": _Syntax(_WORDS, "option_text:read_dtypes"),
    "models": _Syntax(_WORDS, "option_text:read_models"),
    "calls": _Syntax(Path | None, "profile:read_calls"),
    "off": _Syntax(bool, "option_text:read_off"),
}
_PREFIXES, _SUFFIX = ("num_", "has_", "is_"), "_ratio"


@dataclass(frozen=True, kw_only=True)
class AskedOption:
    """A field of a request as an option: its dotted path, its type, and its default.

    One that `is_partial` changes what a file says, so its default stands for "not given".
    """

    path: str
    said: Option
    hint: Any
    default: Any
    group: str
    is_partial: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The option's names: those described, or the field's without what a type says."""
        if self.said.names:
            return self.said.names
        name = self.path.rpartition(".")[2].removesuffix(_SUFFIX)
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        return (f"--{name.replace('_', '-')}",)

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command that typer makes the option of."""
        kind, default = self._kind_and_default()
        is_number = kind in {int, float}
        info = typer.Option(
            *self.names,
            help=self.said.text,
            min=self.said.minimum if is_number else None,
            max=self.said.maximum if is_number else None,
            show_default=default is not None,
            exists=kind == Path | None,
            dir_okay=False,
            rich_help_panel=self.group or None,
        )
        if self.is_partial and is_number:
            kind = kind | None
        return inspect.Parameter(
            self.path.replace(".", "__"),
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=typing.Annotated[kind, info],
        )

    def read(self, value: Any) -> Any:
        """Return a value of the field of what was given; None where nothing was.

        Raises:
            InvalidRequestError: the text cannot be read.

        """
        syntax = self._syntax
        if value is None or value is False or value in ([], "" if self._is_optional else None):
            return None
        if syntax is None:
            return value
        module, _, function = syntax.reader.partition(":")
        return getattr(import_module(f".{module}", __package__), function)(self.names[0], value)

    @property
    def _syntax(self) -> _Syntax | None:
        name = self.said.syntax
        if not name and typing.get_origin(self.hint) is tuple:
            item = typing.get_args(self.hint)[0]
            name = "counts" if item is int else "names"
            if isinstance(item, type) and issubclass(item, enum.Enum):
                name = "dtypes"
        elif not name and typing.get_origin(self.hint) is Mapping:
            name = "prices"
        return _SYNTAXES[name] if name else None

    @property
    def _is_optional(self) -> bool:
        return self.is_partial or self._syntax is not None

    def _kind_and_default(self) -> tuple[Any, Any]:
        syntax = self._syntax
        if syntax is not None:
            return syntax.kind, {str: "", bool: False}.get(syntax.kind)
        kind = schema.optional_type(self.hint) or self.hint
        if self.is_partial:
            return kind, {str: "", bool: False}.get(kind)
        return kind, inspect.Parameter.empty if self.default is MISSING else self.default


class Ask:
    """Marks the parameter of a command that takes the answers to a request's fields.

    What begins with one of `partial` ("": everything) is also written in a file, which options
    change. `defaults` are of fields by their path that the command has another default for.
    """

    def __init__(
        self,
        cls: type,
        *,
        partial: tuple[str, ...] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask for the described fields of a dataclass."""
        self._cls = cls
        self._partial = partial
        self._defaults = defaults or {}

    def list_options(self) -> tuple[AskedOption, ...]:
        """Return an option for each described field, sections first to last."""
        return tuple(self._list(self._cls, "", ""))

    def _list(self, cls: type, prefix: str, group: str) -> Iterator[AskedOption]:
        described, hints = options_of(cls), schema.field_types(cls)
        for item in fields(cls):
            said, hint = described.get(item.name), hints[item.name]
            path = f"{prefix}{item.name}"
            if said is None or (said.axis and not said.names):
                continue
            if is_dataclass(hint):
                yield from self._list(typing.cast("type", hint), f"{path}.", said.help)
                continue
            yield AskedOption(
                path=path,
                said=said,
                hint=hint,
                default=self._defaults.get(path, item.default),
                group=said.group or group,
                is_partial=path.startswith(self._partial),
            )


@dataclass(frozen=True, slots=True)
class Answers:
    """What a command line says of a request."""

    options: tuple[AskedOption, ...]
    given: Mapping[str, Any]

    def read(self) -> dict[str, Any]:
        """Return what was said as nested plain data, without what was not.

        Raises:
            InvalidRequestError: a text cannot be read; the option is named.

        """
        content: dict[str, Any] = {}
        for asked in self.options:
            value = asked.read(self.given[asked.parameter.name])
            if value is not None:
                schema.set_key(content, asked.path, value)
        return content


def find_ask(hint: Any) -> Ask | None:
    """Return what a parameter of this type asks for; None where it is an option of its own."""
    found = (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Ask))
    return next(found, None)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with options of their own for its parameters that are groups of them."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _find_group(hint))}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        option
        for parameter in inspect.signature(command).parameters.values()
        for option in (
            groups[parameter.name][1]
            if parameter.name in groups
            else [parameter.replace(kind=keyword, annotation=hints[parameter.name])]
        )
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: build({option.name: values.pop(option.name) for option in options})
            for name, (build, options) in groups.items()
        }
        command(**values, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _find_group(hint: Any) -> _Group | None:
    ask = find_ask(hint)
    if ask is not None:
        asked = ask.list_options()
        return functools.partial(Answers, asked), [item.parameter for item in asked]
    if not (is_dataclass(hint) and isinstance(hint, type)):
        return None
    hints = typing.get_type_hints(hint, include_extras=True)
    options = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(hint)
    ]
    return lambda values: hint(**values), options
