"""The files that start TensorRT-LLM have the names of the release that a profile is of."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from foretoken.app.scenario_file import build_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.requests.cluster import (
    ClusterSpec,
    LoraSpec,
    ReplicaPool,
    RoutingSpec,
    SpeculativeSpec,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.launch.deployment import LaunchOptions, write_deployment
from foretoken.simulator.launch.training import read_launch

_PLAIN = ServingScenario(
    model=find_model("llama-3.1-8b"),
    device="h200_sxm",
    engine=EngineSpec(profile="trtllm-1.2", max_num_seqs=96),
    workload=WorkloadSpec(
        num_requests=10, prefill=LengthSpec(mean=4000), decode=LengthSpec(mean=1000)
    ),
)
_POOLS = (
    ReplicaPool(name="prefill", role="prefill", num_replicas=2, layout=ParallelLayout(tp=2)),
    ReplicaPool(name="decode", role="decode", layout=ParallelLayout(tp=4)),
)
_WIDE = dataclasses.replace(
    _PLAIN, model=find_model("qwen3-30b-a3b"), layout=ParallelLayout(dp=8, ep=8)
)


def _with(scenario: ServingScenario = _PLAIN, **changes: Any) -> ServingScenario:
    return dataclasses.replace(scenario, **changes)


def _engine(profile: str = "trtllm-1.2", **rules: str) -> EngineSpec:
    return EngineSpec(profile=profile, max_num_seqs=96, rules=rules)


def _routed(router: str, *pools: ReplicaPool) -> ServingScenario:
    return _with(cluster=ClusterSpec(pools=pools, routing=RoutingSpec(router=router)))


_SPLIT = _routed("least_outstanding", *_POOLS)
_SEVERAL = _routed("power_of_two", ReplicaPool(name="chat", num_replicas=3))


def _text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def _manifests(folder: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_text(folder, "deployment.yaml")))


def _settings(scenario: ServingScenario, folder: Path, name: str = "server") -> dict[str, Any]:
    write_deployment(scenario, folder)
    settings: dict[str, Any] = yaml.safe_load(_text(folder, f"{name}.llm.yaml"))
    return settings


def test_a_deployment_of_pools(tmp_path: Path) -> None:
    write_deployment(_SPLIT, tmp_path)
    expected = """\
# Each command starts one replica, on a machine of its own; a router's names of replicas
# are those they have in Kubernetes, put your machines' in their place.

# prefill: 2 x 2 h200_sxm
trtllm-serve serve meta-llama/Llama-3.1-8B --host 0.0.0.0 --port 8000 --backend pytorch\
 --tp_size 2 --max_batch_size 96 --max_num_tokens 8192 --max_seq_len 5120\
 --extra_llm_api_options ./prefill.llm.yaml

# decode: 1 x 4 h200_sxm
trtllm-serve serve meta-llama/Llama-3.1-8B --host 0.0.0.0 --port 8000 --backend pytorch\
 --tp_size 4 --max_batch_size 96 --max_num_tokens 8192 --max_seq_len 5120\
 --extra_llm_api_options ./decode.llm.yaml

# router
trtllm-serve disaggregated -c ./router.servers.yaml -t 3600 -r 3600
"""
    assert expected == _text(tmp_path, "commands.sh")
    expected = """\
dtype: bfloat16
cuda_graph_config:
  enable_padding: true
  max_batch_size: 96
kv_cache_config:
  free_gpu_memory_fraction: 0.9
cache_transceiver_config:
  backend: NIXL
  max_tokens_in_buffer: 5120
"""
    assert expected == _text(tmp_path, "decode.llm.yaml")
    assert expected + "disable_overlap_scheduler: true\n" == _text(tmp_path, "prefill.llm.yaml")
    expected = """\
hostname: 0.0.0.0
port: 8000
backend: pytorch
context_servers:
  num_instances: 2
  urls:
  - prefill-0.prefill:8000
  - prefill-1.prefill:8000
  router:
    type: load_balancing
generation_servers:
  num_instances: 1
  urls:
  - decode-0.decode:8000
  router:
    type: load_balancing
