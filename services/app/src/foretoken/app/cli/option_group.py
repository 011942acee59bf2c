"""Options of a command that belong together, as one frozen dataclass.

`Annotated` fields of the dataclass are written as a command's parameters are; `with_option_groups`
makes each an option of its own and hands the command the dataclass.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each field of its parameters that are dataclasses."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)
    }
    parameters = [
        expanded
        for parameter in inspect.signature(command).parameters.values()
        for expanded in _expand(parameter, hints[parameter.name])
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _expand(parameter: inspect.Parameter, hint: Any) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    if not (is_dataclass(hint) and isinstance(hint, type)):
        return [parameter.replace(kind=keyword, annotation=hint)]
    hints = typing.get_type_hints(hint, include_extras=True)
    return [
        inspect.Parameter(
            item.name,
            keyword,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(hint)
    ]
