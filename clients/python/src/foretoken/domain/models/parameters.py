"""How many parameters a model has, from its dimensions."""

from dataclasses import dataclass

from foretoken.domain.models.architecture import ModelArchitecture, MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters by part; `active_total` is what one token passes through.

    `mlp_per_layer` is a dense layer's, `moe_per_layer` that of a layer with experts, router and
    shared experts included; each is 0 where the model has no such layer. A tied head counts in
    `embedding` alone.
    """

    embedding: int
    attention_per_layer: int
    mlp_per_layer: int
    moe_per_layer: int
    norm_per_layer: int
    final_norm: int
    lm_head: int
    total: int
    active_total: int


def count_parameters(model: ModelArchitecture) -> ParameterCount:
    """Count the parameters of the main model: no draft heads, no buffers."""
    num_positions = model.max_position if model.position == "learned" else 0
    embedding = (model.vocab + num_positions) * model.hidden
    lm_head = 0 if model.has_tied_embedding else model.vocab * model.hidden
    attention = _mla(model) if model.mla else _attention(model)
    num_dense = model.moe.num_dense_layers if model.moe else model.num_layers
    num_moe = model.num_layers - num_dense
    mlp = _mlp(model, model.intermediate) if num_dense else 0
    moe = _moe(model, model.moe, model.moe.num_experts) if model.moe else 0
    active_moe = _moe(model, model.moe, model.moe.top_k) if model.moe else 0
    norm = model.hidden * (2 if model.norm == "layer_norm" else 1)
    # Phi shares one norm between its parallel branches; GPT-NeoX has two, 3e-5 of its total.
    norm_per_layer = norm if model.has_parallel_residual else 2 * norm
    shared = embedding + lm_head + norm
    shared += model.num_layers * (attention + norm_per_layer) + num_dense * mlp
    return ParameterCount(
        embedding=embedding,
        attention_per_layer=attention,
        mlp_per_layer=mlp,
        moe_per_layer=moe,
        norm_per_layer=norm_per_layer,
        final_norm=norm,
        lm_head=lm_head,
        total=shared + num_moe * moe,
        active_total=shared + num_moe * active_moe,
    )


def _attention(model: ModelArchitecture) -> int:
    q_width = model.num_heads * model.head_dim
    qkv_width = q_width + 2 * model.num_kv_heads * model.head_dim
    count = model.hidden * (qkv_width + q_width)
    if model.has_qkv_bias or model.has_bias:
        count += qkv_width
    if model.has_bias:
        count += model.hidden
    if model.has_qk_norm:
        count += 2 * model.head_dim
    return count


def _mla(model: ModelArchitecture) -> int:
    mla = model.mla
    if mla is None:
        return 0
    qk_head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    q_width = model.num_heads * qk_head_dim
    if mla.q_lora_rank:
        # Down, norm, up.
        queries = mla.q_lora_rank * (model.hidden + 1 + q_width)
    else:
        queries = model.hidden * q_width
    kv_width = model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    keys = model.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    keys += mla.kv_lora_rank * (1 + kv_width)
    return queries + keys + model.num_heads * mla.v_head_dim * model.hidden


def _mlp(model: ModelArchitecture, width: int) -> int:
    up_width = (2 if model.is_gated else 1) * width
    count = model.hidden * (up_width + width)
    if model.has_bias:
        count += up_width + model.hidden
    return count


def _moe(model: ModelArchitecture, moe: MoeSpec, num_experts: int) -> int:
    """Return the parameters of a layer that keeps `num_experts` of its routed experts."""
    router = model.hidden * moe.num_experts
    num_visited = num_experts + moe.num_shared_experts
    return router + num_visited * _mlp(model, moe.expert_intermediate)
