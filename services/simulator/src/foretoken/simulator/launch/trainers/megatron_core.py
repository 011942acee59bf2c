"""Megatron-Core: the arguments of Megatron-LM's `pretrain_gpt.py`.

Sources: NVIDIA/Megatron-LM, `megatron/training/arguments.py` (options, and what goes with what) and
`docs` on Megatron-FSDP (with tensor, expert and context parallelism).
"""

import math
import re
from collections.abc import Mapping, Sequence

from foretoken.domain.frameworks.trainer import TrainerProfile, find_trainer
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.documented_option import find_options
from foretoken.simulator.launch.megatron_model import find_presets, model_options, refuse_model
from foretoken.simulator.launch.option_map import (
    Fields,
    Link,
    OptionMap,
    Options,
    switch,
    value,
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
    list_differences,
    refuse_common,
    splits_sequence,
    strategy_of_fields,
)

_RELEASE = "core_v0.15.0"
# Has PyTorch, Transformer Engine, FlashAttention and git.
_IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
_GRADIENTS_STAGE = 2
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# Megatron's names of the modules that differ from the scenario's.
_MODULES = {"core_attention": "core_attn"}
_EXCHANGES = {"ring": "p2p", "all_to_all": "a2a"}
# What may count as a layer when layers are cut to chunks.
_ENDS: tuple[tuple[str, ...], ...] = ((), ("loss",), ("embedding",), ("embedding", "loss"))


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
    "log-throughput": True,
}


def _refuse(scenario: TrainingScenario) -> None:
    refusals = Refusals(MegatronCore.name)
    refuse_common(scenario, refusals)
    refuse_model(scenario.model, refusals)
    refusals.add_lacks(scenario, MegatronCore.can)
    refusals.add_if(
        scenario.layout.cp > 1 and scenario.context_parallel not in _EXCHANGES,
        "context_parallel",
        f"files are written for {' and '.join(_EXCHANGES)}",
    )
    refusals.finish()


def _write_chunks(fields: Fields) -> Options:
    chunks, virtual_stages = fields["stage_layers"], fields["virtual_stages"]
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


def _write_exchange(fields: Fields) -> Options:
    has_ranks = fields["cp"] > 1
    return {"cp-comm-type": (_EXCHANGES[fields["context_parallel"]],) if has_ranks else None}


def _read_exchange(options: Options) -> Fields:
    names = {name: exchange for exchange, name in _EXCHANGES.items()}
    return {"context_parallel": names[options.get("cp-comm-type", "p2p")]}


