"""Questions in SQL: what can be asked, in which types the answer comes, and what is said if not."""

import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.schema import describe_views
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter, RunKind, SqlQuery
from foretoken.wire.arrow import read_table
from foretoken.wire.ipc import read_chunks, write_chunks

_REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "catalog-sql.md"


def _ask(catalog: CatalogService, text: str, max_num_rows: int = 0) -> list[tuple[object, ...]]:
    answer = read_table(catalog.query_sql(SqlQuery(text=text, max_num_rows=max_num_rows)))
    return list(zip(*(column.to_pylist() for column in answer.columns), strict=True))


def _refusal(catalog: CatalogService, text: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        _ask(catalog, text)
    return caught.value.message


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogService]:
    """A catalog of two runs, which the tests only read."""
    path = tmp_path_factory.mktemp("recorded") / "catalog.duckdb"
    catalog = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    catalog.open()
    list(catalog.record(run("first"), batches(gemms([1, 2, 3]), gemms([4]))))
    list(
        catalog.record(run("second"), batches(table(row(9, status="failed", status_reason="oom"))))
    )
    yield catalog
    catalog.close()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("SELECT count(*) FROM measurements", [(5,)]),
        ("FROM op_gemm SELECT m ORDER BY m LIMIT 2", [(1,), (2,)]),
        ("SELECT dims['m'], dims['k'] FROM measurements WHERE status = 'failed'", [(9, 4096)]),
        ("VALUES (1), (2)", [(1,), (2,)]),
        ("TABLE runs LIMIT 0", []),
        ("(SELECT 1) UNION ALL (SELECT 2)", [(1,), (2,)]),
        ("WITH big AS (SELECT m FROM op_gemm WHERE m > 3) SELECT count(*) FROM big", [(2,)]),
        ("SELECT run_id, num_rows FROM runs ORDER BY ALL", [("first", 4), ("second", 1)]),
        ("SELECT count(*) FROM store.main.measurements JOIN runs USING (run_id)", [(5,)]),
        ("SELECT max(i) FROM range(10) AS t(i)", [(9,)]),
        ("SELECT m FROM op_gemm QUALIFY row_number() OVER (ORDER BY m DESC) = 1", [(9,)]),
        ("PIVOT (FROM op_gemm SELECT status) ON status IN ('ok', 'failed')", [(4, 1)]),
        ("WITH RECURSIVE up(i) AS (SELECT 1 UNION FROM up SELECT 2) SELECT max(i) FROM up", [(2,)]),
        ("-- a remark\nSELECT 1 -- and another\n;", [(1,)]),
    ],
)
def test_a_question_is_answered(
    question: str, answer: list[tuple[object, ...]], recorded: CatalogService
) -> None:
    assert answer == _ask(recorded, question)


@pytest.mark.parametrize(
    "question",
    [
        "DESCRIBE measurements",
        "SHOW measurements",
        "SUMMARIZE runs",
        "DESCRIBE SELECT m FROM op_gemm",
        "EXPLAIN SELECT * FROM measurements",
        "explain analyze SELECT * FROM measurements",
    ],
)
def test_what_tells_about_the_data_is_answered(question: str, recorded: CatalogService) -> None:
    assert [] != _ask(recorded, question)


def test_the_views_can_be_listed(recorded: CatalogService) -> None:
    views = _ask(recorded, "SHOW TABLES")
    assert list(describe_views().items()) == views
    assert {"measurements", "runs", "snapshots", "op_gemm"} <= {name for name, _ in views}


def test_snapshots_tell_who_holds_them(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1, 2]))))
    snapshot = catalog.create_snapshot(MeasurementFilter(), "model 1")
    catalog.create_snapshot(MeasurementFilter(), "model 2")
    question = "SELECT content_hash, num_rows, holders FROM snapshots"
    assert [(snapshot.content_hash, 2, ["model 1", "model 2"])] == _ask(catalog, question)


def test_an_import_is_seen_once_it_is_whole(catalog: CatalogService) -> None:
    first, last = batches(gemms([1]), gemms([2]))
    list(catalog.record(run("import", RunKind.IMPORT), [first]))
    assert [(0,)] == _ask(catalog, "SELECT count(*) FROM measurements")
    list(catalog.record(run("import", RunKind.IMPORT), [last]))
    assert [(2,)] == _ask(catalog, "SELECT count(*) FROM measurements")


def test_views_of_another_version_are_made_anew(catalog: CatalogService, tmp_path: Path) -> None:
    catalog.close()
    with duckdb.connect(str(tmp_path / "catalog.duckdb")) as connection:
        connection.execute("CREATE OR REPLACE VIEW runs AS SELECT 1 AS old")
        connection.execute("DROP VIEW op_gemm")
    catalog.open()
    assert [] == _ask(catalog, "SELECT run_id FROM runs UNION SELECT run_id FROM op_gemm")


def test_an_empty_result_has_its_columns(recorded: CatalogService) -> None:
    answer = read_table(
        recorded.query_sql(SqlQuery(text="SELECT m, device FROM op_gemm WHERE m = 7"))
    )
    assert (["m", "device"], 0) == (answer.schema.names, answer.num_rows)


