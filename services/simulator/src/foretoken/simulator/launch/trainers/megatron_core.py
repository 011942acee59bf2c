"""Megatron-Core: the arguments of Megatron-LM's `pretrain_gpt.py`.

Sources: NVIDIA/Megatron-LM, `megatron/training/arguments.py` (options of 0.15, and what goes with
what) and `docs` on Megatron-FSDP (with tensor, expert and context parallelism).
"""

import math
import re
from collections.abc import Mapping, Sequence

from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.lowering.communication import expert_mesh
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, all_models, list_forms
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    invert,
    switch,
    value,
)
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    NUM_DEVICES,
    SCRIPT,
    LaunchedRun,
    Refusals,
    TrainingFramework,
    list_differences,
)

_GRADIENTS_STAGE = 2
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# Megatron's names of the modules that differ from the scenario's.
_MODULES = {"core_attention": "core_attn"}
_EXCHANGES = {"ring": "p2p", "all_to_all": "a2a"}
# What may count as a layer when layers are cut to chunks.
_ENDS: tuple[tuple[str, ...], ...] = ((), ("loss",), ("embedding",), ("embedding", "loss"))
# The usual weight of the loss that balances experts. Source: the option's own help.
_BALANCE_LOSS = 0.01
# Options that tell one model from another, where they are given.
_GEOMETRY = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups"),
    *("num-key-value-heads", "kv-channels", "max-position-embeddings", "q-lora-rank"),
    *("moe-router-topk", "topk", "moe-ffn-hidden-size"),
)
# Without these a model has no such part.
_PARTS = ("num-experts", "kv-lora-rank")

# What a run needs and no simulation says: for the reader to choose.
TRAINING_OPTIONS: Options = {
    "optimizer": "adam",
    "lr": 1.0e-4,
    "min-lr": 1.0e-5,
    "lr-decay-style": "cosine",
    "weight-decay": 0.1,
    "train-iters": 100,
    "eval-iters": 0,
    "log-interval": 1,
}
# Has PyTorch, Transformer Engine, FlashAttention and git.
IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"


def find_presets(options: Options, known: OptionMap) -> list[str]:
    """Return the presets, one of each model, whose geometry, as a map writes it, is of options."""
    given = {name: str(options[name]) for name in _GEOMETRY if name in options}
    given |= {name: str(options.get(name)) for name in _PARTS}
    found = []
    for name, model in all_models().items():
        run = LaunchedRun.of(TrainingScenario(model=model, device="h100_sxm", sequence_length=1))
        written = known.write(run)
        if given == {key: str(written.get(key)) for key in given}:
            found.append(list_forms(name)[0])
    return sorted(set(found))


def refuse_model(scenario: TrainingScenario, refusals: Refusals) -> None:
    """Note what of a model Megatron-LM does not have."""
    model = scenario.model
    refusals.add_if(
        bool(model.layers), "model.layers", "files are written for layers that are alike"
    )
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


def _refuse(scenario: TrainingScenario, refusals: Refusals) -> None:
    refuse_model(scenario, refusals)
    refusals.add_if(
        scenario.layout.cp > 1 and scenario.context_parallel not in _EXCHANGES,
        "context_parallel",
        f"files are written for {' and '.join(_EXCHANGES)}",
    )


def _write_model(run: LaunchedRun) -> Options:
    model = run.model
    is_grouped = model.num_kv_heads != model.num_heads and model.mla is None
    period = model.full_attention_period
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.intermediate or (model.moe and model.moe.expert_intermediate),
        "num-attention-heads": model.num_heads,
        "group-query-attention": is_grouped,
        "num-query-groups": model.num_kv_heads if is_grouped else None,
        "kv-channels": model.head_dim,
        "max-position-embeddings": max(model.max_position, run.sequence_length),
        "position-embedding-type": "rope" if model.position == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if model.norm == "rms_norm" else "LayerNorm",
        "swiglu": model.is_gated,
        "disable-bias-linear": not model.has_bias,
        "add-qkv-bias": model.has_qkv_bias and not model.has_bias,
        "qk-layernorm": model.has_qk_norm,
        "untie-embeddings-and-output-weights": not model.has_tied_embedding,
        "make-vocab-size-divisible-by": run.rules.vocab_multiple,
        # Tokens to the left, without the token itself, and none to the right.
        "window-size": f"{model.sliding_window - 1},0" if model.sliding_window else None,
        "window-attn-skip-freq": str(period) if model.sliding_window and period else None,
    }


