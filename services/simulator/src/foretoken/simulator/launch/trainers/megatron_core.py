"""Megatron-Core: the arguments of Megatron-LM's `pretrain_gpt.py`.

Sources: NVIDIA/Megatron-LM, `megatron/training/arguments.py` (options, and what goes with what) and
`docs` on Megatron-FSDP (with tensor, expert and context parallelism).
"""

import re
from collections.abc import Mapping, Sequence

from foretoken.domain.estimate import DType
from foretoken.domain.placement import expert_mesh
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile, find_trainer
from foretoken.simulator.launch.documented_option import find_options
from foretoken.simulator.launch.megatron_model import model_options, refuse_model
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
    chunk_layers,
    list_differences,
    refuse_common,
    splits_sequence,
    strategy_of,
)
from foretoken.simulator.steps.sharding import ScenarioDegrees

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


class MegatronCore:
    """Starts Megatron-LM's `pretrain_gpt.py`."""

    name = "megatron-core"
    profiles = ("megatron-core", "megatron-lm-2022", "megatron-lm-2021", "plain")
    can = find_trainer("megatron-core").can

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        _refuse(scenario)
        trainer = scenario.trainer.resolve()
        options = {
            **model_options(scenario),
            **_layout_options(scenario),
            **_batch_options(scenario),
            **_recompute_options(scenario),
            **_state_options(scenario, trainer),
            **_format_options(scenario, trainer),
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

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the arguments ask for."""
        script = files[SCRIPT]
        options = read_array(script, ARGUMENTS)
        tp = read_int(options, "tensor-model-parallel-size")
        pp = read_int(options, "pipeline-model-parallel-size")
        cp = read_int(options, "context-parallel-size")
        dp = count_devices(script) // (tp * pp * cp)
        stage = _read_stage(options)
        instances = read_int(options, "num-distributed-optimizer-instances")
        stage_layers, virtual_stages = _read_chunks(options, pp)
        recompute = options.get("recompute-granularity", ["none"])[0]
        modules = {name: module for module, name in _MODULES.items()}
        exchanges = {name: exchange for exchange, name in _EXCHANGES.items()}
        return LaunchedStrategy(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=read_int(options, "expert-model-parallel-size"),
            expert_tp=read_int(options, "expert-tensor-parallel-size"),
            virtual_stages=virtual_stages,
            stage_layers=stage_layers,
            pipeline_schedule="interleaved" if virtual_stages > 1 else "one_f_one_b",
            sequence_length=read_int(options, "seq-length"),
            micro_batch_size=read_int(options, "micro-batch-size"),
            global_batch_size=read_int(options, "global-batch-size"),
            zero_stage=stage,
            shard_degree=dp * cp // instances if stage else 1,
            sequence_parallel="sequence-parallel" in options,
            context_parallel=exchanges[options.get("cp-comm-type", ["p2p"])[0]],
            recompute=recompute,
            recompute_layers=(
                read_int(options, "recompute-num-layers")
                if options.get("recompute-method") == ["block"]
                else 0
            ),
            recompute_modules=tuple(
                modules.get(name, name) for name in options.get("recompute-modules", ())
            ),
            partitions_activations="distribute-saved-activations" in options,
            dtype=_read_dtype(options),
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
    "log-throughput": True,
}


def _refuse(scenario: TrainingScenario) -> None:
    refusals = Refusals(MegatronCore.name)
    refuse_common(scenario, refusals)
    refuse_model(scenario.model, refusals)
    refusals.add_lacks(scenario, MegatronCore.can)
    refusals.finish()


def _layout_options(scenario: TrainingScenario) -> Mapping[str, object]:
    layout = scenario.layout
    chunks = chunk_layers(scenario)
    ends = _find_ends(chunks)
    is_even = ends is not None
    options: dict[str, object] = {
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": splits_sequence(scenario),
        "pipeline-model-parallel-size": layout.pp,
        "num-virtual-stages-per-pipeline-rank": (
            scenario.virtual_stages if is_even and scenario.virtual_stages > 1 else None
        ),
        "account-for-embedding-in-pipeline-split": ends is not None and "embedding" in ends,
        "account-for-loss-in-pipeline-split": ends is not None and "loss" in ends,
        "pipeline-model-parallel-layout": None if is_even else _render_chunks(chunks),
        "context-parallel-size": layout.cp,
        "cp-comm-type": (_EXCHANGES[scenario.context_parallel],) if layout.cp > 1 else None,
    }
    if scenario.model.moe:
        options["expert-model-parallel-size"] = layout.ep
        options["expert-tensor-parallel-size"] = expert_mesh(layout, scenario.expert_tp).tp
    return options


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


def _read_chunks(options: Mapping[str, Sequence[str]], pp: int) -> tuple[tuple[int, ...], int]:
    if "pipeline-model-parallel-layout" in options:
        text = options["pipeline-model-parallel-layout"][0]
        words = (re.search(r"t\*(\d+)", chunk) for chunk in text.split("|"))
        chunks = tuple(int(word[1]) if word else 0 for word in words)
        return chunks, len(chunks) // pp
    virtual_stages = read_int(options, "num-virtual-stages-per-pipeline-rank")
    ends = tuple(end for end in _ENDS[-1] if f"account-for-{end}-in-pipeline-split" in options)
    num_parts = read_int(options, "num-layers") + len(ends)
    num_chunks = pp * virtual_stages
    counts = [num_parts // num_chunks] * num_chunks
    counts[0] -= "embedding" in ends
    counts[-1] -= "loss" in ends
    return tuple(counts), virtual_stages


def _batch_options(scenario: TrainingScenario) -> Mapping[str, object]:
    return {
        "seq-length": scenario.sequence_length,
        "micro-batch-size": scenario.micro_batch_size,
        "global-batch-size": scenario.global_batch_size,
    }


def _recompute_options(scenario: TrainingScenario) -> Mapping[str, object]:
    strategy = strategy_of(scenario)
    if strategy.recompute == "none":
        return {}
    if strategy.recompute == "selective":
        modules = tuple(_MODULES.get(name, name) for name in strategy.recompute_modules)
        return {"recompute-granularity": "selective", "recompute-modules": modules}
    return {
        "recompute-granularity": "full",
        "recompute-method": "block" if strategy.recompute_layers else "uniform",
        "recompute-num-layers": strategy.recompute_layers or 1,
        "distribute-saved-activations": scenario.partitions_activations,
    }


def _state_options(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, object]:
    stage = scenario.zero_stage
    is_sharded = stage > 0
    instances = ScenarioDegrees.of(scenario).dense.replicas if is_sharded else 1
    overlaps_gradients = trainer.overlaps_gradient_reduction
    options: dict[str, object] = {
        "use-distributed-optimizer": is_sharded,
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
        "overlap-grad-reduce": overlaps_gradients,
        "overlap-param-gather": (
            is_sharded and overlaps_gradients and trainer.overlaps_parameter_gather
        ),
        "ddp-bucket-size": trainer.bucket_elements or None,
    }
    if stage >= _GRADIENTS_STAGE:
        options |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": _SHARDING[stage],
            "ckpt-format": "fsdp_dtensor",
        }
    return options


def _read_stage(options: Mapping[str, Sequence[str]]) -> int:
    strategies = {name: stage for stage, name in _SHARDING.items()}
    strategy = options.get("data-parallel-sharding-strategy", [""])[0]
    return strategies.get(strategy, int("use-distributed-optimizer" in options))


def _format_options(scenario: TrainingScenario, trainer: TrainerProfile) -> Mapping[str, object]:
    dtype = scenario.dtype
    is_16_bit = dtype in (DType.BF16, DType.FP16, DType.FP8)
    is_reduced_in_bf16 = dtype is not DType.FP16 and trainer.gradient_dtype is not DType.FP32
    return {
        "bf16": dtype in (DType.BF16, DType.FP8),
        "fp16": dtype is DType.FP16,
        "fp8-format": "hybrid" if dtype is DType.FP8 else None,
        "accumulate-allreduce-grads-in-fp32": is_16_bit and trainer.gradient_dtype is DType.FP32,
        "grad-reduce-in-bf16": is_16_bit and is_reduced_in_bf16,
    }


def _read_dtype(options: Mapping[str, Sequence[str]]) -> DType:
    if "fp8-format" in options:
        return DType.FP8
    if "bf16" in options:
        return DType.BF16
    return DType.FP16 if "fp16" in options else DType.FP32


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
