"""DeepSpeed: its JSON, and the arguments of Megatron-DeepSpeed's `pretrain_gpt.py`.

Sources: DeepSpeed, `docs/_pages/config-json.md` and `runtime/pipe/engine.py` (pipelines go with
ZeRO 0 and 1); deepspeedai/Megatron-DeepSpeed, `megatron/arguments.py` and
`megatron/core/parallel_state.py` (sequence parallelism by heads goes without tp and pp).
"""

import json
import math
from collections.abc import Mapping

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    switch,
    value,
    word,
)
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    NUM_DEVICES,
    SCRIPT,
    ConfigFile,
    LaunchedRun,
    Refusals,
    TrainingFramework,
)
from foretoken.simulator.launch.trainers.megatron_core import (
    IMAGE,
    TRAINING_OPTIONS,
    find_presets,
    refuse_model,
)
from foretoken.simulator.rank import even_layers

_CONFIG = "deepspeed.json"
_GRADIENTS_STAGE = 2
_PARTITIONS = "activation_checkpointing.partition_activations"


def _refuse(scenario: TrainingScenario, refusals: Refusals) -> None:
    model, moe = scenario.model, scenario.model.moe
    refuse_model(scenario, refusals)
    refusals.add_if(model.mla, "model.mla", "has no latent attention; megatron-core has")
    for field in ("has_qk_norm", "sliding_window"):
        refusals.add_if(getattr(model, field), f"model.{field}", "has none; megatron-core has")
    refusals.add_if(
        moe and (moe.num_shared_experts or moe.num_dense_layers),
        "model.moe",
        "has no shared experts, and experts in every layer; megatron-core has both",
    )
    refusals.add_if(
        model.has_qkv_bias and not model.has_bias,
        "model.has_qkv_bias",
        "all projections have biases or none; megatron-core has them for attention alone",
    )


def _write_model(run: LaunchedRun) -> Options:
    model = run.model
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.moe.expert_intermediate if model.moe else model.intermediate,
        "num-attention-heads": model.num_heads,
        "num-key-value-heads": model.num_kv_heads,
        "kv-channels": model.head_dim,
        "max-position-embeddings": model.max_position,
        "use-rotary-position-embeddings": model.position == "rope",
        "normalization": "rmsnorm" if model.norm == "rms_norm" else "layernorm",
        "swiglu": model.is_gated,
        "disable-bias-linear": not model.has_bias,
        "untie-embeddings-and-output-weights": not model.has_tied_embedding,
        "make-vocab-size-divisible-by": run.rules.vocab_multiple,
    }


def _write_experts(run: LaunchedRun) -> Options:
    moe = run.model.moe
    if moe is None:
        return {}
    return {
        "num-experts": moe.num_experts,
        "topk": moe.top_k,
        "expert-interval": 1,
        "disable-moe-token-dropping": True,
        "moe-expert-parallel-size": run.ep,
        "enable-expert-tensor-parallelism": run.tp > 1 and run.expert_tp == run.tp,
        "create-moe-param-group": run.zero_stage > 0,
    }


def _read_experts(options: Options) -> Fields:
    has_experts = "num-experts" in options
    is_split = has_experts and "enable-expert-tensor-parallelism" in options
    return {
        "has_experts": has_experts,
        "ep": int(options.get("moe-expert-parallel-size", 1)),
        "expert_tp": int(options.get("tensor-model-parallel-size", 1)) if is_split else 1,
    }


def _read_stages(options: Options) -> Fields:
    pp = int(options.get("pipeline-model-parallel-size", 1))
    return {"stage_layers": even_layers(int(options["num-layers"]), pp)}


def _write_recompute(run: LaunchedRun) -> Options:
    if run.recompute == "selective":
        return {"recompute-granularity": "selective"}
    is_full = run.recompute == "full"
    return {
        "checkpoint-activations": is_full,
        "checkpoint-num-layers": 1 if is_full else None,
        "deepspeed-activation-checkpointing": is_full,
        "partition-activations": run.partitions_activations,
    }


