"""Which tables suit measurements of operators with different dimensions: three ways, measured.

The same rows go into one table with the dimensions in a map, into one table per operator with its
dimensions as columns, and into one long table with columns d0, d1, ... for the dimensions in their
canonical order. Prints what storing costs, the size, and what typical questions take.

Arguments: number of rows (5,000,000), threads of DuckDB (its default).
"""

# ruff: noqa: S608 - queries are made of this file's own names
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import DIM_COLUMNS, columns_to_dims
from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.domain.operators.spec.operator import find_operator

BATCH_ROWS = 100_000
NUM_REPEATS = 5
# Parts of a batch. A batch is of one device and framework, as imports and profiles are.
OPERATORS = {"gemm": 0.5, "attention_prefill": 0.25, "rms_norm": 0.15, "all_reduce": 0.1}
DEVICES = ("a30", "a100_sxm_80gb", "h100_sxm", "h200_sxm")
DTYPES = ("fp16", "bf16", "fp8")
STATISTICS = ("median", "mean", "min", "max", "std", "p10", "p90")
# Columns of every layout but for the dimensions.
PLAIN: Mapping[str, str] = {
    "batch_number": "BIGINT",
    "row_index": "BIGINT",
    "operator": "VARCHAR",
    "phase": "VARCHAR",
    "dtype": "VARCHAR",
    "device": "VARCHAR",
    "framework": "VARCHAR",
    "framework_version": "VARCHAR",
    **{f"latency_us_{name}": "DOUBLE" for name in STATISTICS},
    "num_samples": "BIGINT",
    "status": "VARCHAR",
    "flags": "VARCHAR[]",
    "source_file": "VARCHAR",
    "source_row": "BIGINT",
}
GROUPED = "operator, device, dtype, phase"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one operator: the plain columns, and the dimensions by name."""

    operator: str
    plain: pa.Table
    dims: Mapping[str, Any]


class Layout(Protocol):
    """A way to lay measurements out in tables."""

    name: str

    def tables(self) -> Mapping[str, str]:
        """Return the columns of each table by its name, as SQL."""

    def arrange(self, batch: Sequence[Rows]) -> Iterator[tuple[str, pa.Table]]:
        """Yield what to insert into which table."""

    def of_operator(self, operator: str) -> str:
        """Return a query for an operator's rows with its dimensions by name."""

    def of_all(self) -> str:
        """Return a query for all rows, the dimensions in one form or another."""


class MapLayout:
    """One table, the dimensions in a map."""

    name = "map"

    def tables(self) -> Mapping[str, str]:
        return {"measurement": _columns({"dims": "MAP(VARCHAR, BIGINT)"})}

    def arrange(self, batch: Sequence[Rows]) -> Iterator[tuple[str, pa.Table]]:
        tables = [
            rows.plain.append_column("dims", columns_to_dims(rows.dims, rows.plain.num_rows))
            for rows in batch
        ]
        yield "measurement", pa.concat_tables(tables)

    def of_operator(self, operator: str) -> str:
        dims = ", ".join(f"dims['{name}'] AS {name}" for name in find_operator(operator).dim_names)
        return f"SELECT {dims}, * FROM measurement WHERE operator = '{operator}'"

    def of_all(self) -> str:
        return "SELECT * FROM measurement"


class OperatorLayout:
    """One table per operator, each dimension a column of its name."""

    name = "per operator"

    def tables(self) -> Mapping[str, str]:
        return {
            f"of_{name}": _columns(dict.fromkeys(find_operator(name).dim_names, "BIGINT"))
            for name in OPERATORS
        }

    def arrange(self, batch: Sequence[Rows]) -> Iterator[tuple[str, pa.Table]]:
        for rows in batch:
            table = rows.plain
            for name, column in rows.dims.items():
                table = table.append_column(name, pa.array(column))
            yield f"of_{rows.operator}", table

    def of_operator(self, operator: str) -> str:
        return f"SELECT * FROM of_{operator}"

    def of_all(self) -> str:
        return " UNION ALL BY NAME ".join(f"SELECT * FROM of_{name}" for name in OPERATORS)


class LongLayout:
    """One table, the dimensions in columns by place."""

    name = "long"

    def tables(self) -> Mapping[str, str]:
        return {"measurement": _columns(dict.fromkeys(DIM_COLUMNS, "BIGINT"))}

    def arrange(self, batch: Sequence[Rows]) -> Iterator[tuple[str, pa.Table]]:
        tables = []
        for rows in batch:
            table, values = rows.plain, list(rows.dims.values())
            for place, name in enumerate(DIM_COLUMNS):
                empty = pa.nulls(table.num_rows, pa.int64())
                column = pa.array(values[place]) if place < len(values) else empty
                table = table.append_column(name, column)
            tables.append(table)
        yield "measurement", pa.concat_tables(tables)

    def of_operator(self, operator: str) -> str:
        names = find_operator(operator).dim_names
        dims = ", ".join(f"d{place} AS {name}" for place, name in enumerate(names))
        return f"SELECT {dims}, * FROM measurement WHERE operator = '{operator}'"

    def of_all(self) -> str:
        return "SELECT * FROM measurement"


def _columns(dims: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in {**PLAIN, **dims}.items())


