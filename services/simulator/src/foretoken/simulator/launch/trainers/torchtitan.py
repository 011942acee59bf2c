"""torchtitan: the TOML of a job.

Sources: torchtitan 0.2.2, `torchtitan/config/job_config.py` (keys), `distributed/parallel_dims.py`,
`distributed/pipeline_parallel.py` and `models/*/infra/parallelize.py` (what goes with what);
PyTorch, `torch/distributed/pipelining/schedules.py` (names of schedules).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretoken.domain.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.placement import expert_mesh
from foretoken.domain.plugins import scan_yaml
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import find_trainer
from foretoken.simulator.launch.documented_option import find_options, flatten
from foretoken.simulator.launch.shell_script import Program, count_devices, render_script
from foretoken.simulator.launch.toml_text import render_toml
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    SCRIPT,
    LaunchedStrategy,
    Refusals,
    TrainingJob,
    TrainingLaunch,
    chunk_layers,
    list_differences,
    num_virtual_stages,
    refuse_common,
    strategy_of,
)
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.training.operator_recompute import EVERY_OTHER_MATMUL

_RELEASE = "0.2.2"
# It needs a PyTorch of its own time.
_IMAGE = "pytorch/pytorch:2.10.0-cuda12.8-cudnn9-devel"
_CONFIG = "train.toml"
_OUTPUTS = "/tmp/torchtitan"  # noqa: S108 - in the container
_SCHEDULES = {
    "one_f_one_b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
}
_GRADIENTS_STAGE, _PARAMETERS_STAGE = 2, 3
_RESHARD = {_GRADIENTS_STAGE: "never", _PARAMETERS_STAGE: "default"}
_PRECISIONS = {DType.BF16: "bfloat16", DType.FP8: "bfloat16", DType.FP32: "float32"}
# Source: attn_type of the models, and `parallelize.py` of theirs.
_WITHOUT_CONTEXT = ("deepseek_v3", "gpt_oss")
# Recomputation by operator. Source: distributed/activation_checkpoint.py.
_BY_OPERATOR = "op"
_FP8_CONVERTER = "quantize.linear.float8"
_FP8_EXPERTS_CONVERTER = "quantize.grouped_mm.float8"

_DATA = (
    'DATA=(--model.hf_assets_path "${TOKENIZER:?set it to the folder of the tokenizer}")',
    'if [[ -n "${DATA_PATH:-}" ]]; then DATA+=(--training.dataset_path "${DATA_PATH}"); fi',
)

Tables = Mapping[str, Mapping[str, object]]


class Torchtitan:
    """Starts `torchtitan.train` with a TOML."""

    name = "torchtitan"
    profiles = ("torchtitan",)
    can = find_trainer("torchtitan").can

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        flavor = _refuse(scenario)
        tables = {**_run_tables(scenario, *flavor), **_strategy_tables(scenario)}
        find_options("torchtitan").check(flatten(tables))
        program = Program(
            title=f"{scenario.model.name} on torchtitan {_RELEASE}",
            target="-m torchtitan.train",
            lines=[
                f'python -c "import torchtitan" 2> /dev/null || pip install torchtitan=={_RELEASE}'
            ],
            data_lines=_DATA,
        )
        # torchtitan has its options in the file, so its script has this one.
        script = render_script(
            job, program, {"job.config_file": _CONFIG}, find_options("torchtitan-command")
        )
        return TrainingLaunch(
            files={SCRIPT: script, _CONFIG: render_toml(tables)},
            image=_IMAGE,
            remarks=_remarks(scenario, *flavor),
        )

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the TOML asks for."""
        tables = tomllib.loads(files[_CONFIG])
        parallelism, training = tables["parallelism"], tables["training"]
        tp, cp = parallelism["tensor_parallel_degree"], parallelism["context_parallel_degree"]
        pp, shards = (
            parallelism["pipeline_parallel_degree"],
            parallelism["data_parallel_shard_degree"],
        )
        dp = count_devices(files[SCRIPT]) // (tp * pp * cp)
        stage_layers = _read_chunks(tables)
        schedules = {name: schedule for schedule, name in _SCHEDULES.items()}
        stages = {policy: stage for stage, policy in _RESHARD.items()}
        is_sharded = shards * cp > 1
        stage = stages[parallelism["fsdp_reshard_after_forward"]] if is_sharded else 0
        micro_batch_size = (
            parallelism["pipeline_parallel_microbatch_size"]
            if pp > 1
            else training["local_batch_size"]
        )
        return LaunchedStrategy(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=parallelism.get("expert_parallel_degree", 1),
            expert_tp=_read_expert_tp(parallelism),
            virtual_stages=len(stage_layers) // pp,
            stage_layers=stage_layers,
            pipeline_schedule=schedules[parallelism.get("pipeline_parallel_schedule", "1F1B")],
            sequence_length=training["seq_len"],
            micro_batch_size=micro_batch_size,
            global_batch_size=training["global_batch_size"],
            zero_stage=stage,
            shard_degree=shards * cp if stage else 1,
            sequence_parallel=tp > 1,
            recompute=tables["activation_checkpoint"]["mode"],
            recompute_modules=_read_modules(tables["activation_checkpoint"]),
            dtype=_read_dtype(tables),
        )


