"""Rows, runs and batches for the catalog's tests."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table


def row(m: int = 64, **changes: Any) -> dict[str, Any]:
    """Return one GEMM on an A30; `changes` replaces fields."""
    return {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "fp16",
        "dims": {"m": m, "n": 4096, "k": 4096},
        "device": "a30",
        "framework": "vllm",
        "framework_version": "0.19.0",
        "latency_us_median": 40.0 + m,
        "status": "ok",
        **changes,
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return rows_to_table(rows)


def gemms(sizes: Sequence[int], **changes: Any) -> pa.Table:
    return rows_to_table([row(m, **changes) for m in sizes])


def run(run_id: str = "run-1", kind: RunKind = RunKind.PROFILE, content_hash: str = "") -> Run:
    return Run(run_id=run_id, kind=kind, tool="test", content_hash=content_hash)


def batches(*tables: pa.Table, is_complete: bool = True) -> list[MeasurementBatch]:
    return [
        MeasurementBatch(
            batch_index=index, rows=rows, is_last=is_complete and index == len(tables) - 1
        )
        for index, rows in enumerate(tables)
    ]
