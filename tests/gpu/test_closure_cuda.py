"""Whole steps, kernel counts and host times on a real CUDA device."""

import json
import threading
from collections.abc import Iterable, Iterator

import pytest
import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import Artifact, BatchReceipt, MeasurementBatch, Run
from foretoken.domain.measurements.profiling import ClosureReport, ClosureRequest, ClosureStep
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.closure.measuring import measure_closure
from foretoken.profiler.host.measuring import measure_host
from foretoken.profiler.local_device import LocalDevice, list_local_devices
from foretoken.wire.arrow import read_table

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 8000,
    "max_position_embeddings": 4096,
}


class _Catalog:
    """Keeps the variants of rows, and takes files."""

    def __init__(self) -> None:
        self.variants: set[str] = set()

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        assert artifact.num_bytes == sum(map(len, content))
        return artifact

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        for batch in batches:
            table = read_table(batch.rows)
            self.variants |= set(table.column("variant").to_pylist())
            yield BatchReceipt(
                run_id=run.run_id, batch_index=batch.batch_index, num_rows=table.num_rows
            )


def _progress() -> JobProgress:
    return JobProgress(lambda *_: None, threading.Event())


@pytest.fixture(scope="module")
def device() -> LocalDevice:
    known = [device for device in list_local_devices() if device.is_cuda]
    if not known:
        pytest.skip("no device file describes this GPU")
    return known[0]


def _measure(device: LocalDevice, *steps: ClosureStep) -> ClosureReport:
    request = ClosureRequest(
        device=device.name,
        model="small",
        config_json=json.dumps(_CONFIG),
        steps=steps,
        dtype=DType.BF16,
        quick=True,
    )
    return measure_closure(request, device, _Catalog(), _progress(), num_threads=1)  # type: ignore[arg-type]


def test_a_device_tells_busy_time_kernels_memory_and_queueing(device: LocalDevice) -> None:
    """Busy time is no longer than the step, and queueing is part of it."""
    steps = [ClosureStep(kind=kind, batch_size=2, num_tokens=256) for kind in ("prefill", "decode")]
    steps.append(ClosureStep(kind="training", batch_size=2, num_tokens=256))
    for measured in _measure(device, *steps).steps:
        assert ("ok", "") == (measured.status, measured.reason)
        assert 0 < measured.device_us < 1.1 * measured.latency_us_p90
        assert 0 < measured.host_us <= measured.latency_us_p90
        assert measured.num_kernels > 4 * 20
        assert measured.memory_bytes > 0


def test_a_graph_replays_the_kernels_of_the_eager_step(device: LocalDevice) -> None:
    """As many, with next to nothing to do for the host."""
    eager, graph = _measure(
        device,
        ClosureStep(kind="decode", batch_size=2, num_tokens=256),
        ClosureStep(kind="decode", batch_size=2, num_tokens=256, mode="graph"),
    ).steps
    assert ("ok", "") == (graph.status, graph.reason)
    assert pytest.approx(eager.num_kernels, rel=0.1) == graph.num_kernels
    assert graph.host_us < eager.host_us


def test_a_step_that_does_not_fit_fails_and_the_next_one_runs(device: LocalDevice) -> None:
    """Out of memory is a result."""
    huge, small = _measure(
        device,
        ClosureStep(kind="prefill", batch_size=4_000_000, num_tokens=4096),
        ClosureStep(kind="prefill", batch_size=1, num_tokens=128),
    ).steps
    assert ("failed", True) == (huge.status, huge.reason.startswith("out of memory"))
    assert ("ok", "") == (small.status, small.reason)


def test_host_times_have_graphs_too(device: LocalDevice) -> None:
    """Launches and replays of graphs next to the eager ones."""
    catalog = _Catalog()
    report = measure_host(device, catalog, _progress(), quick=True, num_threads=1)  # type: ignore[arg-type]
    parts = {f"part={part}" for part in ("launch_eager", "launch_graph", "replay", "model_graph")}
    assert parts <= catalog.variants
    assert report.num_rows > 0
