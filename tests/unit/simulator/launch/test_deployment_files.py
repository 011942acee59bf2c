"""The files that start a deployment are what servers, routers and Kubernetes take."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import (
    ClusterSpec,
    LoraSpec,
    ReplicaPool,
    RoutingSpec,
    SpeculativeSpec,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import ImageSpec, LengthSpec, WorkloadSpec
from foretoken.simulator.launch.deployment import LaunchOptions, write_deployment
from foretoken.simulator.launch.files import render_scenario, write_files
from foretoken.simulator.launch.server import find_server

_PLAIN = ServingScenario(
    model=find_model("llama-3.1-8b"),
    device="h200_sxm",
    quantization="fp8",
    engine=EngineSpec(profile="vllm-0.18", max_num_seqs=96),
    workload=WorkloadSpec(
        num_requests=10, prefill=LengthSpec(mean=4000), decode=LengthSpec(mean=1000)
    ),
)
_POOLS = (
    ReplicaPool(
        name="prefill",
        role="prefill",
        num_replicas=2,
        layout=ParallelLayout(tp=2),
        engine=EngineSpec(profile="vllm-0.18", max_num_batched_tokens=16384),
    ),
    ReplicaPool(name="decode", role="decode", layout=ParallelLayout(tp=4)),
)
_SPLIT = dataclasses.replace(_PLAIN, cluster=ClusterSpec(pools=_POOLS))
_SEVERAL = dataclasses.replace(
    _PLAIN,
    cluster=ClusterSpec(
        pools=(
            ReplicaPool(name="fast", num_replicas=2),
            ReplicaPool(name="cheap", device="l40s", layout=ParallelLayout(tp=2)),
        ),
        routing=RoutingSpec(router="prefix_affinity"),
    ),
)
_WIDE = dataclasses.replace(
    _PLAIN,
    model=find_model("qwen3-30b-a3b"),
    layout=ParallelLayout(dp=8, ep=8),
    engine=EngineSpec(
        profile="vllm-0.20",
        rules={
            "expert_exchange": "deepep_low_latency",
            "has_expert_balancing": "true",
            "num_redundant_experts": "16",
            "two_batch_tokens": "32",
            "fuses_all_reduce_norm": "false",
        },
    ),
)
_SCENARIOS = {"plain": _PLAIN, "split": _SPLIT, "several": _SEVERAL, "wide": _WIDE}

# Options as the documentation of the servers and routers lists them.
_OPTIONS: Mapping[str, str] = {
    "vllm": """
        host port dtype tensor-parallel-size pipeline-parallel-size data-parallel-size
        enable-expert-parallel max-model-len max-num-seqs max-num-batched-tokens
        all2all-backend enable-eplb eplb-config enable-dbo dbo-decode-token-threshold
        gpu-memory-utilization quantization kv-cache-dtype enable-prefix-caching
        no-enable-prefix-caching enforce-eager scheduling-policy speculative-config enable-lora
        max-loras max-cpu-loras max-lora-rank kv-transfer-config compilation-config
    """,
    "vllm-router": """
        host port policy worker-startup-timeout-secs worker-urls vllm-pd-disaggregation prefill
        decode
    """,
    "sglang.launch_server": """
        model-path host port dtype tp-size pp-size dp-size enable-dp-attention ep-size
        moe-a2a-backend deepep-mode enable-eplb ep-num-redundant-experts
        enable-two-batch-overlap enable-flashinfer-allreduce-fusion
        context-length max-running-requests chunked-prefill-size enable-mixed-chunk
        mem-fraction-static quantization kv-cache-dtype disable-radix-cache disable-cuda-graph
        enable-priority-scheduling disaggregation-mode disaggregation-transfer-backend
        disaggregation-bootstrap-port enable-lora max-loras-per-batch max-lora-rank
        lora-target-modules speculative-algorithm speculative-num-draft-tokens
        speculative-num-steps speculative-eagle-topk speculative-draft-model-path
        encoder-only language-only encoder-urls
    """,
    "sglang_router.launch_router": """
        host port policy worker-startup-timeout-secs worker-urls pd-disaggregation prefill decode
    """,
}


def _manifests(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _commands(folder: Path) -> dict[str, list[str]]:
    """Return the command of each container of the deployment by the name of its workload."""
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]["containers"][0][
            "command"
        ]
        for manifest in _manifests(folder / "deployment.yaml")
        if manifest["kind"] in ("StatefulSet", "Deployment")
    }


def _option(command: Sequence[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


def _program(command: Sequence[str]) -> str:
    return next(word for word in command if word in _OPTIONS)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", _SCENARIOS)
def test_manifests_are_valid_and_options_documented(tmp_path: Path, name: str, engine: str) -> None:
    write_deployment(_SCENARIOS[name], tmp_path, LaunchOptions(engine=engine))
    for file in ("deployment.yaml", "measure.yaml"):
        for manifest in _manifests(tmp_path / file):
            kubernetes_validate.validate(manifest, "1.34", strict=True)
    for command in _commands(tmp_path).values():
        options = {word[2:] for word in command if word.startswith("--")} - {"quiet", "user"}
        assert set() == options - set(_OPTIONS[_program(command)].split())


def test_the_limits_of_the_engine_and_the_layout_are_started_with(tmp_path: Path) -> None:
    write_deployment(_SPLIT, tmp_path)
    commands = _commands(tmp_path)
    decode, prefill = commands["decode"], commands["prefill"]
    assert ["vllm", "serve", "meta-llama/Llama-3.1-8B"] == decode[:3]
    expected = ("4", "96", "fp8", "kv_consumer")
    transfer = json.loads(_option(decode, "kv-transfer-config"))
    limits = [_option(decode, o) for o in ("tensor-parallel-size", "max-num-seqs", "quantization")]
    assert expected == (*limits, transfer["kv_role"])
    assert "16384" == _option(prefill, "max-num-batched-tokens")
    # 5,000 tokens of prompt and answer, in whole thousands of 1,024.
    assert "5120" == _option(prefill, "max-model-len")


def test_a_pod_has_the_devices_of_a_replica_and_there_are_as_many_as_replicas(
    tmp_path: Path,
) -> None:
    write_deployment(_SPLIT, tmp_path)
    sets = {
        m["metadata"]["name"]: m["spec"]
        for m in _manifests(tmp_path / "deployment.yaml")
        if m["kind"] == "StatefulSet"
    }
    found = {
        name: (
            spec["replicas"],
            spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"],
        )
        for name, spec in sets.items()
    }
    assert {"prefill": (2, "2"), "decode": (1, "4")} == found


def test_the_router_knows_every_replica_by_its_role(tmp_path: Path) -> None:
    write_deployment(_SPLIT, tmp_path)
    router = _commands(tmp_path)["router"]
    urls = [(word, router[i + 1]) for i, word in enumerate(router) if word in _ROLES]
    assert urls == [
        ("--prefill", "http://prefill-0.prefill:8000"),
        ("--prefill", "http://prefill-1.prefill:8000"),
        ("--decode", "http://decode-0.decode:8000"),
    ]


_ROLES = ("--prefill", "--decode")


def _sees(**changes: Any) -> ServingScenario:
    pools = (
        ReplicaPool(name="eyes", role="encoder", num_replicas=2),
        ReplicaPool(name="language", layout=ParallelLayout(tp=4)),
    )
    workload = dataclasses.replace(_PLAIN.workload, images=ImageSpec())
    return dataclasses.replace(
        _PLAIN,
        **{
            "model": find_model("qwen2.5-vl-72b"),
            "quantization": "",
            "engine": EngineSpec(profile="sglang-0.5"),
            "workload": workload,
            "cluster": ClusterSpec(pools=pools),
            **changes,
        },
    )


def test_language_servers_know_every_encoder(tmp_path: Path) -> None:
    write_deployment(_sees(), tmp_path)
    commands = _commands(tmp_path)
    assert "--encoder-only" in commands["eyes"]
    assert "--language-only" in commands["language"]
    first = commands["language"].index("--encoder-urls") + 1
    urls = ["http://eyes-0.eyes:8000", "http://eyes-1.eyes:8000"]
    assert urls == commands["language"][first : first + 2]
    # One replica answers, so nothing stands before it but what encodes.
    assert {"eyes", "language"} == set(commands)


def test_what_decodes_is_sent_no_images(tmp_path: Path) -> None:
    pools = (
        ReplicaPool(name="eyes", role="encoder"),
        ReplicaPool(name="prompts", role="prefill", layout=ParallelLayout(tp=4)),
        ReplicaPool(name="answers", role="decode", layout=ParallelLayout(tp=4)),
    )
    write_deployment(_sees(cluster=ClusterSpec(pools=pools)), tmp_path)
    commands = _commands(tmp_path)
    assert "http://eyes-0.eyes:8000" == _option(commands["prompts"], "encoder-urls")
    assert "--language-only" not in commands["answers"]
    assert not any("eyes" in word for word in commands["router"])


def test_encoders_are_written_for_servers_that_have_them(tmp_path: Path) -> None:
    scenario = _sees(engine=EngineSpec(profile="vllm-0.31"))
    with pytest.raises(InvalidRequestError, match="written for SGLang alone"):
        write_deployment(scenario, tmp_path)


_STORE = KvTier(
    name="store",
    capacity_bytes=8 * 10**11,
    read_bytes_per_s=25e9,
    write_bytes_per_s=25e9,
    is_shared=True,
)


def _sharing(profile: str, *pools: ReplicaPool) -> ServingScenario:
    engine = EngineSpec(profile=profile, kv_tiers=(_STORE,))
    return dataclasses.replace(_PLAIN, engine=engine, cluster=ClusterSpec(pools=pools))


def test_replicas_share_a_store_to_which_every_device_gives_its_part(tmp_path: Path) -> None:
    """800 GB over four replicas of two devices."""
    pool = ReplicaPool(name="chat", num_replicas=4, layout=ParallelLayout(tp=2))
    write_deployment(_sharing("vllm-0.25", pool), tmp_path)
    commands = _commands(tmp_path)
    assert {"chat", "router", "kv-store"} == set(commands)
    transfer = json.loads(_option(commands["chat"], "kv-transfer-config"))
    assert {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"} == transfer
    manifests = _manifests(tmp_path / "deployment.yaml")
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    chat = next(each for each in manifests if each["metadata"]["name"] == "chat")
    (container,) = chat["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    settings = json.loads(variables["MOONCAKE_CONFIG"])
    assert ("100GB", "kv-store:50051") == (
        settings["global_segment_size"],
        settings["master_server_address"],
    )
    script = (tmp_path / "commands.sh").read_text(encoding="utf-8")
    assert "mooncake_master" in script
    read = find_server("vllm").read(shlex.join(commands["chat"]))
    assert read is not None
    assert ("aggregated", 2) == (read[0]["role"], read[0]["tp"])


def test_prefill_replicas_send_blocks_and_keep_them_in_the_store(tmp_path: Path) -> None:
    tiers = EngineSpec(profile="vllm-0.25", kv_tiers=(_STORE,))
    pools = (
        ReplicaPool(name="prompts", role="prefill", num_replicas=2, engine=tiers),
        ReplicaPool(name="answers", role="decode", engine=EngineSpec(profile="vllm-0.25")),
    )
    write_deployment(dataclasses.replace(_PLAIN, cluster=ClusterSpec(pools=pools)), tmp_path)
    commands = _commands(tmp_path)
    prefill = json.loads(_option(commands["prompts"], "kv-transfer-config"))
    found = [each["kv_connector"] for each in prefill["kv_connector_extra_config"]["connectors"]]
    assert ("kv_producer", ["NixlConnector", "MooncakeStoreConnector"]) == (
        prefill["kv_role"],
        found,
    )
    assert (
        "NixlConnector"
        == json.loads(_option(commands["answers"], "kv-transfer-config"))["kv_connector"]
    )


def test_a_release_without_a_store_is_refused(tmp_path: Path) -> None:
    pool = ReplicaPool(name="chat", num_replicas=2)
    with pytest.raises(InvalidRequestError, match=r"vllm-0\.19: has no store; it has host"):
        write_deployment(_sharing("vllm-0.19", pool), tmp_path)


def test_sglang_shares_the_same_store_through_its_hierarchical_cache(tmp_path: Path) -> None:
    """100 GB of each of eight devices, two of which are one server's."""
    pool = ReplicaPool(name="chat", num_replicas=4, layout=ParallelLayout(tp=2))
    write_deployment(_sharing("sglang-0.5", pool), tmp_path)
    commands = _commands(tmp_path)
    assert {"chat", "router", "kv-store"} == set(commands)
    assert "--enable-hierarchical-cache" in commands["chat"]
    assert "mooncake" == _option(commands["chat"], "hicache-storage-backend")
    chat = next(
        each
        for each in _manifests(tmp_path / "deployment.yaml")
        if each["metadata"]["name"] == "chat"
    )
    (container,) = chat["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert ("kv-store:50051", "200000000000") == (
        variables["MOONCAKE_MASTER"],
        variables["MOONCAKE_GLOBAL_SEGMENT_SIZE"],
    )


