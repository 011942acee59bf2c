"""Laws of snapshots: nothing that happens later changes what an old one returns or is named."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import map_to_places
from foretoken.catalog.reading.content import CONTENT_COLUMNS, ContentHash, hash_rows
from foretoken.catalog.reading.selection import find_visible_batches
from foretoken.catalog.reading.snapshot import fetch_snapshots, hash_content
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.store import next_moment
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    PruneRequest,
    Run,
    RunKind,
)
from foretoken.wire.arrow import read_table, rows_to_table

_NUMBERS = itertools.count()
_NOW = datetime(2026, 1, 2, tzinfo=UTC)
_DEVICES = ("a30", "a40")
_SETTINGS = settings(max_examples=20)

_EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
_FILTERS = st.sampled_from(
    (
        _EVERYTHING,
        MeasurementFilter(),
        MeasurementFilter(include_flagged=True),
        MeasurementFilter(device="a30", include_failed=True, include_flagged=True),
        MeasurementFilter(run_id="run-1", include_failed=True, include_flagged=True),
    )
)
_RECORDS = st.tuples(
    st.just("record"),
    st.sampled_from((0, 1, 2, 3)),
    st.sampled_from((False, False, True)),
    st.lists(
        st.tuples(st.sampled_from(_DEVICES), st.integers(1, 4), st.booleans(), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
_REVIEWS = st.tuples(
    st.just("review"),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=3),
)
_ACTIONS = st.lists(
    st.one_of(
        _RECORDS,
        _RECORDS,
        _REVIEWS,
        st.tuples(st.just("snapshot"), _FILTERS),
        st.tuples(st.just("prune"), st.sampled_from((0, 1, 2, 3))),
    ),
    min_size=10,
    max_size=20,
)


def _row(device: str, m: int, failed: bool, flagged: bool) -> dict[str, Any]:
    return {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "fp16",
        "dims": {"m": m, "n": 256, "k": 256},
        "device": device,
        "latency_us_median": None if failed else 100.0 + m,
        "status": "failed" if failed else "ok",
        "status_reason": "out of memory" if failed else None,
        "flags": ["mine: flagged"] if flagged else None,
    }


@dataclass
class _History:
    """Runs even numbered profiles and odd numbered imports; remembers what snapshots returned."""

    catalog: CatalogService
    next_index: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    taken: dict[str, list[str]] = field(default_factory=dict)

    def record(self, number: int, is_last: bool, rows: list[tuple[str, int, bool, bool]]) -> None:
        run_id = f"run-{number}"
        if run_id in self.ended:
            return
        kind = RunKind.IMPORT if number % 2 else RunKind.PROFILE
        index = self.next_index.get(run_id, 0)
        batch = MeasurementBatch(
            batch_index=index, rows=rows_to_table([_row(*r) for r in rows]), is_last=is_last
        )
        list(self.catalog.record(Run(run_id=run_id, kind=kind, tool=run_id), [batch]))
        self.next_index[run_id] = index + 1
        self.ended |= {run_id} if is_last else set()

    def review(self, places: list[tuple[int, int]]) -> None:
        with self.catalog._store.transaction() as cursor:
            number = next_moment(cursor)
            cursor.execute("INSERT INTO review VALUES (?, '', '', '', 0, ?)", [number, _NOW])
            cursor.execute("UPDATE doubt SET until = ? WHERE until IS NULL", [number])
            for place in places:
                cursor.execute(
                    "INSERT INTO doubt SELECT batch_number, row_index, ?, ?, NULL"
                    " FROM measurement WHERE batch_number = ? AND row_index = ?",
                    [f"late: {number}", number, *place],
                )

    def snapshot(self, selection: MeasurementFilter) -> None:
        content_hash = self.catalog.create_snapshot(selection).content_hash
        self.taken.setdefault(content_hash, self.read(content_hash))

    def prune(self, number: int) -> None:
        run_id = f"run-{number}"
        report = self.catalog.prune(PruneRequest(older_than_days=0, tool=run_id))
        if run_id in report.deleted_run_ids:
            self.next_index.pop(run_id)
            self.ended.discard(run_id)

    def read(self, content_hash: str) -> list[str]:
        selection = MeasurementFilter(
            snapshot=content_hash, include_failed=True, include_flagged=True
        )
        rows = read_table(self.catalog.read_measurements(selection)).drop_columns(["recorded_at"])
        return sorted(map(repr, rows.to_pylist()))

    def rehash(self) -> dict[str, str]:
        """Return the hash of what every stored snapshot selects now, by its name."""
        with self.catalog._store.cursor() as cursor:
            return {
                entry.snapshot.content_hash: hash_content(
                    cursor, entry.pinned, find_visible_batches(cursor, entry.pinned)
                ).hexdigest()
                for entry in fetch_snapshots(cursor)
            }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.mark.slow
@_SETTINGS
@given(actions=_ACTIONS)
def test_no_snapshot_ever_changes(
    actions: list[tuple[Any, ...]], folder: Path, make_catalog_path: Callable[[Path], str]
) -> None:
    path = make_catalog_path(folder / str(next(_NUMBERS)))
    # Every look at the clock is two days later: a run is old as soon as it is recorded.
    days = itertools.count(0, 2)
    config = CatalogConfig(path=path, num_threads=1)
    catalog = CatalogService(config, lambda: _NOW + timedelta(days=next(days)))
    catalog.open()
    history = _History(catalog)
    for name, *arguments in actions:
        getattr(history, name)(*arguments)
    assert {name: name for name in history.taken} == history.rehash()
    assert history.taken == {name: history.read(name) for name in history.taken}
    catalog.close()


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "m": st.integers(1, 2**62),
    "kernel": st.none() | st.text(max_size=3),
    "variant": st.none() | st.text(max_size=3),
    "latency_us_median": st.none() | st.floats(allow_nan=False),
    "latency_us_mean": st.none() | st.floats(allow_nan=False),
    "num_samples": st.none() | st.integers(-(2**63), 2**63 - 1),
    "flags": st.none() | st.lists(st.text(max_size=3), min_size=1, max_size=2),
}
_CONTENTS = st.lists(st.fixed_dictionaries(_VALUES), max_size=6)


def _identity(content: dict[str, Any]) -> str:
    """Zeros of both signs are different values; flags have no order."""
    return repr(sorted({**content, "flags": sorted(content["flags"] or ())}.items()))


def _placed(contents: list[dict[str, Any]]) -> pa.RecordBatch:
    rows = rows_to_table(
        [{**_row("a30", c["m"], False, False), **c, "dims": {"m": c["m"]}} for c in contents]
    ).combine_chunks()
    (rows,) = rows.to_batches() or [
        pa.RecordBatch.from_pylist([], schema=rows.schema),
    ]
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns |= map_to_places(rows.column("dims"))
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in CONTENT_COLUMNS], names=list(CONTENT_COLUMNS)
    )


@given(contents=_CONTENTS)
def test_rows_have_the_same_hash_just_when_they_say_the_same(
    contents: list[dict[str, Any]],
) -> None:
    hashes = [tuple(lanes) for lanes in hash_rows(_placed(contents)).T.tolist()]
    said = [_identity(content) for content in contents]
    assert [[a == b for b in said] for a in said] == [[a == b for b in hashes] for a in hashes]
    sliced = _placed(contents).slice(1)
    assert hashes[1:] == [tuple(lanes) for lanes in hash_rows(sliced).T.tolist()]


@given(contents=_CONTENTS, cut=st.integers(0, 6), others=_CONTENTS)
def test_a_hash_is_of_the_multiset_however_it_is_cut(
    contents: list[dict[str, Any]], cut: int, others: list[dict[str, Any]]
) -> None:
    def digest(*pieces: list[dict[str, Any]]) -> str:
        content = ContentHash()
        for piece in pieces:
            content.add(_placed(piece))
        return content.hexdigest()

    assert digest(contents) == digest(contents[cut:][::-1], contents[:cut])
    is_same = sorted(map(_identity, contents)) == sorted(map(_identity, others))
    assert is_same == (digest(contents) == digest(others))
