"""Latent attention to the tokens that an indexer scores highest (DSA)."""

from collections.abc import Iterator

from foretoken.domain.lowering.batch_dims import parts_of, selected_dims, window_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.indexer import lower_indexer
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.latent import (
    LATENT_MATRICES,
    latent_check,
    latent_gate,
    latent_inputs,
    latent_output,
    latent_prefill,
    latent_query,
    latent_state,
    latent_value,
    latent_weights,
    module_node,
    module_widths,
)
from foretoken.domain.models.kinds.spec.dims import INDEX_SCALE_BYTES, INDEXER, LATENT
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)
from foretoken.domain.models.layer import LayerPart


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    yield from latent_weights(d, model)
    if d["has_indexer"]:
        rank = d["q_lora_rank"] or model.hidden
        queries = rank * d["index_heads"] * d["index_head_dim"]
        yield Weights(total=queries + model.hidden * d["index_head_dim"], part="latent")
        # Weights of heads stay wide; the norm of keys has a bias.
        yield Weights(total=model.hidden * d["index_heads"] + 2 * d["index_head_dim"])


def _state(d: Dims, tp: int) -> RequestState:
    latent = latent_state(d, tp)
    index = d["has_indexer"] * (d["index_head_dim"] + INDEX_SCALE_BYTES)
    return RequestState(token_elements=latent.token_elements, token_bytes=index)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    if builder.options.training is not None:
        yield from _train(builder, part, builder.options.training.sequence_length)
        return
    yield from latent_gate(builder, part)
    widths = {
        **module_widths(builder, part),
        "index_num_heads": part["has_indexer"] * part["index_heads"],
        "index_head_dim": part["has_indexer"] * part["index_head_dim"],
        "index_topk": part["index_topk"],
    }
    for index, (name, batch) in enumerate(parts_of(builder.shape)):
        dims = {**selected_dims(batch, part["index_topk"]), **widths}
        yield module_node(builder, f"dsa_{name}_module", dims, is_first=index == 0)


def _train(builder: NodeBuilder, part: LayerPart, length: int) -> Iterator[OperatorNode]:
    """Yield trained layers, in operators of their own.

    Where a query sees less than its sequence, all heads attend in the latent space, each to as many
    tokens as a window of the same width has.
    """
    yield from latent_gate(builder, part)
    yield from latent_inputs(builder, part)
    if part["has_indexer"]:
        rank, width = part["q_lora_rank"] or builder.model.hidden, part["index_head_dim"]
        projections = {
            "index_key_proj": (width + part["index_heads"], builder.model.hidden),
            "index_query_proj": (part["index_heads"] * width, rank),
        }
        yield from lower_indexer(builder, part, projections)
    prefill, topk = builder.shape.prefill, part["index_topk"]
    if topk >= length or prefill is None:
        yield from latent_prefill(builder, part)
    else:
        yield latent_query(builder, part, prefill.q_tokens)
        # The latent vector is the value, and with its positions the key.
        width = part["kv_lora_rank"] + part["qk_rope_head_dim"] // 2
        heads = {"num_heads": part["num_heads"], "num_kv_heads": 1, "head_dim": width}
        dims = {**window_dims(prefill, topk), **heads}
        role, operator = "attention_prefill_selected", "attention_prefill_window"
        yield builder.layer(role, operator, dims, Partition.QUERIES)
        yield latent_value(builder, part, prefill.q_tokens)
    yield from latent_output(builder, part)


KIND = KindSpec(
    name="sparse_latent",
    place=Place.MIXER,
    summary="latent attention to the tokens that an indexer picks (DSA)",
    source="DeepSeek-V3.2, 2025, section 2.1, and its modelling file in transformers 5; GLM-5's"
    " config.json (layers that share the picks of one before: `indexer_types`)",
    dims=(*LATENT, *INDEXER, KindDim("has_indexer", "0: picks of an earlier layer are reused", 1)),
    weights=_weights,
    state=_state,
    lower=_lower,
    rotary_dim=lambda d: d["has_rope"] * d["qk_rope_head_dim"],
    split_heads=("num_heads",),
    check=latent_check,
    approximated="trained attention to chosen tokens takes the time of a window of as many;"
    " choosing them takes none;"
    " the served gate of the output is multiplied in no time of its own",
    backward="as attention in a window, with one key and value for all heads; the indexer's scores"
    " as attention: DeepSeek-V3.2, section 2.1.1",
    whole_sequences="an indexer may choose tokens of any rank",
    matrices=LATENT_MATRICES,
)