_HOST = KvTier(name="cpu", capacity_bytes=64 * 2**30, read_bytes_per_s=25e9, write_bytes_per_s=25e9)


@pytest.mark.parametrize(
    ("profile", "option", "size"),
    [("vllm-0.25", "kv-offloading-size", "128"), ("sglang-0.5", "hicache-size", "68")],
)
def test_servers_keep_blocks_on_their_hosts(
    profile: str, option: str, size: str, tmp_path: Path
) -> None:
    """64 GiB of each of two devices: vLLM counts both in GiB, SGLang each in GB."""
    pool = ReplicaPool(name="chat", num_replicas=2, layout=ParallelLayout(tp=2))
    engine = EngineSpec(profile=profile, kv_tiers=(_HOST,))
    scenario = dataclasses.replace(_PLAIN, engine=engine, cluster=ClusterSpec(pools=(pool,)))
    write_deployment(scenario, tmp_path)
    commands = _commands(tmp_path)
    assert {"chat", "router"} == set(commands)
    assert size == _option(commands["chat"], option)
    assert "69 GB of KV blocks" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_pools_of_different_devices_ask_for_theirs(tmp_path: Path) -> None:
    write_deployment(_SEVERAL, tmp_path)
    selectors = {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]["nodeSelector"]
        for m in _manifests(tmp_path / "deployment.yaml")
        if m["kind"] == "StatefulSet"
    }
    key = "nvidia.com/gpu.product"
    assert {"fast": {key: "NVIDIA-H200"}, "cheap": {key: "NVIDIA-L40S"}} == selectors
    assert "cache_aware" == _option(_commands(tmp_path)["router"], "policy")


