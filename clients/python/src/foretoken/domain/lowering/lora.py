"""Low-rank adapters of the linear layers of a served model.

A layer y = W x becomes y = W x + B (A x), with A of `rank` rows. Requests of one batch ask for
different adapters, so each row of the batch is multiplied with its own A and B. Tensor parallelism
splits the one of the two that has the layer's split dimension, so that a rank adds its part before
the layer's own sum. Router, embedding, head and the projection that unpacks a latent cache have no
adapters; every expert has.
Source: Hu et al., LoRA, 2021; vLLM, `lora/layers` (`fully_sharded_loras` off).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretoken.domain.lowering.expert_layer import larger, rounded
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.units import Quantity, smaller

# Matrices that a fused projection consists of, each with an adapter of its own.
_NUM_SLICES = {"attn_qkv_proj": 3, "attn_down_proj": 2, "mlp_up_proj": 2, "shared_up_proj": 2}
_PLAIN_ROLES = ("attn_out_proj", "attn_q_proj", "mlp_down_proj", "shared_down_proj")
_OPERATOR = "lora_gemm"


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer of a rank: `rows` go in, `num_copies` such layers share them (experts)."""

    role: str
    rows: Quantity
    n: int
    k: int
    num_slices: int = 1
    num_copies: int = 1


def add_adapters(
    nodes: tuple[OperatorNode, ...], rank: RankContext, num_tokens: Quantity, lora: LoraSpec
) -> tuple[OperatorNode, ...]:
    """Return a rank's operators with the two products of every linear layer after it."""
    adapted = [part for node in nodes for part in (node, *_after(node, rank, lora))]
    has_projections = any(node.role == "attn_out_proj" for node in nodes)
    norm = next((node for node in nodes if node.role == "input_norm"), None)
    if rank.model.mla is None or has_projections or norm is None:
        return tuple(adapted)
    # Modules of latent attention hide their projections.
    for linear in _latent_projections(rank, num_tokens):
        adapted += _products(linear, norm, lora)
    return tuple(adapted)


def is_adapter_node(node: OperatorNode) -> bool:
    """Return whether an operator belongs to adapters."""
    return node.operator == _OPERATOR


def adapter_bytes(nodes: Sequence[OperatorNode], lora: LoraSpec) -> float:
    """Return the bytes of one adapter on a rank, whose operators are `nodes`."""
    held = sum(node.weights_bytes for node in nodes if is_adapter_node(node))
    return held / lora.max_loaded


def adapter_shares(lora: LoraSpec) -> tuple[float, ...]:
    """Return how likely a request is to use each adapter."""
    weights = [number**-lora.popularity_spread for number in range(1, lora.num_adapters + 1)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def expected_active(num_draws: Quantity, lora: LoraSpec, num_copies: int = 1) -> Quantity:
    """Return how many different matrices that many draws hit, in whole numbers of at least 1.

    A draw takes an adapter by its popularity and one of `num_copies` layers evenly; at most
    `max_loaded` adapters are there at a time. A row of a batch counts as a draw: those of one
    prompt ask for one adapter, so a step of long prompts hits fewer.
    """
    shares = adapter_shares(lora)
    draws = num_draws * 1.0
    if lora.popularity_spread == 0:
        hit = len(shares) * (1 - (1 - shares[0] / num_copies) ** draws)
    else:
        hit = sum(1 - (1 - share / num_copies) ** draws for share in shares)
    active = rounded(hit * num_copies)
    return larger(smaller(active, lora.max_loaded * num_copies + 0 * active), 1)


def _after(node: OperatorNode, rank: RankContext, lora: LoraSpec) -> Iterator[OperatorNode]:
    if lora.targets == "attention" and not node.role.startswith("attn_"):
        return
    if node.is_experts:
        for linear in _expert_layers(node):
            yield from _products(linear, node, lora)
    elif node.operator == "gemm" and (node.role in _NUM_SLICES or node.role in _PLAIN_ROLES):
        is_single = node.role == "mlp_up_proj" and not rank.model.is_gated
        num_slices = 1 if is_single else _NUM_SLICES.get(node.role, 1)
        linear = _Linear(node.role, node.dims["m"], node.dims["n"], node.dims["k"], num_slices)
        yield from _products(linear, node, lora)


def _expert_layers(node: OperatorNode) -> Iterator[_Linear]:
    dims = node.dims
    pairs = dims.get("num_local_pairs", dims["num_tokens"] * dims["top_k"])
    num_copies = dims.get("num_local_experts", dims["num_experts"])
    hidden, width = dims["hidden"], dims["intermediate"]
    yield _Linear("moe_up_proj", pairs, 2 * width, hidden, 2, num_copies)
    yield _Linear("moe_down_proj", pairs, hidden, width, 1, num_copies)


def _latent_projections(rank: RankContext, num_tokens: Quantity) -> Iterator[_Linear]:
    model, mla = rank.model, rank.model.mla
    if mla is None:
        return
    num_heads = model.num_heads // rank.layout.tp
    down = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
    yield _Linear("attn_down_proj", num_tokens, down, model.hidden, 2)
    queries = num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    yield _Linear("attn_q_proj", num_tokens, queries, mla.q_lora_rank or model.hidden)
    yield _Linear("attn_out_proj", num_tokens, model.hidden, num_heads * mla.v_head_dim)


def _products(linear: _Linear, beside: OperatorNode, lora: LoraSpec) -> Iterator[OperatorNode]:
    """Yield the product into the rank and the one out of it, in the layers of a node."""
    held = {
        "num_slots": lora.max_loaded * linear.num_copies,
        "num_active": expected_active(linear.rows, lora, linear.num_copies),
        "m": linear.rows,
    }
    parts = {
        "shrink": {"n": linear.num_slices * lora.rank, "k": linear.k},
        "expand": {"n": linear.n, "k": lora.rank},
    }
    for name, widths in parts.items():
        yield OperatorNode(
            role=f"{linear.role}_lora_{name}",
            group=find_operator(_OPERATOR).group,
            section=beside.section,
            operator=_OPERATOR,
            dims={**held, **widths},
            dtype=beside.written_dtype,
            **beside.placement,
            is_group_wide=beside.is_group_wide,
        )
