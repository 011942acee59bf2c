"""Answers kept as small tables, compared cell by cell: `tests/golden/<name>.csv`.

Such a table complements the laws that its answers obey, and says what a changed rule changes.
After a change that is meant, take the table that the failed test left in `build/golden`.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_KEPT = _ROOT / "tests" / "golden"
_FOUND = _ROOT / "build" / "golden"

Row = Mapping[str, str | int | float]


def check_golden(name: str, rows: Sequence[Row], rel: float = 1e-9) -> None:
    """Compare rows with the kept table; numbers may differ by `rel`."""
    found, path = _as_text(rows), _KEPT / f"{name}.csv"
    kept = _read(path.read_text(encoding="utf-8") if path.is_file() else "")
    differing = [
        f"{_name_of(one)}: {column} is {other.get(column)}, kept {one.get(column)}"
        for one, other in zip(kept, _read(found), strict=False)
        for column in one
        if not _are_equal(one[column], other.get(column, ""), rel)
    ]
    if len(kept) == len(rows) and not differing:
        return
    _FOUND.mkdir(parents=True, exist_ok=True)
    (_FOUND / path.name).write_text(found, encoding="utf-8")
    changes = "\n".join(differing[:20]) or f"{len(rows)} rows, kept {len(kept)}"
    pytest.fail(f"{changes}\nmeant? cp build/golden/{path.name} tests/golden/{path.name}")


def _name_of(row: Mapping[str, str]) -> str:
    return " ".join(list(row.values())[:2])


def _as_text(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{cell:.12g}" if isinstance(cell, float) else cell for name, cell in row.items()}
        for row in rows
    )
    return text.getvalue()


def _read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _are_equal(one: str, other: str, rel: float) -> bool:
    if one == other:
        return True
    try:
        return float(one) == pytest.approx(float(other), rel=rel)
    except ValueError:
        return False