def test_a_single_replica_needs_no_router(tmp_path: Path) -> None:
    write_deployment(_PLAIN, tmp_path)
    assert ["server"] == list(_commands(tmp_path))
    (job,) = [m for m in _manifests(tmp_path / "measure.yaml") if m["kind"] == "Job"]
    collect = job["spec"]["template"]["spec"]["initContainers"][0]["command"]
    assert "http://server:8000" == _option(collect, "url")


@pytest.mark.parametrize("name", _SCENARIOS)
def test_the_scenario_beside_the_files_is_the_one_simulated(tmp_path: Path, name: str) -> None:
    scenario = _SCENARIOS[name]
    path = tmp_path / "scenario.yaml"
    path.write_text(render_scenario(scenario), encoding="utf-8")
    assert scenario == read_serving_scenario(path, {})


def test_a_model_without_a_name_of_ours_is_written_whole(tmp_path: Path) -> None:
    model = dataclasses.replace(_PLAIN.model, name="mine", num_layers=3, aliases=())
    scenario = dataclasses.replace(_PLAIN, model=model)
    path = tmp_path / "scenario.yaml"
    path.write_text(render_scenario(scenario), encoding="utf-8")
    assert scenario == read_serving_scenario(path, {})


def test_the_commands_are_those_of_the_manifests(tmp_path: Path) -> None:
    write_deployment(_PLAIN, tmp_path)
    lines = (tmp_path / "commands.sh").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("vllm")]
    assert _commands(tmp_path)["server"] == shlex.split(line)


