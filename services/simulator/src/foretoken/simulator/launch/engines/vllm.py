"""vLLM's server, and its router.

Sources: vLLM, `vllm/engine/arg_utils.py` and `docs/features/nixl_connector_usage.md`; the README of
vllm-project/router.
"""

import json
from collections.abc import Mapping, Sequence

from foretoken.domain.cluster import SpeculativeSpec
from foretoken.domain.engine import find_engine
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType
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


class VllmEngine:
    """Starts `vllm serve`, and `vllm-router` before several."""

    name = "vllm"
    can = find_engine("vllm-0.20").can

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        scenario = pool.scenario
        engine, layout = scenario.engine.resolve(), scenario.layout
        remarks: list[str] = []
        options: dict[str, object] = {
            "host": "0.0.0.0",  # noqa: S104 - a pod's own network
            "port": SERVER_PORT,
            "dtype": _DTYPES[scenario.dtype],
            "tensor-parallel-size": layout.tp,
            "pipeline-parallel-size": layout.pp if layout.pp > 1 else None,
            "data-parallel-size": layout.dp if layout.dp > 1 else None,
            "enable-expert-parallel": layout.ep > 1,
            "max-model-len": pool.max_tokens,
            "max-num-seqs": engine.max_num_seqs,
            "max-num-batched-tokens": engine.max_num_batched_tokens,
            "gpu-memory-utilization": engine.memory_utilization_ratio,
            "quantization": _quantization(scenario.quantization, remarks),
            "kv-cache-dtype": "fp8" if scenario.kv_dtype is DType.FP8 else None,
            "enable-prefix-caching": engine.has_prefix_caching,
            "no-enable-prefix-caching": not engine.has_prefix_caching,
            "enforce-eager": engine.graph_mode == "none",
            "scheduling-policy": "priority" if engine.has_priority_scheduling else None,
            **_adapter_options(pool),
            **_transfer_options(pool.pool.role),
        }
        if scenario.speculative:
            options["speculative-config"] = _speculation(scenario.speculative, remarks)
        variables = {}
        if pool.pool.role in _KV_ROLES:
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": f"{{{POD_ADDRESS}}}",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_HANDSHAKE_PORT),
                "UCX_NET_DEVICES": "all",
            }
            remarks.append("KV caches move by NIXL, which must be in the image")
        return Launch(
            command=["vllm", "serve", pool.model_id, *text_arguments(options)],
            image=f"vllm/vllm-openai:v{engine.versions.rpartition('-')[2] or '0.18'}.0",
            variables=variables,
            remarks=remarks,
        )

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


def _quantization(quantization: str, remarks: list[str]) -> str | None:
    if quantization and quantization not in _QUANTIZED_AT_LOAD:
        remarks.append(
            f"weights are {quantization}: name a checkpoint that is, vLLM takes its format from it"
        )
    return _QUANTIZED_AT_LOAD.get(quantization)


def _adapter_options(pool: LaunchPool) -> dict[str, object]:
    lora = pool.scenario.lora
    if lora is None:
        return {}
    return {
        "enable-lora": True,
        "max-loras": lora.max_loaded,
        "max-cpu-loras": max(lora.num_adapters, lora.max_loaded),
        "max-lora-rank": lora.rank,
    }


def _transfer_options(role: str) -> dict[str, object]:
    if role not in _KV_ROLES:
        return {}
    settings = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": "fail",
    }
    return {"kv-transfer-config": json.dumps(settings)}


def _speculation(speculative: SpeculativeSpec, remarks: list[str]) -> str:
    settings: dict[str, object] = {"num_speculative_tokens": speculative.num_draft_tokens}
    if speculative.method == "ngram":
        settings["method"] = "ngram"
    elif speculative.draft_model is not None:
        settings["model"] = next(
            (alias for alias in speculative.draft_model.aliases if "/" in alias),
            speculative.draft_model.name,
        )
    else:
        settings["method"] = "mtp"
        remarks.append("drafts come from the model's own MTP layers; for EAGLE name its checkpoint")
    return json.dumps(settings)


ENGINE = VllmEngine()
