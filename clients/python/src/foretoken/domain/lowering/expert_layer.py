"""The mixture-of-experts MLP of a layer: how many experts are reached, and the work.

A router spreads tokens `balanced`, over all ranks alike, or by `power_law_A`: the experts' shares
are drawn with a density that falls as x^-A. Latencies in the catalog were measured under such
routings, by the same law. It gives every expert its share of the tokens, as far as they go; with
`uniform` and `lognormal_S` each token draws its experts instead, each as likely or by popularity,
and some rank gets more than others (see `drawn_routing`).
Source: AIConfigurator, collector/helper.py (`balanced_logits`, `power_law_logits_v3`).

Engines run all experts as one operator. Training frameworks sort tokens by expert, multiply in
groups and put the results back, each with a backward pass of its own.
Source: Megatron-Core, `transformer/moe` (`token_dispatcher.py`, `experts.py`).
"""

import dataclasses
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import fmean

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.drawn_routing import (
    RankChances,
    busiest_load,
    draw_chances,
    routing_deviation,
    uniform_imbalance,
)
from foretoken.domain.lowering.expert_placement import place_balanced, place_in_order
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import trainer_of, training_projection
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.units import Quantity, ceil_divide, smaller

_UNIFORM, _BALANCED = "uniform", "balanced"
_EVEN = ("", _BALANCED, _UNIFORM)
_DRAWN_AS = "power_law_1.01"
_POWER_LAW = re.compile(r"power_law_(\d+(?:\.\d+)?)")
# Shares of a power law between 1 and 0.8 of the tokens; for so few tokens that not every expert can
# get one, between 0.01 and 2. Source: as above.
_HIGH_SHARE, _FEW_SHARES = 0.8, (0.01, 2.0)
# Experts drawn for one expectation, in layers of as many as a model has.
_NUM_DRAWN = 4096
_SEED = 0
# PyTorch adds rows up by index at 0.25 TB/s on H200 where one kernel for a token's has 2.93 (2.5 as
# predicted). Source: tile-ai/TileOPs, pull request 608, 2,048 tokens of 4,096 features, two experts
# each. On H20, too, 67 million values take 2.07 ms (flagos-ai/FlagGems, pull request 4502).
_INDEX_SUM_SHARE = 10.0
# Kernels of a router besides its product, forward and backward: scores, groups of experts where the
# model has any, the choice, its map, the loss that balances experts. Source: Megatron-Core 0.16,
# `moe/router.py` and `moe_utils.py`, run on a CPU with every operator of PyTorch counted that
# launches a kernel: DeepSeek-V3's sigmoid with groups and a bias, Qwen3's softmax, both in fp32.
_ROUTER_KERNELS, _GROUPED_ROUTER_KERNELS = (22, 14), (43, 30)
# What brings tokens into the order of experts: six kernels count them, four copies take the counts
# to the host, three make a map of rows, two those of what came from other ranks, one moves rows.
# Tokens that are sent once are counted by the exchange. Source: as above, `token_dispatcher.py`;
# Transformer Engine, `pytorch/permutation.py`.
_PERMUTE_KERNELS, _SENT_ONCE_KERNELS = (16, 1), (7, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRouting:
    """A layer's router: every token goes to `top_k` of `num_experts`, spread over `num_ranks`.

    With `is_placed` a load balancer says which rank holds which (see `expert_placement`), and
    `num_redundant` copies of those with most tokens.
    """

    top_k: int
    num_experts: int
    num_ranks: int = 1
    name: str = "balanced"
    is_placed: bool = False
    num_redundant: int = 0

    @property
    def num_held(self) -> int:
        """Experts on all ranks together, copies included."""
        return self.num_experts + self.num_redundant


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """On the busiest rank: pairs of a token and an expert, and experts with any token."""

    num_pairs: Quantity
    num_active: Quantity


def expert_load(
    num_tokens: Quantity, routing: ExpertRouting, imbalance_ratio: float = 1.0
) -> ExpertLoad:
    """Return the expected load of the busiest rank, in whole numbers of at least 1.

    It has `imbalance_ratio` times the mean, or what the routing leads to where that is more.

    Raises:
        InvalidRequestError: the routing is not known.

    """
    num_local = routing.num_held // routing.num_ranks
    check_routing(routing.name)
    imbalance: Quantity = imbalance_ratio
    if routing.name == _UNIFORM:
        drawn_ratio = uniform_imbalance(
            num_tokens, routing.top_k, routing.num_held, routing.num_ranks
        )
        imbalance = -smaller(-drawn_ratio, -imbalance_ratio)
    ratio = smaller(imbalance * (routing.top_k / routing.num_held), 1.0)
    pairs = rounded(num_tokens * (routing.top_k / routing.num_ranks) * imbalance)
    active = rounded(num_local * (1 - (1 - ratio) ** (num_tokens * 1.0)))
    if routing.name not in _EVEN:
        drawn = _each(num_tokens, routing)
        pairs, active = larger(pairs, drawn.num_pairs), drawn.num_active
    # The busiest rank gets no token more often than it has experts for it.
    pairs = smaller(larger(pairs, 1), num_tokens * min(routing.top_k, num_local))
    return ExpertLoad(num_pairs=pairs, num_active=smaller(larger(active, 1), pairs))


def count_places(routing: ExpertRouting, num_places: int, most: int = 0) -> float:
    """Return on how many of the places that hold its experts a token is expected to be.

    Places (ranks or nodes) hold equally many experts. A token goes to `top_k` different ones, each
    set of them as likely as any other; of `most` places, drawn before, where that is not 0.
    Source of that limit: DeepSeek-V3 Technical Report, section 2.1.2, node-limited routing.
    """
    num_local = routing.num_experts // num_places
    num_open = min(num_places, most or num_places)
    # Fewer places than hold `top_k` experts are no choice.
    num_open = max(num_open, int(ceil_divide(routing.top_k, num_local)))
    num_experts = num_open * num_local
    missed = math.comb(num_experts - num_local, routing.top_k)
    return num_open * (1 - missed / math.comb(num_experts, routing.top_k))


def reached_places(part: LayerPart, num_places: int) -> int:
    """Return on how many places at most the experts of a token are; 0 where nothing limits them.

    Places hold groups of experts whole, or parts of one group each.
    Source: DeepSeek-V3 Technical Report, section 2.1.2; `n_group` and `topk_group` of its config.
    """
    groups, reached = part["num_groups"], part["top_k_groups"]
    if reached >= groups:
        return 0
    return int(ceil_divide(reached * max(num_places, groups), groups))


def rounded(value: Quantity) -> Quantity:
    """Return the nearest whole numbers, as integers; of halves the upper."""
    upper = (value + 0.5) // 1
    return upper.astype("int64") if hasattr(upper, "astype") else int(upper)


def larger(first: Quantity, second: Quantity) -> Quantity:
    """Return the larger of two counts, elementwise for arrays."""
    return (first + second + abs(first - second)) // 2


def is_routing(name: str) -> bool:
    """Return whether a spread of tokens over experts goes by this name."""
    is_even_or_law = name in _EVEN or _POWER_LAW.fullmatch(name) is not None
    return is_even_or_law or routing_deviation(name) is not None


def check_routing(name: str) -> None:
    """Refuse a spread of tokens over experts that there is not.

    Raises:
        InvalidRequestError: there is no such spread.

    """
    if not is_routing(name):
        problem = f"{name!r} is not balanced, uniform, power_law_A or lognormal_S"
        raise InvalidRequestError.of_field("moe_routing", problem)


def measured_routing(name: str) -> str:
    """Return under which spread latencies were measured that hold for this one.

    Experts that are all as likely take what balanced ones with as many tokens and experts hit take;
    nobody timed those drawn by popularity. Few tokens that hit as many experts take as long under
    each: as TensorRT-LLM's tables of gpt-oss-120b on H200, learned one by one, have it, 8 tokens
    and 23 experts 161 us (balanced), 159 and 166 (power laws 1.01, 1.2), 64 and 74 389, 385 and
    388; where one expert has many, as of 1,024 tokens, balanced ones take a quarter less.
    """
    if routing_deviation(name) is not None:
        return _DRAWN_AS
    return _BALANCED if name == _UNIFORM else name


def _each(num_tokens: Quantity, routing: ExpertRouting) -> ExpertLoad:
    """Return the load of an uneven spread, one by one for a column of token counts."""
    is_drawn = routing_deviation(routing.name) is not None
    load_of = _drawn_load if is_drawn else _power_law_load
    if not hasattr(num_tokens, "tolist"):
        return load_of(int(num_tokens), routing)
    pairs, active = num_tokens * 0, num_tokens * 0
    for place, count in enumerate(num_tokens.reshape(-1).tolist()):
        load = load_of(int(count), routing)
        pairs.flat[place], active.flat[place] = load.num_pairs, load.num_active
    return ExpertLoad(num_pairs=pairs, num_active=active)


@lru_cache(maxsize=1 << 14)
def _power_law_load(num_tokens: int, routing: ExpertRouting) -> ExpertLoad:
    num_pairs = num_tokens * routing.top_k
    is_few = num_pairs <= routing.num_experts
    low, high = _FEW_SHARES if is_few else (1.0, max(1.0, _HIGH_SHARE * num_tokens))
    law = _POWER_LAW.fullmatch(routing.name)
    exponent = 1 - float(law[1] if law else 0)
    layers = _uniform_draws(routing.num_experts)
    total_pairs = total_active = 0
    for drawn in layers:
        shares = _invert(drawn, low, high, exponent)
        scale = num_pairs / sum(shares)
        counts = [min(round(share * scale), num_tokens) for share in shares]
        busiest = _busiest(counts, num_pairs, routing)
        total_pairs, total_active = total_pairs + busiest[0], total_active + busiest[1]
    return ExpertLoad(
        num_pairs=round(total_pairs / len(layers)), num_active=round(total_active / len(layers))
    )


@lru_cache(maxsize=1 << 14)
def _drawn_load(num_tokens: int, routing: ExpertRouting) -> ExpertLoad:
    loads = [busiest_load(chances, num_tokens) for chances in _chances_by_layer(routing)]
    return ExpertLoad(
        num_pairs=round(fmean(pairs for pairs, _ in loads)),
        num_active=round(fmean(active for _, active in loads)),
    )


@lru_cache(maxsize=64)
def _chances_by_layer(routing: ExpertRouting) -> tuple[RankChances, ...]:
    layers = draw_chances(
        routing_deviation(routing.name) or 0.0, routing.top_k, routing.num_experts
    )
    return tuple(RankChances.of(_placed(chances, routing)) for chances in layers)


def _placed(loads: Sequence[float], routing: ExpertRouting) -> list[list[float]]:
    if routing.is_placed:
        return place_balanced(loads, routing.num_ranks, routing.num_redundant)
    return place_in_order(loads, routing.num_ranks)


@cache
def _uniform_draws(num_experts: int) -> tuple[tuple[float, ...], ...]:
    source = random.Random(_SEED)  # noqa: S311 - a fixed sample, not a secret
    num_layers = max(1, _NUM_DRAWN // num_experts)
    return tuple(tuple(source.random() for _ in range(num_experts)) for _ in range(num_layers))


def _invert(drawn: tuple[float, ...], low: float, high: float, exponent: float) -> list[float]:
    """Return values whose density falls as x**(exponent - 1) between `low` and `high`."""
    if exponent == 0:
        return [low * (high / low) ** value for value in drawn]
    start, span = low**exponent, high**exponent - low**exponent
    return [(span * value + start) ** (1 / exponent) for value in drawn]


def _busiest(counts: list[int], num_pairs: int, routing: ExpertRouting) -> tuple[int, int]:
    """Return pairs and active experts of the rank with most of them.

    What rounding and capping left over goes to experts without any token, rank by rank.
    """
    missing = (num_pairs - sum(counts)) / routing.num_ranks
    fullest = max(_placed(counts, routing), key=sum)
    num_empty = fullest.count(0)
    num_filled = min(num_empty, max(0, round(missing)))
    return round(sum(fullest) + missing), len(fullest) - num_empty + num_filled


_EXPERT_ROLES = (
    "moe_permute",
    "moe_up_proj_quantize",
    "moe_up_proj",
    "moe_activation",
    "moe_down_proj_quantize",
    "moe_down_proj",
    "moe_unpermute",
)


def is_expert_node(node: OperatorNode) -> bool:
    """Return whether an operator works on tokens sorted by expert, in training."""
    return node.role in _EXPERT_ROLES


def lower_experts(builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
    """Yield router, experts and shared experts of a layer.

    Choosing experts, in groups or not, is part of the router; its kernels are not measured apart.
    """
    model, tokens = builder.model, builder.shape.num_tokens
    num_choices = part["num_experts"] + part["num_null_experts"]
    dims = {"m": tokens, "n": num_choices, "k": model.hidden}
    router = builder.layer("moe_router", "gemm", dims)
    if part["has_fp32_router"] and builder.options.training is None:
        router = dataclasses.replace(router, dtype=DType.FP32)
    yield router
    latent = part["latent"]
    if latent:
        dims = {"m": tokens, "n": latent, "k": model.hidden}
        yield builder.layer("moe_latent_down_proj", "gemm", dims)
    if builder.options.training is None:
        yield _served_experts(builder, part)
    else:
        yield from _trained_experts(builder, part)
    if latent:
        dims = {"m": tokens, "n": model.hidden, "k": latent}
        yield builder.layer("moe_latent_up_proj", "gemm", dims)
    if part["shared_intermediate"]:
        yield from _shared_experts(builder, part)


def _shared_experts(builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
    tokens, hidden = builder.shape.num_tokens, builder.model.hidden
    width = part["shared_intermediate"]
    dims = {"m": tokens, "n": (1 + part["is_gated"]) * width, "k": hidden}
    yield from _projection(builder, "shared_up_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": tokens, "intermediate": width}
    operator = "silu_mul" if part["is_gated"] else "gelu"
    yield builder.layer("shared_activation", operator, dims, Partition.WIDTH)
    # In an engine its sum over ranks is the experts': one reduction serves both.
    dims = {"m": tokens, "n": hidden, "k": width}
    yield from _projection(builder, "shared_down_proj", dims, Partition.ROW)
    if builder.options.training is not None:
        yield builder.residual("shared_residual")
    elif part["has_shared_gate"]:
        # Engines do not fuse its products. Source: SGLang 0.5.9, srt/models/qwen2_moe.py
        # (_forward_shared_experts); vLLM 0.24, models/qwen2_moe.py (Qwen2MoeMLP.forward).
        yield builder.layer("shared_gate_proj", "gemm", {"m": tokens, "n": 1, "k": hidden})
        dims = {"num_tokens": tokens, "intermediate": hidden}
        yield builder.layer("shared_gate_product", "product", dims)
    if builder.options.training is None:
        # Source: TensorRT-LLM 1.2, _torch/models/modeling_deepseekv3.py (Deepseekv3MoE.forward).
        yield builder.residual("shared_sum")


def _projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    if builder.options.training is None:
        yield builder.projection(role, dims, partition, builder.quantization.shared_experts)
    else:
        yield from training_projection(builder, role, dims, partition)


def _served_experts(builder: NodeBuilder, part: LayerPart) -> OperatorNode:
    tokens, name = builder.shape.num_tokens, builder.options.moe_routing
    routing = ExpertRouting(top_k=part["top_k"], num_experts=part["num_experts"], name=name)
    dims = {
        "num_tokens": tokens,
        "top_k": part["top_k"],
        "num_experts": part["num_experts"],
        "num_active_experts": expert_load(tokens, routing).num_active,
        "hidden": part["latent"] or builder.model.hidden,
        "intermediate": _gated_width(part),
    }
    node = builder.layer("moe_experts", "moe_experts", dims, Partition.WIDTH)
    return builder.stored(node, builder.quantization.experts, routing=measured_routing(name))


def _gated_width(part: LayerPart) -> int:
    """Return the width of experts with a gate that are as large: operators have three matrices."""
    return part["intermediate"] if part["is_gated"] else 2 * part["intermediate"] // 3


def _trained_experts(builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
    tokens, width = builder.shape.num_tokens, part["intermediate"]
    hidden = part["latent"] or builder.model.hidden
    rows = tokens * part["top_k"]
    dims = {"num_rows": tokens, "width": part["num_experts"] + part["num_null_experts"]}
    yield _router(builder.layer("moe_router_softmax", "softmax", dims), trainer_of(builder), part)
    routed = {"num_tokens": tokens, "top_k": part["top_k"], "hidden": hidden}
    permute = builder.layer("moe_permute", "moe_permute", routed)
    yield dataclasses.replace(permute, num_kernels=_permute_kernels(trainer_of(builder)))
    groups = {"num_groups": part["num_experts"], "m": rows}
    dims = {**groups, "n": (1 + part["is_gated"]) * width, "k": hidden}
    yield from _grouped_gemm(builder, "moe_up_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": rows, "intermediate": width}
    operator = "silu_mul" if part["is_gated"] else "gelu"
    yield builder.layer("moe_activation", operator, dims, Partition.WIDTH)
    dims = {**groups, "n": hidden, "k": width}
    yield from _grouped_gemm(builder, "moe_down_proj", dims, Partition.ROW)
    unpermute = builder.layer("moe_unpermute", "moe_unpermute", routed)
    yield dataclasses.replace(unpermute, share=_sum_share(trainer_of(builder)))


def _router(softmax: OperatorNode, trainer: TrainerProfile, part: LayerPart) -> OperatorNode:
    """Return the choice of experts: one kernel, or a chain of some that move as much each."""
    if trainer.router != "unfused":
        return softmax
    kernels = _GROUPED_ROUTER_KERNELS if part["num_groups"] else _ROUTER_KERNELS
    return dataclasses.replace(softmax, num_kernels=kernels, share=float(kernels[0]))


def backward_of_router(node: OperatorNode) -> OperatorNode:
    """Return the gradient of the choice of experts."""
    share = float(node.num_kernels[1])
    return dataclasses.replace(
        node, role=f"{node.role}_backward", phase=Phase.BACKWARD, share=share
    )


def _permute_kernels(trainer: TrainerProfile) -> tuple[int, int]:
    if trainer.router == "captured" or not trainer.waits_for_counts:
        return 1, 1
    return _SENT_ONCE_KERNELS if trainer.sends_tokens_once else _PERMUTE_KERNELS


def _sum_share(trainer: TrainerProfile) -> float:
    """Return how long rows take to be summed up by token, in multiples of one kernel for that."""
    return 1.0 if trainer.fuses_permutation else _INDEX_SUM_SHARE


def backward_of_permutation(node: OperatorNode, trainer: TrainerProfile) -> OperatorNode:
    """Return the gradient: copies' are summed up by token, and each gets that of a sum as it is."""
    share = _sum_share(trainer) if node.operator == "moe_permute" else 1.0
    return dataclasses.replace(
        node, role=f"{node.role}_backward", phase=Phase.BACKWARD, share=share
    )


def _grouped_gemm(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    """Yield the products of all experts, in 8 bit after their input has been converted."""
    node = builder.layer(role, "grouped_gemm", dims, partition)
    if builder.options.dtype is DType.FP8:
        conversion = {"num_tokens": dims["m"], "hidden": dims["k"]}
        yield builder.layer(f"{role}_quantize", "quantize", conversion)
        node = dataclasses.replace(
            node, dtype=DType.FP8, output_dtype=builder.activation_dtype, weight_bits=16.0
        )
    yield node


def backward_of_grouped_gemm(node: OperatorNode) -> Iterator[OperatorNode]:
    """Yield the gradients of a grouped GEMM: of its input, and of every group's weight."""
    n, k = node.dims["n"], node.dims["k"]
    dims = {**node.dims, "n": k, "k": n}
    yield dataclasses.replace(node, role=f"{node.role}_dgrad", dims=dims)
    yield dataclasses.replace(node, role=f"{node.role}_wgrad", operator="grouped_gemm_wgrad")
