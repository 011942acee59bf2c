"""DeepSpeed: its JSON, and the arguments of Megatron-DeepSpeed's `pretrain_gpt.py`.

Sources: DeepSpeed, `docs/_pages/config-json.md` and `runtime/pipe/engine.py` (pipelines go with
ZeRO 0 and 1); deepspeedai/Megatron-DeepSpeed, `megatron/arguments.py` and
`megatron/core/parallel_state.py` (sequence parallelism by heads goes without tp and pp).
"""

import json
import math
from collections.abc import Mapping, Sequence

from foretoken.domain.frameworks.trainer import TrainerProfile, find_trainer
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.documented_option import find_options, flatten, nest
from foretoken.simulator.launch.megatron_model import find_presets, refuse_model
from foretoken.simulator.launch.option_map import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    switch,
    value,
    word,
)
from foretoken.simulator.launch.shell_script import (
    NUM_DEVICES,
    Program,
    read_script,
    render_script,
)
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    SCRIPT,
    LaunchedStrategy,
    Refusals,
    TrainingJob,
    TrainingLaunch,
    launched_fields,
    refuse_common,
    strategy_of_fields,
)
from foretoken.simulator.rank import even_layers

_RELEASE = "0.17.6"
_COMMIT = "207b2d5aad1eea98464c37e0b991be6f8937226f"
_IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
_CONFIG = "deepspeed.json"
_GRADIENTS_STAGE = 2


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


def _write_model(model: ModelArchitecture, trainer: TrainerProfile) -> Options:
    moe = model.moe
    experts = {"num-experts": moe.num_experts, "topk": moe.top_k} if moe else {}
    return {**_model_options(model, trainer), **experts}


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


def _write_experts(fields: Fields) -> Options:
    if not fields["has_experts"]:
        return {}
    is_split = fields["tp"] > 1 and fields["expert_tp"] == fields["tp"]
    return {
        "num-experts": fields["num_experts"],
        "topk": fields["top_k"],
        "expert-interval": 1,
        "disable-moe-token-dropping": True,
        "moe-expert-parallel-size": fields["ep"],
        "enable-expert-tensor-parallelism": is_split,
        "create-moe-param-group": fields["zero_stage"] > 0,
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


def _write_recompute(fields: Fields) -> Options:
    if fields["recompute"] == "selective":
        return {"recompute-granularity": "selective"}
    is_full = fields["recompute"] == "full"
    return {
        "checkpoint-activations": is_full,
        "checkpoint-num-layers": 1 if is_full else None,
        "deepspeed-activation-checkpointing": is_full,
        "partition-activations": fields["partitions_activations"],
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


def _write_formats(fields: Fields) -> Options:
    return {"bf16": fields["dtype"] is DType.BF16, "fp16": fields["dtype"] is DType.FP16}


_OPTIONS = OptionMap(
    name="megatron-deepspeed",
    versions=_RELEASE,
    source="deepspeedai/Megatron-DeepSpeed, megatron/arguments.py",
    links=(
        Link(write=_write_experts, read=_read_experts),
        value("tp", "tensor-model-parallel-size", default=1, always=True),
        switch("sequence_parallel", "sequence-parallel"),
        value("pp", "pipeline-model-parallel-size", default=1, always=True),
        Link(write=lambda fields: {"no-pipeline-parallel": fields["pp"] == 1}),
        Link(read=_read_stages),
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
        Link(read=_read_exchange),
        Link(write=_write_formats),
        Link(write=_write_recompute, read=_read_recompute),
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


def _write_batch(fields: Fields) -> Options:
    size, micro = fields["global_batch_size"], fields["micro_batch_size"]
    return {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": size // (fields["dp"] * micro),
    }


def _write_zero(fields: Fields) -> Options:
    stage, elements = fields["zero_stage"], fields["rules.bucket_elements"]
    gathers_ahead = stage > _GRADIENTS_STAGE and fields["rules.overlaps_parameter_gather"]
    zero: dict[str, object] = {"stage": stage}
    if stage:
        zero |= {
            "contiguous_gradients": True,
            "reduce_scatter": not fields["rules.reduces_whole_gradients"],
            "allgather_partitions": True,
            "overlap_comm": fields["rules.overlaps_gradient_reduction"] or gathers_ahead,
        }
        if elements:
            zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    return {f"zero_optimization.{name}": said for name, said in zero.items()}


def _write_precision(fields: Fields) -> Options:
    dtype = fields["dtype"]
    if dtype is DType.FP32:
        return {}
    if dtype is DType.FP16:
        return {"fp16.enabled": True, "fp16.loss_scale": 0, "fp16.initial_scale_power": 16}
    is_converted = fields["rules.gradient_accumulation"] == "converted"
    is_wide = is_converted or fields["rules.gradient_dtype"] is DType.FP32
    return {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32" if is_wide else "bf16"}


def _read_precision(options: Options) -> Fields:
    if options.get("bf16.enabled"):
        return {"dtype": DType.BF16}
    return {"dtype": DType.FP16 if options.get("fp16.enabled") else DType.FP32}


_CONFIG_OPTIONS = OptionMap(
    name="deepspeed",
    versions=_RELEASE,
    source="DeepSpeed, docs/_pages/config-json.md",
    links=(
        Link(
            write=_write_batch,
            read=lambda options: {
                "global_batch_size": options["train_batch_size"],
                "micro_batch_size": options["train_micro_batch_size_per_gpu"],
            },
        ),
        constant(steps_per_print=1, wall_clock_breakdown=False),
        Link(write=_write_zero, read=_read_shards),
        Link(write=_write_precision, read=_read_precision),
        Link(
            write=lambda fields: {
                "activation_checkpointing.partition_activations": fields["partitions_activations"]
            },
            read=lambda options: {
                "partitions_activations": options["activation_checkpointing.partition_activations"]
            },
        ),
        Link(
            write=lambda fields: (
                {"gradient_clipping": 1.0} if fields["rules.clips_gradients"] else {}
            )
        ),
    ),
)


class DeepSpeed:
    """Starts Megatron-DeepSpeed's `pretrain_gpt.py` with DeepSpeed's JSON."""

    name = "deepspeed"
    profiles = ("megatron-deepspeed", "megatron-deepspeed-bf16", "deepspeed-zero3-2021")
    can = find_trainer("megatron-deepspeed").can
    options = _OPTIONS

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        _refuse(scenario)
        trainer = scenario.trainer.resolve()
        config = _CONFIG_OPTIONS.write(launched_fields(scenario))
        find_options("deepspeed-json").check(config)
        options = {
            **_model_options(scenario.model, trainer),
            **self.options.write(launched_fields(scenario)),
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
            files={SCRIPT: script, _CONFIG: json.dumps(nest(config), indent=2) + "\n"},
            image=_IMAGE,
            remarks=_remarks(scenario, trainer),
        )

    def starts(self, files: Mapping[str, str]) -> bool:
        """Tell whether the command is of `pretrain_gpt.py` with DeepSpeed."""
        return "pretrain_gpt.py" in files[SCRIPT] and "--deepspeed" in files[SCRIPT]

    def find_models(self, files: Mapping[str, str]) -> Sequence[str]:
        """Return the presets whose geometry the arguments have."""
        rules = find_trainer(self.profiles[0])
        options = read_script(files[SCRIPT])
        return find_presets(options, lambda model: _write_model(model, rules))

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the arguments and the JSON ask for."""
        options = read_script(files[SCRIPT])
        config = flatten(json.loads(files[_CONFIG]))
        read = self.options.read(options)[0] | _CONFIG_OPTIONS.read({**options, **config})[0]
        return strategy_of_fields(read)


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