def test_speculation_and_adapters_are_switched_on(tmp_path: Path) -> None:
    scenario = dataclasses.replace(
        _PLAIN,
        speculative=SpeculativeSpec(method="ngram", num_draft_tokens=4),
        lora=LoraSpec(num_adapters=8, rank=32, max_loaded=4),
    )
    write_deployment(scenario, tmp_path)
    command = _commands(tmp_path)["server"]
    speculation = json.loads(_option(command, "speculative-config"))
    assert {"method": "ngram", "num_speculative_tokens": 4} == speculation
    assert ("4", "32") == (_option(command, "max-loras"), _option(command, "max-lora-rank"))


@pytest.mark.parametrize(
    ("kv_dtype", "engine", "expected"),
    [
        (DType.FP8, "vllm", "fp8"),
        (DType.FP8, "sglang", "fp8_e4m3"),
        # Else a checkpoint with scales would have it in FP8.
        (DType.BF16, "vllm", "bfloat16"),
        (DType.BF16, "sglang", "bf16"),
    ],
)
def test_a_format_of_the_cache_has_each_servers_name(
    tmp_path: Path, kv_dtype: DType, engine: str, expected: str
) -> None:
    scenario = dataclasses.replace(_PLAIN, kv_dtype=kv_dtype)
    write_deployment(scenario, tmp_path, LaunchOptions(engine=engine))
    assert expected == _option(_commands(tmp_path)["server"], "kv-cache-dtype")