"""
    assert expected == _text(tmp_path, "router.servers.yaml")
    assert "has_async_scheduling: false" in _text(tmp_path, "README.md")


@pytest.mark.parametrize("scenario", [_PLAIN, _SPLIT, _SEVERAL, _WIDE])
def test_every_container_has_the_files_that_its_command_reads(
    scenario: ServingScenario, tmp_path: Path
) -> None:
    write_deployment(scenario, tmp_path)
    manifests = _manifests(tmp_path)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    maps = {each["metadata"]["name"]: each["data"] for each in manifests if "data" in each}
    workloads = [each for each in manifests if each["kind"] in ("StatefulSet", "Deployment")]
    assert len(maps) == len(workloads)
    for workload in workloads:
        spec = workload["spec"]["template"]["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "files"]
        ((name, text),) = maps[volume["configMap"]["name"]].items()
        (container,) = spec["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "files"]
        assert mount["mountPath"] in " ".join(container["command"])
        assert any(word.endswith(name) for word in container["command"])
        assert text == _text(tmp_path, name)


@pytest.mark.parametrize(
    ("profile", "option", "decoding", "tag"),
    [
        ("trtllm-1.0.0", "extra_llm_api_options", "DraftTarget", "1.0.0"),
        ("trtllm-1.1", "extra_llm_api_options", "DraftTarget", "1.1.0"),
        ("trtllm-1.2.1", "extra_llm_api_options", "DraftTarget", "1.2.1"),
        ("trtllm-1.3", "config", "Draft_Target", "1.3.0rc22"),
        # The newest of the releases that the file is for.
        ("trtllm-1.0", "config", "Draft_Target", "1.3.0rc22"),
    ],
)
def test_names_are_those_of_the_release(
    profile: str, option: str, decoding: str, tag: str, tmp_path: Path
) -> None:
    drafts = SpeculativeSpec(
        method="draft_model", num_draft_tokens=3, draft_model=find_model("llama-3.2-1b")
    )
    scenario = _with(engine=_engine(profile), speculative=drafts)
    settings = _settings(scenario, tmp_path)
    (container,) = _manifests(tmp_path)[0]["spec"]["template"]["spec"]["containers"]
    assert ["/launch/server.llm.yaml"] == container["command"][-1:]
    assert f"--{option}" == container["command"][-2]
    assert f"nvcr.io/nvidia/tensorrt-llm/release:{tag}" == container["image"]
    expected = {
        "decoding_type": decoding,
        "max_draft_len": 3,
        "speculative_model_dir": "meta-llama/Llama-3.2-1B",
    }
    assert expected == settings["speculative_config"]


def test_heads_of_eagle_3_are_written_as_such(tmp_path: Path) -> None:
    """They are one layer that is given features of the model; nothing else says it."""
    inputs = LayerPart(kind="draft_inputs", dims={"target_hidden": 4096})
    head = dataclasses.replace(find_model("llama-3.1-8b"), name="eagle-head", aliases=())
    drafts = SpeculativeSpec(
        method="draft_model",
        num_draft_tokens=3,
        draft_model=dataclasses.replace(head, num_layers=1, extras=(inputs,)),
    )
    settings = _settings(_with(speculative=drafts), tmp_path)
    named = {"decoding_type": "Eagle", "speculative_model_dir": "eagle-head", "max_draft_len": 3}
    assert named == settings["speculative_config"]
    for profile, words in (
        ("vllm-0.25", '{"num_speculative_tokens": 3, "model": "eagle-head", "method": "eagle3"}'),
        ("sglang-0.5.20", "EAGLE3 --speculative-draft-model-path eagle-head"),
    ):
        write_deployment(_with(engine=_engine(profile), speculative=drafts), tmp_path / profile)
        (container,) = _manifests(tmp_path / profile)[0]["spec"]["template"]["spec"]["containers"]
        assert words in " ".join(container["command"])


def test_ranks_that_share_experts_have_all_of_attention(tmp_path: Path) -> None:
    rules = {
        "has_expert_balancing": "true",
        "num_redundant_experts": "16",
        "balance_timeout_iters": "50",
        "balance_wait_iters": "10",
    }
    settings = _settings(_with(_WIDE, engine=_engine(**rules)), tmp_path)
    assert settings["enable_attention_dp"]
    balance = {"enable_balance": True, "timeout_iters": 50, "batching_wait_iters": 10}
    assert balance == settings["attention_dp_config"]
    # 128 experts and their copies.
    balancer = {"num_slots": 144, "layer_updates_per_iter": 1}
    assert {"backend": "WIDEEP", "load_balancer": balancer} == settings["moe_config"]
    script = _text(tmp_path, "commands.sh")
    assert "--tp_size 8 --ep_size 8 " in script
    assert "all_gather was simulated" in _text(tmp_path, "README.md")


def test_what_is_off_and_what_else_there_is(tmp_path: Path) -> None:
    tier = KvTier(
        name="cpu", capacity_bytes=64 * 2**30, read_bytes_per_s=25e9, write_bytes_per_s=25e9
    )
    rules = {"graph_mode": "none", "max_chunk_tokens": "8192", "batch_wait_iters": "20"}
    scenario = _with(
        kv_dtype=DType.FP8,
        engine=dataclasses.replace(_engine(**rules), kv_tiers=(tier,)),
        speculative=SpeculativeSpec(method="ngram", num_draft_tokens=4),
        lora=LoraSpec(num_adapters=8, rank=32, max_loaded=4),
    )
    settings = _settings(scenario, tmp_path)
    assert settings["cuda_graph_config"] is None
    assert (True, 20) == (settings["enable_chunked_prefill"], settings["batch_wait_timeout_iters"])
    memory = {"free_gpu_memory_fraction": 0.9, "dtype": "fp8", "host_cache_size": 64 * 2**30}
    assert memory == settings["kv_cache_config"]
    drafts = settings["speculative_config"]
    assert ("NGram", 4) == (drafts["decoding_type"], drafts["max_draft_len"])
    adapters = settings["lora_config"]
    found = [adapters[name] for name in ("max_loras", "max_cpu_loras", "max_lora_rank")]
    assert [4, 8, 32] == found


def test_another_engines_share_of_memory_is_not_taken(tmp_path: Path) -> None:
    scenario = _with(engine=EngineSpec(profile="vllm-0.20"))
    write_deployment(scenario, tmp_path, LaunchOptions(engine="trtllm"))
    assert "kv_cache_config" not in yaml.safe_load(_text(tmp_path, "server.llm.yaml"))
    assert "--config ./server.llm.yaml" in _text(tmp_path, "commands.sh")


def test_nginx_stands_before_replicas(tmp_path: Path) -> None:
    write_deployment(_SEVERAL, tmp_path)
    lines = [line.strip() for line in _text(tmp_path, "router.nginx.conf").splitlines()]
    first = lines.index("upstream servers {") + 1
    expected = [
        "random two;",
        *(f"server chat-{index}.chat:8000;" for index in range(3)),
    ]
    assert expected == lines[first : first + 4]


@pytest.mark.parametrize(
    ("scenario", "problem"),
    [
        (
            _with(engine=_engine("trtllm-0.21")),
            r"engine\.profile.*1\.0, 1\.1, 1\.2, 1\.3, not for 0\.21",
        ),
        (_with(_SPLIT, engine=_engine("trtllm-1.0.0")), r"cluster\.pools.*1\.1 or newer"),
        (
            _with(engine=_engine("trtllm-1.0.0", batch_wait_iters="5")),
            r"engine\.rules.*1\.1 or newer",
        ),
        (_with(_WIDE, layout=ParallelLayout(tp=2, dp=4, ep=8)), r"layout\.tp.*undivided.*set it 1"),
        (_with(kv_dtype=DType.INT8), "kv_dtype.*fp8 or nvfp4"),
        (
            _with(engine=_engine(has_priority_scheduling="true")),
            "has_priority_scheduling.*no priorities",
        ),
        (_routed("prefix_affinity", *_POOLS), "router has nothing like prefix_affinity"),
        (
            _routed("session_sticky", ReplicaPool(name="chat", num_replicas=2)),
            "router has nothing like session_sticky",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(
    scenario: ServingScenario, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        write_deployment(scenario, tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_a_published_command_is_read_with_its_file() -> None:
    """Aliases, the file's own names of options, and settings that a scenario has nothing for."""
    settings = """
        tensor_parallel_size: 8
        moe_expert_parallel_size: 8
        enable_attention_dp: true
        attention_dp_config: {enable_balance: true, timeout_iters: 60}
        max_num_tokens: 4096
        enable_chunked_prefill: true
        cuda_graph_config: null
        kv_cache_config: {dtype: fp8, enable_block_reuse: false}
        speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
        stream_interval: 20
    """
    command = (
        "OMPI=1 /usr/local/bin/trtllm-serve deepseek-v3 --max_batch_size 64"
        " --free_gpu_memory_fraction=0.8 --trust_remote_code --extra_llm_api_options /tmp/a.yml"
    )
    found = read_launch(command, {"a.yml": settings})
    given = {"device": "h200_sxm"}
    scenario = build_serving_scenario(dict(found.content), given, Path("x.yaml"))
    engine = scenario.resolve_engine()
    assert {"trust-remote-code", "config.stream_interval"} == set(found.unread)
    assert (ParallelLayout(dp=8, ep=8), DType.FP8) == (scenario.layout, scenario.kv_dtype)
    assert (64, 4096, 0.8) == (
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        engine.memory_utilization_ratio,
    )
    assert (4096, "none", False) == (
        engine.max_chunk_tokens,
        engine.graph_mode,
        engine.has_prefix_caching,
    )
    assert (60, 10) == (engine.balance_timeout_iters, engine.balance_wait_iters)
    assert scenario.speculative is not None
    assert ("layers", 3) == (scenario.speculative.method, scenario.speculative.num_draft_tokens)


