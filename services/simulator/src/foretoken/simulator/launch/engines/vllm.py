"""vLLM's server, and its router.

Sources: vLLM, `vllm/engine/arg_utils.py` (options of 0.8 to 0.20), `vllm/config/cache.py`,
`docs/features/{nixl_connector,mooncake_store_connector}_usage.md`; the README of
vllm-project/router.
"""

import json
import math
from collections.abc import Mapping

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import GIB
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    group_words,
    invert,
    split_words,
    switch,
    text_arguments,
    value,
    word,
)
from foretoken.simulator.launch.server import (
    DTYPE_WORDS,
    NO_DRAFTS,
    POD_ADDRESS,
    QUANTIZED_AT_LOAD,
    SERVER_HOST,
    SERVER_PORT,
    STORE_INSTALL,
    STORE_NAME,
    STORE_PORT,
    Launch,
    LaunchPool,
    Router,
    ServedOptions,
    ServingEngine,
    drafting_fields,
)

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
_TRANSFER = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": f"{{{POD_ADDRESS}}}",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    "UCX_NET_DEVICES": "all",
}
# Blocks that replicas share lie in their hosts' memory, each device's part in its own.
_STORE: Mapping[str, object] = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
_STORE_CLIENT = (
    *("sh", "-c"),
    f'{STORE_INSTALL} && printf %s "$MOONCAKE_CONFIG" > "$MOONCAKE_CONFIG_PATH" && exec "$0" "$@"',
)
# vLLM's name of the methods that draft without a model of their own.
_DRAFTS = {"ngram": "ngram", "layers": "mtp", "eagle": "eagle3"}
# Its exchanges of tokens and experts; without the option it gathers and scatters.
_EXCHANGES = {
    "all_to_all": "flashinfer_all2allv",
    "deepep_normal": "deepep_high_throughput",
    "deepep_low_latency": "deepep_low_latency",
}
# Formats of the KV cache: those that are written, and others that are read. Source: `CacheDType` of
# `vllm/config/cache.py`.
_CACHES = {DType.FP8: "fp8", DType.BF16: "bfloat16"}
_MORE_CACHES = {
    "auto": None,
    "float16": DType.FP16,
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"), DType.FP8),
}
# Source: `dbo_decode_token_threshold` of `vllm/config/parallel.py`.
_TWO_BATCH_TOKENS = 32
# Source: `max_lora_rank` of `vllm/config/lora.py`.
_LORA_RANK = 16


def _read_experts(options: Options) -> Fields:
    # Experts are spread over all ranks of attention.
    degrees = [int(options.get(f"{axis}-parallel-size", 1)) for axis in ("tensor", "data")]
    return {"ep": math.prod(degrees) if "enable-expert-parallel" in options else 1}


def _read_sharing(options: Options) -> Fields:
    # Engines of a model with experts share them, whether or not they are spread.
    is_parallel = int(options.get("data-parallel-size", 1)) > 1
    return {"attention_dp": is_parallel and "enable-expert-parallel" not in options}


def _write_copies(served: ServedOptions) -> Options:
    count = served.num_redundant_experts
    return {"eplb-config": json.dumps({"num_redundant_experts": count}) if count else None}


def _read_copies(options: Options) -> Fields:
    settings = json.loads(options.get("eplb-config", "{}"))
    return {"num_redundant_experts": int(settings.get("num_redundant_experts", 0))}


def _write_halves(served: ServedOptions) -> Options:
    least = served.two_batch_tokens
    return {"enable-dbo": least > 0, "dbo-decode-token-threshold": least or None}


def _read_halves(options: Options) -> Fields:
    least = int(options.get("dbo-decode-token-threshold", _TWO_BATCH_TOKENS))
    return {"two_batch_tokens": least if "enable-dbo" in options else 0}


