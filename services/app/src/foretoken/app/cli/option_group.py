"""Options of a command that belong together, as one object.

A parameter of a command that is a frozen dataclass has an option for each of its `Annotated`
fields, written as a command's parameters are; one that asks for a request (`asked_option.Ask`) has
those that the request's fields describe. `with_option_groups` hands the command the object.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from foretoken.app.cli.asked_option import Answers, find_ask

# What makes the object of the options' values, and the options.
_Group = tuple[Callable[[Mapping[str, Any]], Any], list[inspect.Parameter]]


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