def _recompute(scenario: TrainingScenario) -> Mapping[str, object]:
    chosen = {"selective_ac_option": _BY_OPERATOR} if scenario.recompute == "selective" else {}
    return {"mode": scenario.recompute, **chosen}


def _read_modules(table: Mapping[str, object]) -> tuple[str, ...]:
    is_by_operator = table.get("selective_ac_option") == _BY_OPERATOR
    return (EVERY_OTHER_MATMUL,) if is_by_operator else ()


def _refuse(scenario: TrainingScenario) -> tuple[str, str]:
    """Return the model's name and flavor, or raise what torchtitan does not do."""
    refusals = Refusals(Torchtitan.name)
    refuse_common(scenario, refusals)
    refusals.add_lacks(scenario, Torchtitan.can)
    flavor = _find_flavor(scenario.model)
    refusals.add_if(
        not flavor,
        "model",
        f"has no model of the geometry of {scenario.model.name}; it has"
        f" {', '.join(sorted(_flavors()))}",
    )
    name, _, kind = flavor.partition("/")
    refusals.add_if(
        name in _WITHOUT_CONTEXT and scenario.layout.cp > 1,
        "layout.cp",
        f"its {name} runs FlexAttention, which is not split by context: set it 1",
    )
    refusals.finish()
    return name, kind


def _run_tables(scenario: TrainingScenario, name: str, flavor: str) -> Tables:
    """Return what a run needs and no simulation says."""
    title = f"{scenario.model.name} on {scenario.layout.num_devices} {scenario.device}"
    return {
        "job": {"dump_folder": _OUTPUTS, "description": title},
        "metrics": {"log_freq": 1},
        "model": {
            "name": name,
            "flavor": flavor,
            **_converters(scenario),
        },
        "optimizer": {"name": "AdamW", "lr": 1.0e-4, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 10},
        "checkpoint": {"enable": False},
    }


def _converters(scenario: TrainingScenario) -> Mapping[str, object]:
    if scenario.dtype is not DType.FP8:
        return {}
    experts = [_FP8_EXPERTS_CONVERTER] if scenario.model.moe else []
    return {"converters": [_FP8_CONVERTER, *experts]}