def _write_passes(served: ServedOptions) -> Options:
    fuses = served.fuses_all_reduce_norm
    settings = {"pass_config": {"fuse_allreduce_rms": fuses}}
    return {"compilation-config": None if fuses is None else json.dumps(settings)}


def _read_passes(options: Options) -> Fields:
    settings = json.loads(options.get("compilation-config", "{}"))
    fuses = settings.get("pass_config", {}).get("fuse_allreduce_rms")
    return {"fuses_all_reduce_norm": fuses}


def _write_adapters(served: ServedOptions) -> Options:
    if not served.max_loras:
        return {}
    return {
        "enable-lora": True,
        "max-loras": served.max_loras,
        "max-cpu-loras": served.num_loras,
        "max-lora-rank": served.lora_rank,
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


def _write_transfer(served: ServedOptions) -> Options:
    role = _KV_ROLES.get(served.role)
    sent = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    connectors: list[Mapping[str, object]] = [sent] if role else []
    connectors += [_STORE] if served.store_bytes else []
    if len(connectors) > 1:
        settings = {"connectors": connectors}
        several = {"kv_connector": "MultiConnector", "kv_role": role}
        connectors = [{**several, "kv_connector_extra_config": settings}]
    return {"kv-transfer-config": json.dumps(connectors[0])} if connectors else {}


def _write_host(served: ServedOptions) -> Options:
    # All ranks of an engine together, in GiB.
    gib = served.host_bytes * served.tp * served.pp / GIB
    return {"kv-offloading-size": f"{gib:g}", "kv-offloading-backend": "native"} if gib else {}


def _read_transfer(options: Options) -> Fields:
    said = json.loads(options.get("kv-transfer-config", "{}")).get("kv_role")
    # One that has both roles is a store, whose links no option says.
    return {"role": invert(_KV_ROLES).get(said, "aggregated")}


def _store_variables(served: ServedOptions) -> dict[str, str]:
    settings = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{STORE_NAME}:{STORE_PORT}",
        "global_segment_size": f"{max(served.store_bytes // 10**9, 1)}GB",
        "local_buffer_size": "4GB",
        "protocol": "rdma",
        "device_name": "",
    }
    return {
        "MOONCAKE_CONFIG": json.dumps(settings),
        "MOONCAKE_CONFIG_PATH": "/tmp/mooncake.json",  # noqa: S108 - in a container of its own
    }


def _write_drafts(served: ServedOptions) -> Options:
    if not served.drafts:
        return {}
    settings: dict[str, object] = {"num_speculative_tokens": served.num_draft_tokens}
    if served.draft_model:
        settings["model"] = served.draft_model
    if served.drafts in _DRAFTS:
        settings["method"] = _DRAFTS[served.drafts]
    return {"speculative-config": json.dumps(settings)}


def _read_drafts(options: Options) -> Fields:
    if "speculative-config" not in options:
        return NO_DRAFTS
    settings = json.loads(options["speculative-config"])
    method = settings.get("method", "draft_model")
    drafts = method if method in ("ngram", "draft_model") else "layers"
    return drafting_fields(drafts, int(settings["num_speculative_tokens"]), settings, "model")


