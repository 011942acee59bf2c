"""Judge stored rows against each other, all batches and runs together.

Rows never change: a review records what it flags apart from them, from its own moment on, and ends
earlier flags that no longer hold. Snapshots keep the flags of their moment.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.quality.phase_ratio import phase_ratio
from foretoken.catalog.quality.review_row import (
    ReviewGroup,
    devices_with_backward,
    find_groups,
    find_groups_of_runs,
    load_rows,
)
from foretoken.catalog.quality.review_verdict import (
    FOUND_SCHEMA,
    describe,
    register_verdict,
    write_flags,
    write_review,
)
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import Judges, all_tests
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.measurements.measurement import CheckRequest, QualityReport
from foretoken.domain.operators.spec.operator import find_operator

# Called with how far the work is, from 0 to 1, and what is being judged.
Listener = Callable[[float, str], None]


def _no_listener(_ratio: float, _message: str) -> None:
    """Tell nobody."""


def review_runs(store: Store, run_ids: Sequence[str], now: datetime) -> None:
    """Judge runs that are complete, and the rows of other runs with them, all at once."""
    with store.cursor() as cursor:
        groups = find_groups_of_runs(cursor, run_ids)
        found = _judge_groups(cursor, groups, "", _no_listener)
    requests = [CheckRequest(run_id=run_id) for run_id in run_ids]
    with store.transaction() as cursor:
        number, num_rows = next_moment(cursor), 0
        # What is laid out in memory at a time is bounded.
        for device in sorted({group.device for group in groups}):
            part = [group for group in groups if group.device == device]
            register_verdict(cursor, part, found, "", columns=())
            num_rows += write_flags(cursor, number)
        write_review(cursor, requests, number, num_rows, now)


def review(
    store: Store,
    request: CheckRequest,
    now: datetime,
    listener: Listener = _no_listener,
) -> QualityReport:
    """Judge the selected rows against all rows of the same operators and devices.

    An error that the listener raises ends the review before anything is written. A dry run writes
    nothing and reports the same.
    """
    start_s = time.perf_counter()
    with store.cursor() as cursor:
        groups = find_groups(cursor, request)
        found = _judge_groups(cursor, groups, request.run_id, listener)
    listener(1.0, "writing")
    with store.transaction() as cursor:
        register_verdict(cursor, groups, found, request.run_id)
        report = describe(cursor)
        if not request.is_dry_run:
            number = next_moment(cursor)
            write_review(cursor, [request], number, write_flags(cursor, number), now)
    return replace(report, wall_s=time.perf_counter() - start_s)


def _judge_groups(
    cursor: duckdb.DuckDBPyConnection,
    groups: Sequence[ReviewGroup],
    judged_run: str,
    listener: Listener,
) -> pa.Table:
    """Return the flags about all groups, read one after the other."""
    pieces = [FOUND_SCHEMA.empty_table()]
    peers: dict[str, Mapping[str, float]] = {}
    num_done, num_rows = 0, max(sum(group.num_rows for group in groups), 1)
    for group in groups:
        listener(num_done / num_rows, f"{group.operator} on {group.device}")
        if group.operator not in peers:
            peers[group.operator] = _phase_ratios(cursor, group.operator)
        loaded = load_rows(cursor, group, peers[group.operator])
        flags = find_flags(loaded.rows)
        is_judged = loaded.is_of_run(judged_run)
        flagged = np.array([place for place in flags if is_judged[place]], dtype=np.int64)
        counts = [len(flags[place]) for place in flagged.tolist()]
        rows = np.repeat(flagged, counts)
        pieces.append(
            pa.table(
                {
                    "batch_number": loaded.batch_numbers[rows],
                    "row_index": loaded.row_indices[rows],
                    "flag": [flag for place in flagged.tolist() for flag in flags[place]],
                },
                schema=FOUND_SCHEMA,
            )
        )
        num_done += group.num_rows
    return pa.concat_tables(pieces)


def find_flags(rows: StoredRows) -> dict[int, list[str]]:
    """Return the flags of rows, by their place, ascending.

    Rows of flagged tables are no neighbours of others. Impossible rows have their flag already.
    """
    flags: dict[int, list[str]] = {}
    judged = np.arange(len(rows))
    for kind in Judges:
        subject = rows.take(judged)
        for test in all_tests():
            if test.judges is kind and len(subject):
                for flagged_rows in test.find(subject):
                    for index, place in enumerate(judged[flagged_rows.places].tolist()):
                        flag = f"{test.name}: {flagged_rows.explain(index)}"
                        flags.setdefault(place, []).append(flag)
        is_sound = ~rows.is_impossible
        is_sound[list(flags)] = False
        judged = np.flatnonzero(is_sound)
    return {place: flags[place] for place in sorted(flags) if not rows.is_impossible[place]}


def _phase_ratios(cursor: duckdb.DuckDBPyConnection, operator: str) -> Mapping[str, float]:
    """Return by device how much longer the backward pass takes, where both were measured."""
    if not find_operator(operator).backward_work_ratio:
        return {}
    devices = devices_with_backward(cursor, operator)
    loaded = {d: load_rows(cursor, ReviewGroup(operator, d, 0), {}).rows for d in devices}
    ratios = {device: phase_ratio(rows) for device, rows in loaded.items()}
    return {device: ratio for device, ratio in ratios.items() if ratio is not None}
