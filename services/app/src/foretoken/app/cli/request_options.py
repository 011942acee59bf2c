"""Options of a command, made of what the fields of a dataclass say of themselves.

A parameter of a command whose type is a dataclass has an option, or an argument, for each described
field (`domain.requests.option`), and the command receives the object. `Annotated[SomeRequest,
OptionsOf(SomeRequest)]` also descends into the request's sections; with `Answers` in place of the
request the command receives what was given as plain data, to complete it before `schema.decode`.
"""

import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.option import Option, options_of

# What makes the object of the options' values, and the options.
_Group = tuple[Callable[[Mapping[str, Any]], Any], list[inspect.Parameter]]


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How the text of an option is read: `reader` is `module:function` of this package.

    The reader takes the option's name and what was given, of the type `kind`; without one the value
    is as given. `check` is a callback that refuses a file early, `settings` are typer's.
    """

    kind: Any
    reader: str = ""
    check: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


_WORDS = list[str] | None
_FILE = Path | None
_EXISTING = {"exists": True, "dir_okay": False}
_SYNTAXES = {
    "counts": _Syntax(str, "dim_text:parse_values"),
    "names": _Syntax(str, "option_text:read_names"),
    "devices": _Syntax(str, "option_text:read_devices"),
    "modes": _Syntax(str, "option_text:read_modes"),
    "device": _Syntax(str, "option_text:read_device"),
    "duration": _Syntax(str, "option_text:read_duration"),
    "dtype": _Syntax(str, "option_text:read_dtype"),
    "words": _Syntax(_WORDS, "option_text:read_words"),
    "prices": _Syntax(_WORDS, "option_text:read_prices"),
    "nodes": _Syntax(_WORDS, "option_text:read_nodes"),
    "limits": _Syntax(_WORDS, "option_text:parse_limits"),
    "dtypes": _Syntax(_WORDS, "option_text:read_dtypes"),
    "models": _Syntax(_WORDS, "option_text:read_models"),
    "steps": _Syntax(_WORDS, "profile_model:read_steps"),
    "calls": _Syntax(_FILE, "profile:read_calls", settings=_EXISTING),
    "observations": _Syntax(Path, "calibrate:read_observed", settings=_EXISTING),
    "off": _Syntax(bool, "option_text:read_off"),
    "file": _Syntax(_FILE, settings=_EXISTING),
    "folder": _Syntax(_FILE, settings={"file_okay": False}),
    "output": _Syntax(_FILE, check="state:check_output_path"),
    "page": _Syntax(_FILE, check="output_file:check_page_option"),
    "picture": _Syntax(_FILE, check="output_file:check_picture_option"),
    "table": _Syntax(_FILE, check="output_file:check_table_option"),
}
_S_PER_MIN = 60
_PREFIXES, _SUFFIXES = ("num_", "has_", "is_"), ("_ratio", "_gpu_s")


@dataclass(frozen=True, kw_only=True)
class RequestOption:
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
        name = self.path.rpartition(".")[2]
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        return (f"--{name.replace('_', '-')}",)

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command that typer makes the option of."""
        kind, default = self._kind_and_default()
        is_number = schema.optional_type(kind) in {int, float} or kind in {int, float}
        settings: dict[str, Any] = {"help": self.said.text, "show_default": default is not None}
        if is_number:
            settings |= {"min": self.said.minimum, "max": self.said.maximum}
        if syntax := self._syntax:
            settings |= syntax.settings
            if syntax.check:
                settings["callback"] = _find(syntax.check)
        info = (
            typer.Argument(metavar=self.said.argument, **settings)
            if self.said.argument
            else typer.Option(*self.names, rich_help_panel=self.group or None, **settings)
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
        if syntax is None or not syntax.reader:
            return value
        return _find(syntax.reader)(self.names[0], value)

    @property
    def _syntax(self) -> _Syntax | None:
        name = self.said.syntax
        if not name and self.hint is DType:
            name = "dtype"
        elif not name and typing.get_origin(self.hint) is tuple:
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
        kind = syntax.kind if syntax else schema.optional_type(self.hint) or self.hint
        empty = {str: "", bool: False}.get(kind)
        if self.is_partial:
            return kind, empty
        if self.default is MISSING:
            return schema.optional_type(kind) or kind, inspect.Parameter.empty
        if syntax is None:
            return (kind | None, None) if self.default is None else (kind, self.default)
        if self.default and self.said.syntax == "duration":
            return str, _duration_text(self.default)
        return kind, self.default if isinstance(self.default, str) else empty


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else None


def _duration_text(seconds: float) -> str:
    """Return a duration as an option says it: `60s`, `10min`."""
    minutes = seconds / _S_PER_MIN
    return f"{minutes:g}min" if minutes > 1 else f"{seconds:g}s"


def _find(place: str) -> Callable[..., Any]:
    """Return the function that `module:function` of this package names."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f".{module}", __package__), function)
    return found


class OptionsOf:
    """Marks the parameter of a command that takes a request, or the answers to its fields.

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
        """Take the described fields of a dataclass."""
        self._cls = cls
        self._partial = partial
        self._defaults = defaults or {}

    def list_options(self) -> tuple[RequestOption, ...]:
        """Return an option for each described field, sections first to last."""
        return tuple(self._list(self._cls, "", ""))

    def _list(self, cls: type, prefix: str, group: str) -> Iterator[RequestOption]:
        described, hints = options_of(cls), schema.field_types(cls)
        for item in fields(cls):
            said, hint = described.get(item.name), hints[item.name]
            path = f"{prefix}{item.name}"
            if said is None or (said.axis and not said.names):
                continue
            if is_dataclass(hint):
                yield from self._list(typing.cast("type", hint), f"{path}.", said.help)
                continue
            yield RequestOption(
                path=path,
                said=said,
                hint=hint,
                default=self._defaults.get(path, _default_of(item)),
                group=said.group or group,
                is_partial=path.startswith(self._partial),
            )


@dataclass(frozen=True, slots=True)
class Answers:
    """What a command line says of a request."""

    options: tuple[RequestOption, ...]
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
        built = {}
        for name, (build, options) in groups.items():
            given = {option.name: values.pop(option.name) for option in options}
            built[name] = build(given)
        command(**values, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _find_group(hint: Any) -> _Group | None:
    cls = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if not (isinstance(cls, type) and is_dataclass(cls)):
        return None
    marks = (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, OptionsOf))
    mark = next(marks, None)
    options = (mark or OptionsOf(cls)).list_options()

    def build(given: Mapping[str, Any]) -> Any:
        answers = Answers(options, given)
        if cls is Answers:
            return answers
        # A command's own group has paths and the like, which plain data has not.
        return schema.decode(cls, answers.read()) if mark else cls(**answers.read())

    return build, [item.parameter for item in options]
