"""Data files against measurements: nothing measured is faster than a device or link can be."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.spec.operator import find_operator

# Clocks above those of the data sheet, and a weight or two that stayed in the L2 cache.
_TOLERANCE_RATIO = 0.95


def _gemm_sizes(model: ModelArchitecture) -> dict[str, tuple[int, int]]:
    q_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    return {
        "qkv_proj": (q_width + 2 * kv_width, model.hidden),
        "gate_up_proj": (2 * model.intermediate, model.hidden),
        "down_proj": (model.hidden, model.intermediate),
    }


def _gemm_ratios(
    path: Path, device: DeviceSpec, model: ModelArchitecture
) -> Iterator[tuple[float, str]]:
    """Yield measured time over roofline for every weight GEMM of a profile."""
    sizes = _gemm_sizes(model)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["layer"] in sizes:
                n, k = sizes[row["layer"]]
                dims = {"m": int(row["tokens"]), "n": n, "k": k}
                terms = compute_terms(
                    find_operator("gemm"), dims, DType.BF16, Phase.FORWARD, device
                )
                roofline_us = max(terms.compute_us, terms.memory_us)
                yield float(row["time_us"]) / roofline_us, f"{row['layer']} m={dims['m']}"


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("RTX4090", "meta-llama/Llama-3.1-8B"),
        ("RTXPRO6000", "meta-llama/Llama-3.1-8B"),
        ("RTXPRO6000", "Qwen/Qwen3-32B"),
    ],
)
def test_no_measured_gemm_beats_the_roofline(shared_data: Path, folder: str, model: str) -> None:
    perf = shared_data / "llmservingsim" / "profiler" / "perf"
    path = perf / folder / model / "bf16" / "tp1" / "dense.csv"
    ratios = list(_gemm_ratios(path, find_device(folder), find_model(model)))
    assert len(ratios) > 50
    assert min(ratios)[0] > _TOLERANCE_RATIO, min(ratios)
    # And some come near it: a peak far above what is reached would pass everything.
    assert min(ratios)[0] < 1.5, min(ratios)


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("a100_sxm/gemm/vllm/0.14.0", "a100_sxm_80"),
        ("h200_sxm/gemm/vllm/0.24.0", "h200_sxm"),
        ("gb200/gemm/vllm/0.24.0", "b200"),
        ("l40s/gemm/vllm/0.24.0", "l40s"),
    ],
)
def test_launch_latency_is_the_floor_of_measured_gemms(
    shared_data: Path, path: str, device: str
) -> None:
    folder = shared_data / "aiconfigurator" / "systems" / "data" / path
    latencies_ms = pq.read_table(folder / "gemm_perf.parquet", columns=["latency"])["latency"]
    shortest_us = 1e3 * min(latencies_ms.to_pylist())
    floor_us = find_device(device).launch_latency_us
    assert floor_us <= shortest_us < floor_us + 0.15


@pytest.mark.parametrize("topology", ["a30_single_gpu", "a100_dgx", "h100_dgx"])
@pytest.mark.parametrize("operator", ["all_reduce", "send_recv"])
def test_no_measured_collective_beats_its_links(
    shared_data: Path, topology: str, operator: str
) -> None:
    path = shared_data / "vidur" / "profiling" / "network" / topology / f"{operator}.csv"
    spec, found = find_operator(operator), find_topology(topology)
    ratios: list[float] = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            per_node = int(row["devices_per_node"])
            num_nodes = int(row["num_workers"]) // per_node
            dims = {
                "message_bytes": int(float(row["size"])),
                "devices_per_node": per_node,
                "num_nodes": num_nodes,
            }
            terms = collective_terms(spec, dims, num_nodes, found)
            measured_us = 1e3 * float(row[f"time_stats.{operator}.median"])
            ratios.append(measured_us / max(terms.memory_us, terms.floor_us))
    assert min(ratios) >= _TOLERANCE_RATIO
