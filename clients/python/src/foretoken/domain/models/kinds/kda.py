"""Kimi delta attention: a delta net whose state forgets feature by feature."""

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
from foretoken.domain.models.kinds.spec.recurrent import (
    APPROXIMATED,
    BACKWARD,
    CONV_KERNEL,
    STATE_BYTES,
    WHOLE_SEQUENCES,
    recurrent_state,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width = d["num_heads"] * d["head_dim"]
    low_rank = d["head_dim"] * (model.hidden + width)
    gates = [
        model.hidden * width if d[full] else low_rank
        for full in ("has_full_forget_gate", "has_full_gate")
    ]
    # Queries, keys, values and output; the forget gate; the output's.
    yield Weights(total=4 * model.hidden * width + sum(gates), part="recurrent")
    others = model.hidden * d["num_heads"] + d["num_heads"] + width
    yield Weights(total=others + 3 * width * d["conv_kernel"] + d["head_dim"])


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["num_heads"], tp) * d["head_dim"]
    return recurrent_state(d, width * d["head_dim"], 3 * width)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    num_heads, head_dim = part["num_heads"], part["head_dim"]
    width, stored = num_heads * head_dim, builder.quantization.weight_of("recurrent")
    num_full = part["has_full_gate"] + part["has_full_forget_gate"]
    # Queries, keys, values, full gates and the step of each head.
    dims = {"m": tokens, "n": (3 + num_full) * width + num_heads, "k": hidden}
    yield from project(builder, "recurrent_in_proj", dims, Partition.COLUMN, stored)
    # Those of the forget gate and the output's that are of low rank.
    if num_low := 2 - num_full:
        dims = {"m": tokens, "n": num_low * head_dim, "k": hidden}
        yield from project(builder, "recurrent_gate_down_proj", dims, Partition.REPLICATED, stored)
        dims = {"m": tokens, "n": num_low * width, "k": head_dim}
        yield from project(builder, "recurrent_gate_up_proj", dims, Partition.COLUMN, stored)
    convolved = {"channels": 3 * width, "kernel_size": part["conv_kernel"]}
    heads = {"num_heads": num_heads, "head_dim": head_dim}
    yield from lower_states(builder, causal_conv=convolved, kda=heads)
    dims = {"num_tokens": tokens * num_heads, "hidden": head_dim}
    yield builder.layer("recurrent_norm", "rms_norm", dims, Partition.HEADS)
    yield from lower_gate(builder, width)
    yield from lower_output(builder, width)


KIND = KindSpec(
    name="kda",
    place=Place.MIXER,
    summary="Kimi delta attention: linear attention with a recurrent state",
    source="Kimi Linear, 2025, section 3, and its modelling file in transformers 5; Kimi K3's"
    " config.json (`use_full_rank_gate`); Ling's hybrids in transformers 5",
    dims=(
        KindDim("num_heads", "heads, each with a state", minimum=1),
        KindDim("head_dim", "features of a head", minimum=1),
        CONV_KERNEL,
        KindDim("has_full_gate", "1: the gate of the output is one matrix, 0: of low rank", 0),
        KindDim("has_full_forget_gate", "1: that of the state is, too", 0),
        STATE_BYTES,
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated=APPROXIMATED,
    backward=BACKWARD,
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("num_heads",),
    matrices={"recurrent": ("self_attn.q_proj", "self_attn.o_proj")},
)
