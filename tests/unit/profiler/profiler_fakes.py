"""A device, and a catalog in memory for tests of what records into one."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    Artifact,
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunSummary,
    Snapshot,
)
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.recording.batch_sender import HandOver
from foretoken.wire.arrow import (
    MEASUREMENT_SCHEMA,
    STORED_SCHEMA,
    check_measurement_table,
    read_table,
)

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

# As rough as a timer can be.
FAST = TimerSpec(
    min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.002, case_s_max=0.005, max_input_sets=2
)
# A catalog that is away is asked again at once.
HASTY = HandOver(receipt_s=60.0, catalog_s=60.0, retry_s=0.001, retry_s_max=0.001)
_RECORDED_AT = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)


class FakeCatalog:
    """Keeps every batch; implements `CatalogPort` as far as the profiler needs.

    It raises `errors` first, one for each batch it is sent.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.batches: dict[tuple[str, int], pa.Table] = {}
        self.completed: set[str] = set()
        self.errors: list[Exception] = []
        self.num_reads = 0
        # By kind and name.
        self.artifacts: dict[tuple[str, str], bytes] = {}

    @property
    def table(self) -> pa.Table:
        return pa.concat_tables([MEASUREMENT_SCHEMA.empty_table(), *self.batches.values()])

    @property
    def stored(self) -> pa.Table:
        """Every row with what the catalog adds to it."""
        rows = [
            {
                **row,
                "run_id": run_id,
                "batch_index": index,
                "row_index": place,
                "recorded_at": _RECORDED_AT,
            }
            for (run_id, index), table in self.batches.items()
            for place, row in enumerate(table.to_pylist())
        ]
        return pa.Table.from_pylist(rows, schema=STORED_SCHEMA)

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
        self.num_reads += 1
        rows = [
            row
            for row in self.stored.to_pylist()
            if (not selection.operator or row["operator"] == selection.operator)
            and (not selection.device or row["device"] == selection.device)
            and (not selection.framework or row["framework"] == selection.framework)
            and (selection.include_failed or row["status"] == "ok")
            and (selection.include_flagged or not row["flags"])
        ]
        return pa.Table.from_pylist(rows, schema=STORED_SCHEMA)

    def describe_coverage(self) -> tuple[Coverage, ...]:
        raise NotImplementedError

    def list_runs(self) -> tuple[RunSummary, ...]:
        return tuple(RunSummary(run=run, started_at="") for run in self.runs.values())

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        raise NotImplementedError

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        raise NotImplementedError

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        if self.errors:
            raise self.errors.pop(0)
        self.artifacts[artifact.kind, artifact.name] = b"".join(content)
        return artifact

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        raise NotImplementedError

    def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        raise NotImplementedError

    def activate_artifact(self, kind: str, name: str) -> Artifact:
        raise NotImplementedError

    def delete_artifact(self, kind: str, name: str) -> None:
        raise NotImplementedError


def spooled_rows(folder: Path) -> int:
    """Return how many rows wait in a folder of spools."""
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.jsonl")
    )
