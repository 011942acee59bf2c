"""DeepSpeed: its JSON, and the arguments of Megatron-DeepSpeed's `pretrain_gpt.py`.

Sources: DeepSpeed, `docs/_pages/config-json.md` and `runtime/pipe/engine.py` (pipelines go with
ZeRO 0 and 1); deepspeedai/Megatron-DeepSpeed, `megatron/arguments.py` and
`megatron/core/parallel_state.py` (sequence parallelism by heads goes without tp and pp).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.domain.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.placement import expert_mesh
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile, find_trainer
from foretoken.simulator.launch.documented_option import find_options, flatten
from foretoken.simulator.launch.megatron_model import refuse_model
from foretoken.simulator.launch.shell_script import (
    ARGUMENTS,
    Program,
    count_devices,
    read_array,
    read_int,
    render_script,
)
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    SCRIPT,
    LaunchedStrategy,
    Refusals,
    TrainingJob,
    TrainingLaunch,
    refuse_common,
    splits_sequence,
)
from foretoken.simulator.rank import even_layers

_RELEASE = "0.17.6"
_COMMIT = "207b2d5aad1eea98464c37e0b991be6f8937226f"
_IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
_CONFIG = "deepspeed.json"
_GRADIENTS_STAGE = 2


class DeepSpeed:
    """Starts Megatron-DeepSpeed's `pretrain_gpt.py` with DeepSpeed's JSON."""

    name = "deepspeed"
    profiles = ("megatron-deepspeed", "megatron-deepspeed-bf16", "deepspeed-zero3-2021")
    can = find_trainer("megatron-deepspeed").can

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        _refuse(scenario)
        trainer = scenario.trainer.resolve()
        config = _config(scenario, trainer)
        find_options("deepspeed-json").check(flatten(config))
        options = {
            **_model_options(scenario.model, trainer),
            **_expert_options(scenario),
            **_layout_options(scenario),
            **_recompute_options(scenario),
            **_kernel_options(scenario, trainer),
            "deepspeed": True,
            "deepspeed_config": _CONFIG,
            "zero-stage": scenario.zero_stage,
            **_RUN,
        }
        program = Program(
            title=f"{scenario.model.name} on Megatron-DeepSpeed, DeepSpeed {_RELEASE}",
            target='"${MEGATRON_PATH}/pretrain_gpt.py"',
            lines=_PREPARE,
            data_lines=_DATA,
        )
        script = render_script(job, program, options, find_options("megatron-deepspeed"))
        return TrainingLaunch(
            files={SCRIPT: script, _CONFIG: json.dumps(config, indent=2) + "\n"},
            image=_IMAGE,
            remarks=_remarks(scenario, trainer),
        )

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the arguments and the JSON ask for."""
        config = json.loads(files[_CONFIG])
        options = read_array(files[SCRIPT], ARGUMENTS)
        tp = read_int(options, "tensor-model-parallel-size")
        pp = read_int(options, "pipeline-model-parallel-size")
        cp = read_int(options, "ds-sequence-parallel-size")
        dp = count_devices(files[SCRIPT]) // (tp * pp * cp)
        stage = config["zero_optimization"]["stage"]
        recompute = _read_recompute(options)
        has_experts = "num-experts" in options
        is_split = "enable-expert-tensor-parallelism" in options
        return LaunchedStrategy(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=read_int(options, "moe-expert-parallel-size"),
            expert_tp=tp if has_experts and is_split else 1,
            stage_layers=even_layers(read_int(options, "num-layers"), pp),
            pipeline_schedule=(
                "zero_bubble_h1" if "enable-zbh1-pipeline" in options else "one_f_one_b"
            ),
            sequence_length=read_int(options, "seq-length"),
            micro_batch_size=config["train_micro_batch_size_per_gpu"],
            global_batch_size=config["train_batch_size"],
            zero_stage=stage,
            shard_degree=dp * cp if stage else 1,
            sequence_parallel="sequence-parallel" in options,
            context_parallel="all_to_all" if cp > 1 else "ring",
            recompute=recompute,
            recompute_modules=("core_attention",) if recompute == "selective" else (),
            partitions_activations=config["activation_checkpointing"]["partition_activations"],
            dtype=_read_dtype(config),
        )


