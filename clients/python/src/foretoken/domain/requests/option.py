"""What the fields of a request say of themselves: help, bounds, choices, names as options.

`option` declares a field with its description. Options of commands, the checks of bounds and
choices, and the keys in the documents are made of it, so that a field is described once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from foretoken.domain.errors import Checks, InvalidRequestError

T = TypeVar("T")

_METADATA = "option"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The description of a field.

    `{choices}` in `help` stands for `choices`. Bounds and choices hold for every item of a tuple
    and for the values of a mapping. `names` are those of the option (empty: made of the field's
    name), `syntax` is how its text is read (empty: by the field's type) and `group` the heading it
    is listed under (empty: its section's). `axis` are the field's names where it is an axis of a
    space, one of many that share an option. `argument` is what help calls the field where it is
    given by its place and not by name. `example` is a value of a document (None: the default).
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    syntax: str = ""
    group: str = ""
    axis: tuple[str, ...] = ()
    argument: str = ""
    example: Any = None

    @property
    def text(self) -> str:
        """The help with its choices."""
        return self.help.replace("{choices}", ", ".join(f"`{name}`" for name in self.choices))

    def find_problem(self, value: object) -> str:
        """Return what is wrong with a value of the field; nothing where it may have it."""
        is_many = isinstance(value, tuple | Mapping)
        held = value.values() if isinstance(value, Mapping) else value
        values: list[Any] = list(cast("Any", held)) if is_many else [value]
        if self.choices and not set(values) <= set(self.choices):
            return f"must be {'' if is_many else 'one '}of {', '.join(self.choices)}"
        low, high = self.minimum, self.maximum
        if all((low is None or item >= low) and (high is None or item <= high) for item in values):
            return ""
        if high is not None:
            return f"must be at most {high:g}" if low is None else f"must be {low:g} to {high:g}"
        return f"must be at least {low:g}" if low else "must not be negative"


def describe(text: str, **said: Any) -> Mapping[str, Option]:
    """Return the metadata of a field that has no default, or is a section; see `option`."""
    return {_METADATA: Option(help=text, **said)}


def option(default: T, text: str, **said: Any) -> T:
    """Declare a field of a dataclass with its default and its description, as `Option` has it."""
    metadata = describe(text, **said)
    if isinstance(default, dict):
        return cast("T", field(default_factory=dict, metadata=metadata))
    return field(default=default, metadata=metadata)


def flag(text: str, *, is_on: bool = False, **said: Any) -> bool:
    """Declare a boolean field; see `option`."""
    return option(is_on, text, **said)


def options_of(cls: type) -> Mapping[str, Option]:
    """Return the descriptions of a dataclass by the field's name, of those that have one."""
    return {
        item.name: item.metadata[_METADATA] for item in fields(cls) if _METADATA in item.metadata
    }


def check_options(request: object, subject: str, checks: Checks | None = None) -> None:
    """Refuse a request of which a field is out of its bounds or choices, or further checks fail.

    Raises:
        InvalidRequestError: it names the subject and all such fields.

    """
    InvalidRequestError.check(subject, {**dict(_checks(request)), **(checks or {})})


def _checks(request: object) -> Iterator[tuple[str, tuple[bool, str]]]:
    for name, said in options_of(type(request)).items():
        problem = said.find_problem(getattr(request, name))
        yield name, (not problem, problem)
