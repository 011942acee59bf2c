"""SGLang's server, and its router.

Sources: SGLang, `docs/advanced_features/{server_arguments,pd_disaggregation,router,lora}.md` and
`{epd_disaggregation,hicache_best_practices}.md` (options of 0.5),
`srt/mem_cache/memory_pool_host.py`, `srt/mem_cache/storage/mooncake_store/README.md`.
"""

from collections.abc import Mapping
from dataclasses import replace

from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
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
    # The nearest that there is: it looks at two replicas.
    "least_outstanding": "power_of_two",
    "least_loaded": "power_of_two",
}
# Where prefill servers say how their KV caches are reached.
_BOOTSTRAP_PORT = 8998
# How a method of speculation is named.
_DRAFTS = {"ngram": "NGRAM", "layers": "EAGLE", "draft_model": "STANDALONE"}
_OF_HEAD = "EAGLE3"
# Its exchanges of tokens and experts, with DeepEP's mode; without the options it gathers them.
_EXCHANGES = {
    "all_gather": (None, None),
    "all_to_all": ("flashinfer", None),
    "deepep_normal": ("deepep", "normal"),
    "deepep_low_latency": ("deepep", "low_latency"),
}
# Formats of the KV cache: those that are written, and others that are read. Source: the choices of
# `kv_cache_dtype` in `server_args.py`.
_CACHES = {DType.FP8: "fp8_e4m3", DType.BF16: "bf16"}
_MORE_CACHES = {"auto": None, "bfloat16": DType.BF16, "fp8_e5m2": DType.FP8}
# Source: `swa_full_tokens_ratio` of the server's arguments.
_WINDOW_TOKENS_RATIO = 0.8
# It splits whatever can be split.
_FEWEST_HALVES = 2
# Adapters in a batch where the option is left out. Source: the option's own help.
_MAX_LORAS = 8
# The newest of the releases that profiles were read from; before it that of 0.5.
_NEWEST, _IMAGE = "0.5.20", "lmsysorg/sglang:v{}"
_READ_FROM = {"0.5": "0.5.9"}


