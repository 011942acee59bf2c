"""A question as a form: the options of its command, and how their texts are read."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.app.cli.request_options import Answers, OptionsOf, RequestOption
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError

# Syntaxes of paths on the machine of who runs a command.
_FILES = {"file", "folder", "output", "page", "picture", "table"}
_TRUE = "on"


@dataclass(frozen=True, slots=True)
class FormField:
    """One option as a field of a form; `value` is its text, `problem` what is wrong with it."""

    option: RequestOption
    value: str
    problem: str = ""

    @property
    def name(self) -> str:
        """The field's name in the form and in addresses: that of the option."""
        return self.option.names[0].removeprefix("--")

    @property
    def label(self) -> str:
        """What the page calls it."""
        return self.name.replace("-", " ")

    @property
    def help(self) -> str:
        """What it means."""
        return self.option.said.text.replace("`", "")

    @property
    def choices(self) -> tuple[str, ...]:
        """What it can be, of one that is chosen."""
        return () if _is_many(self.option) else self.option.said.choices

    @property
    def is_flag(self) -> bool:
        """Whether it is on or off."""
        return _kind(self.option) is bool

    @property
    def is_long(self) -> bool:
        """Whether it takes several, one a line."""
        return _is_many(self.option)

    @property
    def number(self) -> str:
        """The step of a number; empty of what is none."""
        return {int: "1", float: "any"}.get(_kind(self.option), "")


class QuestionForm:
    """The fields of a question, which are the options of its command."""

    def __init__(self, *requests: type, without: frozenset[str] = frozenset()) -> None:
        """Take the options of some dataclasses, without some fields by their paths."""
        self._options = {
            request: tuple(
                option
                for option in OptionsOf(request).list_options()
                if option.said.syntax not in _FILES and option.path not in without
            )
            for request in requests
        }

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the form's fields by those of the request's."""
        return {
            option.path.rpartition(".")[2]: FormField(option, "").name
            for options in self._options.values()
            for option in options
        }

    def fields(
        self, given: Mapping[str, str] | None, problems: Mapping[str, str], leading: Sequence[str]
    ) -> dict[str, list[FormField]]:
        """Return the fields by group with what was `given` (None: their defaults).

        Those `leading` are left out: the page has written them itself.
        """
        groups: dict[str, list[FormField]] = {}
        for option in (option for options in self._options.values() for option in options):
            name = FormField(option, "").name
            if name in leading:
                continue
            value = _default_text(option) if given is None else given.get(name, "")
            groups.setdefault(option.group or "More", []).append(
                FormField(option, value, problems.get(name, ""))
            )
        return groups

    def answers(self, request: type, given: Mapping[str, str]) -> Answers:
        """Return what was filled in of one of the dataclasses, as a command would have it.

        A default that was left as it stands in the form was not given: some options are allowed
        next to certain others only.

        Raises:
            InvalidRequestError: a text cannot be read; the field is named.

        """
        options = self._options[request]
        texts = [given.get(FormField(option, "").name, "").strip() for option in options]
        return Answers(
            options,
            {
                option.parameter.name: _to_given(option, text) if _is_given(option, text) else None
                for option, text in zip(options, texts, strict=True)
            },
        )


def _is_given(option: RequestOption, text: str) -> bool:
    return bool(text) and text != _default_text(option)


def _to_given(option: RequestOption, text: str) -> Any:
    """Return what the command line would have given for a text."""
    kind = _kind(option)
    if _is_many(option):
        return text.split()
    if kind is bool:
        return text == _TRUE
    if kind in {int, float}:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise InvalidRequestError.of_field(option.names[0], f"{text!r} is not {what}") from None
    return text


def _kind(option: RequestOption) -> Any:
    hint: Any = typing.get_args(option.parameter.annotation)[0]
    return schema.optional_type(hint) or hint


def _is_many(option: RequestOption) -> bool:
    return typing.get_origin(_kind(option)) is list


def _default_text(option: RequestOption) -> str:
    default = option.parameter.default
    if default is None or default is False or default in (0, 0.0, ""):
        return ""
    return _TRUE if default is True else str(default)
