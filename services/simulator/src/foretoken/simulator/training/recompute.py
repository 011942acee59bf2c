"""Which forward operators run again in the backward pass, and what is kept because of it.

`full` keeps the input of a layer and runs all of it again. `selective` does so by module: what the
named modules made is not kept, and these run again from what is. Modules and their names are those
of Megatron-Core's `--recompute-modules`: the output of `layernorm`, `moe_act` and `mla_up_proj` is
given up too, that of `core_attention`, `mlp` and `moe` is kept by the operator after it.
Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022;
Megatron-Core, `transformer/transformer_config.py` and `tensor_parallel/random.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.communication import PlacedGroup
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering import Nodes
from foretoken.domain.placement import axis_group
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.sequence_parallel import splits_tokens
from foretoken.simulator.training.memory.saved_tensor import SavedTensor, list_saved

RECOMPUTE_MODES = ("none", "selective", "full")
_DEFAULT_MODULES = ("core_attention",)
# Role of the layer's own input where the whole layer runs again.
LAYER_INPUT = "layer_input"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeModule:
    """Operators that run again together, by the beginnings of their roles."""

    prefixes: tuple[str, ...]
    keeps_output: bool = True

    def has(self, role: str) -> bool:
        """Return whether an operator of that role belongs to the module."""
        return role.startswith(self.prefixes)


RECOMPUTE_MODULES: Mapping[str, RecomputeModule] = {
    "core_attention": RecomputeModule(
        prefixes=(
            *("attention_prefill", "mla_prefill", "attn_scores", "attn_softmax"),
            *("attn_dropout", "attn_values", "attn_context"),
        )
    ),
    "layernorm": RecomputeModule(
        prefixes=("input_norm", "post_attention_norm"), keeps_output=False
    ),
    "mlp": RecomputeModule(prefixes=("mlp_up", "mlp_gate", "mlp_activation", "mlp_down")),
    "moe": RecomputeModule(prefixes=("moe_", "shared_")),
    "moe_act": RecomputeModule(prefixes=("moe_activation",), keeps_output=False),
    "shared_experts": RecomputeModule(prefixes=("shared_up", "shared_activation", "shared_down")),
    "mla_up_proj": RecomputeModule(
        prefixes=(
            *("q_latent_norm", "kv_latent_norm", "attn_q_proj", "attn_kv_proj"),
            *("attn_rope", "attn_key_concat"),
        ),
        keeps_output=False,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePlan:
    """What one micro batch of a chunk runs again, and what it keeps until then.

    `recomputed` are forward operators, collectives included, in the group `recompute`; `saved` is
    kept from the forward to the backward pass, `rebuilt` is there only while its layer runs
    backward.
    """

    recomputed: Nodes = ()
    saved: tuple[SavedTensor, ...] = ()
    rebuilt: tuple[SavedTensor, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes that one micro batch keeps."""
        return sum(tensor.total_bytes for tensor in self.saved)


def plan_recompute(forward: Nodes, scenario: TrainingScenario, rank: RankContext) -> RecomputePlan:
    """Return what a chunk with these forward operators recomputes.

    Raises:
        InvalidRequestError: there is no such mode, or no such module.

    """
    saved = list_saved(forward, scenario)
    if scenario.recompute not in RECOMPUTE_MODES:
        message = f"must be one of {', '.join(RECOMPUTE_MODES)}"
        raise InvalidRequestError.of_field("recompute", message)
    if scenario.recompute == "none":
        return RecomputePlan(saved=saved)
    count = scenario.recompute_layers or rank.num_stage_layers
    layers = frozenset(rank.stage_layers[:count])
    if scenario.recompute == "full":
        return _plan_layers(forward, saved, layers, scenario, rank)
    names = scenario.recompute_modules or _DEFAULT_MODULES
    return _plan_modules(forward, saved, layers, find_modules(names))


