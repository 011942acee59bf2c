"""A device, and a catalog in memory for tests of what records into one."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from foretoken.domain.estimate import DType
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurement import (
    ArrowStream,
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunSummary,
    Snapshot,
)
from foretoken.wire.arrow import MEASUREMENT_SCHEMA, check_measurement_table, read_table

CPU = DeviceSpec(
    name="cpu",
    description="a CPU",
    kind="cpu",
    architecture="any",
    memory_bytes=8e9,
    memory_bandwidth_bytes_per_s=20e9,
    peak_flops_per_s={DType.FP32: 200e9},
    num_sms=2,
    l2_cache_bytes=1e5,
    clock_hz=3e9,
    tdp_w=50.0,
    launch_latency_us=1.0,
)


class FakeCatalog:
    """Keeps every batch; implements `CatalogPort` as far as the profiler asks."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.batches: dict[tuple[str, int], pa.Table] = {}
        self.completed: set[str] = set()
        self.errors: list[Exception] = []

    @property
    def table(self) -> pa.Table:
        return pa.concat_tables([MEASUREMENT_SCHEMA.empty_table(), *self.batches.values()])

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        for batch in batches:
            if self.errors:
                raise self.errors.pop(0)
            table = check_measurement_table(read_table(batch.rows))
            key = (run.run_id, batch.batch_index)
            was_duplicate = key in self.batches
            self.runs[run.run_id] = run
            self.batches.setdefault(key, table)
            if batch.is_last:
                self.completed.add(run.run_id)
            yield BatchReceipt(
                run_id=run.run_id,
                batch_index=batch.batch_index,
                num_rows=table.num_rows,
                was_duplicate=was_duplicate,
            )

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        rows = [
            row
            for row in self.table.to_pylist()
            if (not selection.operator or row["operator"] == selection.operator)
            and (not selection.device or row["device"] == selection.device)
            and (not selection.framework or row["framework"] == selection.framework)
            and (selection.include_failed or row["status"] == "ok")
            and (selection.include_flagged or not row["flags"])
        ]
        return pa.Table.from_pylist(rows, schema=MEASUREMENT_SCHEMA)

    def describe_coverage(self) -> tuple[Coverage, ...]:
        raise NotImplementedError

    def list_runs(self) -> tuple[RunSummary, ...]:
        raise NotImplementedError

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        raise NotImplementedError