def _read_ranks(options: Options) -> Fields:
    ranks, dp = int(options.get("tp-size", 1)), int(options.get("dp-size", 1))
    is_shared = _read_experts(options)["ep"] > 1 or "enable-dp-attention" in options
    return {"tp": ranks // dp if is_shared else ranks}


def _read_experts(options: Options) -> Fields:
    # Exchanged otherwise than by gathering tokens, experts lie on all ranks.
    is_wide = options.get("moe-a2a-backend", "none") != "none"
    return {"ep": int(options.get("tp-size" if is_wide else "ep-size", 1))}


def _write_exchange(served: ServedOptions) -> Options:
    backend, mode = _EXCHANGES[served.expert_exchange]
    return {"moe-a2a-backend": backend, "deepep-mode": mode}


def _read_exchange(options: Options) -> Fields:
    said = (options.get("moe-a2a-backend"), options.get("deepep-mode"))
    return {"expert_exchange": invert(_EXCHANGES)[said]}


def _write_windows(served: ServedOptions) -> Options:
    # Rules of other engines have no pool for windows.
    ratio = served.window_tokens_ratio
    return {"swa-full-tokens-ratio": None if ratio in (0.0, _WINDOW_TOKENS_RATIO) else ratio}


def _write_role(served: ServedOptions) -> Options:
    if served.role not in ("prefill", "decode"):
        return {}
    return {
        "disaggregation-mode": served.role,
        "disaggregation-transfer-backend": "nixl",
        "disaggregation-bootstrap-port": _BOOTSTRAP_PORT if served.role == "prefill" else None,
    }


def _write_encoders(served: ServedOptions) -> Options:
    if served.role == "encoder":
        return {"encoder-only": True}
    urls = served.encoder_urls
    return {"language-only": True, "encoder-urls": urls} if urls else {}


def _read_encoders(options: Options) -> Fields:
    if "encoder-only" in options:
        return {"role": "encoder"}
    urls = options.get("encoder-urls", ())
    return {"encoder_urls": (urls,) if isinstance(urls, str) else tuple(urls)}


def _count_ranks(served: ServedOptions) -> int:
    # SGLang counts the ranks of attention and experts together.
    return served.tp * served.dp if served.ep > 1 or served.attention_dp else served.tp


def _write_tiers(served: ServedOptions) -> Options:
    store, host = served.store_bytes > 0, served.host_bytes
    return {
        "enable-hierarchical-cache": store or host > 0,
        "hicache-size": max(host // 10**9, 1) if host else None,
        "hicache-storage-backend": "mooncake" if store else None,
    }


def _store_variables(served: ServedOptions) -> dict[str, str]:
    return {
        "MOONCAKE_MASTER": f"{STORE_NAME}:{STORE_PORT}",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_LOCAL_HOSTNAME": f"{{{POD_ADDRESS}}}",
        "MOONCAKE_PROTOCOL": "rdma",
        # Every rank gives its part of it.
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(served.store_bytes * _count_ranks(served)),
    }


def _write_adapters(served: ServedOptions) -> Options:
    if not served.max_loras:
        return {}
    return {
        "enable-lora": True,
        "max-loras-per-batch": served.max_loras,
        "max-lora-rank": served.lora_rank,
        "lora-target-modules": "all",
    }


def _read_adapters(options: Options) -> Fields:
    if "enable-lora" not in options:
        return {"max_loras": 0, "lora_rank": 0}
    return {
        "max_loras": int(options.get("max-loras-per-batch", _MAX_LORAS)),
        "lora_rank": int(options.get("max-lora-rank", 0)),
    }


def _write_drafts(served: ServedOptions) -> Options:
    drafts, count = served.drafts, served.num_draft_tokens
    if not drafts:
        return {}
    is_ngram = drafts == "ngram"
    return {
        "speculative-algorithm": _DRAFTS.get(drafts, _OF_HEAD),
        "speculative-draft-model-path": served.draft_model or None,
        # The token that verification adds counts as well.
        "speculative-num-draft-tokens": count + 1,
        "speculative-num-steps": None if is_ngram else count,
        "speculative-eagle-topk": None if is_ngram else 1,
    }


def _read_drafts(options: Options) -> Fields:
    if "speculative-algorithm" not in options:
        return NO_DRAFTS
    named = {_OF_HEAD: "layers", **invert(_DRAFTS)}
    drafts = named[options["speculative-algorithm"]]
    num_tokens = int(options["speculative-num-draft-tokens"]) - 1
    return drafting_fields(drafts, num_tokens, options, "speculative-draft-model-path")


class SglangEngine(ServingEngine):
    """Starts `sglang.launch_server`, and `sglang_router.launch_router` before several."""

    name = "sglang"
    label = "SGLang"
    profile = f"sglang-{_NEWEST}"
    encodes_apart = True
    options = OptionMap(
        links=(
            value("model_id", "model-path", str, aliases=("model",)),
            constant({"host": SERVER_HOST, "port": SERVER_PORT}),
            word("dtype", "dtype", DTYPE_WORDS),
            Link(
                flags=("tp-size",),
                write=lambda it: {"tp-size": _count_ranks(it)},
                read=_read_ranks,
                aliases={"tp": "tp-size", "tensor-parallel-size": "tp-size"},
            ),
            value(
                "decode_context_parallel",
                "dcp-size",
                default=1,
                aliases=("decode-context-parallel-size",),
            ),
            value("pp", "pp-size", default=1, aliases=("pp", "pipeline-parallel-size")),
            value("dp", "dp-size", default=1, aliases=("dp", "data-parallel-size")),
            Link(
                flags=("enable-dp-attention",),
                write=lambda served: {"enable-dp-attention": served.dp > 1},
                read=lambda options: {
                    "attention_dp": "enable-dp-attention" in options
                    and _read_experts(options)["ep"] == 1
                },
            ),
            Link(
                flags=("ep-size",),
                write=lambda served: {"ep-size": served.ep if served.ep > 1 else None},
                read=_read_experts,
                aliases={"ep": "ep-size", "expert-parallel-size": "ep-size"},
            ),
            Link(
                flags=("moe-a2a-backend", "deepep-mode"),
                write=_write_exchange,
                read=_read_exchange,
            ),
            switch("has_expert_balancing", "enable-eplb"),
            value("num_redundant_experts", "ep-num-redundant-experts", default=0),
            Link(
                flags=("enable-two-batch-overlap",),
                write=lambda it: {"enable-two-batch-overlap": it.two_batch_tokens > 0},
                read=lambda options: {
                    "two_batch_tokens": _FEWEST_HALVES * ("enable-two-batch-overlap" in options)
                },
            ),
            Link(
                flags=("enable-flashinfer-allreduce-fusion",),
                write=lambda it: {
                    "enable-flashinfer-allreduce-fusion": bool(it.fuses_all_reduce_norm)
                },
                read=lambda options: {
                    # Left out it is the engine's choice, by model and device.
                    "fuses_all_reduce_norm": "enable-flashinfer-allreduce-fusion" in options or None
                },
            ),
            value("max_tokens", "context-length"),
            value("max_num_seqs", "max-running-requests"),
            value("max_num_batched_tokens", "chunked-prefill-size"),
            switch("mixes_prefill", "enable-mixed-chunk"),
            value("receive_interval", "scheduler-recv-interval", default=1),
            Link(
                flags=("swa-full-tokens-ratio",),
                write=_write_windows,
                read=lambda options: {
                    "window_tokens_ratio": float(
                        options.get("swa-full-tokens-ratio", _WINDOW_TOKENS_RATIO)
                    )
                },
            ),
            value("memory_utilization_ratio", "mem-fraction-static", float, default=0.0),
            word("quantization", "quantization", QUANTIZED_AT_LOAD, default=""),
            word("kv_dtype", "kv-cache-dtype", _CACHES, also=_MORE_CACHES),
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
                flags=("encoder-only", "language-only", "encoder-urls"),
                write=_write_encoders,
                read=_read_encoders,
            ),
            # How fast blocks come back no option says.
            Link(write=_write_tiers),
            Link(
                flags=(
                    *("enable-lora", "max-loras-per-batch"),
                    *("max-lora-rank", "lora-target-modules"),
                ),
                write=_write_adapters,
                read=_read_adapters,
            ),
            Link(
                flags=(
                    *("speculative-algorithm", "speculative-draft-model-path"),
                    *("speculative-num-draft-tokens", "speculative-num-steps"),
                    "speculative-eagle-topk",
                ),
                write=_write_drafts,
                read=_read_drafts,
            ),
        ),
    )
    router = Router(
        command=("python3", "-m", "sglang_router.launch_router"),
        disaggregates="pd-disaggregation",
        policies=_POLICIES,
        image=_IMAGE.format(_NEWEST),
        prefill_words=(str(_BOOTSTRAP_PORT),),
    )

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool."""
        served = ServedOptions.of_pool(pool)
        if pool.scenario.resolve_engine().memory_rule != "static":
            # Another engine's share is of other things.
            served = replace(served, memory_utilization_ratio=0.0)
        options = self.options.write(served)
        remarks = self.remarks(served, "layers")
        if served.host_bytes:
            remarks.append("SGLang starts where that is more than the GPU's own KV cache")
        elif served.store_bytes:
            remarks.append("blocks go to the store through host memory, twice each GPU's KV cache")
        return Launch(
            command=["python3", "-m", "sglang.launch_server", *text_arguments(options)],
            image=self.image(pool),
            variables=_store_variables(served) if served.store_bytes else {},
            remarks=remarks,
        )

    def image(self, pool: LaunchPool) -> str:
        """Return the image of the newest release that the pool's profile was read from."""
        engine, _, version = pool.scenario.resolve_engine().software.rpartition(" ")
        release = version if engine == self.name else _NEWEST
        return _IMAGE.format(_READ_FROM.get(release, release))

    def read(
        self, command: str, _: Mapping[str, str] | None = None
    ) -> tuple[Fields, list[str]] | None:
        """Return what a command starts: `python3 -m sglang.launch_server`."""
        options = group_words(split_words(command))[1]
        if options.pop("m", "") != "sglang.launch_server":
            return None
        return self.options.read(options)


ENGINE = SglangEngine()
