"""Devices and topologies: the data files, their sources, and how they are found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownDeviceError,
    UnknownTopologyError,
)
from foretoken.domain.hardware.device import DeviceSpec, all_devices, find_device
from foretoken.domain.hardware.sourced import read_folder, strip_sources
from foretoken.domain.hardware.topology import (
    all_topologies,
    find_topology,
    topology_of_device,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.plugins import scan_yaml

_DEVICES = sorted(all_devices())
# Blackwell Ultra's tensor cores have next to no INT8, and of a Gaudi none is documented.
_SLOW_INT8 = ("b300", "gb300", "gaudi3")
_GPUS = [name for name in _DEVICES if name != "cpu"]
_TOPOLOGIES = sorted(all_topologies())


def test_the_products_that_matter_are_there() -> None:
    expected = {
        "a30",
        "a40",
        "a100_sxm_40",
        "a100_sxm_80",
        "h100_sxm",
        "h200_sxm",
        "gh200",
        "b200",
        "l40s",
        "v100_pcie_16",
        "rtx_4090",
        "rtx_pro_6000",
        "cpu",
        *("b300", "gb200", "gb300", "h20", "h100_nvl", "h100_pcie", "l4", "l40", "a10"),
        *("rtx_6000_ada", "rtx_5090", "mi300x", "mi325x", "mi355x", "gaudi3", "b60"),
    }
    assert expected <= set(_DEVICES)


@pytest.mark.parametrize(
    ("name", "bf16_flops_per_s", "bandwidth_bytes_per_s", "num_sms", "l2_mib"),
    [
        ("a30", 165e12, 933e9, 56, 24),
        ("a40", 149.7e12, 696e9, 84, 6),
        ("a100_sxm_40", 312e12, 1555e9, 108, 40),
        ("a100_sxm_80", 312e12, 2039e9, 108, 40),
        ("h100_sxm", 989.4e12, 3.35e12, 132, 50),
        ("h200_sxm", 989.4e12, 4.8e12, 132, 50),
        ("h800_sxm", 989.4e12, 3.35e12, 132, 50),
        ("gh200", 989.4e12, 4.0e12, 132, 50),
        ("b200", 2250e12, 7.7e12, 148, 126.5),
        ("l40s", 362.05e12, 864e9, 142, 96),
        ("rtx_4090", 165.2e12, 1008e9, 128, 72),
        ("rtx_pro_6000", 503.8e12, 1597e9, 188, 128),
        ("h20", 148e12, 4.0e12, 78, 60),
        ("h100_pcie", 756e12, 2.039e12, 114, 50),
        ("h100_nvl", 835.5e12, 3.938e12, 132, 50),
        ("l4", 121e12, 300e9, 58, 48),
        ("l40", 181.05e12, 864e9, 142, 96),
        ("a10", 125e12, 600e9, 72, 6),
        ("rtx_6000_ada", 364.2e12, 960e9, 142, 96),
        ("rtx_5090", 209.5e12, 1792e9, 170, 96),
        ("mi300x", 1307.4e12, 5.3e12, 304, 256),
        ("mi325x", 1307.4e12, 6.0e12, 304, 256),
        ("mi355x", 2516.6e12, 8.0e12, 256, 256),
        ("gaudi3", 1678e12, 3.7e12, 64, 96),
        ("b60", 98.3e12, 456e9, 20, 18),
    ],
)
def test_figures_that_estimates_hang_on(
    name: str, bf16_flops_per_s: float, bandwidth_bytes_per_s: float, num_sms: int, l2_mib: float
) -> None:
    device = find_device(name)
    found = (
        device.peak_flops_per_s[DType.BF16],
        device.memory_bandwidth_bytes_per_s,
        device.num_sms,
        device.l2_cache_bytes / 2**20,
    )
    assert (bf16_flops_per_s, bandwidth_bytes_per_s, num_sms, l2_mib) == found


@pytest.mark.parametrize("name", _DEVICES)
def test_every_figure_is_positive_and_of_its_order(name: str) -> None:
    device = find_device(name)
    assert ("cpu" if name == "cpu" else "gpu") == device.kind
    assert 2**32 < device.memory_bytes < 2**39
    assert 1e11 < device.memory_bandwidth_bytes_per_s < 1e14
    assert all(1e11 < peak < 1e17 for peak in device.peak_flops_per_s.values())
    assert 1e9 < device.clock_hz < 1e10
    assert 0.1 < device.launch_latency_us < 10
    assert min(device.num_sms, device.l2_cache_bytes, device.tdp_w) >= 1


@pytest.mark.parametrize("name", _DEVICES)
def test_a_narrower_format_is_never_slower(name: str) -> None:
    device = find_device(name)
    order = [DType.FP32, DType.TF32, DType.BF16]
    if name not in _SLOW_INT8:
        order.append(DType.INT8)
    peaks = [device.peak_flops(dtype) for dtype in order]
    assert sorted(peaks) == peaks


@pytest.mark.parametrize("name", _GPUS)
def test_fp32_peak_is_what_the_clock_gives(name: str) -> None:
    """A multiply-add per lane and cycle, within the slack of boost clocks."""
    device = find_device(name)
    lanes_per_sm = 64 if name.startswith(("a30", "a100", "v100", "gaudi")) else 128
    expected = 2 * lanes_per_sm * device.num_sms * device.clock_hz
    # The data sheet of the H20 promises more than its SMs do at the clock of their chip.
    slack_ratio = 0.12 if name == "h20" else 0.03
    assert pytest.approx(expected, rel=slack_ratio) == device.peak_flops_per_s[DType.FP32]


@pytest.mark.parametrize(
    ("name", "dtype", "flops_per_s"),
    [
        ("b200", DType.FP4, 9e15),
        ("gb200", DType.FP4, 10e15),
        ("mi355x", DType.FP4, 10.07e15),
        # No TF32 on CDNA 4.
        ("mi355x", DType.TF32, 157.3e12),
        # No tensor core for either: BF16 runs as FP16, FP4 as FP8.
        ("v100_pcie_16", DType.BF16, 112e12),
        ("h200_sxm", DType.FP4, 1978.9e12),
    ],
)
def test_formats_that_only_some_devices_have(name: str, dtype: DType, flops_per_s: float) -> None:
    assert pytest.approx(flops_per_s, rel=1e-3) == find_device(name).peak_flops(dtype)


@pytest.mark.parametrize("name", _DEVICES)
def test_every_device_has_a_topology(name: str) -> None:
    assert name == topology_of_device(name).device


@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_every_topology_is_made_of_a_known_device_and_slower_between_nodes(name: str) -> None:
    topology = find_topology(name)
    assert topology.device in _DEVICES
    assert topology.devices_per_node >= 1
    inside, between = topology.link_between(1), topology.link_between(2)
    assert inside.bandwidth_bytes_per_s >= between.bandwidth_bytes_per_s > 1e9
    assert 1.0 < inside.latency_us <= between.latency_us < 1000.0


def test_a_name_of_a_vendor_belongs_to_one_device() -> None:
    names = [name for device in all_devices().values() for name in device.vendor_names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("vendor_name", "expected"),
    [
        ("NVIDIA A30", "a30"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-PCIE-16GB", "v100_pcie_16"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("RTX4090", "rtx_4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("RTXPRO6000", "rtx_pro_6000"),
        ("a30", "a30"),
    ],
)
def test_a_device_is_found_by_what_drivers_and_tools_call_it(
    vendor_name: str, expected: str
) -> None:
    assert expected == find_device(vendor_name).name


def test_unknown_hardware_suggests_the_nearest() -> None:
    with pytest.raises(UnknownDeviceError, match="did you mean a30"):
        find_device("a3")
    with pytest.raises(UnknownTopologyError, match="did you mean h100_dgx"):
        find_topology("h100")
    with pytest.raises(UnknownTopologyError):
        topology_of_device("abacus")


def test_a_format_the_device_lacks_runs_at_the_next_wider_one() -> None:
    a100 = find_device("a100_sxm_80")
    assert a100.peak_flops_per_s[DType.BF16] == a100.peak_flops(DType.FP8)
    assert a100.peak_flops_per_s[DType.INT4] == a100.peak_flops(DType.INT4)
    cpu = find_device("cpu")
    assert cpu.peak_flops_per_s[DType.FP32] == cpu.peak_flops(DType.TF32)


def test_a_format_wider_than_all_the_device_has_is_an_error() -> None:
    half_only = DeviceSpec(
        name="half_only",
        description="computes in half precision alone",
        kind="gpu",
        architecture="none",
        memory_bytes=1.0,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s={DType.FP16: 1.0},
        num_sms=1,
        l2_cache_bytes=1.0,
        clock_hz=1.0,
        tdp_w=1.0,
        launch_latency_us=1.0,
    )
    assert 1.0 == half_only.peak_flops(DType.BF16)
    with pytest.raises(InvalidRequestError, match="half_only cannot compute in FP32"):
        half_only.peak_flops(DType.FP32)


def test_sources_are_stripped_at_every_depth() -> None:
    content = {
        "name": "x",
        "num_sms": {"value": 3, "source": "sheet"},
        "peaks": {"fp16": {"value": 1e12, "source": "sheet"}},
        "flags": [True],
        "sources": {"sheet": "a data sheet"},
    }
    expected = {"name": "x", "num_sms": 3, "peaks": {"fp16": 1e12}, "flags": [True]}
    assert expected == strip_sources(content, "x.yaml")


def test_a_number_without_a_listed_source_is_an_error() -> None:
    content = {"peaks": {"fp16": 1e12}, "num_sms": {"value": 3, "source": "memory"}, "sources": {}}
    with pytest.raises(InvalidRequestError, match=r"x\.yaml") as caught:
        strip_sources(content, "x.yaml")
    expected = {
        FieldViolation("peaks.fp16", "a number needs {value, source}"),
        FieldViolation("num_sms", "source 'memory' is not listed"),
    }
    assert expected == set(caught.value.violations)


@pytest.mark.parametrize("folder", ["devices", "topologies"])
def test_every_source_is_cited_and_says_something(folder: str) -> None:
    def cited(item: Any) -> set[str]:
        if not isinstance(item, dict):
            return set()
        if "source" in item:
            return {item["source"]}
        return set().union(*(cited(child) for child in item.values()))

    for _, content in scan_yaml("foretoken.domain.hardware", folder):
        assert set(content["sources"]) == cited(content)
        assert all(len(citation) > 20 for citation in content["sources"].values())


def test_the_peak_of_a_format_that_a_file_leaves_out_is_not_known() -> None:
    """A device without the format computes in a wider one, whose peak is its limit."""
    peaks = {DType.BF16: 2.25e15}
    assert not replace(find_device("b200"), peak_flops_per_s=peaks).knows_peak(DType.FP4)
    assert find_device("b200").knows_peak(DType.FP4)
    assert find_device("a30").knows_peak(DType.FP8)


def test_own_files_join_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folders outside of the package; an own file wins over ours of the same name."""
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.yaml").write_text("description: Mine\n")
    (tmp_path / "devices" / "a30.yaml").write_text("description: Our A30\n")
    monkeypatch.setenv("FORETOKEN_HARDWARE", str(tmp_path))
    read = read_folder.__wrapped__
    assert {"mine": {"description": "Mine"}, "a30": {"description": "Our A30"}} == {
        name: read("devices")[name] for name in ("mine", "a30")
    }
    assert read("devices").keys() > all_devices().keys()
    assert read("topologies").keys() == all_topologies().keys()
    monkeypatch.setenv("FORETOKEN_HARDWARE", str(tmp_path / "absent"))
    with pytest.raises(InvalidRequestError, match="is no folder"):
        read("devices")
