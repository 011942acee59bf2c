"""What importers read: little CSV files, and the rows of the plan that comes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from foretoken.catalog.importing import ImportPlan


def write_csv(path: Path, *rows: Mapping[str, Any]) -> Path:
    """Write rows, which all have the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(str(cell) for cell in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def list_rows(plan: ImportPlan) -> list[dict[str, Any]]:
    """Return the rows of all batches, dims as dictionaries."""
    table = pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])
    return [{**row, "dims": dict(row["dims"])} for row in table.to_pylist()]