def _write_latent_attention(run: LaunchedRun) -> Options:
    mla = run.model.mla
    if mla is None:
        return {}
    return {
        "multi-latent-attention": True,
        "q-lora-rank": mla.q_lora_rank or None,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_nope_head_dim,
        "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "v-head-dim": mla.v_head_dim,
    }


def _write_expert_layers(run: LaunchedRun) -> Options:
    moe = run.model.moe
    if moe is None:
        return {}
    num_dense, shared = moe.num_dense_layers, moe.num_shared_experts * moe.expert_intermediate
    pattern = f"([0]*{num_dense}+[1]*{run.model.num_layers - num_dense})"
    return {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.expert_intermediate,
        "moe-shared-expert-intermediate-size": shared or None,
        "moe-layer-freq": pattern if num_dense else None,
        "moe-grouped-gemm": True,
        "moe-permute-fusion": run.rules.fuses_permutation,
        "moe-router-fusion": run.rules.router != "unfused",
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": _BALANCE_LOSS,
        **_token_exchange(run),
    }


def _token_exchange(run: LaunchedRun) -> Options:
    """Return how tokens get to their experts: to each of them, or once to each node by DeepEP.

    A router that limits the nodes of a token has a group of experts on each, else the model's.
    """
    rules, scenario = run.rules, run.scenario
    is_once = rules.sends_tokens_once and run.ep > 1
    topology = topology_of_device(scenario.device, scenario.topology)
    group = expert_mesh(scenario.layout, scenario.expert_tp).expert_group
    num_nodes = group.dims(topology.devices_per_node)["num_nodes"]
    is_limited = is_once and 0 < rules.nodes_per_token < num_nodes
    groups = (num_nodes, rules.nodes_per_token) if is_limited else _find_groups(run.model)
    return {
        "moe-token-dispatcher-type": "flex" if is_once else "alltoall",
        "moe-enable-deepep": is_once,
        "moe-router-num-groups": groups[0],
        "moe-router-group-topk": groups[1],
    }


def _find_groups(model: ModelArchitecture) -> tuple[int, int] | tuple[None, None]:
    """Return a model's groups of experts, and of how many a token's are; none of no groups."""
    moe = model.moe
    return (moe.num_groups, moe.top_k_groups) if moe and moe.num_groups else (None, None)


def _write_chunks(run: LaunchedRun) -> Options:
    chunks, virtual_stages = run.stage_layers, run.virtual_stages
    ends = _find_ends(chunks)
    is_even = ends is not None
    return {
        "num-virtual-stages-per-pipeline-rank": (
            virtual_stages if is_even and virtual_stages > 1 else None
        ),
        "account-for-embedding-in-pipeline-split": ends is not None and "embedding" in ends,
        "account-for-loss-in-pipeline-split": ends is not None and "loss" in ends,
        "pipeline-model-parallel-layout": None if is_even else _render_chunks(chunks),
    }


def _find_ends(chunks: Sequence[int]) -> tuple[str, ...] | None:
    """Return what has to count as a layer for chunks that are alike then; none where nothing helps.

    Source: Megatron-LM, `transformer_config.py`: the stages and their chunks have to divide layers
    and what counts as one.
    """
    for ends in _ENDS:
        counted = list(chunks)
        counted[0] += "embedding" in ends
        counted[-1] += "loss" in ends
        if len(set(counted)) == 1:
            return ends
    return None


