"""Context parallelism: keys and values sent around, or tokens exchanged for heads.

Queries, keys and values go to the ranks of their heads and outputs come back, four all-to-alls.
Where there are fewer key heads than ranks each is sent to several.
Source: Jacobs et al., "DeepSpeed Ulysses", 2023.

Its own block is causal; of each other rank's one half is seen by all its queries, or all by one
half of them.
Source: Liu et al., "Ring Attention", 2023; the halves are those of Megatron-Core and
TransformerEngine, `context_parallel.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.lowering.communication import PlacedGroup, RankGroup, overlapped_with
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.options import LayoutCases, TrainingOptions
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import find_kind
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity

# Kernels of new tokens over their own sequences.
ATTENTION_KERNELS = ("attention_prefill", "attention_prefill_window", "mla_prefill")


def head_limits(cases: LayoutCases, degree: Quantity, is_exchanged: Quantity) -> Iterator[Limit]:
    """Yield why heads cannot be exchanged by so many ranks."""
    model = cases.model
    for part in stack_of(model).mixers:
        yield _head_limit(model, degree, is_exchanged, part.dims.get("num_heads", degree))
        # Latent attention has no key heads of its own.
        if "num_kv_heads" in part.dims:
            yield key_head_limit(model, degree, is_exchanged, part["num_kv_heads"])


def _head_limit(
    model: ModelArchitecture, degree: Quantity, is_exchanged: Quantity, num_heads: Quantity
) -> Limit:
    return Limit(
        "heads",
        is_exchanged & (num_heads % degree != 0),
        lambda: f"{degree} ranks cannot share the {num_heads} heads of {model.name} evenly",
    )


def sequence_limits(
    cases: LayoutCases, training: TrainingOptions, is_split: Quantity, is_exchanged: bool
) -> Iterator[Limit]:
    """Yield why sequences of a model cannot be split, by exchanges of heads or by a ring.

    Source of the last: TransformerEngine, `context_parallel.py` (a window with all-to-all alone).
    """
    name, length = cases.model.name, training.sequence_length
    for part in stack_of(cases.model).mixers:
        kind = find_kind(part.kind)
        if kind.whole_sequences:
            yield _whole(is_split, f"{name} has {kind.name}: {kind.whole_sequences}")
        if 0 < part.dims.get("chunk", 0) < length:
            yield _whole(is_split, f"{name} has chunks, which are simulated on whole sequences")
        if 0 < part.dims.get("window", 0) < length and not is_exchanged:
            problem = (
                f"{name} has windows, which no ring passes on; set context_parallel all_to_all"
            )
            yield _whole(is_split, problem)


def _whole(is_split: Quantity, problem: str) -> Limit:
    return Limit("sequence", is_split, lambda: problem)


def key_head_limit(
    model: ModelArchitecture, degree: Quantity, is_split: Quantity, num_heads: int
) -> Limit:
    """Return why key heads can be neither split over so many ranks nor repeated on them."""
    return Limit(
        "heads",
        is_split & (num_heads % degree != 0) & (degree % num_heads != 0),
        lambda: f"{degree} and the {num_heads} key heads of {model.name} do not divide",
    )


def head_dims(kernel: OperatorNode) -> tuple[Quantity, Quantity]:
    """Return the features of a head's query and key, and of its value."""
    if "head_dim" in kernel.dims:
        return kernel.dims["head_dim"], kernel.dims["head_dim"]
    key_dim = kernel.dims["qk_nope_head_dim"] + kernel.dims["qk_rope_head_dim"]
    return key_dim, kernel.dims["v_head_dim"]


def num_key_heads(kernel: OperatorNode) -> Quantity:
    """Return the key heads of a kernel; unpacked latent attention has one for every query's."""
    return kernel.dims.get("num_kv_heads", kernel.dims["num_heads"])


