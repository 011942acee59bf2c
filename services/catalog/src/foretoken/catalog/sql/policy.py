"""What a question in SQL may say: it reads the public views, and nothing else.

DuckDB parses the text, and its syntax tree is searched for what is not known to be harmless. This
is the first of several defences: a question runs in a read-only transaction of a database that
reaches no file and no network. What it takes of time and memory is no matter of this: its process
is ended.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import duckdb

from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import InvalidRequestError

_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(ANALYZE\s+)?", re.IGNORECASE)
# Other nodes write: DuckDB 2 has INSERT and DELETE as common table expressions.
_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_TABLE_FUNCTIONS = {"generate_series", "range", "unnest"}
_LISTINGS = {'"tables"', "__show_tables_expanded"}
_OUR_DATABASE = {"", "main", "store"}

# What this process was configured with, what others ask, what changes something, and sleep.
_REVEALERS = {
    "currval",
    "error",
    "getenv",
    "getvariable",
    "in_search_path",
    "json_deserialize_sql",
    "json_execute_serialized_sql",
    "json_serialize_plan",
    "json_serialize_sql",
    "nextval",
    "parse_duckdb_log_message",
    "setseed",
    "setval",
    "sleep_ms",
    "stats",
    "txid_current",
    "vector_type",
    "write_log",
}
_REVEALING_PREFIXES = ("__internal", "current_", "has_", "inet_", "pg_", "st_")
_HARMLESS = {"current_date", "current_localtime", "current_localtimestamp", "pg_typeof"}


def check_query(cursor: duckdb.DuckDBPyConnection, text: str, views: Mapping[str, str]) -> str:
    """Return the statement to run for a text, which may read `views` (name: what is in it).

    Raises:
        InvalidRequestError: it is not exactly one statement, does more than read, or names a
            function or relation it may not use.
        duckdb.Error: it is not SQL.

    """
    statements = cursor.extract_statements(text)
    kinds = [statement.type for statement in statements]
    # What finds the columns of a pivot by itself counts as several statements.
    if len(kinds) != 1 or kinds == [duckdb.StatementType.MULTI]:
        hint = "; PIVOT needs ON column IN (...)" if "PIVOT" in text.upper() else ""
        raise _refuse(f"holds {len(kinds)} statements, not one{hint}")
    (kind,) = kinds
    if kind == duckdb.StatementType.EXPLAIN and (prefix := _EXPLAIN.match(text)):
        check_query(cursor, text[prefix.end() :], views)
        return text
    if kind != duckdb.StatementType.SELECT:
        raise _refuse(f"is {kind.name}; only SELECT, DESCRIBE, SUMMARIZE and EXPLAIN are answered")
    node = _parse(cursor, text)
    if _lists_tables(node):
        rows = ", ".join(f"({quote(name)}, {quote(what)})" for name, what in views.items())
        return f"SELECT * FROM (VALUES {rows}) AS views(name, description)"  # noqa: S608 - quoted
    _Search(views).check(node)
    return text


def _parse(cursor: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """Return the syntax tree of one SELECT statement."""
    rows = cursor.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
    try:
        parsed = json.loads(rows[0][0])
    except RecursionError as err:
        raise _refuse("is nested too deeply") from err
    if parsed["error"]:
        raise _refuse(parsed["error_message"])
    node: dict[str, Any] = parsed["statements"][0]["node"]
    return node


def _lists_tables(node: Mapping[str, Any]) -> bool:
    source = node.get("from_table") or {}
    return source.get("type") == "SHOW_REF" and source["table_name"] in _LISTINGS


class _Search:
    """Looks at every part of a syntax tree, knowing which names stand for expressions there."""

    def __init__(self, views: Mapping[str, str]) -> None:
        self._views = views

    def check(self, tree: dict[str, Any]) -> None:
        pending: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
        while pending:
            part, names = pending.pop()
            if isinstance(part, list):
                pending += [(child, names) for child in part]
            elif isinstance(part, dict):
                for entry in (part.get("cte_map") or {}).get("map", ()):
                    later = names | {entry["key"].lower()}
                    pending.append((entry["value"], later if _is_recursive(entry) else names))
                    names = later
                self._check_part(part, names)
                children = _children_of(part)
                pending += [(child, names) for child in children]

    def _check_part(self, part: Mapping[str, Any], names: frozenset[str]) -> None:
        kind = part.get("type")
        if kind == "BASE_TABLE":
            self._check_relation(part, names)
        elif kind == "SHOW_REF":
            self._check_listing(part)
        elif kind == "TABLE_FUNCTION":
            name = part["function"]["function_name"].lower()
            if name not in _TABLE_FUNCTIONS:
                raise _refuse(f"uses the function {name}, which may reach other than measurements")
        elif part.get("class") == "FUNCTION":
            _check_function(part["function_name"].lower())
        elif isinstance(kind, str) and kind.endswith("_NODE") and kind not in _NODES:
            raise _refuse("changes rows; the catalog is only read here")

    def _check_relation(self, part: Mapping[str, Any], names: frozenset[str]) -> None:
        qualifiers = {part["schema_name"].lower(), part["catalog_name"].lower()}
        name = part["table_name"].lower()
        if name in names and qualifiers == {""}:
            return
        if name not in self._views or not qualifiers <= _OUR_DATABASE:
            raise self._unknown(part["table_name"])

    def _check_listing(self, part: Mapping[str, Any]) -> None:
        name = part["table_name"].strip('"').lower()
        if part["query"] is None and name not in self._views:
            raise self._unknown(name or part["schema_name"])

    def _unknown(self, name: str) -> InvalidRequestError:
        views = ", ".join(self._views)
        return _refuse(f"requests {name!r}; there are {views}, and DESCRIBE tells their columns")


def _children_of(part: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a part; a table function is known by the table it makes."""
    children = [child for key, child in part.items() if key != "cte_map"]
    if part.get("type") == "TABLE_FUNCTION":
        children = [child for child in children if child is not part["function"]]
        children += [value for key, value in part["function"].items() if key != "function_name"]
    return children


def _is_recursive(entry: Mapping[str, Any]) -> bool:
    value = entry["value"]
    node = value.get("query_node") or (value.get("query") or {}).get("node") or {}
    return bool(node.get("type") == "RECURSIVE_CTE_NODE")


def _check_function(name: str) -> None:
    reveals = name in _REVEALERS or name.startswith(_REVEALING_PREFIXES)
    if reveals and name not in _HARMLESS:
        raise _refuse(f"uses the function {name}, which is not about measurements")


def _refuse(reason: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("text", reason)