class VllmEngine(ServingEngine):
    """Starts `vllm serve`, and `vllm-router` before several."""

    name = "vllm"
    label = "vLLM"
    profile = "vllm-0.20"
    options = OptionMap(
        links=(
            # The model is the command's own word, not an option of it; it is read as one.
            Link(
                flags=("model",),
                read=lambda options: {"model_id": options["model"]} if "model" in options else {},
            ),
            word("dtype", "dtype", DTYPE_WORDS),
            value("tp", "tensor-parallel-size", default=1, aliases=("tp",), always=True),
            value("pp", "pipeline-parallel-size", default=1, aliases=("pp",)),
            value("dp", "data-parallel-size", default=1, aliases=("dp",)),
            value(
                "decode_context_parallel",
                "decode-context-parallel-size",
                default=1,
                aliases=("dcp",),
            ),
            Link(read=_read_sharing),
            Link(
                flags=("enable-expert-parallel",),
                write=lambda served: {"enable-expert-parallel": served.ep > 1},
                read=_read_experts,
                aliases={"ep": "enable-expert-parallel"},
            ),
            word("expert_exchange", "all2all-backend", _EXCHANGES, default="all_gather"),
            switch("has_expert_balancing", "enable-eplb"),
            Link(flags=("eplb-config",), write=_write_copies, read=_read_copies),
            Link(
                flags=("enable-dbo", "dbo-decode-token-threshold"),
                write=_write_halves,
                read=_read_halves,
            ),
            Link(flags=("compilation-config",), write=_write_passes, read=_read_passes),
            value("max_tokens", "max-model-len"),
            value("max_num_seqs", "max-num-seqs"),
            value("max_num_batched_tokens", "max-num-batched-tokens"),
            value("memory_utilization_ratio", "gpu-memory-utilization", float),
            word("quantization", "quantization", QUANTIZED_AT_LOAD, default="", aliases=("q",)),
            word("kv_dtype", "kv-cache-dtype", _CACHES, also=_MORE_CACHES),
            switch("has_prefix_caching", "enable-prefix-caching", "no-enable-prefix-caching"),
            switch("has_graphs", off="enforce-eager"),
            value("prefill_interval", "prefill-schedule-interval", default=1),
            word("has_priority_scheduling", "scheduling-policy", {True: "priority"}, default=False),
            Link(
                flags=("enable-lora", "max-loras", "max-cpu-loras", "max-lora-rank"),
                write=_write_adapters,
                read=_read_adapters,
            ),
            Link(flags=("kv-transfer-config",), write=_write_transfer, read=_read_transfer),
            # How fast blocks come back no option says.
            Link(write=_write_host),
            Link(flags=("speculative-config",), write=_write_drafts, read=_read_drafts),
        ),
    )
    router = Router(
        command=(
            *("sh", "-c"),
            'pip install --quiet --user vllm-router && exec "$HOME/.local/bin/$0" "$@"',
            "vllm-router",
        ),
        disaggregates="vllm-pd-disaggregation",
        policies=_POLICIES,
        image="python:3.12-slim",
        remarks=("the router's image has Python; it installs the package vllm-router at start",),
    )

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        served = ServedOptions.of_pool(pool)
        options = {"host": SERVER_HOST, "port": SERVER_PORT, **self.options.write(served)}
        command = ["vllm", "serve", pool.model_id, *text_arguments(options)]
        variables = dict(_TRANSFER) if served.role in _KV_ROLES else {}
        if served.store_bytes:
            command = [*_STORE_CLIENT, *command]
            variables |= _store_variables(served)
        return Launch(
            command=command,
            image=self.image(pool),
            variables=variables,
            remarks=self.remarks(served, "MTP layers"),
        )

    def image(self, pool: LaunchPool) -> str:
        """Return the image of the newest release that the engine's profile is of."""
        release = pool.scenario.resolve_engine().versions.rpartition("-")[2] or "0.18"
        return f"vllm/vllm-openai:v{release}.0"

    def read(
        self, command: str, _: Mapping[str, str] | None = None
    ) -> tuple[Fields, list[str]] | None:
        """Return what a command starts; `vllm serve MODEL`, or its module with `--model`."""
        split = split_words(command)
        # What a shell does before it is no option of the server.
        split = split[split.index("serve") - 1 :] if "serve" in split[1:] else split
        words, options = group_words(split)
        if "serve" in words and words[words.index("serve") - 1].endswith("vllm"):
            options |= zip(["model"], words[words.index("serve") + 1 :], strict=False)
        elif not str(options.get("m", "")).startswith("vllm.entrypoints"):
            return None
        options.pop("m", None)
        return self.options.read(options)


ENGINE = VllmEngine()
