"""Which operator of ours a traced call is, where it is exactly one.

What a call does in addition to the operator is in its variant: such rows are kept, and never taken
for the plain case. Calls that are a part of an operator only (a norm written out) are none.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.profiler.graph.trace import TensorShape, TracedCall
from foretoken.profiler.kernel import TORCH_DTYPES

KERNEL_PREFIX = "fx:"
# Weights and their inputs are matrices, activations have a sequence and a batch as well.
_MATRIX, _BATCHED, _HEADS = 2, 3, 4

# The operator, its dimensions, its variant.
_Found = tuple[str, dict[str, int], str]


def operator_calls(call: TracedCall, dtype: DType) -> dict[Phase, OperatorCall]:
    """Return the operator that a call is, by the passes in which it is exactly that."""
    find = _READERS.get(str(call.target))
    floats = [shape for shape in call.inputs if shape.dtype.is_floating_point]
    if find is None or any(shape.dtype is not TORCH_DTYPES[dtype] for shape in floats):
        return {}
    positional, named = call.arguments
    found = find(call, positional, named)
    if found is None:
        return {}
    operator, dims, variant = found
    phases = [Phase.FORWARD]
    has_gradients = bool(floats) and all(shape.requires_grad for shape in floats)
    # Backward, a sum hands the gradient on; the operator's is the sum where the stream forked.
    if has_gradients and operator != "residual_add":
        phases.append(Phase.BACKWARD)
    return {
        phase: OperatorCall(operator=operator, dims=dims, dtype=dtype, phase=phase, variant=variant)
        for phase in phases
    }


def kernel_name(call: TracedCall) -> str:
    """Return what rows call the code of a call."""
    return f"{KERNEL_PREFIX}{call.target}"


def _linear(_: TracedCall, positional: tuple[Any, ...], named: Mapping[str, Any]) -> _Found | None:
    x, weight = positional[:2]
    bias = positional[2] if len(positional) > _MATRIX else named.get("bias")
    if not weight.is_weight or len(weight.shape) != _MATRIX:
        return None
    return "gemm", _gemm_dims(x, *weight.shape), "" if bias is None else "epilogue=bias"


def _addmm(_: TracedCall, positional: tuple[Any, ...], named: Mapping[str, Any]) -> _Found | None:
    _bias, x, weight = positional[:3]
    if not weight.is_weight or named:
        return None
    num_in, num_out = weight.shape
    return "gemm", _gemm_dims(x, num_out, num_in), "epilogue=bias;layout=nn"


def _gemm_dims(x: TensorShape, num_out: int, num_in: int) -> dict[str, int]:
    return {"m": _rows(x), "n": num_out, "k": num_in}


def _attention(
    _: TracedCall, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> _Found | None:
    queries, keys, values = positional[:3]
    facts = dict(zip(("attn_mask", "dropout_p", "is_causal"), positional[3:], strict=False))
    facts |= named
    is_plain = facts.get("attn_mask") is None and not facts.get("dropout_p")
    if not is_plain or not facts.get("is_causal") or len(queries.shape) != _HEADS:
        return None
    num_seqs, num_heads, num_tokens, head_dim = queries.shape
    if keys.shape[2] != num_tokens or values.shape != keys.shape:
        return None
    heads = {"num_heads": num_heads, "num_kv_heads": keys.shape[1], "head_dim": head_dim}
    return "attention_prefill", {**prefill_dims(num_seqs, num_tokens, 0), **heads}, ""


def _embedding(_: TracedCall, positional: tuple[Any, ...], __: Mapping[str, Any]) -> _Found:
    table, indices = positional[:2]
    vocab, hidden = table.shape
    num_tokens = math.prod(indices.shape)
    return "embedding", {"num_tokens": num_tokens, "hidden": hidden, "vocab": vocab}, ""


def _rows_of(operator: str, width: str) -> Callable[..., _Found | None]:
    """Return the reader of an operation on each of the rows of its first input."""

    def read(call: TracedCall, positional: tuple[Any, ...], _: Mapping[str, Any]) -> _Found | None:
        x = positional[0]
        if len(x.shape) < _MATRIX or not _is_dense(x):
            return None
        is_norm = width == "hidden"
        # A norm without its weights, or one of several dimensions, is another operator.
        if is_norm and len(call.inputs) != _NUM_NORM_INPUTS[operator]:
            return None
        return operator, {"num_tokens": _rows(x), width: x.shape[-1]}, ""

    return read


# The input, and the weights of a norm.
_NUM_NORM_INPUTS = {"layer_norm": 3, "rms_norm": 2}


def _sum(call: TracedCall, positional: tuple[Any, ...], named: Mapping[str, Any]) -> _Found | None:
    is_in_layer = call.module.rpartition(".")[2].isdecimal()
    if not _are_alike(positional) or named or not is_in_layer:
        return None
    x = positional[0]
    return "residual_add", {"num_tokens": _rows(x), "hidden": x.shape[-1]}, ""


def _product(
    call: TracedCall, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> _Found | None:
    parent = call.module.rpartition(".")[2]
    if not _are_alike(positional) or named or parent not in ("mlp", "experts", "feed_forward"):
        return None
    x = positional[0]
    return "product", {"num_tokens": _rows(x), "intermediate": x.shape[-1]}, ""


def _are_alike(positional: tuple[Any, ...]) -> bool:
    """Return whether there are two dense activations of one shape."""
    if len(positional) != 2 or not all(isinstance(item, TensorShape) for item in positional):  # noqa: PLR2004
        return False
    left, right = positional
    is_same = left.shape == right.shape and left.name != right.name
    return is_same and len(left.shape) >= _MATRIX and _is_dense(left) and _is_dense(right)


def _is_dense(x: TensorShape) -> bool:
    return x.num_elements == math.prod(x.shape) and x.stride[-1] == 1


def _rows(x: TensorShape) -> int:
    return math.prod(x.shape[:-1])


_aten = torch.ops.aten
_READERS: Mapping[str, Callable[..., _Found | None]] = {
    str(_aten.linear.default): _linear,
    str(_aten.addmm.default): _addmm,
    str(_aten.scaled_dot_product_attention.default): _attention,
    str(_aten.embedding.default): _embedding,
    str(_aten.layer_norm.default): _rows_of("layer_norm", "hidden"),
    str(_aten.rms_norm.default): _rows_of("rms_norm", "hidden"),
    str(_aten.silu.default): _rows_of("silu", "intermediate"),
    str(_aten.gelu.default): _rows_of("gelu", "intermediate"),
    str(_aten.add.Tensor): _sum,
    str(_aten.mul.Tensor): _product,
}