def test_rows_after_those_wanted_are_not_sent(recorded: CatalogService) -> None:
    question = "SELECT m FROM op_gemm ORDER BY m"
    assert [(1,), (2,)] == _ask(recorded, question, max_num_rows=2)
    assert [(1,), (2,), (3,), (4,), (9,)] == _ask(recorded, question, max_num_rows=5)
    assert [(1,), (2,), (3,), (4,), (9,)] == _ask(recorded, question, max_num_rows=99)
    counted = read_table(
        recorded.query_sql(SqlQuery(text="FROM range(100000)", max_num_rows=12_345))
    )
    assert 12_345 == counted.num_rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SELEC 1", "syntax error at or near"),
        ("SELECT nope FROM runs", 'column "nope" not found'),
        ("SELECT CAST('x' AS INTEGER)", "Could not convert string 'x'"),
        ("SELECT nope(1)", "nope"),
        ("SELECT $1", "arameter"),
        (
            "SELECT * FROM gemms",
            "'gemms'; there are measurements, runs, snapshots, artifacts, losses, op_",
        ),
        ("SELECT * FROM batch", "DESCRIBE tells their columns"),
        ("", "holds 0 statements"),
        ("SELECT 1; SELECT 2", "holds 2 statements"),
        ("DELETE FROM batch", "is DELETE; only SELECT"),
        ("PIVOT measurements ON device", "PIVOT needs"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str, recorded: CatalogService) -> None:
    assert said in _refusal(recorded, text)


def test_an_error_in_a_late_row_ends_the_stream(recorded: CatalogService) -> None:
    question = "SELECT CAST(if(i = 199999, 'x', '1') AS INTEGER) FROM range(200000) AS t(i)"
    assert "Could not convert string 'x'" in _refusal(recorded, question)
    assert 0 == recorded.sql_statistics().num_running


@pytest.mark.parametrize(
    "expression",
    [
        "170141183460469231731687303715884105727::HUGEINT",
        "1::UHUGEINT",
        "'a'::ENUM('a', 'b')",
        "'123e4567-e89b-12d3-a456-426614174000'::UUID",
        "INTERVAL 1 DAY",
        "'101'::BIT",
        "1.5::DECIMAL(38, 5)",
        "TIME '12:00:00'",
        "'12:00:00+02'::TIMETZ",
        "TIMESTAMP '2026-01-02 03:04:05'",
        "TIMESTAMPTZ '2026-01-02 03:04:05+00'",
        "TIMESTAMP_NS '2026-01-02 03:04:05'",
        "'infinity'::TIMESTAMP",
        "DATE '2026-01-02'",
        "[1, 2]",
        "[1, 2]::INTEGER[2]",
        "{'a': 1}",
        "MAP {'a': 1}",
        "union_value(a := 1)",
        "'x'::BLOB",
        "'{}'::JSON",
        "NULL",
        "1::UTINYINT",
        "'nan'::FLOAT",
    ],
)
def test_every_type_comes_through_an_arrow_stream(
    expression: str, recorded: CatalogService
) -> None:
    """As pieces of IPC bytes too, which is how a remote caller gets it."""
    question = SqlQuery(text=f"SELECT {expression} AS x")
    received = read_chunks(write_chunks(recorded.query_sql(question)))
    assert read_table(recorded.query_sql(question)).schema == received.schema
    assert 1 == received.num_rows
    assert isinstance(received.schema, pa.Schema)


@pytest.mark.parametrize(
    "limits",
    [{"sql_timeout_s": 0.0}, {"sql_max_rows": 0}, {"sql_max_running": -1}],
    ids=str,
)
def test_limits_must_leave_something(limits: dict[str, int]) -> None:
    (name,) = limits
    with pytest.raises(InvalidRequestError, match=name):
        CatalogConfig(path="x", **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"max_num_rows": -1}, {"timeout_s": -1.0}, {"timeout_s": "nan"}])
def test_a_query_with_impossible_limits_is_refused(
    wrong: dict[str, float], recorded: CatalogService
) -> None:
    (name,) = wrong
    values = {key: float(value) for key, value in wrong.items()}
    with pytest.raises(InvalidRequestError, match=name):
        recorded.query_sql(SqlQuery(text="SELECT 1", **values))  # type: ignore[arg-type]


def test_the_reference_names_every_column_of_the_views(recorded: CatalogService) -> None:
    """A line of its table is: | `view` or nothing | `column` | type | meaning |."""
    lines = re.findall(
        r"^\| *`?(\w*)`? *\| `(\w+)` +\| ([^|]+?) +\|", _REFERENCE.read_text(), re.MULTILINE
    )
    shown: dict[str, list[tuple[str, str]]] = {}
    last = ""
    for view, column, kind in lines:
        last = view or last
        shown.setdefault(last, []).append((column, kind))
    names = ("measurements", "runs", "snapshots", "artifacts", "losses")
    assert {
        name: [(column, kind) for column, kind, *_ in _ask(recorded, f"DESCRIBE {name}")]
        for name in names
    } == shown
