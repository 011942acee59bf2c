"""torchtitan: the TOML of a job.

Sources: torchtitan 0.2.2, `torchtitan/config/job_config.py` (keys), `distributed/parallel_dims.py`,
`distributed/pipeline_parallel.py` and `models/*/infra/parallelize.py` (what goes with what);
PyTorch, `torch/distributed/pipelining/schedules.py` (names of schedules).
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.plugins import scan_yaml
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.documented_option import find_options, flatten, nest
from foretoken.simulator.launch.option_map import Fields, Link, OptionMap, Options, value
from foretoken.simulator.launch.shell_script import (
    NUM_DEVICES,
    Program,
    read_script,
    render_script,
)
from foretoken.simulator.launch.toml_text import render_toml
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    SCRIPT,
    LaunchedStrategy,
    Refusals,
    TrainingJob,
    TrainingLaunch,
    launched_fields,
    list_differences,
    num_virtual_stages,
    refuse_common,
    strategy_of_fields,
)
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

# Prefixes and keys of the TOML.
_AXES = "parallelism."
_SELECTED = "activation_checkpoint.selective_ac_option"

_DATA = (
    'DATA=(--model.hf_assets_path "${TOKENIZER:?set it to the folder of the tokenizer}")',
    'if [[ -n "${DATA_PATH:-}" ]]; then DATA+=(--training.dataset_path "${DATA_PATH}"); fi',
)

Tables = Mapping[str, Mapping[str, object]]


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


def _write_training(fields: Fields) -> Options:
    is_pipeline = fields["pp"] > 1
    local = fields["global_batch_size"] // fields["dp"]
    return {
        "training.dataset": "c4",
        "training.steps": 100,
        "training.local_batch_size": local if is_pipeline else fields["micro_batch_size"],
        "training.global_batch_size": fields["global_batch_size"],
        "training.seq_len": fields["sequence_length"],
        "training.max_norm": 1.0,
        "training.mixed_precision_param": _PRECISIONS[fields["dtype"]],
        "training.mixed_precision_reduce": "float32",
    }


def _read_training(options: Options) -> Fields:
    precision = options["training.mixed_precision_param"]
    is_fp8 = _FP8_CONVERTER in options.get("model.converters", ())
    return {
        "global_batch_size": options["training.global_batch_size"],
        "sequence_length": options["training.seq_len"],
        "micro_batch_size": options.get(
            f"{_AXES}pipeline_parallel_microbatch_size", options["training.local_batch_size"]
        ),
        "dtype": DType.FP8 if is_fp8 else DType.BF16 if precision == "bfloat16" else DType.FP32,
    }


def _write_shards(fields: Fields) -> Options:
    stage = fields["zero_stage"]
    shards = fields["shard_degree"] // fields["cp"] if stage else 1
    return {
        f"{_AXES}data_parallel_replicate_degree": fields["dp"] // shards,
        f"{_AXES}data_parallel_shard_degree": shards,
        f"{_AXES}fsdp_reshard_after_forward": _RESHARD.get(stage, "default"),
    }


def _read_shards(options: Options) -> Fields:
    pipeline, tensor, context = (
        options[f"{_AXES}{axis}_parallel_degree"] for axis in ("pipeline", "tensor", "context")
    )
    shards = options[f"{_AXES}data_parallel_shard_degree"] * context
    stages = {policy: stage for stage, policy in _RESHARD.items()}
    stage = stages[options[f"{_AXES}fsdp_reshard_after_forward"]] if shards > 1 else 0
    return {
        "dp": options[NUM_DEVICES] // (pipeline * tensor * context),
        "zero_stage": stage,
        "shard_degree": shards if stage else 1,
        "sequence_parallel": tensor > 1,
    }


def _write_optional(fields: Fields) -> Options:
    options: dict[str, object] = {}
    if fields["rules.overlaps_tensor_collectives"] and fields["tp"] > 1:
        options["enable_async_tensor_parallel"] = True
    if fields["cp"] > 1:
        options["context_parallel_rotate_method"] = "alltoall"
    if fields["has_experts"]:
        options["expert_parallel_degree"] = fields["ep"]
        options["expert_tensor_parallel_degree"] = fields["expert_tp"]
    return {f"{_AXES}{name}": said for name, said in options.items()}


def _write_chunks(fields: Fields) -> Options:
    """Return the modules of every chunk of layers in the order of the model."""
    if fields["pp"] == 1:
        return {}
    chunks: list[list[str]] = []
    first = 0
    for count in fields["stage_layers"]:
        chunks.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    chunks[0].insert(0, "tok_embeddings")
    chunks[-1] += ["norm", "output"]
    return {
        f"{_AXES}pipeline_parallel_schedule": _SCHEDULES[fields["pipeline_schedule"]],
        f"{_AXES}pipeline_parallel_microbatch_size": fields["micro_batch_size"],
        f"{_AXES}module_fqns_per_model_part": chunks,
    }


def _read_chunks(options: Options) -> Fields:
    chunks = options.get(f"{_AXES}module_fqns_per_model_part")
    if chunks is None:
        counts: tuple[int, ...] = (_read_preset(options).num_layers,)
    else:
        counts = tuple(sum(name.startswith("layers.") for name in chunk) for chunk in chunks)
    schedules = {name: schedule for schedule, name in _SCHEDULES.items()}
    return {
        "stage_layers": counts,
        "virtual_stages": len(counts) // options[f"{_AXES}pipeline_parallel_degree"],
        "pipeline_schedule": schedules[options.get(f"{_AXES}pipeline_parallel_schedule", "1F1B")],
    }


def _read_preset(options: Options) -> ModelArchitecture:
    wanted = f"{options['model.name']}/{options['model.flavor']}"
    return find_model(next(preset for preset, flavor in _flavors().items() if flavor == wanted))


def _write_recompute(fields: Fields) -> Options:
    chosen = {_SELECTED: _BY_OPERATOR} if fields["recompute"] == "selective" else {}
    return {"activation_checkpoint.mode": fields["recompute"], **chosen}


def _read_recompute(options: Options) -> Fields:
    is_by_operator = options.get(_SELECTED) == _BY_OPERATOR
    return {
        "recompute": options["activation_checkpoint.mode"],
        "recompute_modules": (EVERY_OTHER_MATMUL,) if is_by_operator else (),
    }


def _write_compilation(fields: Fields) -> Options:
    is_fp8 = fields["dtype"] is DType.FP8
    is_async = fields["rules.overlaps_tensor_collectives"] and fields["tp"] > 1
    options: dict[str, object] = {}
    if is_async or is_fp8:
        options |= {"compile.enable": True, "compile.components": ["model", "loss"]}
    if is_fp8:
        options |= {
            "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
            "quantize.linear.float8.filter_fqns": ["output", "router.gate"],
        }
    if is_fp8 and fields["has_experts"]:
        options["quantize.grouped_mm.float8.fqns"] = ["experts"]
    return options


_OPTIONS = OptionMap(
    name="torchtitan",
    versions=_RELEASE,
    source="torchtitan, torchtitan/config/job_config.py",
    links=(
        Link(write=_write_training, read=_read_training),
        Link(write=_write_shards, read=_read_shards),
        value("tp", f"{_AXES}tensor_parallel_degree", always=True),
        value("pp", f"{_AXES}pipeline_parallel_degree", always=True),
        value("cp", f"{_AXES}context_parallel_degree", always=True),
        Link(
            write=_write_optional,
            read=lambda options: {
                "has_experts": f"{_AXES}expert_parallel_degree" in options,
                "ep": options.get(f"{_AXES}expert_parallel_degree", 1),
                "expert_tp": options.get(f"{_AXES}expert_tensor_parallel_degree", 1),
            },
        ),
        Link(write=_write_chunks, read=_read_chunks),
        Link(write=_write_recompute, read=_read_recompute),
        Link(write=_write_compilation),
    ),
)


class Torchtitan:
    """Starts `torchtitan.train` with a TOML."""

    name = "torchtitan"
    profiles = ("torchtitan",)
    can = find_trainer("torchtitan").can
    options = _OPTIONS

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run."""
        scenario = job.scenario
        flavor = _refuse(scenario)
        leaves = {
            **flatten(_run_tables(scenario, *flavor)),
            **self.options.write(launched_fields(scenario)),
        }
        find_options("torchtitan").check(leaves)
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
            files={SCRIPT: script, _CONFIG: render_toml(nest(leaves))},
            image=_IMAGE,
            remarks=_remarks(scenario, *flavor),
        )

    def starts(self, files: Mapping[str, str]) -> bool:
        """Tell whether the command is of `torchtitan.train`, or there is a TOML."""
        return "torchtitan" in files[SCRIPT] or _CONFIG in files

    def find_models(self, files: Mapping[str, str]) -> Sequence[str]:
        """Return the preset of the model's flavor."""
        return [_read_preset(flatten(tomllib.loads(files[_CONFIG]))).name]

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what the TOML asks for."""
        leaves = flatten(tomllib.loads(files[_CONFIG]))
        started = read_script(files[SCRIPT])[NUM_DEVICES]
        return strategy_of_fields(self.options.read({**leaves, NUM_DEVICES: started})[0])


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
