"""A training scenario becomes files of a framework, of options that it documents."""

import json
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.options import all_options, find_options, flatten
from foretoken.simulator.launch.trainer import all_frameworks
from foretoken.simulator.launch.training import (
    check_framework_has,
    read_launch,
    write_training_launch,
)

_DENSE = TrainingScenario(
    name="llama on 16",
    model=find_model("llama-3.1-8b"),
    device="h100_sxm",
    layout=ParallelLayout(tp=2, pp=2, dp=4),
    sequence_length=8192,
    micro_batch_size=2,
    global_batch_size=64,
    trainer=TrainerSpec(profile="megatron-core"),
    zero_stage=1,
    sequence_parallel=True,
)
_EXPERTS = replace(
    _DENSE,
    model=find_model("deepseek-v3"),
    layout=ParallelLayout(tp=2, pp=4, dp=4, ep=8),
    expert_tp=1,
    recompute="selective",
    recompute_modules=("mla_up_proj", "core_attention"),
    dtype=DType.FP8,
)
_SHARDED = replace(
    _DENSE,
    layout=ParallelLayout(tp=2, dp=8),
    trainer=TrainerSpec(profile="torchtitan"),
    zero_stage=3,
    recompute="full",
)
_DEEPSPEED = replace(
    _DENSE,
    trainer=TrainerSpec(profile="megatron-deepspeed", rules={"bucket_elements": "1000"}),
    recompute="full",
)
_SCENARIOS = {
    "megatron-core": _DENSE,
    "megatron-core, experts": _EXPERTS,
    "torchtitan": _SHARDED,
    "deepspeed": _DEEPSPEED,
}


def _write(tmp_path: Path, scenario: TrainingScenario, framework: str = "") -> dict[str, str]:
    paths = write_training_launch(scenario, tmp_path, framework)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _lines(script: str) -> list[str]:
    return [line.strip() for line in script.splitlines()]


def _refusals(tmp_path: Path, scenario: TrainingScenario, framework: str) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        write_training_launch(scenario, tmp_path, framework)
    assert [] == list(tmp_path.iterdir())
    return {violation.field: violation.description for violation in caught.value.violations}


def test_megatron_is_given_degrees_batches_and_the_model(tmp_path: Path) -> None:
    lines = _lines(_write(tmp_path, _DENSE)["train.sh"])
    expected = [
        *("--nnodes 2", "--nproc-per-node 8"),
        *("--num-layers 32", "--hidden-size 4096", "--ffn-hidden-size 14336"),
        *("--num-attention-heads 32", "--group-query-attention", "--num-query-groups 8"),
        *("--swiglu", "--normalization RMSNorm", "--disable-bias-linear"),
        *("--tensor-model-parallel-size 2", "--sequence-parallel"),
        *("--pipeline-model-parallel-size 2", "--seq-length 8192"),
        *("--micro-batch-size 2", "--global-batch-size 64"),
        *("--use-distributed-optimizer", "--bf16", "--make-vocab-size-divisible-by 128"),
    ]
    assert [] == [line for line in expected if line not in lines]
    # The tokenizer that makes up data counts one token of its own.
    assert "DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255)" in lines


