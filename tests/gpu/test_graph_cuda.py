"""Profiles of model graphs on a real CUDA device."""

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import Artifact, BatchReceipt, MeasurementBatch, Run
from foretoken.domain.measurements.profiling import GraphReport, GraphRequest
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.config import ProfilerConfig
from foretoken.profiler.graph.profiling import RowKeeping, profile_graph
from foretoken.profiler.local_device import CPU, LocalDevice, list_local_devices
from foretoken.profiler.timing.case import open_rig
from foretoken.wire.arrow import read_table

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytestmark = pytest.mark.gpu

_SMALL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
_FAMILIES = {
    "llama": _SMALL,
    "gpt2": {"vocab_size": 4096, "n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 1024},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}


class _Rows:
    """Keeps what a profile records, and takes its report."""

    def __init__(self) -> None:
        self.tables: list[pa.Table] = []

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        assert artifact.num_bytes == sum(map(len, content))
        return artifact

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        for batch in batches:
            table = read_table(batch.rows)
            self.tables.append(table)
            yield BatchReceipt(
                run_id=run.run_id, batch_index=batch.batch_index, num_rows=table.num_rows
            )


@pytest.fixture
def device() -> LocalDevice:
    """The first GPU that has a device file."""
    found = [device for device in list_local_devices() if device.name != CPU]
    if not found:
        pytest.skip("no device file names this GPU")
    return found[0]


def _profile(
    family: str, device: LocalDevice, folder: Path, **facts: int
) -> tuple[GraphReport, pa.Table]:
    text = json.dumps({**_FAMILIES[family], "model_type": family, **facts})
    request = GraphRequest(
        device=device.name,
        model=family,
        config_json=text,
        sequence_length=512,
        micro_batch_size_max=2,
        dtype=DType.BF16,
    )
    rows = _Rows()
    report = profile_graph(
        request,
        open_rig(device, ProfilerConfig(state_folder=str(folder)).quick_timer, 1),
        RowKeeping(catalog=rows, spool_folder=folder),  # type: ignore[arg-type]
        JobProgress(lambda _ratio, _message: None, threading.Event()),
    )
    return report, pa.concat_tables(rows.tables)


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_modules_have_times(family: str, device: LocalDevice, tmp_path: Path) -> None:
    """Every module of a family has times on the GPU, and operators become rows."""
    report, rows = _profile(family, device, tmp_path)
    (profile,) = report.profiles
    assert {1, 2} == {item.micro_batch_size for item in profile.times}
    assert all(item.forward_us > 0 for item in profile.times)
    assert {"ok"} == set(rows["status"].to_pylist())
    assert "gemm" in rows["operator"].to_pylist()


def test_a_model_larger_than_the_gpu(device: LocalDevice, tmp_path: Path) -> None:
    """A model that cannot fit is shortened, and the report says so."""
    report, _ = _profile(
        "llama",
        device,
        tmp_path,
        num_hidden_layers=200,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
    )
    assert report.num_layers_timed < report.num_layers
    assert any("200 layers: out of memory" in line for line in report.notes)
    assert 1 == len(report.profiles)
