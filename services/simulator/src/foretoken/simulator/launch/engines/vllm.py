"""vLLM's server, and its router.

Sources: vLLM, `vllm/engine/arg_utils.py` and `docs/features/nixl_connector_usage.md`; the README of
vllm-project/router.
"""

import json
import math
from collections.abc import Mapping, Sequence

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.option_map import (
    Fields,
    Link,
    OptionMap,
    Options,
    group_words,
    split_words,
    switch,
    value,
    word,
)
from foretoken.simulator.launch.served_options import ServedOptions
from foretoken.simulator.launch.server import (
    POD_ADDRESS,
    SERVER_PORT,
    STARTUP_S,
    Launch,
    LaunchPool,
    text_arguments,
)

_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
# Formats that vLLM makes of a 16-bit checkpoint while it loads it.
_QUANTIZED_AT_LOAD = {"fp8": "fp8"}
_POLICIES = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "prefix_affinity": "cache_aware",
    "session_sticky": "consistent_hash",
    # The nearest that there is: it looks at two replicas.
    "least_outstanding": "power_of_two",
    "least_loaded": "power_of_two",
}
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_HANDSHAKE_PORT = 5600
# vLLM's name of the methods that draft without a model of their own.
_DRAFTS = {"ngram": "ngram", "layers": "mtp"}
# Source: `max_lora_rank` of `vllm/config/lora.py`.
_LORA_RANK = 16


def _read_experts(options: Options) -> Fields:
    # Experts are spread over all ranks of attention.
    degrees = [int(options.get(f"{axis}-parallel-size", 1)) for axis in ("tensor", "data")]
    return {"ep": math.prod(degrees) if "enable-expert-parallel" in options else 1}


def _write_adapters(fields: Fields) -> Options:
    if not fields["max_loras"]:
        return {}
    return {
        "enable-lora": True,
        "max-loras": fields["max_loras"],
        "max-cpu-loras": fields["num_loras"],
        "max-lora-rank": fields["lora_rank"],
    }


def _read_adapters(options: Options) -> Fields:
    if "enable-lora" not in options:
        return {"max_loras": 0, "num_loras": 0, "lora_rank": 0}
    # vLLM's own where they are left out.
    most = int(options.get("max-loras", 1))
    return {
        "max_loras": most,
        "num_loras": int(options.get("max-cpu-loras", most)),
        "lora_rank": int(options.get("max-lora-rank", _LORA_RANK)),
    }


def _write_transfer(fields: Fields) -> Options:
    if fields["role"] not in _KV_ROLES:
        return {}
    settings = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[fields["role"]],
        "kv_load_failure_policy": "fail",
    }
    return {"kv-transfer-config": json.dumps(settings)}


def _read_transfer(options: Options) -> Fields:
    if "kv-transfer-config" not in options:
        return {"role": "aggregated"}
    said = json.loads(options["kv-transfer-config"])["kv_role"]
    return {"role": {name: role for role, name in _KV_ROLES.items()}[said]}


def _write_drafts(fields: Fields) -> Options:
    if not fields["drafts"]:
        return {}
    settings: dict[str, object] = {"num_speculative_tokens": fields["num_draft_tokens"]}
    if fields["drafts"] == "draft_model":
        settings["model"] = fields["draft_model"]
    else:
        settings["method"] = _DRAFTS[fields["drafts"]]
    return {"speculative-config": json.dumps(settings)}


def _read_drafts(options: Options) -> Fields:
    if "speculative-config" not in options:
        return {"drafts": "", "num_draft_tokens": 0, "draft_model": ""}
    settings = json.loads(options["speculative-config"])
    # A head of its own, such as EAGLE's, is a checkpoint and no model that drafts alone.
    method = settings.get("method", "draft_model")
    drafts = {"ngram": "ngram", "draft_model": "draft_model"}.get(method, "layers")
    return {
        "drafts": drafts,
        "num_draft_tokens": int(settings["num_speculative_tokens"]),
        "draft_model": settings["model"] if drafts == "draft_model" else "",
    }


