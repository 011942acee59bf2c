"""Options that other projects document: one data file a project in `options/`.

What is written for a project is checked against its file, so that an option the project does not
have, or a value it does not take, is an error here and not on the cluster.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_yaml

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

    def check(self, given: Mapping[str, object]) -> None:
        """Check options and their values; `None` and `False` of a flag stand for leaving it out.

        Raises:
            InvalidRequestError: the project documents no such option, or takes no such value.

        """
        violations = list(self._violations(given))
        if violations:
            raise InvalidRequestError.of_violations(violations, self.project)

    def _violations(self, given: Mapping[str, object]) -> Iterator[FieldViolation]:
        for name, value in given.items():
            kind = self.options.get(name)
            if kind is None:
                yield FieldViolation(name, f"is no documented option of {self.project}")
            elif value is not None and not _takes(kind, value):
                yield FieldViolation(name, f"takes {kind}, not {value!r}")


def find_options(name: str) -> OptionList:
    """Return the options of that file.

    Raises:
        UnknownPluginError: there is no such file.

    """
    return UnknownPluginError.look_up(name, all_options())


@cache
def all_options() -> Mapping[str, OptionList]:
    """Return the options of every project by the name of its file."""
    return {
        stem: schema.decode(OptionList, {"name": stem, **content}, f"options/{stem}.yaml")
        for stem, content in scan_yaml("foretoken.simulator.launch", "options")
    }


def flatten(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by their path."""
    leaves: dict[str, object] = {}
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


def nest(leaves: Mapping[str, object]) -> dict[str, Any]:
    """Return nested mappings of leaves by their path."""
    content: dict[str, Any] = {}
    for path, value in leaves.items():
        schema.set_key(content, path, value)
    return content


def _takes(kind: str, value: object) -> bool:
    if kind.startswith(_CHOICE):
        return value in kind.removeprefix(_CHOICE).split()
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "texts":
        return isinstance(value, list | tuple)
    if kind == "text":
        return isinstance(value, str)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or (kind == "float" and isinstance(value, float))