def _strategy_tables(scenario: TrainingScenario) -> Tables:
    layout = scenario.layout
    trainer = scenario.trainer.resolve()
    local = scenario.global_batch_size // layout.dp if layout.pp > 1 else scenario.micro_batch_size
    tables: dict[str, Mapping[str, object]] = {
        "training": {
            "dataset": "c4",
            "steps": 100,
            "local_batch_size": local,
            "global_batch_size": scenario.global_batch_size,
            "seq_len": scenario.sequence_length,
            "max_norm": 1.0,
            "mixed_precision_param": _PRECISIONS[scenario.dtype],
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(scenario),
        "activation_checkpoint": _recompute(scenario),
    }
    is_async = trainer.overlaps_tensor_collectives and layout.tp > 1
    if is_async or scenario.dtype is DType.FP8:
        tables["compile"] = {"enable": True, "components": ["model", "loss"]}
    if scenario.dtype is DType.FP8:
        quantize: dict[str, object] = {
            "linear": {
                "float8": {
                    "enable_fsdp_float8_all_gather": False,
                    "filter_fqns": ["output", "router.gate"],
                }
            }
        }
        if scenario.model.moe:
            quantize["grouped_mm"] = {"float8": {"fqns": ["experts"]}}
        tables["quantize"] = quantize
    return tables


def _parallelism(scenario: TrainingScenario) -> Mapping[str, object]:
    layout, trainer = scenario.layout, scenario.trainer.resolve()
    stage = scenario.zero_stage
    shards = ScenarioDegrees.of(scenario).shards // layout.cp if stage else 1
    options: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": _RESHARD.get(stage, "default"),
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
    }
    if trainer.overlaps_tensor_collectives and layout.tp > 1:
        options["enable_async_tensor_parallel"] = True
    if layout.cp > 1:
        options["context_parallel_rotate_method"] = "alltoall"
    if scenario.model.moe:
        options["expert_parallel_degree"] = layout.ep
        options["expert_tensor_parallel_degree"] = expert_mesh(layout, scenario.expert_tp).tp
    if layout.pp > 1:
        schedule = strategy_of(scenario).pipeline_schedule
        options |= {
            "pipeline_parallel_schedule": _SCHEDULES[schedule],
            "pipeline_parallel_microbatch_size": scenario.micro_batch_size,
        }
        options["module_fqns_per_model_part"] = _chunks(scenario)
    return options


def _chunks(scenario: TrainingScenario) -> list[list[str]]:
    """Return the modules of every chunk of layers in the order of the model."""
    chunks: list[list[str]] = []
    first = 0
    for count in chunk_layers(scenario):
        chunks.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    chunks[0].insert(0, "tok_embeddings")
    chunks[-1] += ["norm", "output"]
    return chunks


def _read_chunks(tables: Mapping[str, Any]) -> tuple[int, ...]:
    chunks = tables["parallelism"].get("module_fqns_per_model_part")
    if chunks is None:
        wanted = f"{tables['model']['name']}/{tables['model']['flavor']}"
        preset = next(preset for preset, flavor in _flavors().items() if flavor == wanted)
        return (find_model(preset).num_layers,)
    return tuple(sum(name.startswith("layers.") for name in chunk) for chunk in chunks)


def _read_expert_tp(parallelism: Mapping[str, Any]) -> int:
    return int(parallelism.get("expert_tensor_parallel_degree", 1))


def _read_dtype(tables: Mapping[str, Any]) -> DType:
    if _FP8_CONVERTER in tables["model"].get("converters", ()):
        return DType.FP8
    precision = tables["training"]["mixed_precision_param"]
    return DType.BF16 if precision == "bfloat16" else DType.FP32


def _flavors() -> Mapping[str, str]:
    content = dict(scan_yaml("foretoken.simulator.launch", "flavors"))
    return {str(preset): str(flavor) for preset, flavor in content[Torchtitan.name].items()}


def _find_flavor(model: ModelArchitecture) -> str:
    """Return name and flavor of the model of that geometry; nothing where there is none."""
    for preset, flavor in _flavors().items():
        if _geometry(find_model(preset)) == _geometry(model):
            return flavor
    return ""


def _geometry(model: ModelArchitecture) -> ModelArchitecture:
    return replace(model, name="", aliases=(), max_position=1)


def _remarks(scenario: TrainingScenario, name: str, flavor: str) -> list[str]:
    trainer = scenario.trainer.resolve()
    remarks = [
        f"set TOKENIZER to the folder of the tokenizer of {name} {flavor}",
        "set DATA_PATH to the data of `training.dataset` (left out: fetched from Hugging Face)",
        LEARNING_REMARK,
        f"torchtitan {_RELEASE} needs the PyTorch that its release names; later ones have no TOML",
    ]
    if num_virtual_stages(scenario) == 1 and scenario.layout.pp > 1:
        remarks.append("a pipeline's micro batches are `local_batch_size` cut into pieces")
    if trainer.overlaps_tensor_collectives and scenario.layout.tp > 1:
        remarks.append("overlapped tensor parallelism needs torch.compile, which fuses kernels too")
    followed = [("overlaps_gradient_reduction", True), ("overlaps_parameter_gather", True)]
    return remarks + list_differences(scenario, followed if scenario.zero_stage else ())


TRAINER = Torchtitan()