@pytest.mark.parametrize(
    ("head", "expected", "remarks"),
    [("llama-3.1-8b-eagle3", ("draft_model", 3), 0), ("some/head", ("layers", 3), 1)],
)
def test_a_head_of_eagle_3_is_read_at_its_own_cost_where_it_is_at_hand(
    head: str, expected: tuple[str, int], remarks: int
) -> None:
    drafting = f"decoding_type: Eagle3, max_draft_len: 3, speculative_model: {head}"
    settings = f"speculative_config: {{{drafting}}}"
    command = "trtllm-serve llama-3.1-8b --extra_llm_api_options a.yml"
    found = read_launch(command, {"a.yml": settings})
    drafts = found.content["speculative"]
    assert expected == (drafts["method"], drafts["num_draft_tokens"])
    assert remarks == len(found.remarks)


def test_ranks_that_split_contexts_are_of_tensor_parallelism_but_in_attention(
    tmp_path: Path,
) -> None:
    rules = {"decode_context_parallel": "4"}
    split = EngineSpec(profile="trtllm-1.3", max_num_seqs=96, rules=rules)
    pools = (
        ReplicaPool(name="prefill", role="prefill"),
        ReplicaPool(name="decode", role="decode", engine=split),
    )
    scenario = _with(
        model=find_model("deepseek-v3"),
        device="b200",
        layout=ParallelLayout(tp=8, ep=8),
        engine=_engine("trtllm-1.3"),
        cluster=ClusterSpec(pools=pools),
    )
    settings = _settings(scenario, tmp_path, "decode")
    assert (4, {"cp_type": "HELIX", "tokens_per_block": 32}, 32) == (
        settings["context_parallel_size"],
        settings["cp_config"],
        settings["kv_cache_config"]["tokens_per_block"],
    )
    assert {"context_parallel_size", "cp_config"}.isdisjoint(
        yaml.safe_load(_text(tmp_path, "prefill.llm.yaml"))
    )
    line = next(
        text
        for text in _text(tmp_path, "commands.sh").splitlines()
        if text.endswith("./decode.llm.yaml")
    )
    assert "--tp_size 2" in line
    # A command of a pool is read without its transfer.
    settings.pop("cache_transceiver_config")
    found = read_launch(line, {"decode.llm.yaml": yaml.safe_dump(settings)})
    assert (8, "4", ()) == (
        found.content["layout"]["tp"],
        str(found.content["engine"]["rules"]["decode_context_parallel"]),
        found.unread,
    )


def test_contexts_that_are_split_otherwise_are_not_read() -> None:
    settings = "{context_parallel_size: 2, cp_config: {cp_type: STAR}}"
    command = "trtllm-serve deepseek-v3 --tp_size 4 --extra_llm_api_options a.yml"
    found = read_launch(command, {"a.yml": settings})
    assert 4 == found.content["layout"]["tp"]
    assert {"config.context_parallel_size", "config.cp_config.cp_type"} == set(found.unread)


def test_what_is_written_is_read_back_as_the_scenario(tmp_path: Path) -> None:
    scenario = _with(engine=EngineSpec(profile="trtllm-1.3", max_num_seqs=96))
    write_deployment(scenario, tmp_path)
    line = _text(tmp_path, "commands.sh").splitlines()[-1]
    assert "trtllm-serve" == shlex.split(line)[0]
    files = {"server.llm.yaml": _text(tmp_path, "server.llm.yaml")}
    found = read_launch(line, files)
    given = {"device": "h200_sxm"}
    again = build_serving_scenario(dict(found.content), given, Path("x.yaml"))
    assert ((), scenario.resolve_engine()) == (found.unread, again.resolve_engine())
    assert (scenario.model, scenario.layout) == (again.model, again.layout)