_OPTIONS = OptionMap(
    name="vllm",
    versions="0.8 to 0.20",
    source="vLLM, vllm/engine/arg_utils.py",
    links=(
        Link(
            flags=("model",),
            # The command's own word, not an option of it.
            write=lambda _: {},
            read=lambda options: {"model_id": options["model"]} if "model" in options else {},
        ),
        word("dtype", "dtype", _DTYPES),
        value("tp", "tensor-parallel-size", default=1, aliases=("tp",), always=True),
        value("pp", "pipeline-parallel-size", default=1, aliases=("pp",)),
        value("dp", "data-parallel-size", default=1, aliases=("dp",)),
        Link(
            flags=("enable-expert-parallel",),
            write=lambda fields: {"enable-expert-parallel": fields["ep"] > 1},
            read=_read_experts,
            aliases={"ep": "enable-expert-parallel"},
        ),
        value("max_tokens", "max-model-len"),
        value("max_num_seqs", "max-num-seqs"),
        value("max_num_batched_tokens", "max-num-batched-tokens"),
        value("memory_utilization_ratio", "gpu-memory-utilization", float),
        word("quantization", "quantization", _QUANTIZED_AT_LOAD, default="", aliases=("q",)),
        word("kv_dtype", "kv-cache-dtype", {DType.FP8: "fp8"}),
        switch("has_prefix_caching", "enable-prefix-caching", "no-enable-prefix-caching"),
        switch("has_graphs", off="enforce-eager"),
        word(
            "has_priority_scheduling",
            "scheduling-policy",
            {True: "priority"},
            default=False,
        ),
        Link(
            flags=("enable-lora", "max-loras", "max-cpu-loras", "max-lora-rank"),
            write=_write_adapters,
            read=_read_adapters,
        ),
        Link(flags=("kv-transfer-config",), write=_write_transfer, read=_read_transfer),
        Link(flags=("speculative-config",), write=_write_drafts, read=_read_drafts),
    ),
)


class VllmEngine:
    """Starts `vllm serve`, and `vllm-router` before several."""

    name = "vllm"
    profile = "vllm-0.20"
    can = find_engine(profile).can
    options = _OPTIONS

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        engine = pool.scenario.engine.resolve()
        served = ServedOptions.of_pool(pool)
        remarks: list[str] = []
        if served.quantization and served.quantization not in _QUANTIZED_AT_LOAD:
            remarks.append(
                f"weights are {served.quantization}: name a checkpoint that is, vLLM takes its"
                " format from it"
            )
        if served.drafts == "layers":
            remarks.append(
                "drafts come from the model's own MTP layers; for EAGLE name its checkpoint"
            )
        variables = {}
        if served.role in _KV_ROLES:
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": f"{{{POD_ADDRESS}}}",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_HANDSHAKE_PORT),
                "UCX_NET_DEVICES": "all",
            }
            remarks.append("KV caches move by NIXL, which must be in the image")
        options = {"host": "0.0.0.0", "port": SERVER_PORT, **self.options.write(served.fields)}  # noqa: S104 - a pod's own network
        return Launch(
            command=["vllm", "serve", pool.model_id, *text_arguments(options)],
            image=f"vllm/vllm-openai:v{engine.versions.rpartition('-')[2] or '0.18'}.0",
            variables=variables,
            remarks=remarks,
        )

    def read(self, command: str) -> tuple[Fields, list[str]] | None:
        """Return what a command starts; `vllm serve MODEL`, or its module with `--model`."""
        words, options = group_words(split_words(command))
        if "serve" in words and words[words.index("serve") - 1].endswith("vllm"):
            models = words[words.index("serve") + 1 :]
        elif str(options.get("m", "")).startswith("vllm.entrypoints"):
            models = []
        else:
            return None
        options.pop("m", None)
        if models:
            options["model"] = models[0]
        return self.options.read(options)

    def route(self, urls_by_role: Mapping[str, Sequence[str]], router: str) -> Launch:
        """Return what starts the router before servers."""
        policy = _POLICIES.get(router)
        if policy is None:
            raise InvalidRequestError.of_field(
                "cluster.routing.router",
                f"vLLM's router has nothing like {router}; it knows {', '.join(_POLICIES)}",
            )
        arguments = ["vllm-router", "--host", "0.0.0.0", "--port", str(SERVER_PORT)]  # noqa: S104
        arguments += ["--policy", policy]
        arguments += ["--worker-startup-timeout-secs", str(STARTUP_S)]
        if "prefill" in urls_by_role:
            arguments.append("--vllm-pd-disaggregation")
            for role in ("prefill", "decode"):
                for url in urls_by_role[role]:
                    arguments += [f"--{role}", url]
        else:
            arguments += ["--worker-urls", *urls_by_role["aggregated"]]
        remarks = ["the router's image has Python; it installs the package vllm-router at start"]
        if policy != router:
            remarks.append(f"the router's policy {policy} stands for {router}")
        return Launch(
            command=[
                "sh",
                "-c",
                'pip install --quiet --user vllm-router && exec "$HOME/.local/bin/$0" "$@"',
                *arguments,
            ],
            image="python:3.12-slim",
            remarks=remarks,
        )


ENGINE = VllmEngine()
