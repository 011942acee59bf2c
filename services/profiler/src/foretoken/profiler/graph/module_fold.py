"""Fold the times of calls to the modules that FASOP's columns name.

A column is an interval: from the end of the module before to the module's own end, in the order of
the calls. So `attn_q` holds the norm before it, `attn_o` rotary embedding and attention,
`mlp_down` the product with the gate. What a layer runs after its last module, the residual sum, is
in its first one. All before the first layer is `embed`, all after the last `lm_head`, with the
final norm. Projections that a model fuses are one module (`qkv_proj`, `gate_up_proj`), and a block
of experts with its router is `mlp`. A layer whose modules have other names is one module, `layer`.

Source of the columns: `ModuleProfiler` in `fasop/make_profiledb/profile_fx.py` of
https://github.com/ai-computing/aicomp.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from foretoken.domain.measurements.training_truth import ModuleTime
from foretoken.profiler.graph.trace import TracedCall

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.(.*))?$")
_EMBEDDING, _HEAD = "embed", "lm_head"
_OUTSIDE = -1
# Names of modules within a layer. Source: the modelling files of transformers 4.57 and 5.
_COLUMNS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "qkv_proj",
    "query_key_value": "qkv_proj",
    "Wqkv": "qkv_proj",
    "attn.c_attn": "qkv_proj",
    "o_proj": "attn_o",
    "out_proj": "attn_o",
    "self_attn.dense": "attn_o",
    "attention.dense": "attn_o",
    "self_attention.dense": "attn_o",
    "attn.c_proj": "attn_o",
    "gate_proj": "mlp_gate",
    "up_proj": "mlp_up",
    "gate_up_proj": "gate_up_proj",
    "c_fc": "mlp_up",
    "fc1": "mlp_up",
    "dense_h_to_4h": "mlp_up",
    "act_fn": "mlp_act_fn",
    "act": "mlp_act_fn",
    "activation_fn": "mlp_act_fn",
    "fc_in": "mlp_up",
    "feed_forward.w1": "mlp_gate",
    "feed_forward.w3": "mlp_up",
    "down_proj": "mlp_down",
    "fc_out": "mlp_down",
    "feed_forward.w2": "mlp_down",
    "fc2": "mlp_down",
    "dense_4h_to_h": "mlp_down",
    "mlp.c_proj": "mlp_down",
}
_EXPERT_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
_EXPERTS = ("experts", "expert")
# Layers that differ by less differ by a sum of gradients that the last one does not need.
_ALIKE_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class ModuleSum:
    """The times of a module's calls together, in µs."""

    forward_us: float
    backward_us: float


# By layer (-1: outside of layers) and column, in the order of a forward pass.
ModuleSums = Mapping[tuple[int, str], ModuleSum]


def fold_calls(
    calls: Sequence[TracedCall], times_of: Callable[[TracedCall], tuple[float, float]]
) -> ModuleSums:
    """Return the times of modules; `times_of` gives µs forward and backward of a call."""
    sums: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for layer, members in _by_layer(calls):
        columns = _columns_of_layer(members) if layer >= 0 else None
        for index, call in enumerate(members):
            column = columns[index] if columns else _EMBEDDING if layer == _OUTSIDE else _HEAD
            sums[max(layer, _OUTSIDE), column].append(times_of(call))
    return {
        key: ModuleSum(math.fsum(f for f, _ in times), math.fsum(b for _, b in times))
        for key, times in sums.items()
    }


def add_missing_layers(sums: ModuleSums, layer_kinds: Sequence[object]) -> ModuleSums:
    """Return the sums with layers that were not built: the mean of the built ones of their kind.

    `layer_kinds` are those of all layers. A layer of a kind that was not built stays out.
    """
    built = sorted({layer for layer, _ in sums if layer >= 0})
    found = dict(sums)
    for layer, kind in enumerate(layer_kinds):
        alike = [other for other in built if layer_kinds[other] == kind]
        if layer in built or not alike:
            continue
        columns = dict.fromkeys(column for other, column in sums if other in alike)
        for column in columns:
            parts = [sums[other, column] for other in alike if (other, column) in sums]
            found[layer, column] = _mean(parts)
    return found


