"""The geometry of a model as options of Megatron-LM's training script."""

from collections.abc import Callable, Mapping

from foretoken.domain.lowering.placement import expert_mesh
from foretoken.domain.models.architecture import ModelArchitecture, all_models
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.trainer import Refusals, topology_of

Options = Mapping[str, object]

# Options that tell one model from another, where they are given.
_GEOMETRY = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups"),
    *("num-key-value-heads", "kv-channels", "max-position-embeddings", "q-lora-rank"),
    *("moe-router-topk", "topk", "moe-ffn-hidden-size"),
)
# Without these a model has no such part.
_PARTS = ("num-experts", "kv-lora-rank")
# The usual weight of the loss that balances experts. Source: the option's own help.
_BALANCE_LOSS = 0.01


def model_options(scenario: TrainingScenario) -> Options:
    """Return the options that make a scenario's model."""
    model, trainer = scenario.model, scenario.trainer.resolve()
    is_grouped = model.num_kv_heads != model.num_heads and model.mla is None
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.intermediate or (model.moe and model.moe.expert_intermediate),
        "num-attention-heads": model.num_heads,
        "group-query-attention": is_grouped,
        "num-query-groups": model.num_kv_heads if is_grouped else None,
        "kv-channels": model.head_dim,
        "max-position-embeddings": max(model.max_position, scenario.sequence_length),
        "position-embedding-type": "rope" if model.position == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if model.norm == "rms_norm" else "LayerNorm",
        "swiglu": model.is_gated,
        "disable-bias-linear": not model.has_bias,
        "add-qkv-bias": model.has_qkv_bias and not model.has_bias,
        "qk-layernorm": model.has_qk_norm,
        "untie-embeddings-and-output-weights": not model.has_tied_embedding,
        "make-vocab-size-divisible-by": trainer.vocab_multiple,
        **_window(model),
        **_latent_attention(model),
        **_experts(scenario),
    }


def find_presets(options: Options, write: Callable[[ModelArchitecture], Options]) -> list[str]:
    """Return the presets whose geometry, as a framework's options write it, is that of options."""
    given = {name: str(options[name]) for name in _GEOMETRY if name in options}
    given |= {name: str(options.get(name)) for name in _PARTS}
    return [
        name
        for name, model in all_models().items()
        if given == {key: str(write(model).get(key)) for key in given}
    ]


def refuse_model(model: ModelArchitecture, refusals: Refusals) -> None:
    """Note what of a model Megatron-LM does not have."""
    refusals.add_if(
        model.has_parallel_residual,
        "model.has_parallel_residual",
        "attention and MLP follow each other",
    )
    refusals.add_if(
        model.is_gated != (model.activation == "silu"),
        "model.activation",
        "MLPs are gated with silu (--swiglu) or plain with gelu",
    )


def _window(model: ModelArchitecture) -> Options:
    if not model.sliding_window:
        return {}
    period = model.full_attention_period
    return {
        # Tokens to the left besides the token itself, and none to the right.
        "window-size": f"{model.sliding_window - 1},0",
        "window-attn-skip-freq": str(period) if period else None,
    }


def _latent_attention(model: ModelArchitecture) -> Options:
    if model.mla is None:
        return {}
    mla = model.mla
    return {
        "multi-latent-attention": True,
        "q-lora-rank": mla.q_lora_rank or None,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_nope_head_dim,
        "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "v-head-dim": mla.v_head_dim,
    }


def _experts(scenario: TrainingScenario) -> Options:
    model = scenario.model
    if model.moe is None:
        return {}
    moe = model.moe
    num_expert_layers = model.num_layers - moe.num_dense_layers
    pattern = f"([0]*{moe.num_dense_layers}+[1]*{num_expert_layers})"
    return {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.expert_intermediate,
        "moe-shared-expert-intermediate-size": (
            moe.num_shared_experts * moe.expert_intermediate or None
        ),
        "moe-layer-freq": pattern if moe.num_dense_layers else None,
        "moe-grouped-gemm": True,
        "moe-permute-fusion": True,
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": _BALANCE_LOSS,
        **_token_exchange(scenario),
    }


def _token_exchange(scenario: TrainingScenario) -> Options:
    """Return how tokens get to their experts: to each of them, or once to each node by DeepEP.

    A router that limits the nodes of a token has a group of experts on each.
    """
    trainer, layout = scenario.trainer.resolve(), scenario.layout
    is_once = trainer.sends_tokens_once and layout.ep > 1
    topology = topology_of(scenario)
    group = expert_mesh(layout, scenario.expert_tp).expert_group
    num_nodes = group.dims(topology.devices_per_node)["num_nodes"]
    is_limited = is_once and 0 < trainer.nodes_per_token < num_nodes
    return {
        "moe-token-dispatcher-type": "flex" if is_once else "alltoall",
        "moe-enable-deepep": is_once,
        "moe-router-num-groups": num_nodes if is_limited else None,
        "moe-router-group-topk": trainer.nodes_per_token if is_limited else None,
    }
