"""Latent attention (MLA): keys and values of all heads from one small vector a token."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import LATENT
from foretoken.domain.models.kinds.spec.kind import Dims, KindSpec, Place, RequestState, Weights

LATENT_MATRICES = {
    "latent": (
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    )
}


def latent_weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    """Yield the weights of latent attention."""
    qk_head_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"]
    q_width, rank = d["num_heads"] * qk_head_dim, d["q_lora_rank"]
    queries = rank * (model.hidden + q_width) if rank else model.hidden * q_width
    kv_width = d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"])
    keys = model.hidden * (d["kv_lora_rank"] + d["qk_rope_head_dim"]) + d["kv_lora_rank"] * kv_width
    out = (1 + d["has_gate"]) * d["num_heads"] * d["v_head_dim"] * model.hidden
    yield Weights(total=queries + keys + out, part="latent")
    yield Weights(total=rank + d["kv_lora_rank"])


def latent_state(d: Dims, _tp: int) -> RequestState:
    """Return the vector of every token, which each rank holds whole."""
    return RequestState(token_elements=d["kv_lora_rank"] + d["qk_rope_head_dim"])


KIND = KindSpec(
    name="latent",
    place=Place.MIXER,
    summary="latent attention over all tokens",
    source="DeepSeek-V2, 2024, section 2.1; Kimi K3's config.json (gate, no positions)",
    dims=LATENT,
    weights=latent_weights,
    state=latent_state,
    approximated="the gate of the output takes no time of its own",
    has_backward=True,
    matrices=LATENT_MATRICES,
)