def _render_chunks(chunks: Sequence[int]) -> str:
    """Return chunks in Megatron's words: embedding (E), layers (t) and loss (L), parted by `|`."""
    words = [f"t*{count}" if count else "" for count in chunks]
    return f"E{'|'.join(words)}L"


def _read_chunks(options: Options) -> Fields:
    pp = int(options.get("pipeline-model-parallel-size", 1))
    if "pipeline-model-parallel-layout" in options:
        text = options["pipeline-model-parallel-layout"]
        words = (re.search(r"t\*(\d+)", chunk) for chunk in text.split("|"))
        chunks = tuple(int(word[1]) if word else 0 for word in words)
    else:
        num_chunks = pp * int(options.get("num-virtual-stages-per-pipeline-rank", 1))
        ends = [end for end in _ENDS[-1] if f"account-for-{end}-in-pipeline-split" in options]
        counts = [(int(options["num-layers"]) + len(ends)) // num_chunks] * num_chunks
        counts[0] -= "embedding" in ends
        counts[-1] -= "loss" in ends
        chunks = tuple(counts)
    virtual_stages = len(chunks) // pp
    return {
        "stage_layers": chunks,
        "virtual_stages": virtual_stages,
        "pipeline_schedule": "interleaved" if virtual_stages > 1 else "one_f_one_b",
    }


def _write_exchange(run: LaunchedRun) -> Options:
    has_ranks = run.cp > 1
    return {"cp-comm-type": (_EXCHANGES[run.context_parallel],) if has_ranks else None}


def _read_exchange(options: Options) -> Fields:
    return {"context_parallel": invert(_EXCHANGES)[options.get("cp-comm-type", "p2p")]}


def _write_experts(run: LaunchedRun) -> Options:
    if not run.has_experts:
        return {}
    return {
        "expert-model-parallel-size": run.ep,
        "expert-tensor-parallel-size": run.expert_tp,
    }


def _read_experts(options: Options) -> Fields:
    has_experts = "num-experts" in options
    # Megatron splits experts as it splits attention where the option is left out.
    width = options.get("tensor-model-parallel-size", 1) if has_experts else 1
    return {
        "has_experts": has_experts,
        "ep": int(options.get("expert-model-parallel-size", 1)),
        "expert_tp": int(options.get("expert-tensor-parallel-size", width)),
    }


def _write_recompute(run: LaunchedRun) -> Options:
    if run.recompute == "none":
        return {}
    if run.recompute == "selective":
        modules = tuple(_MODULES.get(name, name) for name in run.recompute_modules)
        return {"recompute-granularity": "selective", "recompute-modules": modules}
    return {
        "recompute-granularity": "full",
        "recompute-method": "block" if run.recompute_layers else "uniform",
        "recompute-num-layers": run.recompute_layers or 1,
        "distribute-saved-activations": run.partitions_activations,
    }


def _read_recompute(options: Options) -> Fields:
    names = invert(_MODULES)
    kind = options.get("recompute-granularity", "none")
    default = ("core_attn",) if kind == "selective" else ()
    modules = options.get("recompute-modules", default)
    is_block = options.get("recompute-method") == "block"
    return {
        "recompute": kind,
        "recompute_layers": int(options.get("recompute-num-layers", 1)) if is_block else 0,
        "recompute_modules": tuple(
            names.get(name, name) for name in ([modules] if isinstance(modules, str) else modules)
        ),
        "partitions_activations": "distribute-saved-activations" in options,
    }


def _write_shards(run: LaunchedRun) -> Options:
    is_sharded = run.zero_stage > 0
    instances = run.dp * run.cp // run.shard_degree if is_sharded else 1
    return {
        "use-distributed-optimizer": is_sharded,
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
    }


def _read_shards(options: Options) -> Fields:
    sharding = options.get("data-parallel-sharding-strategy", "")
    stage = invert(_SHARDING).get(sharding, int("use-distributed-optimizer" in options))
    degrees = [f"{axis}-model-parallel-size" for axis in ("tensor", "pipeline")]
    replicas = int(options[NUM_DEVICES]) // math.prod(int(options.get(name, 1)) for name in degrees)
    instances = int(options.get("num-distributed-optimizer-instances", 1))
    return {
        "dp": replicas // int(options.get("context-parallel-size", 1)),
        "zero_stage": stage,
        "shard_degree": replicas // instances if stage else 1,
    }


def _write_gather(run: LaunchedRun) -> Options:
    is_ahead = run.rules.overlaps_gradient_reduction and run.zero_stage > 0
    return {"overlap-param-gather": is_ahead and run.rules.overlaps_parameter_gather}


def _write_fsdp(run: LaunchedRun) -> Options:
    if run.zero_stage < _GRADIENTS_STAGE:
        return {}
    return {
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": _SHARDING[run.zero_stage],
        "ckpt-format": "fsdp_dtensor",
    }


def _write_formats(run: LaunchedRun) -> Options:
    dtype, gradients = run.dtype, run.rules.gradient_dtype
    is_16_bit = dtype in (DType.BF16, DType.FP16, DType.FP8)
    is_reduced_in_bf16 = dtype is not DType.FP16 and gradients is not DType.FP32
    return {
        "bf16": dtype in (DType.BF16, DType.FP8),
        "fp16": dtype is DType.FP16,
        "fp8-format": "hybrid" if dtype is DType.FP8 else None,
        "fp8-param-gather": dtype is DType.FP8 and run.rules.keeps_narrow_weights,
        "accumulate-allreduce-grads-in-fp32": is_16_bit and gradients is DType.FP32,
        "grad-reduce-in-bf16": is_16_bit and is_reduced_in_bf16,
        **_write_moments(run),
    }


def _write_moments(run: LaunchedRun) -> Options:
    moments = run.rules.moment_dtype
    name = None if moments is DType.FP32 else moments.name.lower()
    return {
        "use-precision-aware-optimizer": name is not None,
        "exp-avg-dtype": name,
        "exp-avg-sq-dtype": name,
    }


def _read_formats(options: Options) -> Fields:
    formats = {"fp8-format": DType.FP8, "bf16": DType.BF16, "fp16": DType.FP16}
    found = (dtype for name, dtype in formats.items() if name in options)
    return {"dtype": next(found, DType.FP32)}


def _write_kernels(run: LaunchedRun) -> Options:
    model, rules = run.model, run.rules
    is_fused = rules.fuses_bias_activation and rules.fuses_gate
    dropout = None if rules.has_dropout else 0.0
    return {
        "transformer-impl": "transformer_engine",
        "attention-backend": "flash" if rules.attention == "flash" else "unfused",
        "no-gradient-accumulation-fusion": rules.gradient_accumulation != "fused",
        "no-bias-swiglu-fusion": model.is_gated and not is_fused,
        "no-bias-gelu-fusion": not model.is_gated and not rules.fuses_bias_activation,
        "no-bias-dropout-fusion": not rules.fuses_residual,
        "no-rope-fusion": model.position == "rope" and not rules.fuses_rope,
        "cross-entropy-loss-fusion": not rules.casts_logits,
        "attention-dropout": dropout,
        "hidden-dropout": dropout,
        "clip-grad": None if rules.clips_gradients else 0.0,
        "no-check-for-nan-in-loss-and-grad": not rules.checks_gradients,
        "no-overlap-p2p-communication": run.waits_for_sends,
        "tp-comm-overlap": rules.overlaps_tensor_collectives and run.sequence_parallel,
        "overlap-moe-expert-parallel-comm": rules.overlaps_expert_exchange and run.ep > 1,
    }


_OPTIONS = OptionMap(
    documented="megatron-core",
    links=(
        Link(write=_write_model),
        Link(write=_write_latent_attention),
        Link(write=_write_expert_layers),
        value("tp", "tensor-model-parallel-size", default=1, always=True),
        switch("sequence_parallel", "sequence-parallel"),
        value("pp", "pipeline-model-parallel-size", default=1, always=True),
        Link(write=_write_chunks, read=_read_chunks),
        value("cp", "context-parallel-size", default=1, always=True),
        Link(write=_write_exchange, read=_read_exchange),
        Link(write=_write_experts, read=_read_experts),
        value("moe_capacity_factor", "moe-expert-capacity-factor", float, default=0.0),
        value("sequence_length", "seq-length"),
        value("micro_batch_size", "micro-batch-size"),
        value("global_batch_size", "global-batch-size"),
        Link(write=_write_recompute, read=_read_recompute),
        Link(write=_write_shards, read=_read_shards),
        switch("rules.overlaps_gradient_reduction", "overlap-grad-reduce"),
        Link(write=_write_gather),
        value("rules.bucket_elements", "ddp-bucket-size", default=0),
        Link(write=_write_fsdp),
        Link(write=_write_formats, read=_read_formats),
        Link(write=_write_kernels),
        constant({**TRAINING_OPTIONS, "log-throughput": True}),
    ),
)


# Blocks of `templates/train.sh.j2`.
_SCRIPT = """\
{% block prepare %}
MEGATRON_PATH="${MEGATRON_PATH:-/tmp/megatron-lm}"
if [[ ! -f "${MEGATRON_PATH}/pretrain_gpt.py" ]]; then
    git clone --quiet --depth 1 --branch {{ framework.release }} \\
        https://github.com/NVIDIA/Megatron-LM "${MEGATRON_PATH}"
fi
{% if run.rules.overlaps_expert_exchange and run.ep > 1 %}
export CUDA_DEVICE_MAX_CONNECTIONS=32
{% elif run.zero_stage < 2 %}
# Before Blackwell, collectives are hidden only where kernels start in their order.
export CUDA_DEVICE_MAX_CONNECTIONS=1
{% endif %}
{% endblock %}
{% block data %}
if [[ -n "${DATA_PATH:-}" ]]; then
    DATA=(--data-path "${DATA_PATH}" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER:?set it to the folder or name of a tokenizer}")
else
    # Made-up tokens; this tokenizer adds one to its size.
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size {{ run.model.vocab - 1 }})
fi
{% endblock %}
"""


def _remarks(run: LaunchedRun) -> Mapping[str, object]:
    rules = run.rules
    tokens = rules.dispatch_dtype
    is_ring = run.cp > 1 and run.context_parallel == "ring"
    followed = [
        *([("overlaps_tensor_gradients", True)] if run.tp > 1 else []),
        *([("overlaps_context_exchange", True)] if is_ring else []),
    ]
    return {
        "without DATA_PATH the run makes up its data; set DATA_PATH and TOKENIZER for your own": 1,
        LEARNING_REMARK: 1,
        "FP8 is used with Megatron's default recipe; `--fp8-recipe` names others": (
            run.dtype is DType.FP8
        ),
        "`--tp-comm-overlap` needs an MPI or NCCL bootstrap of user buffers": (
            rules.overlaps_tensor_collectives and run.sequence_parallel
        ),
        "parameters are not gathered ahead: that needs overlaps_gradient_reduction": (
            rules.overlaps_parameter_gather and not rules.overlaps_gradient_reduction
        ),
        f"tokens are sent to experts as activations are, not in {tokens and tokens.name.lower()}": (
            tokens is not None and run.ep > 1
        ),
        **list_differences(run.scenario, followed),
    }


TRAINER = TrainingFramework(
    name="megatron-core",
    project="Megatron-LM",
    release="core_v0.15.0",
    profiles=("megatron-core", "megatron-lm-2022", "megatron-lm-2021", "plain"),
    script=_SCRIPT,
    image=IMAGE,
    options=_OPTIONS,
    starts=lambda files: "pretrain_gpt.py" in files[SCRIPT] and "--deepspeed" not in files[SCRIPT],
    refuse=_refuse,
    remarks=_remarks,
    find_models=lambda options: find_presets(options, _OPTIONS),
)
