"""SGLang's server, and its router.

Sources: SGLang, `docs/advanced_features/{server_arguments,pd_disaggregation,router,lora}.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.option_map import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    group_words,
    split_words,
    switch,
    value,
    word,
)
from foretoken.simulator.launch.served_options import ServedOptions
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
# How a method of speculation is named.
_DRAFTS = {"ngram": "NGRAM", "layers": "EAGLE", "draft_model": "STANDALONE"}
# Adapters in a batch where the option is left out. Source: the option's own help.
_MAX_LORAS = 8
# The newest of the releases that the profile was read from.
_IMAGE = "lmsysorg/sglang:v0.5.9"


def _write_ranks(fields: Fields) -> Options:
    # SGLang counts the ranks of attention and experts together.
    return {"tp-size": fields["tp"] * fields["dp"] if fields["ep"] > 1 else fields["tp"]}


def _read_ranks(options: Options) -> Fields:
    ranks, dp = int(options.get("tp-size", 1)), int(options.get("dp-size", 1))
    return {"tp": ranks // dp if int(options.get("ep-size", 1)) > 1 else ranks}


def _write_role(fields: Fields) -> Options:
    role = fields["role"]
    if role == "aggregated":
        return {}
    return {
        "disaggregation-mode": role,
        "disaggregation-transfer-backend": "nixl",
        "disaggregation-bootstrap-port": _BOOTSTRAP_PORT if role == "prefill" else None,
    }


def _write_adapters(fields: Fields) -> Options:
    if not fields["max_loras"]:
        return {}
    return {
        "enable-lora": True,
        "max-loras-per-batch": fields["max_loras"],
        "max-lora-rank": fields["lora_rank"],
        "lora-target-modules": "all",
    }


def _read_adapters(options: Options) -> Fields:
    if "enable-lora" not in options:
        return {"max_loras": 0, "lora_rank": 0}
    return {
        "max_loras": int(options.get("max-loras-per-batch", _MAX_LORAS)),
        "lora_rank": int(options.get("max-lora-rank", 0)),
    }


def _write_drafts(fields: Fields) -> Options:
    drafts, count = fields["drafts"], fields["num_draft_tokens"]
    if not drafts:
        return {}
    is_model = drafts == "draft_model"
    options: dict[str, object] = {"speculative-algorithm": _DRAFTS[drafts]}
    if is_model:
        options["speculative-draft-model-path"] = fields["draft_model"]
    # The token that verification adds counts as well.
    options["speculative-num-draft-tokens"] = count + 1
    if drafts != "ngram":
        options |= {"speculative-num-steps": count, "speculative-eagle-topk": 1}
    return options


def _read_drafts(options: Options) -> Fields:
    if "speculative-algorithm" not in options:
        return {"drafts": "", "num_draft_tokens": 0, "draft_model": ""}
    drafts = {name: drafts for drafts, name in _DRAFTS.items()}[options["speculative-algorithm"]]
    is_model = drafts == "draft_model"
    return {
        "drafts": drafts,
        "num_draft_tokens": int(options["speculative-num-draft-tokens"]) - 1,
        "draft_model": options["speculative-draft-model-path"] if is_model else "",
    }


_OPTIONS = OptionMap(
    name="sglang",
    versions="0.5",
    source="SGLang, docs/advanced_features/server_arguments.md",
    links=(
        value("model_id", "model-path", str, aliases=("model",)),
        constant(host="0.0.0.0", port=SERVER_PORT),  # noqa: S104 - a pod's own network
        word("dtype", "dtype", _DTYPES),
        Link(
            flags=("tp-size",),
            write=_write_ranks,
            read=_read_ranks,
            aliases={"tp": "tp-size", "tensor-parallel-size": "tp-size"},
        ),
        value("pp", "pp-size", default=1, aliases=("pp", "pipeline-parallel-size")),
        value("dp", "dp-size", default=1, aliases=("dp", "data-parallel-size")),
        Link(
            flags=("enable-dp-attention",),
            write=lambda fields: {"enable-dp-attention": fields["dp"] > 1},
            read=lambda _: {},
        ),
        value("ep", "ep-size", default=1, aliases=("ep", "expert-parallel-size")),
        value("max_tokens", "context-length"),
        value("max_num_seqs", "max-running-requests"),
        value("max_num_batched_tokens", "chunked-prefill-size"),
        switch("mixes_prefill", "enable-mixed-chunk"),
        value("memory_utilization_ratio", "mem-fraction-static", float, default=0.0),
        word("quantization", "quantization", _QUANTIZED_AT_LOAD, default=""),
        word("kv_dtype", "kv-cache-dtype", {DType.FP8: "fp8_e4m3"}),
        switch("has_prefix_caching", off="disable-radix-cache"),
        switch("has_graphs", off="disable-cuda-graph"),
        switch("has_priority_scheduling", "enable-priority-scheduling"),
        Link(
            flags=(
                "disaggregation-mode",
                "disaggregation-transfer-backend",
                "disaggregation-bootstrap-port",
            ),
            write=_write_role,
            read=lambda options: {"role": options.get("disaggregation-mode", "aggregated")},
        ),
        Link(
            flags=("enable-lora", "max-loras-per-batch", "max-lora-rank", "lora-target-modules"),
            write=_write_adapters,
            read=_read_adapters,
        ),
        Link(
            flags=(
                "speculative-algorithm",
                "speculative-draft-model-path",
                "speculative-num-draft-tokens",
                "speculative-num-steps",
                "speculative-eagle-topk",
            ),
            write=_write_drafts,
            read=_read_drafts,
        ),
    ),
)


class SglangEngine:
    """Starts `sglang.launch_server`, and `sglang_router.launch_router` before several."""

    name = "sglang"
    profile = "sglang-0.5"
    can = find_engine(profile).can
    options = _OPTIONS

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        served = ServedOptions.of_pool(pool)
        if pool.scenario.engine.resolve().memory_rule != "static":
            # Another engine's share is of other things.
            served = replace(served, memory_utilization_ratio=0.0)
        remarks: list[str] = []
        if served.quantization and served.quantization not in _QUANTIZED_AT_LOAD:
            remarks.append(
                f"weights are {served.quantization}: name a checkpoint that is, SGLang takes its"
                " format from it"
            )
        if served.drafts == "layers":
            remarks.append("drafts come from the model's own layers; for EAGLE name its checkpoint")
        if served.role != "aggregated":
            remarks.append("KV caches move by NIXL, which must be in the image")
        options = self.options.write(served.fields)
        return Launch(
            command=["python3", "-m", "sglang.launch_server", *text_arguments(options)],
            image=_IMAGE,
            remarks=remarks,
        )

    def read(self, command: str) -> tuple[Fields, list[str]] | None:
        """Return what a command starts: `python3 -m sglang.launch_server`."""
        _, options = group_words(split_words(command))
        if options.pop("m", "") != "sglang.launch_server":
            return None
        return self.options.read(options)

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


ENGINE = SglangEngine()