def find_modules(names: tuple[str, ...]) -> tuple[RecomputeModule, ...]:
    """Return the modules of these names.

    Raises:
        InvalidRequestError: there is none of a name; the message lists them.

    """
    unknown = [name for name in names if name not in RECOMPUTE_MODULES]
    if unknown:
        message = f"no module {', '.join(unknown)}; known: {', '.join(RECOMPUTE_MODULES)}"
        raise InvalidRequestError.of_field("recompute_modules", message)
    return tuple(RECOMPUTE_MODULES[name] for name in names)


def _plan_layers(
    forward: Nodes,
    saved: tuple[SavedTensor, ...],
    layers: frozenset[int],
    scenario: TrainingScenario,
    rank: RankContext,
) -> RecomputePlan:
    stream = next(
        (n for n in forward if n.role == "input_norm" and n.section is Section.LAYER), None
    )
    if stream is None or not layers:
        return RecomputePlan(saved=saved)
    num_bytes = int(
        stream.written_dtype.bytes_of(stream.dims["num_tokens"] * stream.dims["hidden"])
    )
    gathers: Nodes = ()
    is_whole = rank.layout.tp > 1 and not splits_tokens(rank, scenario)
    if scenario.partitions_activations and is_whole:
        group = PlacedGroup.of_rank(axis_group(rank.layout, "tp"), rank)
        gathers = (group.collective(stream, f"{LAYER_INPUT}_all_gather", "all_gather", num_bytes),)
        num_bytes //= rank.layout.tp
    kept = SavedTensor(
        role=LAYER_INPUT,
        producer="",
        section=Section.LAYER,
        num_bytes=num_bytes,
        layers=tuple(sorted(layers)),
    )
    in_layers = (node for node in forward if node.section is Section.LAYER)
    parts = [_cut(tensor, layers) for tensor in saved]
    return RecomputePlan(
        recomputed=tuple(_again((*gathers, *in_layers), layers)),
        saved=(kept, *(outside for outside, _ in parts if outside is not None)),
        rebuilt=tuple(inside for _, inside in parts if inside is not None),
    )


def _plan_modules(
    forward: Nodes,
    saved: tuple[SavedTensor, ...],
    layers: frozenset[int],
    modules: tuple[RecomputeModule, ...],
) -> RecomputePlan:
    kept, rebuilt = [], []
    for tensor in saved:
        outside, inside = _cut(tensor, layers)
        if not any(_is_given_up(tensor, module) for module in modules):
            kept.append(tensor)
            continue
        kept += [outside] if outside is not None else []
        rebuilt += [inside] if inside is not None else []
    runs = tuple(
        node
        for node in forward
        if node.section is Section.LAYER and any(module.has(node.role) for module in modules)
    )
    return RecomputePlan(
        recomputed=tuple(_again(runs, layers)), saved=tuple(kept), rebuilt=tuple(rebuilt)
    )


def _is_given_up(tensor: SavedTensor, module: RecomputeModule) -> bool:
    """Return whether a module makes the tensor again, so that nobody has to keep it."""
    if not module.has(tensor.producer):
        return False
    return not module.keeps_output or module.has(tensor.role)


def _cut(
    tensor: SavedTensor, layers: frozenset[int]
) -> tuple[SavedTensor | None, SavedTensor | None]:
    """Return the tensor outside of these layers, and in them."""
    if tensor.section is not Section.LAYER:
        return tensor, None
    inside = tuple(layer for layer in tensor.layers if layer in layers)
    outside = tuple(layer for layer in tensor.layers if layer not in layers)
    return (
        dataclasses.replace(tensor, layers=outside) if outside else None,
        dataclasses.replace(tensor, layers=inside) if inside else None,
    )


def _again(nodes: Nodes, layers: frozenset[int]) -> Iterator[OperatorNode]:
    """Yield the operators in those layers, as what runs again."""
    for node in nodes:
        stop = node.first_layer + node.repeat * node.layer_stride
        kept = [i for i in range(node.first_layer, stop, node.layer_stride) if i in layers]
        if kept:
            yield dataclasses.replace(
                node, group="recompute", first_layer=kept[0], repeat=len(kept)
            )