# What a run needs and no simulation says: for the reader to choose.
_RUN: Mapping[str, object] = {
    "optimizer": "adam",
    "lr": 1.0e-4,
    "min-lr": 1.0e-5,
    "lr-decay-style": "cosine",
    "weight-decay": 0.1,
    "train-iters": 100,
    "eval-iters": 0,
    "log-interval": 1,
}
_PREPARE = (
    'MEGATRON_PATH="${MEGATRON_PATH:-/tmp/megatron-deepspeed}"',
    'if [[ ! -f "${MEGATRON_PATH}/pretrain_gpt.py" ]]; then',
    '    git clone --quiet https://github.com/deepspeedai/Megatron-DeepSpeed "${MEGATRON_PATH}"',
    f'    git -C "${{MEGATRON_PATH}}" checkout --quiet {_COMMIT}',
    "fi",
    f'python -c "import deepspeed" 2> /dev/null || pip install deepspeed=={_RELEASE}',
    "export CUDA_DEVICE_MAX_CONNECTIONS=1",
)
_DATA = (
    'DATA=(--data-path "${DATA_PATH:?set it to the data that Megatron preprocessed}"',
    "    --split 99,1,0 --tokenizer-type HFTokenizer",
    '    --tokenizer-model "${TOKENIZER:?set it to the folder or name of a tokenizer}")',
)


def _refuse(scenario: TrainingScenario) -> None:
    refusals = Refusals(DeepSpeed.name)
    refuse_common(scenario, refusals)
    refusals.add_lacks(scenario, DeepSpeed.can)
    _refuse_geometry(scenario.model, refusals)
    refusals.finish()


def _refuse_geometry(model: ModelArchitecture, refusals: Refusals) -> None:
    refuse_model(model, refusals)
    refusals.add_if(model.mla, "model.mla", "has no latent attention; megatron-core has")
    for field in ("has_qk_norm", "sliding_window"):
        refusals.add_if(getattr(model, field), f"model.{field}", "has none; megatron-core has")
    moe = model.moe
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


def _config(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, Any]:
    stage = scenario.zero_stage
    overlaps = trainer.overlaps_gradient_reduction
    zero: dict[str, object] = {"stage": stage}
    if stage:
        zero |= {
            "contiguous_gradients": True,
            "reduce_scatter": not trainer.reduces_whole_gradients,
            "allgather_partitions": True,
            "overlap_comm": overlaps or (stage > _GRADIENTS_STAGE and _gathers_ahead(trainer)),
        }
        if trainer.bucket_elements:
            zero |= {
                "reduce_bucket_size": trainer.bucket_elements,
                "allgather_bucket_size": trainer.bucket_elements,
            }
    config: dict[str, object] = {
        "train_batch_size": scenario.global_batch_size,
        "train_micro_batch_size_per_gpu": scenario.micro_batch_size,
        "gradient_accumulation_steps": scenario.num_micro_batches,
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
        "zero_optimization": zero,
        **_formats(scenario, trainer),
        "activation_checkpointing": {"partition_activations": scenario.partitions_activations},
    }
    if trainer.clips_gradients:
        config["gradient_clipping"] = 1.0
    return config


def _gathers_ahead(trainer: TrainerProfile) -> bool:
    return trainer.overlaps_parameter_gather


def _formats(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, object]:
    if scenario.dtype is DType.FP32:
        return {}
    if scenario.dtype is DType.FP16:
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    is_converted = trainer.gradient_accumulation == "converted"
    is_wide = is_converted or trainer.gradient_dtype is DType.FP32
    return {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if is_wide else "bf16"},
    }


def _read_dtype(config: Mapping[str, Any]) -> DType:
    if "bf16" in config:
        return DType.BF16
    return DType.FP16 if "fp16" in config else DType.FP32


