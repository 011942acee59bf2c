"""Expert parallelism: spread the experts of a layer over the ranks of tp and dp.

Within one engine every rank has all tokens already: it computes its own experts, and the sum that
tensor parallelism ends a layer with adds the ranks up. Engines with a data-parallel attention each
(`dp` above 1) step together: their tokens go to the ranks of the experts and back. Ranks that
expert parallelism leaves over split each expert's width, with `attention_dp` and no expert
parallelism all of them: tokens are gathered then, whatever else is set. In training
`domain/lowering/expert_exchange.py` spreads them, over the ranks of cp too.

vLLM and SGLang gather the tokens of all ranks and scatter the sums where nothing else is set
(`all_gather`). `all_to_all` sends a token once to every rank that has any of its experts;
`deepep_normal` crosses the network once for every node that has, and spreads it over the node's own
links meanwhile; `deepep_low_latency` sends it once for each of its experts, without asking first
how many come. Tokens of experts in FP8 blocks go in that format, with their scales; what comes back
is not quantised.
Source: vLLM 0.19, `fused_moe/layer.py`, `fused_moe/deepep_{ht,ll}_prepare_finalize.py`; SGLang
0.5.9, `layers/moe/token_dispatcher/deepep.py`; deepseek-ai/DeepEP, `csrc/kernels`; DeepSeek-V3,
section 3.4.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.communication import group_dims
from foretoken.domain.lowering.expert_exchange import distribute_experts, expert_limits
from foretoken.domain.lowering.expert_layer import (
    ExpertRouting,
    count_places,
    expert_load,
    larger,
    reached_places,
    rounded,
)
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
)
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.expert_exchange import (
    ExchangePart,
    exchange_facts,
    scaled_bytes,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    experts = stack_of(cases.model).experts
    yield Limit(
        "experts",
        cases.attention_dp & (not experts or cases.training is not None),
        lambda: "attention_dp is for engines that serve a model with experts; leave it out",
    )
    if not experts:
        yield Limit(
            "experts",
            cases.ep > 1,
            lambda: f"{cases.model.name} has no experts to spread; leave it at 1",
        )
    for part in experts:
        if cases.training is None:
            yield from _served_limits(cases, part)
        else:
            yield from expert_limits(cases, cases.training, part)


def _served_limits(cases: LayoutCases, experts: LayerPart) -> Iterator[Limit]:
    ep, num_ranks = cases.ep, cases.tp * cases.dp
    yield Limit(
        "experts",
        experts["num_experts"] % ep != 0,
        lambda: f"{ep} does not divide the {experts['num_experts']} experts of {cases.model.name}",
    )
    yield Limit(
        "experts",
        num_ranks % ep != 0,
        lambda: f"{ep} does not divide the {num_ranks} ranks of tp and dp that hold the experts",
    )
    num_redundant = cases.num_redundant_experts
    yield Limit(
        "experts",
        (num_redundant > 0) & ((ep == 1) | ((experts["num_experts"] + num_redundant) % ep != 0)),
        lambda: (
            f"{experts['num_experts']} experts and {num_redundant} redundant ones cannot be spread"
            f" evenly over {ep}, which must be above 1"
        ),
    )
    width = larger(1, num_ranks // ep)
    is_shared = (ep > 1) | cases.attention_dp
    yield Limit(
        "experts",
        is_shared & (num_ranks % ep == 0) & (experts["intermediate"] % width != 0),
        lambda: (
            f"the {width} ranks that share an expert do not divide its width"
            f" {experts['intermediate']}"
        ),
    )
    yield Limit(
        "experts",
        is_shared & (cases.dp > 1) & (cases.pp > 1),
        lambda: "engines that share experts cannot have pipeline stages; set pp 1",
    )


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    if lowering.options.training is not None:
        return distribute_experts(nodes, lowering)
    if lowering.rank.layout.ep == 1 and not lowering.rank.has_lock_step:
        return nodes
    return tuple(part for node in nodes for part in _spread(node, lowering))


def _spread(node: OperatorNode, lowering: Lowering) -> Iterator[OperatorNode]:
    if node.operator != "moe_experts":
        yield node
        return
    rank, own_tokens = lowering.rank, node.dims["num_tokens"]
    if not rank.has_lock_step:
        yield _local_experts(node, lowering, own_tokens)
        yield _collective(node, rank, "all_reduce", own_tokens, "tp")
        return
    tokens = lowering.shape.num_group_tokens
    if tokens is None:
        tokens = own_tokens * rank.layout.dp
    held = _hold(lowering)
    dispatch, combine = _exchange(node, held, tokens, rank.layout)
    experts = _local_experts(node, held, tokens)
    for shared in (dispatch, experts, combine):
        yield dataclasses.replace(shared, is_group_wide=True)
    if rank.layout.tp > 1:
        # Each rank of an engine brought back its part of the engine's tokens.
        yield _collective(node, rank, "all_gather", own_tokens, "tp")


def _hold(lowering: Lowering) -> Lowering:
    """Return what the experts are lowered for: their devices, where attention has others."""
    num_devices = lowering.options.ffn_devices
    if num_devices == 0:
        return lowering
    layout = ParallelLayout(dp=num_devices, ep=num_devices)
    return dataclasses.replace(lowering, rank=dataclasses.replace(lowering.rank, layout=layout))


def _routing(node: OperatorNode, lowering: Lowering) -> ExpertRouting:
    options = lowering.options
    return ExpertRouting(
        top_k=int(node.dims["top_k"]),
        num_experts=int(node.dims["num_experts"]),
        num_ranks=lowering.rank.layout.ep,
        name=options.moe_routing,
        is_placed=options.has_expert_balancing,
        num_redundant=options.num_redundant_experts,
    )


def _local_experts(node: OperatorNode, lowering: Lowering, tokens: Quantity) -> OperatorNode:
    rank, routing = lowering.rank, _routing(node, lowering)
    load = expert_load(tokens, routing, lowering.options.moe_imbalance_ratio)
    if rank.layout.ep == 1:
        dims = {
            **node.dims,
            "num_tokens": tokens,
            "num_active_experts": load.num_active,
            "intermediate": node.dims["intermediate"] // rank.moe_tp,
        }
        return dataclasses.replace(node, dims=dims)
    dims = {
        "num_tokens": tokens,
        "top_k": routing.top_k,
        "num_experts": routing.num_held,
        "num_local_experts": routing.num_held // rank.layout.ep,
        "num_local_pairs": load.num_pairs,
        "num_active_experts": load.num_active,
        "hidden": node.dims["hidden"],
        "intermediate": node.dims["intermediate"] // rank.moe_tp,
    }
    return dataclasses.replace(node, operator="moe_local_experts", dims=dims)


def _exchange(
    node: OperatorNode, lowering: Lowering, tokens: Quantity, attending: ParallelLayout
) -> tuple[OperatorNode, OperatorNode]:
    """Return what brings the group's tokens to the experts, and what brings the sums back.

    They are on the ranks of the layout `attending`, the experts on those of `lowering`.
    """
    rank, num_apart = lowering.rank, lowering.options.ffn_devices
    if not num_apart and (lowering.options.expert_exchange == "all_gather" or rank.layout.ep == 1):
        return (
            _collective(node, rank, "all_gather", tokens, "dp"),
            _collective(node, rank, "reduce_scatter", tokens, "dp"),
        )
    num_ranks = attending.tp * attending.dp
    both = ParallelLayout(dp=num_ranks + num_apart, cp=attending.cp)
    placed = _collective(node, dataclasses.replace(rank, layout=both), "all_to_all", tokens, "dp")
    routing = _routing(node, lowering)
    load = expert_load(tokens, routing, lowering.options.moe_imbalance_ratio)
    # The busiest rank ends last: it receives, and sends back, more than its own.
    ratio = load.num_pairs * (rank.layout.ep / routing.top_k) / tokens
    copies = _count_copies(node, lowering, placed.dims["num_nodes"])
    if num_apart:
        # Ranks that attend send alike, devices of experts receive what routing says.
        received = rounded(tokens / num_apart * copies * ratio)
        sent = larger(larger(rounded(tokens / num_ranks * copies), received), 1)
    else:
        sent = larger(rounded(tokens / num_ranks * copies * ratio), 1)
    width = node.dims["hidden"]
    bytes_out = rounded(sent * _dispatched_bytes(node, width))
    bytes_back = node.written_dtype.bytes_of(sent * width)
    kernels = "" if num_apart else lowering.options.expert_exchange
    dispatch, combine = (
        dataclasses.replace(
            placed,
            dims={**placed.dims, "message_bytes": message_bytes},
            variant=format_variant(exchange_facts(kernels, routing.num_held, part)) or "",
        )
        for part, message_bytes in zip(ExchangePart, (bytes_out, bytes_back), strict=True)
    )
    return dispatch, dataclasses.replace(combine, role=f"{node.role}_combine")


def _count_copies(node: OperatorNode, lowering: Lowering, num_nodes: int) -> float:
    """Return how often a rank sends a token, to itself too; every rank of an expert gets it."""
    routing = _routing(node, lowering)
    part = stack_of(lowering.rank.model).layers[node.first_layer].feed_forward

    def count(num_places: int) -> float:
        return count_places(routing, num_places, reached_places(part, num_places) if part else 0)

    match lowering.options.expert_exchange:
        case "deepep_low_latency":
            num_copies: float = routing.top_k
        case "deepep_normal" if num_nodes > 1:
            return count(num_nodes)
        case _:
            num_copies = count(routing.num_ranks)
    return num_copies * lowering.rank.moe_tp


def _dispatched_bytes(node: OperatorNode, width: Quantity) -> Quantity:
    """Return the bytes of a token on its way to an expert."""
    if parse_variant(node.variant).get("quant") != "fp8_block":
        return node.written_dtype.bytes_of(width)
    return scaled_bytes(width)


def _collective(
    node: OperatorNode, rank: RankContext, operator: str, tokens: Quantity, axis: str
) -> OperatorNode:
    """Return a collective of tokens over the ranks of an engine (tp) or of all engines (dp)."""
    layout = rank.layout
    if axis == "dp":
        # The ranks of tp and dp together are one group.
        layout = ParallelLayout(tp=layout.tp * layout.dp, cp=layout.cp)
    return OperatorNode(
        role=f"{node.role}_{operator}",
        group="collective",
        section=node.section,
        operator=find_operator(operator).name,
        dims={
            "message_bytes": node.written_dtype.bytes_of(tokens * node.dims["hidden"]),
            **group_dims(layout, "tp", rank.devices_per_node),
        },
        dtype=node.written_dtype,
        **node.placement,
        axis="ep" if axis == "dp" else axis,
    )


PASS = ParallelPass(axis="ep", limits=_limits, rewrite=_rewrite)