def module_times(
    sums: ModuleSums, micro_batch_size: int, *, is_split: bool
) -> Iterator[ModuleTime]:
    """Yield the times of modules; those alike in all layers are listed once.

    With `is_split` layers have the shapes of one of several ranks, the head still all of its own.
    """
    by_column: dict[str, dict[int, ModuleSum]] = {}
    for (layer, column), found in sums.items():
        by_column.setdefault(column, {})[layer] = found
    layers = {layer for layer, _ in sums if layer >= 0}
    for column, by_layer in by_column.items():
        is_alike = set(by_layer) >= layers and _are_alike(list(by_layer.values()))
        stated = {-1: _mean(list(by_layer.values()))} if is_alike else by_layer
        for layer, found in stated.items():
            yield ModuleTime(
                module=column,
                micro_batch_size=micro_batch_size,
                forward_us=found.forward_us,
                backward_us=found.backward_us,
                layer=layer,
                is_whole=is_split and column == _HEAD,
            )


def _are_alike(sums: Sequence[ModuleSum]) -> bool:
    passes = ([found.forward_us for found in sums], [found.backward_us for found in sums])
    return all(max(times) - min(times) <= _ALIKE_RATIO * max(times) for times in passes)


def _mean(sums: Sequence[ModuleSum]) -> ModuleSum:
    return ModuleSum(
        fmean(found.forward_us for found in sums), fmean(found.backward_us for found in sums)
    )


def layer_in_path(path: str) -> tuple[int, str]:
    """Return the layer that the path of a module names, -1 for none, and the path inside of it."""
    match = _LAYER.search(path)
    return (int(match[1]), match[2] or "") if match else (_OUTSIDE, "")


def _by_layer(calls: Sequence[TracedCall]) -> Iterator[tuple[int, list[TracedCall]]]:
    """Yield layers in order: -1 for what runs before them, -2 for what runs after."""
    places = [place for place, call in enumerate(calls) if layer_in_path(call.module)[0] >= 0]
    if not places:
        yield _OUTSIDE, list(calls)
        return
    first, last = places[0], places[-1] + 1
    yield _OUTSIDE, list(calls[:first])
    layers: dict[int, list[TracedCall]] = {}
    present = layer_in_path(calls[first].module)[0]
    for call in calls[first:last]:
        # What runs outside between two layers goes with the one before.
        layer, _ = layer_in_path(call.module)
        present = layer if layer >= 0 else present
        layers.setdefault(present, []).append(call)
    yield from layers.items()
    yield _OUTSIDE - 1, list(calls[last:])


def _columns_of_layer(calls: Sequence[TracedCall]) -> list[str]:
    """Return the column of each call of a layer: the next module that ends, else the first."""
    insides = [layer_in_path(call.module)[1] for call in calls]
    blocks = {
        path.split(".")[0]
        for path in insides
        if path.split(".")[0] in _EXPERT_BLOCKS and set(path.split(".")) & set(_EXPERTS)
    }
    ends: dict[str, int] = {}
    for index, path in enumerate(insides):
        column = "mlp" if path.split(".")[0] in blocks else _column_of(path)
        if column:
            ends[column] = index
    # Without the ends of its halves nothing says where one begins.
    if "attn_o" not in ends or not {"mlp", "mlp_down"} & set(ends):
        return ["layer"] * len(calls)
    ordered = sorted(ends.items(), key=lambda item: item[1])
    found = []
    for index in range(len(calls)):
        following = (column for column, end in ordered if end >= index)
        found.append(next(following, ordered[0][0]))
    return found


def _column_of(path: str) -> str:
    parts = path.split(".")
    return _COLUMNS.get(".".join(parts[-2:])) or _COLUMNS.get(parts[-1], "")
