"""Which forward operators run again in the backward pass, and what is kept because of it.

`full` keeps the input of a layer and runs all of it again. `selective` does so by module: what the
named modules made is not kept, and these run again from what is. Modules and their names are those
of Megatron-Core's `--recompute-modules`: the output of `layernorm`, `moe_act` and `mla_up_proj` is
given up too, that of `core_attention`, `mlp` and `moe` is kept by the operator after it. Or it does
so by operator (`every_other_matmul`). What `selective` means by default is the trainer's to say.
Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022;
Megatron-Core, `transformer/transformer_config.py` and `tensor_parallel/random.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.communication import PlacedGroup, axis_group
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section, place
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.held.saved_tensor import SavedTensor, list_saved
from foretoken.simulator.steps.operator_recompute import (
    EVERY_OTHER_MATMUL,
    before_last_use,
    list_rerun,
    split_outputs,
)

Tensors = tuple[SavedTensor, ...]

RECOMPUTE_MODES = ("none", "selective", "full")
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


def plan_recompute(forward: Nodes, scenario: TrainingScenario, rank: RankContext) -> RecomputePlan:
    """Return what a chunk with these forward operators recomputes.

    Raises:
        InvalidRequestError: there is no such mode, or no such module.

    """
    every = list_saved(forward, scenario)
    saved, rebuilt = split_saved(every, forward, scenario, rank)
    recomputed: Nodes = ()
    if scenario.recompute == "full":
        recomputed = _rerun_layers(forward, every, scenario, rank)
    elif is_by_operator(scenario):
        layers = _layers_again(scenario, rank)
        recomputed = tuple(_again(tuple(list_rerun(forward, every, scenario)), layers))
    elif scenario.recompute == "selective":
        recomputed = _rerun_modules(forward, scenario, rank)
    return RecomputePlan(recomputed=recomputed, saved=saved, rebuilt=rebuilt)


def split_saved(
    saved: Tensors, forward: Nodes, scenario: TrainingScenario, rank: RankContext
) -> tuple[Tensors, Tensors]:
    """Return what a chunk keeps, and what it makes again, of what all operators need.

    Raises:
        InvalidRequestError: there is no such mode, or no such module.

    """
    if scenario.recompute not in RECOMPUTE_MODES:
        message = f"must be one of {', '.join(RECOMPUTE_MODES)}"
        raise InvalidRequestError.of_field("recompute", message)
    if scenario.recompute == "full":
        return _split_layers(saved, forward, scenario, rank)
    if is_by_operator(scenario):
        outputs, again = split_outputs(saved, forward, scenario)
        return _split_layers(saved, forward, scenario, rank, (outputs, again))
    if scenario.recompute == "selective":
        modules = find_modules(selected_modules(scenario))
        return _split_modules(saved, _layers_again(scenario, rank), modules)
    return saved, ()


def selected_modules(scenario: TrainingScenario) -> tuple[str, ...]:
    """Return what `selective` recomputes: what the scenario says, or its trainer."""
    return scenario.recompute_modules or scenario.trainer.resolve().selective_modules


def is_by_operator(scenario: TrainingScenario) -> bool:
    """Tell whether `selective` goes by operator.

    Raises:
        InvalidRequestError: it goes by module too.

    """
    if scenario.recompute != "selective":
        return False
    names = selected_modules(scenario)
    if EVERY_OTHER_MATMUL in names and len(names) > 1:
        message = f"{EVERY_OTHER_MATMUL} chooses among all operators: name it alone"
        raise InvalidRequestError.of_field("recompute_modules", message)
    return names == (EVERY_OTHER_MATMUL,)


def _layers_again(scenario: TrainingScenario, rank: RankContext) -> frozenset[int]:
    """Return the layers of a chunk that recompute."""
    count = scenario.recompute_layers or rank.num_stage_layers
    return frozenset(rank.stage_layers[:count])


def find_modules(names: tuple[str, ...]) -> tuple[RecomputeModule, ...]:
    """Return the modules of these names.

    Raises:
        InvalidRequestError: there is none of a name; the message lists them.

    """
    unknown = [name for name in names if name not in RECOMPUTE_MODULES]
    if unknown:
        known = ", ".join((*RECOMPUTE_MODULES, EVERY_OTHER_MATMUL))
        message = f"no module {', '.join(unknown)}; known: {known}"
        raise InvalidRequestError.of_field("recompute_modules", message)
    return tuple(RECOMPUTE_MODULES[name] for name in names)


def _split_layers(
    saved: Tensors,
    forward: Nodes,
    scenario: TrainingScenario,
    rank: RankContext,
    inside: tuple[Tensors, Tensors] | None = None,
) -> tuple[Tensors, Tensors]:
    """Keep the inputs of layers, and of `inside` the first; without it these inputs alone."""
    layers, stream = _layers_again(scenario, rank), _find_stream(forward)
    if stream is None or not layers:
        return saved, ()
    num_bytes = _stream_bytes(stream)
    if _splits_input(scenario, rank):
        num_bytes //= rank.layout.tp
    kept = SavedTensor(
        role=LAYER_INPUT,
        producer="",
        section=Section.LAYER,
        num_bytes=num_bytes,
        layers=tuple(sorted(layers)),
    )
    outputs, rebuilt = inside or ((), saved)
    return (
        (kept, *_take(outputs, layers, is_inside=True), *_take(saved, layers, is_inside=False)),
        _take(rebuilt, layers, is_inside=True),
    )


def _take(tensors: Tensors, layers: frozenset[int], *, is_inside: bool) -> Tensors:
    """Return tensors in these layers, or those that are not in them."""
    parts = (_cut(tensor, layers)[is_inside] for tensor in tensors)
    return tuple(part for part in parts if part is not None)


def _rerun_layers(
    forward: Nodes, saved: Tensors, scenario: TrainingScenario, rank: RankContext
) -> Nodes:
    """Return all operators of layers that run again, and what brings their inputs together."""
    layers, stream = _layers_again(scenario, rank), _find_stream(forward)
    if stream is None or not layers:
        return ()
    gathers: Nodes = ()
    if _splits_input(scenario, rank):
        group = PlacedGroup.of_rank(axis_group(rank.layout, "tp"), rank)
        role = f"{LAYER_INPUT}_all_gather"
        gathers = (group.collective(stream, role, "all_gather", _stream_bytes(stream)),)
    in_layers = tuple(node for node in forward if node.section is Section.LAYER)
    if scenario.trainer.resolve().ends_recompute_early:
        in_layers = tuple(before_last_use(forward, saved))
    return tuple(_again((*gathers, *in_layers), layers))


def _find_stream(forward: Nodes) -> OperatorNode | None:
    """Return the operator that reads the input of a layer."""
    names = (node for node in forward if node.role == "input_norm")
    return next((node for node in names if node.section is Section.LAYER), None)


def _stream_bytes(stream: OperatorNode) -> int:
    elements = stream.dims["num_tokens"] * stream.dims["hidden"]
    return int(stream.written_dtype.bytes_of(elements))


def _splits_input(scenario: TrainingScenario, rank: RankContext) -> bool:
    """Tell whether every rank of tp keeps its share of an input that all have."""
    is_whole = rank.layout.tp > 1 and not splits_tokens(rank, scenario)
    return scenario.partitions_activations and is_whole


def _split_modules(
    saved: Tensors, layers: frozenset[int], modules: tuple[RecomputeModule, ...]
) -> tuple[Tensors, Tensors]:
    kept, rebuilt = [], []
    for tensor in saved:
        if not any(_is_given_up(tensor, module) for module in modules):
            kept.append(tensor)
            continue
        outside, inside = _cut(tensor, layers)
        kept += [outside] if outside is not None else []
        rebuilt += [inside] if inside is not None else []
    return tuple(kept), tuple(rebuilt)


def _rerun_modules(forward: Nodes, scenario: TrainingScenario, rank: RankContext) -> Nodes:
    modules = find_modules(selected_modules(scenario))
    runs = tuple(
        node
        for node in forward
        if node.section is Section.LAYER and any(module.has(node.role) for module in modules)
    )
    return tuple(_again(runs, _layers_again(scenario, rank)))


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
        kept = [layer for layer in node.layers if layer in layers]
        if kept:
            yield dataclasses.replace(node, group="recompute", **place(kept))
