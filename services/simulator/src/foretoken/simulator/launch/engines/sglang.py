"""SGLang's server, and its router.

Sources: SGLang, `docs/advanced_features/{server_arguments,pd_disaggregation,router,lora}.md`.
"""

from collections.abc import Mapping, Sequence

from foretoken.domain.engine import EngineProfile, find_engine
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.simulator.launch.server import (
    SERVER_PORT,
    STARTUP_S,
    Launch,
    LaunchPool,
    text_arguments,
)

_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
_QUANTIZED_AT_LOAD = {"fp8": "fp8"}
_POLICIES = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "prefix_affinity": "cache_aware",
    # The nearest that there is: it looks at two replicas.
    "least_outstanding": "power_of_two",
    "least_loaded": "power_of_two",
}
# Where prefill servers say how their KV caches are reached.
_BOOTSTRAP_PORT = 8998
# The newest of the releases that the profile was read from.
_IMAGE = "lmsysorg/sglang:v0.5.9"


class SglangEngine:
    """Starts `sglang.launch_server`, and `sglang_router.launch_router` before several."""

    name = "sglang"
    can = find_engine("sglang-0.5").can

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        scenario, role = pool.scenario, pool.pool.role
        engine, layout = scenario.engine.resolve(), scenario.layout
        remarks: list[str] = []
        if scenario.quantization and scenario.quantization not in _QUANTIZED_AT_LOAD:
            remarks.append(
                f"weights are {scenario.quantization}: name a checkpoint that is, SGLang takes its"
                " format from it"
            )
        is_disaggregated = role != "aggregated"
        # SGLang counts the ranks of attention and experts together.
        tp = layout.tp * layout.dp if layout.ep > 1 else layout.tp
        options: dict[str, object] = {
            "model-path": pool.model_id,
            "host": "0.0.0.0",  # noqa: S104 - a pod's own network
            "port": SERVER_PORT,
            "dtype": _DTYPES[scenario.dtype],
            "tp-size": tp,
            "pp-size": layout.pp if layout.pp > 1 else None,
            "dp-size": layout.dp if layout.dp > 1 else None,
            "enable-dp-attention": layout.dp > 1,
            "ep-size": layout.ep if layout.ep > 1 else None,
            "context-length": pool.max_tokens,
            "max-running-requests": engine.max_num_seqs,
            "chunked-prefill-size": engine.max_num_batched_tokens,
            "enable-mixed-chunk": engine.mixes_prefill,
            "mem-fraction-static": _memory_ratio(engine),
            "quantization": _QUANTIZED_AT_LOAD.get(scenario.quantization),
            "kv-cache-dtype": "fp8_e4m3" if scenario.kv_dtype is DType.FP8 else None,
            "disable-radix-cache": not engine.has_prefix_caching,
            "disable-cuda-graph": engine.graph_mode == "none",
            "enable-priority-scheduling": engine.has_priority_scheduling,
            "disaggregation-mode": role if is_disaggregated else None,
            "disaggregation-transfer-backend": "nixl" if is_disaggregated else None,
            "disaggregation-bootstrap-port": _BOOTSTRAP_PORT if role == "prefill" else None,
            **_adapter_options(pool),
            **_speculation_options(pool, remarks),
        }
        if is_disaggregated:
            remarks.append("KV caches move by NIXL, which must be in the image")
        return Launch(
            command=["python3", "-m", "sglang.launch_server", *text_arguments(options)],
            image=_IMAGE,
            remarks=remarks,
        )

    def route(self, urls_by_role: Mapping[str, Sequence[str]], router: str) -> Launch:
        """Return what starts the router before servers."""
        policy = _POLICIES.get(router)
        if policy is None:
            raise InvalidRequestError.of_field(
                "cluster.routing.router",
                f"SGLang's router has nothing like {router}; it knows {', '.join(_POLICIES)}",
            )
        arguments = ["python3", "-m", "sglang_router.launch_router"]
        arguments += ["--host", "0.0.0.0", "--port", str(SERVER_PORT), "--policy", policy]  # noqa: S104
        arguments += ["--worker-startup-timeout-secs", str(STARTUP_S)]
        if "prefill" in urls_by_role:
            arguments.append("--pd-disaggregation")
            for url in urls_by_role["prefill"]:
                arguments += ["--prefill", url, str(_BOOTSTRAP_PORT)]
            for url in urls_by_role["decode"]:
                arguments += ["--decode", url]
        else:
            arguments += ["--worker-urls", *urls_by_role["aggregated"]]
        remarks = [f"the router's policy {policy} stands for {router}"] if policy != router else []
        return Launch(command=arguments, image=_IMAGE, remarks=remarks)


def _memory_ratio(engine: EngineProfile) -> float | None:
    return engine.memory_utilization_ratio if engine.memory_rule == "static" else None


def _adapter_options(pool: LaunchPool) -> dict[str, object]:
    lora = pool.scenario.lora
    if lora is None:
        return {}
    return {
        "enable-lora": True,
        "max-loras-per-batch": lora.max_loaded,
        "max-lora-rank": lora.rank,
        "lora-target-modules": "all",
    }


def _speculation_options(pool: LaunchPool, remarks: list[str]) -> dict[str, object]:
    speculative = pool.scenario.speculative
    if speculative is None:
        return {}
    options: dict[str, object] = {
        "speculative-num-draft-tokens": speculative.num_draft_tokens + 1,
    }
    if speculative.method == "ngram":
        return {"speculative-algorithm": "NGRAM", **options}
    options |= {
        "speculative-num-steps": speculative.num_draft_tokens,
        "speculative-eagle-topk": 1,
    }
    if speculative.draft_model is not None:
        draft = speculative.draft_model
        path = next((alias for alias in draft.aliases if "/" in alias), draft.name)
        return {
            "speculative-algorithm": "STANDALONE",
            "speculative-draft-model-path": path,
            **options,
        }
    remarks.append("drafts come from the model's own layers; for EAGLE name its checkpoint")
    return {"speculative-algorithm": "EAGLE", **options}


ENGINE = SglangEngine()
