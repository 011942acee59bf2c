"""What a writer makes of a group of rows, and what it must know of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.catalog.exporters.aiconfigurator.rows import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Columns of a table, one value per row of `group` or one for all, in the table's order."""

    table: str
    op_name: str
    group: Group
    columns: Mapping[str, Any]
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes groups of one operator whose variants say nothing but these facts.

    It returns None for a group that its table has no words for, and otherwise the rows it has room
    for.
    """

    facts: frozenset[str]
    write: Callable[[Group], Written | None]
