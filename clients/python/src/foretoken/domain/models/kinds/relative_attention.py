"""Attention with a learned bias by distance, and short convolutions around it (Inkling)."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.recurrent import lower_states
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.attention import KIND as ATTENTION
from foretoken.domain.models.kinds.attention import lower_attention
from foretoken.domain.models.kinds.spec.dims import local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)
from foretoken.domain.models.kinds.spec.recurrent import (
    CONV_KERNEL,
    WHOLE_SEQUENCES,
    convolved_bytes,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    yield from ATTENTION.weights(d, model)
    yield Weights(total=model.hidden * d["num_heads"] * d["distance_dim"], part="attention")
    # Convolutions of keys, values and the outputs of both halves of the layer.
    channels = 2 * (d["num_kv_heads"] * d["head_dim"] + model.hidden)
    yield Weights(total=d["distance_dim"] * d["max_distance"] + channels * d["conv_kernel"])


def _state(d: Dims, tp: int) -> RequestState:
    channels = 2 * (local_heads(d["num_kv_heads"], tp) * d["head_dim"] + d["hidden"])
    kept = ATTENTION.state(d, tp)
    return dataclasses.replace(kept, request_bytes=convolved_bytes(d, channels))


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    dims = {"m": tokens, "n": part["num_heads"] * part["distance_dim"], "k": hidden}
    yield builder.projection(
        "attn_distance_proj", dims, Partition.COLUMN, builder.quantization.attention
    )
    of_heads = 2 * part["num_kv_heads"] * part["head_dim"]
    for role, channels, partition in (
        ("kv_conv", of_heads, Partition.STATES),
        ("attn_conv", hidden, Partition.REPLICATED),
        ("mlp_conv", hidden, Partition.REPLICATED),
    ):
        sizes = {"channels": channels, "kernel_size": part["conv_kernel"]}
        yield from lower_states(builder, role=role, partition=partition, causal_conv=sizes)
    yield from lower_attention(builder, parts)


KIND = KindSpec(
    name="relative_attention",
    place=Place.MIXER,
    summary="attention with a learned bias by distance, and short convolutions around it",
    source="Inkling's modelling file in transformers 5",
    dims=(
        *ATTENTION.dims,
        KindDim("hidden", "features of the model, which are convolved", minimum=1),
        KindDim("distance_dim", "features of a head that the bias is made of", minimum=1),
        KindDim("max_distance", "tokens back to which it reaches", minimum=1),
        CONV_KERNEL,
    ),
    weights=_weights,
    state=_state,
    check=ATTENTION.check,
    lower=_lower,
    rotary_dim=ATTENTION.rotary_dim,
    split_heads=ATTENTION.split_heads,
    approximated="the bias by distance, and additions around the convolutions, take no time of"
    " their own; a cached prefix is taken to have its last inputs too",
    untrained="how a backward pass runs the bias by distance is not known here",
    whole_sequences=WHOLE_SEQUENCES,
    matrices=ATTENTION.matrices,
)