def exchange_heads(
    nodes: Sequence[OperatorNode], rank: RankContext, group: RankGroup
) -> tuple[OperatorNode, ...]:
    """Return the graph with the attention of every layer between exchanges over the group."""
    placed = PlacedGroup.of_rank(group, rank)
    return tuple(part for node in nodes for part in _around(node, placed))


def _around(node: OperatorNode, group: PlacedGroup) -> Iterator[OperatorNode]:
    if node.operator not in ATTENTION_KERNELS or group.degree == 1:
        yield node
        return
    tokens, num_heads = node.dims["q_tokens"], node.dims["num_heads"]
    key_dim, value_dim = head_dims(node)
    num_sent = max(num_key_heads(node), group.degree)

    def exchange(content: str, width: Quantity) -> OperatorNode:
        role = f"{node.role}_{content}_all_to_all"
        return group.collective(node, role, "all_to_all", node.dtype.bytes_of(tokens * width))

    yield exchange("query", num_heads * key_dim)
    yield exchange("key", num_sent * key_dim)
    yield exchange("value", num_sent * value_dim)
    yield _on_some_heads(node, group.degree)
    yield exchange("output", num_heads * value_dim)


def _on_some_heads(node: OperatorNode, degree: int) -> OperatorNode:
    length = node.dims["q_tokens"] // node.dims["num_seqs"] * degree
    num_seqs, window = node.dims["num_seqs"], node.dims.get("window", 0)
    batch = prefill_dims(num_seqs, length, 0)
    dims = {
        **node.dims,
        **(window_prefill_dims(num_seqs, length, window) if window else batch),
        "num_heads": node.dims["num_heads"] // degree,
    }
    if "num_kv_heads" in dims:
        dims["num_kv_heads"] = max(1, dims["num_kv_heads"] // degree)
    return dataclasses.replace(node, dims=dims)


def attend_in_ring(
    nodes: Sequence[OperatorNode], rank: RankContext, *, is_hidden: bool
) -> tuple[OperatorNode, ...]:
    """Return the graph with the attention of every layer in a ring over the cp of a rank's layout.

    Sending is concurrent with attention to what has arrived where it `is_hidden`.
    """
    return tuple(part for node in nodes for part in _ring(node, rank, is_hidden=is_hidden))


def _ring(node: OperatorNode, rank: RankContext, *, is_hidden: bool) -> Iterator[OperatorNode]:
    if node.operator not in ATTENTION_KERNELS or rank.layout.cp == 1:
        yield node
        return
    group = PlacedGroup.of_neighbours("cp", rank)
    key_dim, value_dim = head_dims(node)
    elements = node.dims["kv_tokens"] * num_key_heads(node) * (key_dim + value_dim)
    message_bytes = node.dtype.bytes_of(elements)
    kernel = node
    for index in range(1, rank.layout.cp):
        role = f"{node.role}_ring_send_{index}"
        send = group.collective(node, role, "send_recv", message_bytes)
        yield overlapped_with(send, kernel.role, is_hidden=is_hidden)
        yield kernel
        kernel = _other_block(node, index)
    yield kernel
    # Every further block's output is added to the sum, scaled by both softmax denominators.
    dims = {
        "num_tokens": node.dims["q_tokens"] * (rank.layout.cp - 1),
        "hidden": node.dims["num_heads"] * value_dim,
    }
    yield dataclasses.replace(
        node,
        role=f"{node.role}_ring_merge",
        group="elementwise",
        operator="residual_add",
        dims=dims,
        variant="",
    )


def _other_block(node: OperatorNode, index: int) -> OperatorNode:
    num_seqs = node.dims["num_seqs"]
    half = node.dims["q_tokens"] // num_seqs // 2
    dims = {
        **node.dims,
        "q_tokens": num_seqs * half,
        "kv_tokens": num_seqs * 2 * half,
        "score_pairs": num_seqs * 2 * half * half,
    }
    return dataclasses.replace(node, role=f"{node.role}_ring_{index}", dims=dims)
