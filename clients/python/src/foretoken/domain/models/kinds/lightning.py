"""Lightning attention: linear attention whose heads forget at a rate of their own, always the same.

S <- e^(-rate) S + k v^T, y = S^T q: Mamba2's recurrence with a way in and out for every head, whose
operators it runs as.
"""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.recurrent import lower_output, lower_states
from foretoken.domain.lowering.training_layer import lower_gate, project
from foretoken.domain.models.architecture import ModelArchitecture
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
from foretoken.domain.models.kinds.spec.recurrent import STATE_BYTES, WHOLE_SEQUENCES


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width = d["num_heads"] * d["head_dim"]
    # Queries, keys, values, the gate and the output; the norm.
    yield Weights(total=5 * model.hidden * width, part="recurrent")
    yield Weights(total=width)


def _state(d: Dims, tp: int) -> RequestState:
    elements = local_heads(d["num_heads"], tp) * d["head_dim"] ** 2
    return RequestState(request_bytes=elements * d["state_bytes"])


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    num_heads, head_dim = part["num_heads"], part["head_dim"]
    width, stored = num_heads * head_dim, builder.quantization.weight_of("recurrent")
    for role, columns in (("recurrent_in_proj", 3 * width), ("recurrent_gate_proj", width)):
        dims = {"m": tokens, "n": columns, "k": hidden}
        yield from project(builder, role, dims, Partition.COLUMN, stored)
    heads = {"num_heads": num_heads, "num_groups": num_heads}
    yield from lower_states(builder, mamba2={**heads, "head_dim": head_dim, "state_dim": head_dim})
    dims = {"num_tokens": tokens, "hidden": width}
    yield builder.layer("recurrent_norm_of_all", "rms_norm", dims, Partition.WIDTH)
    yield from lower_gate(builder, width)
    yield from lower_output(builder, width)


KIND = KindSpec(
    name="lightning",
    place=Place.MIXER,
    summary="lightning attention: linear attention with a fixed decay for each head",
    source="MiniMax-01, 2025, section 2.2; MiniMax's modelling file in transformers 5",
    dims=(
        KindDim("num_heads", "heads, each with a state", minimum=1),
        KindDim("head_dim", "features of a head", minimum=1),
        STATE_BYTES,
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated="it runs as Mamba2's recurrence; a cached prefix is taken to have its state too;"
    " the served gate of the output and the ranks' sum of the norm's squares take no time",
    backward="flash-linear-attention, `ops/lightning_attn` (states computed again, as Mamba2's)",
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("num_heads",),
    matrices={"recurrent": ("self_attn.qkv_proj", "self_attn.out_proj")},
)