def make_batch(number: int) -> list[Rows]:
    """Return the rows of a batch, operator by operator."""
    rng = np.random.default_rng(number)
    sizes = {name: int(part * BATCH_ROWS) for name, part in OPERATORS.items()}
    return [_make_rows(rng, number, name, size) for name, size in sizes.items()]


def _make_rows(rng: np.random.Generator, number: int, operator: str, num_rows: int) -> Rows:
    latency_us = 5 * np.exp(rng.normal(3, 1.5, num_rows)).round(3)
    texts = {
        "operator": operator,
        "phase": "forward",
        "device": DEVICES[number % len(DEVICES)],
        "framework": "vllm",
        "framework_version": f"0.{number % 7}.0",
        "status": "ok",
        "source_file": f"data/batch_{number}.csv",
    }
    columns: dict[str, Any] = {
        "batch_number": np.full(num_rows, number),
        "row_index": np.arange(num_rows),
        "dtype": pa.array(DTYPES).take(rng.integers(0, len(DTYPES), num_rows)),
        "num_samples": np.full(num_rows, 20),
        "flags": pa.nulls(num_rows, pa.list_(pa.string())),
        "source_row": np.arange(1, num_rows + 1),
        **{name: pa.repeat(text, num_rows) for name, text in texts.items()},
        **{f"latency_us_{name}": latency_us * rng.uniform(0.9, 1.1) for name in STATISTICS},
    }
    names = find_operator(operator).dim_names
    dims = {name: rng.integers(1, 65, num_rows) * 64 for name in names}
    return Rows(operator, pa.table({name: columns[name] for name in PLAIN}), dims)


def fill(connection: duckdb.DuckDBPyConnection, layout: Layout, num_batches: int) -> float:
    """Make the tables and store batches, a transaction each; return rows/s of the median batch."""
    for name, columns in layout.tables().items():
        connection.execute(f"CREATE TABLE {name} ({columns})")
    times_s = []
    for number in range(num_batches):
        arranged = list(layout.arrange(make_batch(number)))
        start_s = time.perf_counter()
        connection.begin()
        for name, rows in arranged:
            connection.register("incoming", rows)
            connection.execute(f"INSERT INTO {name} BY NAME SELECT * FROM incoming")
            connection.unregister("incoming")
        connection.commit()
        times_s.append(time.perf_counter() - start_s)
    return BATCH_ROWS / statistics.median(times_s)


def questions(layout: Layout) -> dict[str, str]:
    """Return typical queries by what they ask."""
    gemms, all_rows = layout.of_operator("gemm"), layout.of_all()
    hashed = "sum(hash(COLUMNS(* EXCLUDE (batch_number, row_index, source_file, source_row))))"
    return {
        "one point": f"FROM ({gemms}) WHERE device = 'a30' AND m = 640 AND n = 1280 AND k = 64",
        "GEMMs of a device": f"FROM ({gemms}) WHERE device = 'a30'",
        "range of m": f"SELECT count(*), median(latency_us_median) FROM ({gemms})"
        " WHERE device = 'h100_sxm' AND m BETWEEN 512 AND 1024",
        "coverage": f"SELECT {GROUPED}, count(*), count(*) FILTER (len(flags) > 0)"
        f" FROM ({all_rows}) GROUP BY ALL",
        "hash of a device": f"SELECT {hashed} FROM ({all_rows}) WHERE device = 'a30'",
    }


def time_ms(connection: duckdb.DuckDBPyConnection, query: str) -> float:
    """Return the best time of a query to an Arrow table, in ms: others may use the machine."""
    times_ms = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        connection.sql(query).to_arrow_table()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return min(times_ms)


def measure(layout: Layout, num_rows: int, num_threads: int, folder: Path) -> dict[str, float]:
    """Return all figures of a layout by what they say."""
    attachment = FileAttachment(folder / f"{layout.name}.duckdb")
    with duckdb.connect(":memory:") as connection:
        if num_threads:
            connection.execute(f"SET threads = {num_threads}")
        attachment.configure(connection)
        attachment.attach(connection)
        connection.execute("USE store")
        figures = {"ingest, rows/s": fill(connection, layout, max(1, num_rows // BATCH_ROWS))}
        connection.execute("CHECKPOINT")
        figures["size, MB"] = attachment.size_bytes() / 1e6
        for name, query in questions(layout).items():
            figures[f"{name}, ms"] = time_ms(connection, query)
    return figures


def main() -> None:
    """Print a line per figure, a column per layout."""
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000
    num_threads = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    layouts: tuple[Layout, ...] = (MapLayout(), OperatorLayout(), LongLayout())
    with TemporaryDirectory() as folder:
        found = [measure(layout, num_rows, num_threads, Path(folder)) for layout in layouts]
    threads = num_threads or "all"
    title = f"{num_rows:,} rows, threads: {threads}"
    sys.stdout.write(f"{title:<32}" + "".join(f"{layout.name:>14}" for layout in layouts) + "\n")
    for name in found[0]:
        line = "".join(f"{figures[name]:>14,.1f}" for figures in found)
        sys.stdout.write(f"{name:<32}{line}\n")


if __name__ == "__main__":
    main()
