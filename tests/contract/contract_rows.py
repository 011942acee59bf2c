"""Rows in the measurement schema."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table


def make_run(
    run_id: str = "run-1", content_hash: str = "abc", kind: RunKind = RunKind.IMPORT
) -> Run:
    return Run(
        run_id=run_id,
        kind=kind,
        tool="contract tests",
        content_hash=content_hash,
        source="nowhere",
        licence="Apache-2.0",
        environment={"driver": "570.86", "vllm": "0.19"},
    )


def make_rows(sizes: Sequence[int], **changes: Any) -> pa.Table:
    """Return gemm rows of these m, each of a time that a real device could have."""
    rows = [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "bf16",
            "dims": {"m": m, "n": 4096, "k": 4096},
            "device": "a30",
            "framework": "vllm",
            "framework_version": "0.19",
            "latency_us_median": 50.0 + 0.3 * m,
            "num_samples": 20,
            "status": "ok",
            **changes,
        }
        for m in sizes
    ]
    return rows_to_table(rows)


def make_batches(num_batches: int, num_rows: int = 4) -> list[MeasurementBatch]:
    return [
        MeasurementBatch(
            batch_index=index,
            rows=make_rows([1 + index * num_rows + row for row in range(num_rows)]),
            is_last=index == num_batches - 1,
        )
        for index in range(num_batches)
    ]
