"""A catalog of synthetic rows whose latency is a known function of the roofline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from artifact_shelf import ArtifactShelf

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunSummary,
    Snapshot,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.roofline import Target, compute_limits
from foretoken.predictor.service import PredictorService
from foretoken.wire.arrow import rows_to_table

GEMM_EFFICIENCY = 0.6

Rows = list[dict[str, Any]]
# The fixtures `make_predictor` and `train`.
MakePredictor = Callable[[Rows], PredictorService]
Train = Callable[..., PredictorTrainingReport]


@dataclass
class FakeCatalog(ArtifactShelf):
    """Holds rows of the measurement schema and honours operator and device of a filter.

    Snapshots keep their rows; `holders` tells who holds which.
    """

    rows: Rows = field(default_factory=list)
    snapshots: dict[str, Rows] = field(default_factory=dict)
    holders: list[tuple[str, str]] = field(default_factory=list)

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Take nothing: the rows are given."""
        del run, batches
        return iter(())

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        """Return the selected rows."""
        return rows_to_table(self._select(selection))

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return nothing: the predictor does not ask."""
        return ()

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return nothing: the predictor does not ask."""
        return ()

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the number of rows as their identity."""
        num_rows = len(self._select(selection))
        return Snapshot(content_hash=f"rows-{num_rows}", num_rows=num_rows)

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Keep the selected rows."""
        snapshot = self.describe_snapshot(selection)
        self.snapshots[snapshot.content_hash] = self._select(selection)
        if holder:
            self.holders.append((snapshot.content_hash, holder))
        return snapshot

    def _select(self, selection: MeasurementFilter) -> Rows:
        rows = self.snapshots[selection.snapshot] if selection.snapshot else self.rows
        return [row for row in rows if _is_selected(row, selection)]


def _is_selected(row: Mapping[str, Any], selection: MeasurementFilter) -> bool:
    return selection.operator in ("", row["operator"]) and selection.device in ("", row["device"])


def base_us(
    operator: str, dims: Mapping[str, int], device: str = "a30", topology: str = ""
) -> float:
    """Return launch floor plus roofline of one fp16 call."""
    columns = {name: np.array([value]) for name, value in dims.items()}
    target = Target(
        device=find_device(device),
        dtype=DType.FP16,
        phase=Phase.FORWARD,
        topology=find_topology(topology) if topology else None,
    )
    return float(compute_limits(find_operator(operator), columns, target).base_us[0])


def row_of(
    operator: str, dims: Mapping[str, int], latency_us: float, **other: Any
) -> dict[str, Any]:
    """Return one good row; other columns by name."""
    return {
        "operator": operator,
        "phase": "forward",
        "dtype": "fp16",
        "dims": dict(dims),
        "device": "a30",
        "latency_us_median": latency_us,
        "status": "ok",
        **other,
    }


def gemm_rows(
    slowdown: Callable[[Mapping[str, int]], float] = lambda _: 1.0 / GEMM_EFFICIENCY,
    device: str = "a30",
    **other: Any,
) -> Rows:
    """Return a grid of GEMMs, each at `slowdown` times its base latency."""
    rows = []
    for m in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048):
        for n, k in ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096)):
            dims = {"m": m, "n": n, "k": k}
            latency_us = base_us("gemm", dims, device) * slowdown(dims)
            rows.append(row_of("gemm", dims, latency_us, device=device, **other))
    return rows


def all_reduce_rows() -> Rows:
    """Return all-reduces of 2 and 8 devices of one A100 node at 80 % of the link's bandwidth."""
    rows = []
    for devices_per_node in (2, 8):
        for exponent in range(10, 29):
            dims = {
                "message_bytes": 2**exponent,
                "devices_per_node": devices_per_node,
                "num_nodes": 1,
            }
            latency_us = base_us("all_reduce", dims, "a100_sxm_80", "a100_dgx") / 0.8
            other = {"device": "a100_sxm_80", "topology": "a100_dgx"}
            rows.append(row_of("all_reduce", dims, latency_us, **other))
    return rows


def columns_of(*dims: Mapping[str, int]) -> dict[str, npt.NDArray[np.int64]]:
    """Return calls as columns."""
    return {name: np.array([d[name] for d in dims]) for name in dims[0]}
