"""Catalog: coverage by device and operator, runs, snapshots, and SQL that only reads."""

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pyarrow as pa

from foretoken.app.starter import describe_starter
from foretoken.app.web.views.results import send_page
from foretoken.app.web.visit import Sent, Shown, Visit
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.measurements.measurement import Coverage, SqlQuery
from foretoken.page.block import Column, Page, Scalar, Table
from foretoken.page.chart import Plot
from foretoken.page.html import render
from foretoken.wire.arrow import read_table

_MAX_ROWS: Final = 1_000
_EXAMPLE: Final = (
    "SELECT device, operator, count(*) AS num_rows\nFROM measurements\nGROUP BY ALL ORDER BY ALL"
)
_SHOWN_RUNS: Final = 50
_KINDS: Final = ("scatter", "lines", "bars")
# From so many rows on a cell of the map is of the next shade.
_SHADES: Final = (1, 100, 1_000, 10_000)


def show(visit: Visit) -> Shown:
    """Show what was measured."""
    counts: dict[str, dict[str, list[Coverage]]] = defaultdict(lambda: defaultdict(list))
    for entry in visit.catalog.describe_coverage():
        counts[entry.operator][entry.device].append(entry)
    devices = sorted({device for row in counts.values() for device in row})
    content = {
        "devices": devices,
        "cells": {
            operator: {device: _describe_cell(entries) for device, entries in row.items()}
            for operator, row in sorted(counts.items())
        },
        "runs": visit.catalog.list_runs()[:_SHOWN_RUNS],
        "snapshots": visit.catalog.list_snapshots(),
        "starter": describe_starter(Path(folder)) if (folder := visit.offered.starter) else "",
    }
    return Shown(template="catalog.html", content=content)


def _describe_cell(entries: Sequence[Coverage]) -> dict[str, Any]:
    """Return the counts of an operator on a device, a shade for them, and what they are of."""
    num_rows = sum(entry.num_rows for entry in entries)
    dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
    engines = ", ".join(sorted({name for entry in entries for name in entry.frameworks}))
    return {
        "num_rows": num_rows,
        "num_flagged": sum(entry.num_flagged for entry in entries),
        "shade": sum(num_rows >= least for least in _SHADES),
        "said": f"{dtypes}; {engines}" if engines else dtypes,
    }


def show_sql(visit: Visit) -> Shown:
    """Show the rows that a query selects, and the form to write another."""
    text = visit.first("q")
    content: dict[str, Any] = {"text": text or _EXAMPLE, "names": [], "rows": [], "problem": ""}
    content["numbers"] = []
    status = 200
    if text:
        try:
            table = _select(visit, text)
            content["names"] = table.schema.names
            content["numbers"] = _number_names(table)
            columns = [column.to_pylist() for column in table.columns]
            content["rows"] = list(zip(*columns, strict=True))
        except InvalidRequestError as err:
            content["problem"], status = err.message, 400
        except ForetokenError as err:
            if err.reason != "QUERY_LIMIT":
                raise
            content["problem"], status = err.message, 400
    drawn = {name: visit.first(name) for name in ("x", "y", "by", "kind")}
    content |= {"most": _MAX_ROWS, "drawn": drawn, "query": urlencode({**drawn, "q": text})}
    content["kinds"] = list(_KINDS)
    return Shown(template="sql.html", content=content, status=status)


def send_chart(visit: Visit) -> Sent:
    """Send the page of a chart of a query's rows: `y` over `x`, apart `by` colour."""
    rows = _select(visit, visit.first("q"))
    x, y, by = (visit.first(name) for name in ("x", "y", "by"))
    kind = visit.first("kind", _KINDS[0])
    numbers = _number_names(rows)
    checks = {
        "x": (x in rows.schema.names, f"{x!r} is no column"),
        "y": (y in numbers, f"{y!r} is no column of numbers"),
        "by": (not by or by in rows.schema.names, f"{by!r} is no column"),
        "kind": (kind in _KINDS, f"{kind!r} is none of {', '.join(_KINDS)}"),
    }
    InvalidRequestError.check("chart", checks)
    columns = [
        Column(title=name, name=name) if name in numbers else Column.words(name, name)
        for name in rows.schema.names
    ]
    places = {column.name: name for column, name in zip(columns, rows.schema.names, strict=True)}
    cells = [[_plain(value) for value in column.to_pylist()] for column in rows.columns]
    named = {name: key for key, name in places.items()}
    plot = Plot(
        title=f"{y} over {x}",
        table=Table(columns=columns, rows=list(zip(*cells, strict=True))),
        x=named[x],
        y=named[y],
        by=named.get(by, ""),
    )
    is_across = kind == "bars" or x not in numbers
    chart = plot.histogram() if is_across else getattr(plot, kind)()
    return send_page(render(Page(title=plot.title, subtitle=visit.first("q"), blocks=[chart])))


def _select(visit: Visit, text: str) -> pa.Table:
    query = SqlQuery(text=text, max_num_rows=_MAX_ROWS)
    return read_table(visit.catalog.query_sql(query))


def _number_names(table: pa.Table) -> list[str]:
    return [
        field.name
        for field in table.schema
        if pa.types.is_integer(field.type)
        or pa.types.is_floating(field.type)
        or pa.types.is_decimal(field.type)
    ]


def _plain(value: Any) -> Scalar:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return float(value) if isinstance(value, Decimal) else str(value)