def test_what_cannot_be_started_is_refused_with_what_to_do(tmp_path: Path) -> None:
    orca = dataclasses.replace(_PLAIN, quantization="", engine=EngineSpec(profile="orca"))
    with pytest.raises(InvalidRequestError, match="sglang, trtllm, vllm, not for orca"):
        write_deployment(orca, tmp_path)
    wide = dataclasses.replace(_PLAIN, layout=ParallelLayout(tp=16))
    with pytest.raises(InvalidRequestError, match="replicas that fit a node"):
        write_deployment(wide, tmp_path)
    tiers = (_HOST, dataclasses.replace(_HOST, name="disk"))
    tiered = dataclasses.replace(_PLAIN.engine, kv_tiers=tiers)
    with pytest.raises(InvalidRequestError, match="has no several; it has host"):
        write_deployment(dataclasses.replace(_PLAIN, engine=tiered), tmp_path)
    with pytest.raises(UnknownPluginError, match="vllm"):
        write_deployment(_PLAIN, tmp_path, LaunchOptions(engine="vlm"))
    assert [] == list(tmp_path.iterdir())


def test_a_name_that_climbs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = {"run.sh": "echo", "../climbed.sh": "echo"}
    with pytest.raises(InvalidRequestError, match=r"folder: .* leads out of its folder"):
        write_files(tmp_path / "out", files)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]
