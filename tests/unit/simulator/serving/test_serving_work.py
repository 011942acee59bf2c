"""The work a run needed: the format it multiplies in, and where its devices are."""

import pytest
from serving_fakes import build_scenario

from foretoken.domain.estimate import DType
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.work import compute_dtype


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
    assert dtype is compute_dtype(build_scenario(quantization=quantization))


@pytest.mark.parametrize("name", ["h100_sxm", "NVIDIA H100 80GB HBM3", "h100"])
def test_a_device_has_its_topology_under_each_of_its_names(name: str) -> None:
    ranks = stage_ranks(find_model("llama-3-8b"), ParallelLayout(tp=4), name, "")
    assert [8] == [rank.devices_per_node for rank in ranks]