def _write_experts(fields: Fields) -> Options:
    if not fields["has_experts"]:
        return {}
    return {
        "expert-model-parallel-size": fields["ep"],
        "expert-tensor-parallel-size": fields["expert_tp"],
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


def _write_recompute(fields: Fields) -> Options:
    if fields["recompute"] == "none":
        return {}
    if fields["recompute"] == "selective":
        modules = tuple(_MODULES.get(name, name) for name in fields["recompute_modules"])
        return {"recompute-granularity": "selective", "recompute-modules": modules}
    return {
        "recompute-granularity": "full",
        "recompute-method": "block" if fields["recompute_layers"] else "uniform",
        "recompute-num-layers": fields["recompute_layers"] or 1,
        "distribute-saved-activations": fields["partitions_activations"],
    }


def _read_recompute(options: Options) -> Fields:
    names = {name: module for module, name in _MODULES.items()}
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


def _write_shards(fields: Fields) -> Options:
    is_sharded = fields["zero_stage"] > 0
    instances = fields["dp"] * fields["cp"] // fields["shard_degree"] if is_sharded else 1
    return {
        "use-distributed-optimizer": is_sharded,
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
    }


def _read_shards(options: Options) -> Fields:
    stages = {name: stage for stage, name in _SHARDING.items()}
    sharding = options.get("data-parallel-sharding-strategy", "")
    stage = stages.get(sharding, int("use-distributed-optimizer" in options))
    degrees = [f"{axis}-model-parallel-size" for axis in ("tensor", "pipeline")]
    replicas = int(options[NUM_DEVICES]) // math.prod(int(options.get(name, 1)) for name in degrees)
    instances = int(options.get("num-distributed-optimizer-instances", 1))
    return {
        "dp": replicas // int(options.get("context-parallel-size", 1)),
        "zero_stage": stage,
        "shard_degree": replicas // instances if stage else 1,
    }


def _write_gather(fields: Fields) -> Options:
    is_ahead = fields["rules.overlaps_gradient_reduction"] and fields["zero_stage"] > 0
    return {"overlap-param-gather": is_ahead and fields["rules.overlaps_parameter_gather"]}


def _write_fsdp(fields: Fields) -> Options:
    if fields["zero_stage"] < _GRADIENTS_STAGE:
        return {}
    return {
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": _SHARDING[fields["zero_stage"]],
        "ckpt-format": "fsdp_dtensor",
    }


def _write_formats(fields: Fields) -> Options:
    dtype, gradients = fields["dtype"], fields["rules.gradient_dtype"]
    is_16_bit = dtype in (DType.BF16, DType.FP16, DType.FP8)
    is_reduced_in_bf16 = dtype is not DType.FP16 and gradients is not DType.FP32
    return {
        "bf16": dtype in (DType.BF16, DType.FP8),
        "fp16": dtype is DType.FP16,
        "fp8-format": "hybrid" if dtype is DType.FP8 else None,
        "accumulate-allreduce-grads-in-fp32": is_16_bit and gradients is DType.FP32,
        "grad-reduce-in-bf16": is_16_bit and is_reduced_in_bf16,
    }


def _read_formats(options: Options) -> Fields:
    if "fp8-format" in options:
        return {"dtype": DType.FP8}
    if "bf16" in options:
        return {"dtype": DType.BF16}
    return {"dtype": DType.FP16 if "fp16" in options else DType.FP32}


def _write_model(model: ModelArchitecture) -> Options:
    return model_options(TrainingScenario(model=model, device="h100_sxm", sequence_length=1))


_OPTIONS = OptionMap(
    name="megatron-core",
    versions="0.15",
    source="NVIDIA/Megatron-LM, megatron/training/arguments.py",
    links=(
        value("tp", "tensor-model-parallel-size", default=1, always=True),
        switch("sequence_parallel", "sequence-parallel"),
        value("pp", "pipeline-model-parallel-size", default=1, always=True),
        Link(write=_write_chunks, read=_read_chunks),
        value("cp", "context-parallel-size", default=1, always=True),
        Link(write=_write_exchange, read=_read_exchange),
        Link(write=_write_experts, read=_read_experts),
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
    ),
)


class MegatronCore:
    """Starts Megatron-LM's `pretrain_gpt.py`."""

    name = "megatron-core"
    profiles = ("megatron-core", "megatron-lm-2022", "megatron-lm-2021", "plain")
    can = find_trainer("megatron-core").can
    options = _OPTIONS

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        _refuse(scenario)
        trainer = scenario.trainer.resolve()
        options = {
            **model_options(scenario),
            **self.options.write(launched_fields(scenario)),
            **_kernel_options(scenario, trainer),
            **_RUN,
        }
        program = Program(
            title=f"{scenario.model.name} on Megatron-LM {_RELEASE}",
            target='"${MEGATRON_PATH}/pretrain_gpt.py"',
            lines=_prepare(scenario),
            data_lines=_data(scenario),
        )
        script = render_script(job, program, options, find_options("megatron-core"))
        return TrainingLaunch(
            files={SCRIPT: script}, image=_IMAGE, remarks=_remarks(scenario, trainer)
        )

    def starts(self, files: Mapping[str, str]) -> bool:
        """Tell whether the command is of `pretrain_gpt.py`, without DeepSpeed."""
        return "pretrain_gpt.py" in files[SCRIPT] and "--deepspeed" not in files[SCRIPT]

    def find_models(self, files: Mapping[str, str]) -> Sequence[str]:
        """Return the presets whose geometry the arguments have."""
        return find_presets(read_script(files[SCRIPT]), _write_model)

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the arguments ask for."""
        options = read_script(files[SCRIPT])
        return strategy_of_fields(self.options.read(options)[0])


def _kernel_options(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, object]:
    model = scenario.model
    is_fused = trainer.fuses_bias_activation and trainer.fuses_gate
    dropout = None if trainer.has_dropout else 0.0
    fuses_loss = not trainer.casts_logits
    return {
        "transformer-impl": "transformer_engine",
        "attention-backend": "flash" if trainer.attention == "flash" else "unfused",
        "no-gradient-accumulation-fusion": trainer.gradient_accumulation != "fused",
        "no-bias-swiglu-fusion": model.is_gated and not is_fused,
        "no-bias-gelu-fusion": not model.is_gated and not trainer.fuses_bias_activation,
        "no-bias-dropout-fusion": not trainer.fuses_residual,
        "no-rope-fusion": model.position == "rope" and not trainer.fuses_rope,
        "cross-entropy-loss-fusion": fuses_loss,
        "attention-dropout": dropout,
        "hidden-dropout": dropout,
        "clip-grad": None if trainer.clips_gradients else 0.0,
        "no-check-for-nan-in-loss-and-grad": not trainer.checks_gradients,
        "tp-comm-overlap": trainer.overlaps_tensor_collectives and splits_sequence(scenario),
        "overlap-moe-expert-parallel-comm": _overlaps_experts(scenario, trainer),
    }


def _overlaps_experts(scenario: TrainingScenario, trainer: TrainerProfile) -> bool:
    return trainer.overlaps_expert_exchange and scenario.layout.ep > 1


def _prepare(scenario: TrainingScenario) -> Sequence[str]:
    lines = [
        'MEGATRON_PATH="${MEGATRON_PATH:-/tmp/megatron-lm}"',
        'if [[ ! -f "${MEGATRON_PATH}/pretrain_gpt.py" ]]; then',
        f"    git clone --quiet --depth 1 --branch {_RELEASE} \\",
        '        https://github.com/NVIDIA/Megatron-LM "${MEGATRON_PATH}"',
        "fi",
    ]
    if _overlaps_experts(scenario, scenario.trainer.resolve()):
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=32")
    elif scenario.zero_stage < _GRADIENTS_STAGE:
        lines += [
            "# Before Blackwell, collectives are hidden only where kernels start in their order.",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ]
    return lines


def _data(scenario: TrainingScenario) -> Sequence[str]:
    return [
        'if [[ -n "${DATA_PATH:-}" ]]; then',
        '    DATA=(--data-path "${DATA_PATH}" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer',
        '        --tokenizer-model "${TOKENIZER:?set it to the folder or name of a tokenizer}")',
        "else",
        "    # Made-up tokens; this tokenizer adds one to its size.",
        (
            "    DATA=(--mock-data --tokenizer-type NullTokenizer"
            f" --vocab-size {scenario.model.vocab - 1})"
        ),
        "fi",
    ]


def _remarks(scenario: TrainingScenario, trainer: TrainerProfile) -> list[str]:
    remarks = [
        "without DATA_PATH the run makes up its data; set DATA_PATH and TOKENIZER for your own",
        LEARNING_REMARK,
    ]
    if scenario.dtype is DType.FP8:
        remarks.append("FP8 is used with Megatron's default recipe; `--fp8-recipe` names others")
    if trainer.overlaps_tensor_collectives and splits_sequence(scenario):
        remarks.append("`--tp-comm-overlap` needs an MPI or NCCL bootstrap of user buffers")
    if trainer.overlaps_parameter_gather and not trainer.overlaps_gradient_reduction:
        remarks.append("parameters are not gathered ahead: that needs overlaps_gradient_reduction")
    if trainer.dispatch_dtype is not None and scenario.layout.ep > 1:
        name = trainer.dispatch_dtype.name.lower()
        remarks.append(f"tokens are sent to experts as activations are, not in {name}")
    tensor_rules = [("overlaps_tensor_gradients", True)] if scenario.layout.tp > 1 else []
    is_ring = scenario.layout.cp > 1 and scenario.context_parallel == "ring"
    context_rules = [("overlaps_context_exchange", True)] if is_ring else []
    return remarks + list_differences(scenario, (*tensor_rules, *context_rules))


TRAINER = MegatronCore()
