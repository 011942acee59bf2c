"""Catalog: coverage by device and operator, runs, snapshots, and SQL that only reads."""

from collections import defaultdict
from typing import Any, Final

from foretoken.app.web.visit import Shown, Visit
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table

_MAX_ROWS: Final = 1_000
_EXAMPLE: Final = (
    "SELECT device, operator, count(*) AS num_rows\nFROM measurements\nGROUP BY ALL ORDER BY ALL"
)
_SHOWN_RUNS: Final = 50


def show(visit: Visit) -> Shown:
    """Show what was measured."""
    cells: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in visit.catalog.describe_coverage():
        cells[entry.operator][entry.device] += entry.num_rows
    devices = sorted({device for row in cells.values() for device in row})
    content = {
        "devices": devices,
        "cells": {operator: dict(cells[operator]) for operator in sorted(cells)},
        "most": max((count for row in cells.values() for count in row.values()), default=0),
        "runs": visit.catalog.list_runs()[:_SHOWN_RUNS],
        "snapshots": visit.catalog.list_snapshots(),
    }
    return Shown(template="catalog.html", content=content)


def show_sql(visit: Visit) -> Shown:
    """Show the rows that a query selects, and the form to write another."""
    text = visit.first("q")
    content: dict[str, Any] = {"text": text or _EXAMPLE, "names": [], "rows": [], "problem": ""}
    status = 200
    if text:
        try:
            query = SqlQuery(text=text, max_num_rows=_MAX_ROWS)
            table = read_table(visit.catalog.query_sql(query))
            content["names"] = table.schema.names
            columns = [column.to_pylist() for column in table.columns]
            content["rows"] = list(zip(*columns, strict=True))
        except InvalidRequestError as err:
            content["problem"], status = err.message, 400
        except ForetokenError as err:
            if err.reason != "QUERY_LIMIT":
                raise
            content["problem"], status = err.message, 400
    return Shown(template="sql.html", content={**content, "most": _MAX_ROWS}, status=status)