def _model_options(model: ModelArchitecture, trainer: TrainerProfile) -> Mapping[str, object]:
    width = model.moe.expert_intermediate if model.moe else model.intermediate
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": width,
        "num-attention-heads": model.num_heads,
        "num-key-value-heads": model.num_kv_heads,
        "kv-channels": model.head_dim,
        "max-position-embeddings": model.max_position,
        "use-rotary-position-embeddings": model.position == "rope",
        "normalization": "rmsnorm" if model.norm == "rms_norm" else "layernorm",
        "swiglu": model.is_gated,
        "disable-bias-linear": not model.has_bias,
        "untie-embeddings-and-output-weights": not model.has_tied_embedding,
        "make-vocab-size-divisible-by": trainer.vocab_multiple,
    }


def _expert_options(scenario: TrainingScenario) -> Mapping[str, object]:
    moe, layout = scenario.model.moe, scenario.layout
    if moe is None:
        return {}
    width = expert_mesh(layout, scenario.expert_tp).tp
    return {
        "num-experts": moe.num_experts,
        "topk": moe.top_k,
        "expert-interval": 1,
        "disable-moe-token-dropping": True,
        "moe-expert-parallel-size": layout.ep,
        "enable-expert-tensor-parallelism": layout.tp > 1 and width == layout.tp,
        "create-moe-param-group": scenario.zero_stage > 0,
    }


def _layout_options(scenario: TrainingScenario) -> Mapping[str, object]:
    layout = scenario.layout
    return {
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": splits_sequence(scenario),
        "pipeline-model-parallel-size": layout.pp,
        "no-pipeline-parallel": layout.pp == 1,
        "enable-zbh1-pipeline": scenario.pipeline_schedule == "zero_bubble_h1",
        "ds-sequence-parallel-size": layout.cp if layout.cp > 1 else None,
        "seq-length": scenario.sequence_length,
        "micro-batch-size": scenario.micro_batch_size,
        "global-batch-size": scenario.global_batch_size,
        "bf16": scenario.dtype is DType.BF16,
        "fp16": scenario.dtype is DType.FP16,
    }


def _recompute_options(scenario: TrainingScenario) -> Mapping[str, object]:
    if scenario.recompute == "selective":
        return {"recompute-granularity": "selective"}
    is_full = scenario.recompute == "full"
    return {
        "checkpoint-activations": is_full,
        "checkpoint-num-layers": 1 if is_full else None,
        "deepspeed-activation-checkpointing": is_full,
        "partition-activations": scenario.partitions_activations,
    }


def _read_recompute(options: Mapping[str, Sequence[str]]) -> str:
    if "checkpoint-activations" in options:
        return "full"
    return options.get("recompute-granularity", ["none"])[0]


def _kernel_options(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, object]:
    dropout = None if trainer.has_dropout else 0.0
    return {
        "use-flash-attn-v2": trainer.attention == "flash",
        "no-gradient-accumulation-fusion": trainer.gradient_accumulation != "fused",
        "no-bias-gelu-fusion": not scenario.model.is_gated and not trainer.fuses_bias_activation,
        "no-bias-dropout-fusion": not trainer.fuses_residual,
        "attention-dropout": dropout,
        "hidden-dropout": dropout,
        "clip-grad": 1.0 if trainer.clips_gradients else 0.0,
    }


def _remarks(scenario: TrainingScenario, trainer: TrainerProfile) -> list[str]:
    remarks = [
        "set DATA_PATH to data that Megatron's `tools/preprocess_data.py` wrote, and TOKENIZER",
        f"a tokenizer of {scenario.model.vocab} tokens is what was simulated",
        LEARNING_REMARK,
    ]
    if scenario.zero_stage and not trainer.bucket_elements:
        remarks.append(
            "buckets are DeepSpeed's own, of 500 million elements, where one was simulated"
        )
    if scenario.model.moe:
        remarks.append("experts are DeepSpeed's, with its gate; tokens are not dropped")
    return remarks


TRAINER = DeepSpeed()
