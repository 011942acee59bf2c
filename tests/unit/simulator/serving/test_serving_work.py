"""The work a run needed: the format it multiplies in, and where its devices are."""

import pytest
from serving_fakes import build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.cost.latency_surfaces import quantization_of, serving_options
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.efficiency import compute_dtype
from foretoken.simulator.serving.scenario_check import check_scenario


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ("", DType.BF16),
        ("int4_wo", DType.BF16),
        ("mxfp4", DType.BF16),
        ("fp8_block", DType.FP8),
        ("sq", DType.INT8),
        ("nvfp4", DType.FP4),
        ("w4afp8", DType.FP8),
        ("w4a8_mxfp4_mxfp8", DType.FP8),
    ],
)
def test_the_peak_is_that_of_the_format_matrices_are_multiplied_in(
    quantization: str, dtype: DType
) -> None:
    """Where only weights are stored narrow, they are multiplied in the model's own format."""
    assert dtype is compute_dtype(build_scenario(quantization=quantization, device="b200"))


@pytest.mark.parametrize(
    ("device", "quantization", "executed"),
    [
        ("a100_sxm_80", "fp8", "int8_wo"),
        ("a100_sxm_80", "nvfp4", "nvfp4_wo"),
        ("h100_sxm", "nvfp4", "nvfp4_wo"),
        ("h100_sxm", "fp8", "fp8"),
        ("a100_sxm_80", "int4_wo", "int4_wo"),
        ("b200", "nvfp4", "nvfp4"),
    ],
)
def test_vllm_emulates_formats_that_a_device_lacks_and_says_so(
    device: str, quantization: str, executed: str
) -> None:
    engine = EngineSpec(profile="vllm-0.19")
    scenario = build_scenario(quantization=quantization, device=device, engine=engine)
    check_scenario(scenario)
    found = quantization_of(scenario)
    assert found.name == executed == serving_options(scenario).quantization
    assert bool(found.remark) == (executed != quantization)


@pytest.mark.parametrize(
    ("device", "quantization", "profile"),
    [
        ("a100_sxm_80", "fp8", "trtllm-1.0"),
        ("a100_sxm_80", "nvfp4", "sglang-0.5"),
        ("v100_pcie_16", "fp8", "vllm-0.19"),
        ("h100_sxm", "nvfp4", "trtllm-1.0"),
    ],
)
def test_a_format_that_nothing_emulates_is_refused(
    device: str, quantization: str, profile: str
) -> None:
    engine = EngineSpec(profile=profile)
    with pytest.raises(InvalidRequestError, match=f"{device}.* has no fp.*no kernel that emulates"):
        check_scenario(build_scenario(quantization=quantization, device=device, engine=engine))


def test_activations_in_a_format_the_device_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"dtype: a100_sxm_80 \(ampere\) has no fp8"):
        check_scenario(build_scenario(dtype=DType.FP8, device="a100_sxm_80"))
    check_scenario(build_scenario(dtype=DType.FP8, device="h100_sxm"))


def test_a_spread_over_experts_that_is_none_is_refused_of_a_dense_model_too() -> None:
    check_scenario(build_scenario(moe_routing="power_law_1.2"))
    with pytest.raises(InvalidRequestError, match="'nosuch' is not balanced"):
        check_scenario(build_scenario(moe_routing="nosuch"))


@pytest.mark.parametrize("name", ["h100_sxm", "NVIDIA H100 80GB HBM3", "h100"])
def test_a_device_has_its_topology_under_each_of_its_names(name: str) -> None:
    ranks = stage_ranks(find_model("llama-3-8b"), ParallelLayout(tp=4), name, "")
    assert [8] == [rank.devices_per_node for rank in ranks]
