"""How many kernels a step launches that runs operator by operator, as `transformers` does.

Counted in its source and PyTorch's, and seen with a dispatch mode: llama, qwen3 and gpt2 in
transformers 5.23. On a GPU some operators are two kernels, which the count leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import EAGER_VARIANT
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.units import ceil_divide


@dataclass(frozen=True, slots=True)
class _Count:
    """Kernels of a pass of an operator, and how many more convert between 16 bit and fp32."""

    forward: int = 1
    backward: int = 1
    conversions: int = 0


_CHAINS: Mapping[str, _Count] = {
    "rms_norm": _Count(forward=6, backward=14, conversions=2),
    "rope": _Count(forward=10, backward=14),
    "gelu": _Count(forward=8, backward=11),
}
_COUNTS: Mapping[str, _Count] = {
    "cross_entropy": _Count(forward=4, backward=3, conversions=1),
    "kv_cache_write": _Count(forward=2),
    "product": _Count(backward=2),
}
# Positions, and with rotary embedding their angles, sines and cosines.
_NUM_POSITION_KERNELS = {"learned": 2, "rope": 9}
_NUM_ANGLE_CONVERSIONS = 2
# Before training, transformers looks whether several sequences share a row.
_NUM_PACKING_KERNELS = 8
# A launch of a fused optimizer takes this many tensors and elements, and one counts the steps.
# Source: PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh (four lists of tensors: 36
# tensors, 320 blocks of 65,536 elements).
_TENSORS_PER_LAUNCH = 36
_ELEMENTS_PER_LAUNCH = 320 * 65536


def count_kernels(nodes: Nodes, step: ClosureStep, model: ModelArchitecture, dtype: DType) -> int:
    """Return the kernels of a step that consists of these operators."""
    is_narrow = dtype is not DType.FP32
    count = _NUM_POSITION_KERNELS[model.position]
    if model.position == "rope" and is_narrow:
        count += _NUM_ANGLE_CONVERSIONS
    if step.kind == "training":
        count += _NUM_PACKING_KERNELS
    return count + sum(node.repeat * _of_node(node, is_narrow=is_narrow) for node in nodes)


def _of_node(node: OperatorNode, *, is_narrow: bool) -> int:
    if node.operator == "fused_adam":
        by_tensors = ceil_divide(node.dims["num_tensors"], _TENSORS_PER_LAUNCH)
        by_elements = ceil_divide(node.dims["num_params"], _ELEMENTS_PER_LAUNCH)
        return 1 + max(int(by_tensors), int(by_elements))
    counts = _CHAINS if node.variant == EAGER_VARIANT else _COUNTS
    count = counts.get(node.operator, _Count())
    kernels = count.forward if node.phase is Phase.FORWARD else count.backward
    return kernels + (count.conversions if is_narrow else 0)