def test_megatron_is_given_experts_latent_attention_and_uneven_stages(tmp_path: Path) -> None:
    lines = _lines(_write(tmp_path, _EXPERTS)["train.sh"])
    expected = [
        *("--multi-latent-attention", "--q-lora-rank 1536", "--kv-lora-rank 512"),
        *("--qk-head-dim 128", "--qk-pos-emb-head-dim 64", "--v-head-dim 128"),
        *("--num-experts 256", "--moe-router-topk 8", "--moe-ffn-hidden-size 2048"),
        *("--moe-shared-expert-intermediate-size 2048", "--moe-layer-freq '([0]*3+[1]*58)'"),
        *("--expert-model-parallel-size 8", "--expert-tensor-parallel-size 1"),
        *("--bf16", "--fp8-format hybrid"),
        "--recompute-modules mla_up_proj core_attn",
        # 61 layers over four stages: the first has one more.
        "--pipeline-model-parallel-layout 'Et*16|t*15|t*15|t*15L'",
    ]
    assert [] == [line for line in expected if line not in lines]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"recompute": "full"}, ["--recompute-method uniform", "--recompute-num-layers 1"]),
        (
            {"recompute": "full", "recompute_layers": 3},
            ["--recompute-method block", "--recompute-num-layers 3"],
        ),
        (
            {"pipeline_schedule": "interleaved", "virtual_stages": 4},
            ["--num-virtual-stages-per-pipeline-rank 4"],
        ),
        (
            {
                "pipeline_schedule": "interleaved",
                "virtual_stages": 4,
                "trainer": TrainerSpec(
                    profile="megatron-core", rules={"interleaved_transfers": "rendezvous"}
                ),
            },
            ["--no-overlap-p2p-communication"],
        ),
        ({"stage_layers": (20, 12)}, ["--pipeline-model-parallel-layout 'Et*20|t*12L'"]),
        ({"stage_layers": (0, 32)}, ["--pipeline-model-parallel-layout 'E|t*32L'"]),
        ({"shard_degree": 2}, ["--num-distributed-optimizer-instances 2"]),
        (
            {"layout": ParallelLayout(dp=8, cp=2), "context_parallel": "all_to_all"},
            ["--context-parallel-size 2", "--cp-comm-type a2a"],
        ),
        (
            {"layout": ParallelLayout(dp=16), "zero_stage": 3},
            [
                "--use-megatron-fsdp",
                "--data-parallel-sharding-strategy optim_grads_params",
                "--ckpt-format fsdp_dtensor",
            ],
        ),
        (
            {"trainer": TrainerSpec(rules={"overlaps_gradient_reduction": "true"})},
            ["--overlap-grad-reduce"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_megatron_is_given_what_a_strategy_says(
    tmp_path: Path, change: dict[str, Any], expected: list[str]
) -> None:
    plain = _lines(_write(tmp_path / "plain", replace(_DENSE, sequence_parallel=False))["train.sh"])
    script = _write(tmp_path / "changed", replace(_DENSE, **change), "megatron-core")["train.sh"]
    assert [] == [line for line in expected if line not in _lines(script)]
    assert [] == [line for line in expected if line in plain]


@pytest.mark.parametrize(
    ("num_layers", "virtual_stages", "ends"),
    [
        (30, 4, {"embedding", "loss"}),
        (31, 4, {"loss"}),
        (32, 4, set()),
        (14, 8, {"embedding", "loss"}),
    ],
)
def test_megatron_counts_the_embedding_and_the_head_where_chunks_are_alike_then(
    tmp_path: Path, num_layers: int, virtual_stages: int, ends: set[str]
) -> None:
    """Eight chunks of four layers, or 16 of one, of which the ends have one less."""
    scenario = replace(
        _DENSE,
        model=replace(_DENSE.model, num_layers=num_layers),
        pipeline_schedule="interleaved",
        virtual_stages=virtual_stages,
    )
    lines = _lines(_write(tmp_path, scenario, "megatron-core")["train.sh"])
    assert f"--num-virtual-stages-per-pipeline-rank {virtual_stages}" in lines
    known = ("embedding", "loss")
    found = {end for end in known if f"--account-for-{end}-in-pipeline-split" in lines}
    assert ends == found
    assert not any("pipeline-model-parallel-layout" in line for line in lines)


def test_only_fsdp_leaves_connections_alone(tmp_path: Path) -> None:
    """Megatron refuses FSDP with one connection, and tensor parallelism with several."""
    sharded = replace(_DENSE, layout=ParallelLayout(dp=16), zero_stage=2)
    setting = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert setting in _write(tmp_path / "a", _DENSE)["train.sh"]
    assert setting not in _write(tmp_path / "b", sharded)["train.sh"]


def test_experts_exchange_is_hidden_only_where_megatron_can(tmp_path: Path) -> None:
    trainer = TrainerSpec(profile="megatron-core", rules={"overlaps_expert_exchange": "true"})
    scenario = replace(_EXPERTS, trainer=trainer, layout=ParallelLayout(tp=2, dp=8, ep=8))
    script = _write(tmp_path / "hidden", scenario)["train.sh"]
    assert "--overlap-moe-expert-parallel-comm" in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in script
    for change in (
        {"recompute": "full", "recompute_modules": ()},
        {"layout": _EXPERTS.layout},
        {"recompute_modules": ("moe",)},
    ):
        refused = tmp_path / "refused"
        refused.mkdir(exist_ok=True)
        reasons = _refusals(refused, replace(scenario, **change), "")  # type: ignore[arg-type]
        assert {"trainer.rules.overlaps_expert_exchange"} == set(reasons)


def test_tokens_are_sent_once_by_deepep_to_as_many_nodes_as_the_router_allows(
    tmp_path: Path,
) -> None:
    """Experts over 16 ranks, two nodes: a group of experts on each."""
    rules = {"sends_tokens_once": "true", "nodes_per_token": "1", "dispatch_dtype": "fp8"}
    trainer = TrainerSpec(profile="megatron-core", rules=rules)
    layout = ParallelLayout(tp=2, pp=4, dp=8, ep=16)
    files = _write(tmp_path / "once", replace(_EXPERTS, trainer=trainer, layout=layout))
    expected = [
        *("--moe-token-dispatcher-type flex", "--moe-enable-deepep"),
        *("--moe-router-num-groups 2", "--moe-router-group-topk 1"),
    ]
    lines = _lines(files["train.sh"])
    assert [] == [line for line in expected if line not in lines]
    assert "not in fp8" in files["README.md"]
    plain = _lines(_write(tmp_path / "every", _EXPERTS)["train.sh"])
    assert "--moe-token-dispatcher-type alltoall" in plain
    assert [] == [line for line in expected if line in plain]


def test_a_capacity_of_experts_is_written_and_read_back(tmp_path: Path) -> None:
    limited = replace(_EXPERTS, moe_capacity_factor=1.25)
    lines = _lines(_write(tmp_path / "limited", limited)["train.sh"])
    assert "--moe-expert-capacity-factor 1.25" in lines
    script = (tmp_path / "limited" / "train.sh").read_text(encoding="utf-8")
    assert 1.25 == read_launch("", {"train.sh": script}).content["moe_capacity_factor"]
    plain = _lines(_write(tmp_path / "plain", _EXPERTS)["train.sh"])
    assert [] == [line for line in plain if "capacity" in line]


def test_formats_of_states_are_options(tmp_path: Path) -> None:
    """Moments in 16 bit take the optimizer that has them."""
    expected = [
        *("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
        "--fp8-param-gather",
    ]
    rules = {"moment_dtype": "bf16", "keeps_narrow_weights": "true"}
    trainer = TrainerSpec(profile="megatron-core", rules=rules)
    narrow = _lines(_write(tmp_path / "narrow", replace(_EXPERTS, trainer=trainer))["train.sh"])
    assert [] == [line for line in expected if line not in narrow]
    plain = _lines(_write(tmp_path / "plain", _EXPERTS)["train.sh"])
    assert [] == [line for line in expected if line in plain]


def test_torchtitan_is_given_a_job(tmp_path: Path) -> None:
    tables = tomllib.loads(_write(tmp_path, _SHARDED)["train.toml"])
    assert {"name": "llama3", "flavor": "8B"} == tables["model"]
    parallelism = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 8,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
    }
    assert parallelism == tables["parallelism"]
    training = tables["training"]
    assert (2, 64, 8192) == tuple(
        training[name] for name in ("local_batch_size", "global_batch_size", "seq_len")
    )
    assert {"mode": "full"} == tables["activation_checkpoint"]


def test_torchtitan_cuts_a_pipelines_samples_and_layers(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=4)
    scenario = replace(_SHARDED, layout=layout, shard_degree=2, stage_layers=(17, 15), zero_stage=2)
    tables = tomllib.loads(_write(tmp_path, scenario)["train.toml"])
    parallelism = tables["parallelism"]
    # 64 samples over 4 replicas, in pieces of 2.
    assert 16 == tables["training"]["local_batch_size"]
    assert 2 == parallelism["pipeline_parallel_microbatch_size"]
    assert ("1F1B", "never") == (
        parallelism["pipeline_parallel_schedule"],
        parallelism["fsdp_reshard_after_forward"],
    )
    assert (2, 2) == (
        parallelism["data_parallel_replicate_degree"],
        parallelism["data_parallel_shard_degree"],
    )
    first, last = parallelism["module_fqns_per_model_part"]
    assert ["tok_embeddings", *(f"layers.{index}" for index in range(17))] == first
    assert [*(f"layers.{index}" for index in range(17, 32)), "norm", "output"] == last


def test_deepspeed_is_given_json_and_arguments(tmp_path: Path) -> None:
    files = _write(tmp_path, _DEEPSPEED)
    config = json.loads(files["deepspeed.json"])
    # 64 samples are 8 micro batches of 2 on each of 4 replicas.
    assert (64, 2, 8) == (
        config["train_batch_size"],
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    )
    assert 1 == config["zero_optimization"]["stage"]
    assert 1000 == config["zero_optimization"]["reduce_bucket_size"]
    assert {"enabled": True} == config["bf16"]
    lines = _lines(files["train.sh"])
    expected = ("--deepspeed_config deepspeed.json", "--zero-stage 1", "--checkpoint-activations")
    assert [] == [line for line in expected if line not in lines]


def test_deepspeed_without_a_pipeline_splits_heads_and_weights(tmp_path: Path) -> None:
    scenario = replace(
        _DEEPSPEED,
        layout=ParallelLayout(dp=4, cp=4),
        trainer=TrainerSpec(profile="megatron-deepspeed", rules={"attention": "flash"}),
        context_parallel="all_to_all",
        zero_stage=3,
        dtype=DType.FP16,
    )
    files = _write(tmp_path, scenario)
    config, lines = json.loads(files["deepspeed.json"]), _lines(files["train.sh"])
    assert 3 == config["zero_optimization"]["stage"]
    assert config["fp16"]["enabled"]
    expected = (
        *("--ds-sequence-parallel-size 4", "--no-pipeline-parallel", "--fp16"),
        "--use-flash-attn-v2",
    )
    assert [] == [line for line in expected if line not in lines]


@pytest.mark.parametrize("name", _SCENARIOS)
def test_scripts_parse_and_kubernetes_takes_the_job(tmp_path: Path, name: str) -> None:
    files = _write(tmp_path, _SCENARIOS[name])
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", tmp_path / "train.sh"], check=True)
    manifests = list(yaml.safe_load_all(files["job.yaml"]))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    config_map, service, _ = manifests
    assert config_map["data"]["train.sh"] == files["train.sh"]
    # People read and change the script there: it stands as it is, indented.
    assert "\n    set -euo pipefail\n" in files["job.yaml"]
    assert set(config_map["data"]) == set(files) & {"train.sh", "train.toml", "deepspeed.json"}
    assert "None" == service["spec"]["clusterIP"]


def test_a_pod_a_node_and_all_meet_at_the_first(tmp_path: Path) -> None:
    files = _write(tmp_path, _DENSE)
    _, service, job = yaml.safe_load_all(files["job.yaml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    # 16 devices are two nodes of eight.
    assert ("Indexed", 2, 2) == (spec["completionMode"], spec["completions"], spec["parallelism"])
    (container,) = pod["containers"]
    assert {"nvidia.com/gpu": "8"} == container["resources"]["limits"]
    assert {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"} == pod["nodeSelector"]
    name, subdomain = job["metadata"]["name"], pod["subdomain"]
    address = {item["name"]: item.get("value") for item in container["env"]}["MASTER_ADDR"]
    assert f"{name}-0.{subdomain}" == address
    assert subdomain == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    (spread,) = pod["topologySpreadConstraints"]
    assert ("kubernetes.io/hostname", 1) == (spread["topologyKey"], spread["maxSkew"])


def test_the_scenario_is_written_as_it_was(tmp_path: Path) -> None:
    for name, scenario in _SCENARIOS.items():
        folder = tmp_path / name
        _write(folder, scenario)
        assert scenario == read_training_scenario(folder / "scenario.yaml", {})


def test_the_trainers_framework_is_taken_and_other_rules_are_told(tmp_path: Path) -> None:
    files = _write(tmp_path / "own", _DEEPSPEED)
    assert "deepspeed.json" in files
    assert "trainer.profile=" not in files["README.md"]
    other = _write(tmp_path / "other", _DEEPSPEED, "megatron-core")["README.md"]
    assert "simulated by the rules of megatron-deepspeed" in other


def test_a_trainer_without_files_needs_a_framework(tmp_path: Path) -> None:
    scenario = replace(_DENSE, trainer=TrainerSpec(profile="gpt-neox"))
    reasons = _refusals(tmp_path, scenario, "")
    assert "deepspeed, megatron-core, torchtitan" in reasons["trainer.profile"]
    with pytest.raises(UnknownPluginError, match="megatron-core"):
        write_training_launch(_DENSE, tmp_path, "megatron-cor")


@pytest.mark.parametrize(
    ("framework", "change", "field", "way"),
    [
        ("megatron-core", {"pipeline_schedule": "zero_bubble_v"}, "pipeline_schedule", "one_f_o"),
        ("megatron-core", {"zero_stage": 3}, "zero_stage", "0 and 1"),
        ("megatron-core", {"weight_parallel": "isp"}, "weight_parallel", "leave it out"),
        ("megatron-core", {"weight_parallel": "fsp"}, "weight_parallel", "leave it out"),
        ("megatron-core", {"dtype": DType.TF32}, "dtype", "bf16, fp16, fp8 and fp32"),
        (
            "megatron-core",
            {"stage_devices": ("h100_sxm", "a100_sxm_80")},
            "stage_devices",
            "stage_layers",
        ),
        ("megatron-core", {"model": find_model("phi-2")}, "model.has_parallel_residual", "follow"),
        ("torchtitan", {"zero_stage": 1}, "zero_stage", "2 and 3"),
        ("torchtitan", {"sequence_parallel": False}, "sequence_parallel", "set it true"),
        (
            "torchtitan",
            {"recompute": "selective", "recompute_modules": ("mlp",)},
            "recompute_modules",
            "it has every_other_matmul",
        ),
        ("torchtitan", {"model": find_model("llama-2-7b")}, "model", "llama-3.1-8b"),
        ("torchtitan", {"dtype": DType.FP16}, "dtype", "bf16, fp8 and fp32"),
        ("deepspeed", {"zero_stage": 2}, "zero_stage", "0 and 1"),
        ("deepspeed", {"stage_layers": (20, 12)}, "stage_layers", "pp that divides"),
        (
            "deepspeed",
            {"pipeline_schedule": "interleaved", "virtual_stages": 2},
            "virtual_stages",
            "it has 1",
        ),
        ("deepspeed", {"model": find_model("qwen3-8b")}, "model.has_qk_norm", "megatron-core"),
    ],
)
def test_what_a_framework_lacks_is_refused_with_what_can_be(
    tmp_path: Path, framework: str, change: dict[str, Any], field: str, way: str
) -> None:
    reasons = _refusals(tmp_path, replace(_DENSE, **change), framework)
    assert way in reasons[field]


def test_devices_fill_nodes(tmp_path: Path) -> None:
    scenario = replace(_DENSE, layout=ParallelLayout(tp=2, pp=2, dp=3), global_batch_size=48)
    assert "whole number of nodes" in _refusals(tmp_path, scenario, "")["layout"]


def test_an_option_that_is_not_documented_is_an_error() -> None:
    known = find_options("megatron-core")
    known.check({"num-layers": 4, "swiglu": True, "cp-comm-type": ("p2p",), "save": None})
    for wrong in (
        {"num-layer": 4},
        {"num-layers": "4"},
        {"num-layers": True},
        {"swiglu": "yes"},
        {"recompute-method": "some"},
        {"cp-comm-type": "p2p"},
    ):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            known.check(wrong)


def test_every_list_of_options_says_where_it_is_from() -> None:
    for known in all_options().values():
        assert known.options
        assert all((known.project, known.versions, known.source, known.read_on))
    assert {"a.b": 1, "a.c.d": (2,), "e": True} == flatten(
        {"a": {"b": 1, "c": {"d": (2,)}}, "e": True}
    )


def test_frameworks_share_no_profile() -> None:
    profiles = [profile for trainer in all_frameworks().values() for profile in trainer.profiles]
    assert len(set(profiles)) == len(profiles)


def test_a_model_no_strategy_helps_is_refused_before_a_search() -> None:
    """What a layout would change is not asked of the framework then."""
    scenario = replace(_SHARDED, model=find_model("llama-2-7b"), zero_stage=1)
    with pytest.raises(InvalidRequestError, match=r"llama-3\.1-8b") as refused:
        check_framework_has(scenario, "torchtitan")
    assert {item.field for item in refused.value.violations} == {"model"}
    check_framework_has(replace(_SHARDED, zero_stage=1), "torchtitan")


def test_torchtitan_is_asked_to_recompute_by_operator(tmp_path: Path) -> None:
    write_training_launch(replace(_SHARDED, recompute="selective"), tmp_path)
    tables = tomllib.loads((tmp_path / "train.toml").read_text(encoding="utf-8"))
    expected = {"mode": "selective", "selective_ac_option": "op"}
    assert expected == tables["activation_checkpoint"]
