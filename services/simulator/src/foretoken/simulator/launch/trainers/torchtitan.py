"""torchtitan: the TOML of a job.

Sources: torchtitan 0.2.2, `torchtitan/config/job_config.py` (keys), `distributed/parallel_dims.py`,
`distributed/pipeline_parallel.py` and `models/*/infra/parallelize.py` (what goes with what);
PyTorch, `torch/distributed/pipelining/schedules.py` (names of schedules).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.plugins import scan_yaml
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.files import render_toml
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    invert,
    value,
)
from foretoken.simulator.launch.trainer import (
    LEARNING_REMARK,
    NUM_DEVICES,
    SCRIPT,
    ConfigFile,
    LaunchedRun,
    Refusals,
    TrainingFramework,
    list_differences,
)
from foretoken.simulator.steps.operator_recompute import EVERY_OTHER_MATMUL

_NAME = "torchtitan"
_RELEASE, _CONFIG = "0.2.2", "train.toml"
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


def _refuse(scenario: TrainingScenario, refusals: Refusals) -> None:
    flavor = _find_flavor(scenario.model)
    refusals.add_if(
        not flavor,
        "model",
        f"has no model of the geometry of {scenario.model.name}; it has"
        f" {', '.join(sorted(_flavors()))}",
    )
    name = flavor.partition("/")[0]
    refusals.add_if(
        name in _WITHOUT_CONTEXT and scenario.layout.cp > 1,
        "layout.cp",
        f"its {name} runs FlexAttention, which is not split by context: set it 1",
    )


def _flavors() -> Mapping[str, str]:
    content = dict(scan_yaml("foretoken.simulator.launch", "flavors"))
    return {str(preset): str(flavor) for preset, flavor in content[_NAME].items()}


def _find_flavor(model: ModelArchitecture) -> str:
    """Return name and flavor of the model of that geometry; nothing where there is none."""
    for preset, flavor in _flavors().items():
        if _geometry(find_model(preset)) == _geometry(model):
            return flavor
    return ""


def _geometry(model: ModelArchitecture) -> ModelArchitecture:
    return replace(model, name="", aliases=(), max_position=1)


def _read_preset(options: Options) -> ModelArchitecture:
    return find_model(invert(_flavors())[f"{options['model.name']}/{options['model.flavor']}"])


def _write_job(run: LaunchedRun) -> Options:
    """Return what a run needs and no simulation says, and the model."""
    name, _, flavor = _find_flavor(run.model).partition("/")
    experts = [_FP8_EXPERTS_CONVERTER] if run.has_experts else []
    converters = {"model.converters": [_FP8_CONVERTER, *experts]}
    return {
        "job.dump_folder": "/tmp/torchtitan",  # noqa: S108 - in the container
        "job.description": (
            f"{run.model.name} on {run.scenario.layout.num_devices} {run.scenario.device}"
        ),
        "metrics.log_freq": 1,
        "model.name": name,
        "model.flavor": flavor,
        **(converters if run.dtype is DType.FP8 else {}),
        "optimizer.name": "AdamW",
        "optimizer.lr": 1.0e-4,
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 10,
        "checkpoint.enable": False,
    }


def _write_training(run: LaunchedRun) -> Options:
    is_pipeline = run.pp > 1
    local = run.global_batch_size // run.dp
    return {
        "training.dataset": "c4",
        "training.steps": 100,
        "training.local_batch_size": local if is_pipeline else run.micro_batch_size,
        "training.global_batch_size": run.global_batch_size,
        "training.seq_len": run.sequence_length,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": _PRECISIONS[run.dtype],
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


def _write_shards(run: LaunchedRun) -> Options:
    stage = run.zero_stage
    shards = run.shard_degree // run.cp if stage else 1
    return {
        f"{_AXES}data_parallel_replicate_degree": run.dp // shards,
        f"{_AXES}data_parallel_shard_degree": shards,
        f"{_AXES}fsdp_reshard_after_forward": _RESHARD.get(stage, "default"),
    }


def _read_shards(options: Options) -> Fields:
    pipeline, tensor, context = (
        options[f"{_AXES}{axis}_parallel_degree"] for axis in ("pipeline", "tensor", "context")
    )
    shards = options[f"{_AXES}data_parallel_shard_degree"] * context
    policy = options[f"{_AXES}fsdp_reshard_after_forward"]
    stage = invert(_RESHARD)[policy] if shards > 1 else 0
    return {
        "dp": options[NUM_DEVICES] // (pipeline * tensor * context),
        "zero_stage": stage,
        "shard_degree": shards if stage else 1,
        "sequence_parallel": tensor > 1,
    }


def _write_optional(run: LaunchedRun) -> Options:
    options: dict[str, object] = {}
    if run.rules.overlaps_tensor_collectives and run.tp > 1:
        options["enable_async_tensor_parallel"] = True
    if run.cp > 1:
        options["context_parallel_rotate_method"] = "alltoall"
    if run.has_experts:
        options["expert_parallel_degree"] = run.ep
        options["expert_tensor_parallel_degree"] = run.expert_tp
    return {f"{_AXES}{name}": said for name, said in options.items()}


def _write_chunks(run: LaunchedRun) -> Options:
    """Return the modules of every chunk of layers in the order of the model."""
    if run.pp == 1:
        return {}
    chunks: list[list[str]] = []
    first = 0
    for count in run.stage_layers:
        chunks.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    chunks[0].insert(0, "tok_embeddings")
    chunks[-1] += ["norm", "output"]
    return {
        f"{_AXES}pipeline_parallel_schedule": _SCHEDULES[run.pipeline_schedule],
        f"{_AXES}pipeline_parallel_microbatch_size": run.micro_batch_size,
        f"{_AXES}module_fqns_per_model_part": chunks,
    }


def _read_chunks(options: Options) -> Fields:
    chunks = options.get(f"{_AXES}module_fqns_per_model_part")
    if chunks is None:
        counts: tuple[int, ...] = (_read_preset(options).num_layers,)
    else:
        counts = tuple(sum(name.startswith("layers.") for name in chunk) for chunk in chunks)
    schedule = options.get(f"{_AXES}pipeline_parallel_schedule", "1F1B")
    return {
        "stage_layers": counts,
        "virtual_stages": len(counts) // options[f"{_AXES}pipeline_parallel_degree"],
        "pipeline_schedule": invert(_SCHEDULES)[schedule],
    }


def _write_recompute(run: LaunchedRun) -> Options:
    chosen = {_SELECTED: _BY_OPERATOR} if run.recompute == "selective" else {}
    return {"activation_checkpoint.mode": run.recompute, **chosen}


def _read_recompute(options: Options) -> Fields:
    is_by_operator = options.get(_SELECTED) == _BY_OPERATOR
    return {
        "recompute": options["activation_checkpoint.mode"],
        "recompute_modules": (EVERY_OTHER_MATMUL,) if is_by_operator else (),
    }


def _write_compilation(run: LaunchedRun) -> Options:
    is_fp8 = run.dtype is DType.FP8
    is_async = run.rules.overlaps_tensor_collectives and run.tp > 1
    options: dict[str, object] = {}
    if is_async or is_fp8:
        options |= {"compile.enable": True, "compile.components": ["model", "loss"]}
    if is_fp8:
        options |= {
            "quantize.linear.float8.enable_fsdp_float8_all_gather": (
                run.rules.keeps_narrow_weights
            ),
            "quantize.linear.float8.filter_fqns": ["output", "router.gate"],
        }
    if is_fp8 and run.has_experts:
        options["quantize.grouped_mm.float8.fqns"] = ["experts"]
    return options


_OPTIONS = OptionMap(
    documented="torchtitan",
    links=(
        Link(write=_write_job),
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


# Blocks of `templates/train.sh.j2`.
_SCRIPT = """\
{% block prepare %}
python -c "import torchtitan" 2> /dev/null || pip install torchtitan=={{ framework.release }}
{% endblock %}
{% block data %}
DATA=(--model.hf_assets_path "${TOKENIZER:?set it to the folder of the tokenizer}")
if [[ -n "${DATA_PATH:-}" ]]; then DATA+=(--training.dataset_path "${DATA_PATH}"); fi
{% endblock %}
{% block program %}-m torchtitan.train{% endblock %}
"""


def _remarks(run: LaunchedRun) -> Mapping[str, object]:
    flavor = _find_flavor(run.model).replace("/", " ")
    followed = [("overlaps_gradient_reduction", True), ("overlaps_parameter_gather", True)]
    return {
        f"set TOKENIZER to the folder of the tokenizer of {flavor}": 1,
        "set DATA_PATH to the data of `training.dataset` (left out: fetched from Hugging Face)": 1,
        LEARNING_REMARK: 1,
        f"torchtitan {_RELEASE} needs the PyTorch that its release names; later ones have no TOML"
        "": 1,
        "a pipeline's micro batches are `local_batch_size` cut into pieces": (
            run.virtual_stages == 1 and run.pp > 1
        ),
        "overlapped tensor parallelism needs torch.compile, which fuses kernels too": (
            run.rules.overlaps_tensor_collectives and run.tp > 1
        ),
        **list_differences(run.scenario, followed if run.zero_stage else ()),
    }


TRAINER = TrainingFramework(
    name=_NAME,
    project=_NAME,
    release=_RELEASE,
    profiles=("torchtitan",),
    # It needs a PyTorch of its own time.
    script=_SCRIPT,
    image="pytorch/pytorch:2.10.0-cuda12.8-cudnn9-devel",
    # torchtitan has its options in the file, so its script has this one.
    options=OptionMap(
        documented="torchtitan-command", links=(constant({"job.config_file": _CONFIG}),)
    ),
    config=ConfigFile(name=_CONFIG, options=_OPTIONS, render=render_toml, parse=tomllib.loads),
    starts=lambda files: _NAME in files[SCRIPT] or _CONFIG in files,
    refuse=_refuse,
    remarks=_remarks,
    find_models=lambda options: [_read_preset(options).name],
)
