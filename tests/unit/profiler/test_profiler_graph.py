"""Profiles of whole models: what is reported and recorded, and what happens without memory."""

import json
import threading
from pathlib import Path

import pytest
from graph_models import QUICK, config_json, graph_request, profile
from profiler_fakes import CPU, FakeCatalog

from foretoken.domain import schema
from foretoken.domain.errors import CancelledJobError, DeviceMemoryError, InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import GRAPH_KIND, GraphReport
from foretoken.domain.measurements.training_truth import ModuleTimes
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import GIB
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.graph.profiling import RowKeeping, check_graph_request, profile_graph
from foretoken.profiler.graph.whole_pass import MemoryLimit, memory_reason
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.stopwatch import CpuStopwatch

_DEVICE = LocalDevice(name="cpu", torch_name="cpu")


def _no_memory(_device: LocalDevice) -> float:
    return 0.0


class _ShrinkingMemory:
    """Room for everything at first, and for nothing after it was asked about `num_times`."""

    def __init__(self, num_times: int) -> None:
        self._left = num_times

    def __call__(self, _device: LocalDevice) -> float:
        self._left -= 1
        return GIB if self._left >= 0 else 0.0


_OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "mixtral")]


@pytest.fixture(scope="module", params=["llama", *_OTHERS])
def profiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, GraphReport, FakeCatalog]:
    """A family with the report of its profile and what the catalog got."""
    catalog, folder = FakeCatalog(), tmp_path_factory.mktemp("spool")
    report = profile(graph_request(request.param, micro_batch_size_max=3), folder, catalog)
    return request.param, report, catalog


def test_a_profile(profiled: tuple[str, GraphReport, FakeCatalog]) -> None:
    """Every module has times of both passes for micro batches of 1 and 2 samples."""
    family, report, _ = profiled
    assert (family, "cpu", 2, 2) == (
        report.model,
        report.device,
        report.num_layers,
        report.num_layers_timed,
    )
    (times,) = report.profiles
    assert ("intervals", False, 1, 8, DType.FP32) == (
        times.measures,
        times.has_communication,
        times.tp,
        times.sequence_length,
        times.dtype,
    )
    assert {1, 2} == {item.micro_batch_size for item in times.times}
    assert all(item.forward_us > 0 for item in times.times)
    # 0 would stand for a backward pass that was not measured.
    assert all(item.backward_us > 0 for item in times.times)
    assert times == schema.decode(ModuleTimes, schema.encode(times), "profile")


def test_the_sum_is_held_to_the_whole(profiled: tuple[str, GraphReport, FakeCatalog]) -> None:
    """A note of each size compares the calls with whole passes of the model."""
    notes = [line for line in profiled[1].notes if "add up to" in line]
    assert 2 == len(notes)
    assert all(" forward, " in line and line.endswith(" backward") for line in notes)


def test_rows_are_operators(profiled: tuple[str, GraphReport, FakeCatalog]) -> None:
    """Recorded are calls that are operators, with their dimensions, of the model."""
    family, report, catalog = profiled
    rows = catalog.table.to_pylist()
    assert {report.run_id} == catalog.completed
    assert {family} == {row["model"] for row in rows}
    assert {"ok"} == {row["status"] for row in rows}
    assert {"fp32"} == {row["dtype"] for row in rows}
    assert all(row["kernel"].startswith("fx:aten.") for row in rows)
    assert all(
        set(find_operator(row["operator"]).dim_names) == set(dict(row["dims"])) for row in rows
    )
    phases = {(row["operator"], row["phase"]) for row in rows}
    assert {("gemm", "forward"), ("gemm", "backward")} <= phases
    assert ("residual_add", "backward") not in phases


@pytest.mark.slow
def test_forward_only(tmp_path: Path) -> None:
    """Without backward passes none is timed, and none recorded."""
    catalog = FakeCatalog()
    report = profile(graph_request("llama", has_backward=False), tmp_path, catalog)
    assert {0.0} == {item.backward_us for item in report.profiles[0].times}
    assert {"forward"} == {row["phase"] for row in catalog.table.to_pylist()}


@pytest.mark.slow
def test_ranks_share_what_is_whole(tmp_path: Path) -> None:
    """Of two ranks each has the whole head; a split that is not even is a note, not a crash."""
    report = profile(graph_request("llama", tp_sizes=(1, 2, 3)), tmp_path)
    assert [1, 2] == [times.tp for times in report.profiles]
    heads = [item for times in report.profiles for item in times.times if item.module == "lm_head"]
    assert [False, True] == [item.is_whole for item in heads]
    assert any("tp 3" in line and "does not divide" in line for line in report.notes)


def test_a_device_without_memory(tmp_path: Path) -> None:
    """Where not even one layer fits there is a report without profiles that says so."""
    report = profile(graph_request("llama"), tmp_path, free_bytes=_no_memory)
    assert () == report.profiles
    assert 0 == report.num_layers_timed
    assert ["2 layers", "1 layers"] == [line.split(":")[0][6:] for line in report.notes]
    assert all("out of memory" in line for line in report.notes)


