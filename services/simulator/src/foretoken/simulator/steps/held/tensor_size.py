"""Sizes of the tensors that an operator reads and writes, in bytes."""

from collections.abc import Callable, Mapping

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.operators.spec.operator import Dims
from foretoken.domain.units import Quantity

_Elements = Callable[[Dims], Quantity]


def read_bytes(node: OperatorNode) -> float:
    """Return the bytes of the activations an operator reads; their gradients are as large."""
    return _bytes_of(node, _READ.get(node.operator, _row))


def written_bytes(node: OperatorNode) -> float:
    """Return the bytes an operator writes."""
    return _bytes_of(node, _WRITTEN.get(node.operator, _row))


def _bytes_of(node: OperatorNode, elements: _Elements) -> float:
    if node.operator == "all_to_all":
        return float(node.dims["message_bytes"])
    if "message_bytes" in node.dims:
        return 0.0
    return float(node.written_dtype.bytes_of(int(elements(node.dims))))


def _row(dims: Dims) -> Quantity:
    """Return the elements of an operator that works row by row; nothing for other dimensions."""
    width = dims.get("hidden", dims.get("intermediate", dims.get("width", 0)))
    return dims.get("num_tokens", dims.get("num_rows", 0)) * width


def _rotated(dims: Dims) -> Quantity:
    return dims["num_tokens"] * (dims["num_heads"] + dims["num_kv_heads"]) * dims["head_dim"]


def _scores(dims: Dims) -> Quantity:
    return dims["num_matrices"] * dims["length"] * dims["length"]


def _latent_attention_input(dims: Dims) -> Quantity:
    key_width = dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"]
    per_head = dims["q_tokens"] * key_width + dims["kv_tokens"] * (key_width + dims["v_head_dim"])
    return dims["num_heads"] * per_head


def _attention_input(dims: Dims) -> Quantity:
    queries = dims["q_tokens"] * dims["num_heads"]
    return (queries + 2 * dims["kv_tokens"] * dims["num_kv_heads"]) * dims["head_dim"]


_READ: Mapping[str, _Elements] = {
    "gemm": lambda d: d["m"] * d["k"],
    "grouped_gemm": lambda d: d["m"] * d["k"],
    "batched_gemm": lambda d: d["batch"] * (d["m"] + d["n"]) * d["k"],
    "silu_mul": lambda d: 2 * d["num_tokens"] * d["intermediate"],
    "rope": _rotated,
    "causal_softmax": _scores,
    "attention_prefill": _attention_input,
    "attention_prefill_window": _attention_input,
    "mla_prefill": _latent_attention_input,
    "moe_unpermute": lambda d: d["num_tokens"] * d["top_k"] * d["hidden"],
}
_WRITTEN: Mapping[str, _Elements] = {
    "gemm": lambda d: d["m"] * d["n"],
    "grouped_gemm": lambda d: d["m"] * d["n"],
    "batched_gemm": lambda d: d["batch"] * d["m"] * d["n"],
    "rope": _rotated,
    "causal_softmax": _scores,
    "attention_prefill": lambda d: d["q_tokens"] * d["num_heads"] * d["head_dim"],
    "attention_prefill_window": lambda d: d["q_tokens"] * d["num_heads"] * d["head_dim"],
    "mla_prefill": lambda d: d["q_tokens"] * d["num_heads"] * d["v_head_dim"],
    "moe_permute": lambda d: d["num_tokens"] * d["top_k"] * d["hidden"],
}