def _read_recompute(options: Options) -> Fields:
    kind = options.get("recompute-granularity", "none")
    return {
        "recompute": "full" if "checkpoint-activations" in options else kind,
        "recompute_modules": ("core_attention",) if kind == "selective" else (),
    }


def _read_exchange(options: Options) -> Fields:
    is_split = int(options.get("ds-sequence-parallel-size", 1)) > 1
    return {"context_parallel": "all_to_all" if is_split else "ring"}


def _write_kernels(run: LaunchedRun) -> Options:
    rules = run.rules
    dropout = None if rules.has_dropout else 0.0
    return {
        "use-flash-attn-v2": rules.attention == "flash",
        "no-gradient-accumulation-fusion": rules.gradient_accumulation != "fused",
        "no-bias-gelu-fusion": not run.model.is_gated and not rules.fuses_bias_activation,
        "no-bias-dropout-fusion": not rules.fuses_residual,
        "attention-dropout": dropout,
        "hidden-dropout": dropout,
        "clip-grad": 1.0 if rules.clips_gradients else 0.0,
    }


_OPTIONS = OptionMap(
    documented="megatron-deepspeed",
    links=(
        Link(write=_write_model),
        Link(write=_write_experts, read=_read_experts),
        value("tp", "tensor-model-parallel-size", default=1, always=True),
        switch("sequence_parallel", "sequence-parallel"),
        value("pp", "pipeline-model-parallel-size", default=1, always=True),
        Link(write=lambda run: {"no-pipeline-parallel": run.pp == 1}, read=_read_stages),
        word(
            "pipeline_schedule",
            "enable-zbh1-pipeline",
            {"zero_bubble_h1": True},
            default="one_f_one_b",
        ),
        value("cp", "ds-sequence-parallel-size", default=1),
        value("sequence_length", "seq-length"),
        value("micro_batch_size", "micro-batch-size"),
        value("global_batch_size", "global-batch-size"),
        Link(
            write=lambda run: {"bf16": run.dtype is DType.BF16, "fp16": run.dtype is DType.FP16},
            read=_read_exchange,
        ),
        Link(write=_write_recompute, read=_read_recompute),
        Link(write=_write_kernels),
        constant({"deepspeed": True, "deepspeed_config": _CONFIG}),
        Link(write=lambda run: {"zero-stage": run.zero_stage}),
        constant(TRAINING_OPTIONS),
    ),
)


def _read_shards(options: Options) -> Fields:
    axes = ("tensor-model-parallel-size", "pipeline-model-parallel-size")
    ranks = int(options[NUM_DEVICES]) // math.prod(int(options.get(name, 1)) for name in axes)
    stage = options["zero_optimization.stage"]
    return {
        "dp": ranks // int(options.get("ds-sequence-parallel-size", 1)),
        "zero_stage": stage,
        "shard_degree": ranks if stage else 1,
    }


def _write_batch(run: LaunchedRun) -> Options:
    size, micro = run.global_batch_size, run.micro_batch_size
    return {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": size // (run.dp * micro),
    }


def _write_zero(run: LaunchedRun) -> Options:
    stage, elements = run.zero_stage, run.rules.bucket_elements
    gathers_ahead = stage > _GRADIENTS_STAGE and run.rules.overlaps_parameter_gather
    zero: dict[str, object] = {"stage": stage}
    if stage:
        zero |= {
            "contiguous_gradients": True,
            "reduce_scatter": not run.rules.reduces_whole_gradients,
            "allgather_partitions": True,
            "overlap_comm": run.rules.overlaps_gradient_reduction or gathers_ahead,
        }
        if elements:
            zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    return {f"zero_optimization.{name}": said for name, said in zero.items()}