@pytest.mark.slow
def test_a_sweep_ends_where_memory_does(tmp_path: Path) -> None:
    """What fits is kept; the size that does not is in the report, which the catalog keeps."""
    catalog = FakeCatalog()
    # Asked for the weights, a pass of one sample, then for one of two.
    report = profile(
        graph_request("llama", micro_batch_size_max=8),
        tmp_path,
        catalog,
        free_bytes=_ShrinkingMemory(2),
    )
    (times,) = report.profiles
    assert {1} == {item.micro_batch_size for item in times.times}
    assert any("ends before micro batches of 2: out of memory" in line for line in report.notes)
    assert {"ok"} == set(catalog.table.column("status").to_pylist())
    assert [(GRAPH_KIND, report.run_id)] == list(catalog.artifacts)
    content = json.loads(catalog.artifacts[GRAPH_KIND, report.run_id])
    assert report == schema.decode(GraphReport, content)
    assert {report.run_id} == catalog.completed


def test_a_model_is_shortened(tmp_path: Path) -> None:
    """Layers are left out until the rest fits; the times are those of a layer all the same."""
    text = config_json("llama", num_hidden_layers=3)
    weights = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) * 4
    request = graph_request("llama", config_json=text, has_backward=False)
    report = profile(request, tmp_path, free_bytes=lambda _device: weights)
    assert (3, 2) == (report.num_layers, report.num_layers_timed)
    assert any("3 layers: out of memory" in line for line in report.notes)
    assert any("2 of 3 layers were built" in line for line in report.notes)
    assert {-1} == {item.layer for item in report.profiles[0].times}


@pytest.mark.slow
def test_layers_of_another_kind_are_told(tmp_path: Path) -> None:
    """Layers that only a longer model has are not taken for those timed without saying so."""
    text = config_json("qwen3_moe", mlp_only_layers=[0])
    report = profile(graph_request("qwen3_moe", config_json=text, num_layers=1), tmp_path)
    assert any("1 kinds of layers are not among the first 1" in line for line in report.notes)


@pytest.mark.slow
def test_layers_left_out_are_like_those_of_their_kind(tmp_path: Path) -> None:
    """Of a dense layer and three with experts two are built: the last two have experts, too."""
    text = config_json("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=4)
    report = profile(graph_request("qwen3_moe", config_json=text, num_layers=2), tmp_path)
    times = {(item.module, item.layer): item for item in report.profiles[0].times}
    assert [1, 2, 3] == sorted(layer for module, layer in times if module == "mlp")
    assert [0] == [layer for module, layer in times if module == "mlp_down"]
    assert times["mlp", 1].forward_us == times["mlp", 3].forward_us
    assert not any("not among" in line for line in report.notes)


@pytest.mark.slow
def test_long_sequences_are_told(tmp_path: Path) -> None:
    """A model is given more positions than it has, and a note says so."""
    report = profile(graph_request("gpt2", sequence_length=80), tmp_path)
    assert 1 == len(report.profiles)
    assert any("longer than the model's 64 positions" in line for line in report.notes)


def test_the_time_cap_ends_a_profile(tmp_path: Path) -> None:
    """Once the time is up nothing more is timed: a size half done is no result."""
    report = profile(graph_request("llama", time_cap_s=1e-6), tmp_path)
    assert () == report.profiles
    assert any("the time is up" in line for line in report.notes)


def test_cancelling_keeps_rows(tmp_path: Path) -> None:
    """A cancelled profile ends, and the catalog has the rows until then."""
    catalog, cancelled = FakeCatalog(), threading.Event()

    def report(_ratio: float, message: str) -> None:
        if "call 40" in message:
            cancelled.set()

    rig = Rig(
        device=_DEVICE,
        device_spec=CPU,
        stopwatch=CpuStopwatch(),
        timer=QUICK,
        num_threads=1,
    )
    with pytest.raises(CancelledJobError):
        profile_graph(
            graph_request("llama"),
            rig,
            RowKeeping(catalog=catalog, spool_folder=tmp_path),
            JobProgress(report, cancelled),
        )
    operators = {row["operator"] for row in catalog.table.to_pylist()}
    assert {"embedding", "gemm"} <= operators


def test_models_are_checked_first() -> None:
    """A job is not started for a model that cannot be built."""
    check_graph_request(graph_request("llama"))
    with pytest.raises(InvalidRequestError, match="no_such"):
        check_graph_request(
            graph_request("llama", config_json=config_json("llama", model_type="no_such"))
        )


def test_memory_errors_are_recognised() -> None:
    """What torch and the limit say of full memory differs from other failures."""
    limit = MemoryLimit(device=_DEVICE, free_bytes=lambda _device: GIB)
    limit.check(0.5 * GIB, "half")
    with pytest.raises(DeviceMemoryError, match="all takes 1 GiB") as caught:
        limit.check(GIB, "all")
    assert memory_reason(caught.value).startswith("out of memory")
    cpu = "[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"
    assert memory_reason(RuntimeError(cpu)).startswith("out of memory")
    assert "" == memory_reason(RuntimeError("shapes do not match"))