def _write_precision(run: LaunchedRun) -> Options:
    dtype = run.dtype
    if dtype is DType.FP32:
        return {}
    if dtype is DType.FP16:
        return {"fp16.enabled": True, "fp16.loss_scale": 0, "fp16.initial_scale_power": 16}
    is_converted = run.rules.gradient_accumulation == "converted"
    is_wide = is_converted or run.rules.gradient_dtype is DType.FP32
    return {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32" if is_wide else "bf16"}


def _read_precision(options: Options) -> Fields:
    if options.get("bf16.enabled"):
        return {"dtype": DType.BF16}
    return {"dtype": DType.FP16 if options.get("fp16.enabled") else DType.FP32}


_CONFIG_OPTIONS = OptionMap(
    documented="deepspeed-json",
    links=(
        Link(
            write=_write_batch,
            read=lambda options: {
                "global_batch_size": options["train_batch_size"],
                "micro_batch_size": options["train_micro_batch_size_per_gpu"],
            },
        ),
        constant({"steps_per_print": 1, "wall_clock_breakdown": False}),
        Link(write=_write_zero, read=_read_shards),
        Link(write=_write_precision, read=_read_precision),
        Link(
            write=lambda run: {_PARTITIONS: run.partitions_activations},
            read=lambda options: {"partitions_activations": options[_PARTITIONS]},
        ),
        Link(write=lambda run: {"gradient_clipping": 1.0} if run.rules.clips_gradients else {}),
    ),
)


# Blocks of `templates/train.sh.j2`.
_SCRIPT = """\
{% block prepare %}
MEGATRON_PATH="${MEGATRON_PATH:-/tmp/megatron-deepspeed}"
if [[ ! -f "${MEGATRON_PATH}/pretrain_gpt.py" ]]; then
    git clone --quiet https://github.com/deepspeedai/Megatron-DeepSpeed "${MEGATRON_PATH}"
    git -C "${MEGATRON_PATH}" checkout --quiet 207b2d5aad1eea98464c37e0b991be6f8937226f
fi
python -c "import deepspeed" 2> /dev/null || pip install deepspeed=={{ framework.release }}
export CUDA_DEVICE_MAX_CONNECTIONS=1
{% endblock %}
{% block data %}
DATA=(--data-path "${DATA_PATH:?set it to the data that Megatron preprocessed}"
    --split 99,1,0 --tokenizer-type HFTokenizer
    --tokenizer-model "${TOKENIZER:?set it to the folder or name of a tokenizer}")
{% endblock %}
"""


def _remarks(run: LaunchedRun) -> Mapping[str, object]:
    return {
        "set DATA_PATH to data that Megatron's `tools/preprocess_data.py` wrote, and TOKENIZER": 1,
        f"a tokenizer of {run.model.vocab} tokens is what was simulated": 1,
        LEARNING_REMARK: 1,
        "buckets are DeepSpeed's own, of 500 million elements, where one was simulated": (
            run.zero_stage and not run.rules.bucket_elements
        ),
        "experts are DeepSpeed's, with its gate; tokens are not dropped": run.model.moe,
    }


TRAINER = TrainingFramework(
    name="deepspeed",
    project="Megatron-DeepSpeed, DeepSpeed",
    release="0.17.6",
    profiles=("megatron-deepspeed", "megatron-deepspeed-bf16", "deepspeed-zero3-2021"),
    script=_SCRIPT,
    image=IMAGE,
    options=_OPTIONS,
    config=ConfigFile(
        name=_CONFIG,
        options=_CONFIG_OPTIONS,
        render=lambda content: json.dumps(content, indent=2) + "\n",
        parse=json.loads,
    ),
    starts=lambda files: "pretrain_gpt.py" in files[SCRIPT] and "--deepspeed" in files[SCRIPT],
    refuse=_refuse,
    remarks=_remarks,
    find_models=lambda options: find_presets(options, _OPTIONS),
)
