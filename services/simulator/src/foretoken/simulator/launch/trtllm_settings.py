"""What TensorRT-LLM's server is started with: its command's options, and its file's settings.

Sources: TensorRT-LLM, `tensorrt_llm/commands/serve.py` and `llmapi/llm_args.py` (options and keys
of 1.0 to 1.3), `examples/wide_ep/README.md`, `examples/llm-api/llm_speculative_decoding.py`; pull
requests 10005 (`--config`) and 6887 (names of transfers).
"""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.options import (
    Fields,
    Link,
    OptionMap,
    Options,
    constant,
    value,
    word,
)
from foretoken.simulator.launch.server import (
    DTYPE_WORDS,
    NO_DRAFTS,
    SERVER_HOST,
    SERVER_PORT,
    ServedOptions,
    count_experts,
    drafting_fields,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What a series of releases calls things, and what it has not.

    `tag` is of the newest image there was, `config` the option with the file of settings,
    `draft_model` how speculation with a model is called there. Without `is_settled` transfers and
    waits are not written: their words changed within the series.
    """

    tag: str
    config: str = "extra_llm_api_options"
    draft_model: str = "DraftTarget"
    is_settled: bool = True


RELEASES = {
    "1.0": Release(tag="1.0.0", is_settled=False),
    "1.1": Release(tag="1.1.0"),
    "1.2": Release(tag="1.2.1"),
    "1.3": Release(tag="1.3.0rc22", config="config", draft_model="Draft_Target"),
}
NEWEST = "1.3"

# In the map settings of the file are named by their path below this; other options are the
# command's own.
FILE = "config"
_KV = f"{FILE}.kv_cache_config"
GRAPHS = f"{FILE}.cuda_graph_config"
DRAFTING = f"{FILE}.speculative_config"
_ADAPTERS = f"{FILE}.lora_config"
_BALANCER = f"{FILE}.moe_config.load_balancer"
_CONTEXTS = f"{FILE}.context_parallel_size"
_SPLITTING = f"{FILE}.cp_config"
_HELIX = "HELIX"
_BLOCKS = (f"{_SPLITTING}.tokens_per_block", f"{_KV}.tokens_per_block")
_BALANCING = f"{FILE}.attention_dp_config"
_TRANSFER = f"{FILE}.cache_transceiver_config"
_CHUNKED = f"{FILE}.enable_chunked_prefill"
_NO_OVERLAP = f"{FILE}.disable_overlap_scheduler"
_ATTENTION_DP = f"{FILE}.enable_attention_dp"
# A setting that is switched off: left out it would be on.
OFF = "null"
# Tokens of a step where the option is left out. Source: `max_num_tokens` of `llm_args.py`.
_STEP_TOKENS = 8192
# Steps that ranks wait for each other. Source: `AttentionDpConfig`.
_WAITS = (50, 10)
# Tokens of a block, which ranks that split contexts have to say twice. Source: `KvCacheConfig`.
_BLOCK_TOKENS = 32
# How long n-grams are looked for. Source: `llm_speculative_decoding.py`.
_NGRAM_SIZE = 3
# The parts of a layer that adapters change, all that Hugging Face's have.
_ADAPTED = (
    *("attn_q", "attn_k", "attn_v", "attn_dense"),
    *("mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"),
)


def _write_ranks(served: ServedOptions) -> Options:
    """Return settings; ranks that split contexts are of tensor parallelism but in attention."""
    splits, is_split = served.decode_context_parallel, served.decode_context_parallel > 1
    return {
        "tp-size": max(served.tp // splits, served.dp),
        _ATTENTION_DP: True if served.dp > 1 else None,
        _CONTEXTS: splits if is_split else None,
        f"{_SPLITTING}.cp_type": _HELIX if is_split else None,
        **dict.fromkeys(_BLOCKS, _BLOCK_TOKENS if is_split else None),
    }


def _count_splits(options: Options) -> int:
    """Return over how many ranks contexts are split; contexts of prompts alone are no such ones."""
    is_helix = str(options.get(f"{_SPLITTING}.cp_type", "")).upper() == _HELIX
    return int(options.get(_CONTEXTS, 1)) if is_helix else 1


def _read_ranks(options: Options) -> Fields:
    ranks, splits = int(options.get("tp-size", 1)), _count_splits(options)
    tp, dp = (1, ranks) if options.get(_ATTENTION_DP) else (ranks, 1)
    return {"tp": tp * splits, "dp": dp, "decode_context_parallel": splits}


def _read_splitting(options: Options) -> Fields:
    blocks = {options.get(name, _BLOCK_TOKENS) for name in _BLOCKS}
    if int(options.get(_CONTEXTS, 1)) > _count_splits(options) or blocks != {_BLOCK_TOKENS}:
        raise ValueError(_SPLITTING)
    return {}


def _read_experts(options: Options) -> Fields:
    return {"ep": int(options.get("ep-size", 1))}


def _read_sharing(options: Options) -> Fields:
    is_shared = bool(options.get(_ATTENTION_DP)) and _read_ranks(options)["dp"] > 1
    return {"attention_dp": is_shared and _read_experts(options)["ep"] == 1}


def _write_graphs(served: ServedOptions) -> Options:
    if not served.has_graphs:
        return {GRAPHS: OFF}
    return {
        f"{GRAPHS}.enable_padding": True,
        f"{GRAPHS}.max_batch_size": served.max_num_seqs or None,
    }


def _read_chunks(options: Options) -> Fields:
    # A piece of a prompt is as long as a step allows.
    tokens = int(options.get("max-num-tokens", _STEP_TOKENS))
    return {"max_chunk_tokens": tokens if options.get(_CHUNKED) else 0}


def _write_copies(served: ServedOptions) -> Options:
    if not served.has_expert_balancing:
        return {}
    return {
        f"{FILE}.moe_config.backend": "WIDEEP",
        f"{_BALANCER}.num_slots": served.num_experts + served.num_redundant_experts,
        f"{_BALANCER}.layer_updates_per_iter": 1,
    }


def _read_copies(options: Options) -> Fields:
    slots = options.get(f"{_BALANCER}.num_slots")
    if slots is None:
        return {"has_expert_balancing": False, "num_redundant_experts": 0}
    copies = int(slots) - count_experts(str(options.get("model", "")))
    return {"has_expert_balancing": True, "num_redundant_experts": copies}


def _write_balance(served: ServedOptions) -> Options:
    if not served.balance_timeout_iters:
        return {}
    return {
        f"{_BALANCING}.enable_balance": True,
        f"{_BALANCING}.timeout_iters": served.balance_timeout_iters,
        f"{_BALANCING}.batching_wait_iters": served.balance_wait_iters,
    }


def _read_balance(options: Options) -> Fields:
    if not options.get(f"{_BALANCING}.enable_balance"):
        return {"balance_timeout_iters": 0, "balance_wait_iters": 0}
    timeout, wait = _WAITS
    return {
        "balance_timeout_iters": int(options.get(f"{_BALANCING}.timeout_iters", timeout)),
        "balance_wait_iters": int(options.get(f"{_BALANCING}.batching_wait_iters", wait)),
    }


def _write_role(served: ServedOptions) -> Options:
    if served.role not in ("prefill", "decode"):
        return {}
    return {
        f"{_TRANSFER}.backend": "NIXL",
        f"{_TRANSFER}.max_tokens_in_buffer": served.max_tokens or None,
        # Those that compute prompts for others have no overlap scheduler.
        _NO_OVERLAP: True if served.role == "prefill" else None,
    }


def _read_role(options: Options) -> Fields:
    if f"{_TRANSFER}.backend" not in options:
        return {"role": "aggregated"}
    return {"role": "prefill" if options.get(_NO_OVERLAP) else "decode"}


def _write_adapters(served: ServedOptions) -> Options:
    if not served.max_loras:
        return {}
    return {
        f"{_ADAPTERS}.max_loras": served.max_loras,
        f"{_ADAPTERS}.max_cpu_loras": served.num_loras,
        f"{_ADAPTERS}.max_lora_rank": served.lora_rank,
        f"{_ADAPTERS}.lora_target_modules": list(_ADAPTED),
    }


def _read_adapters(options: Options) -> Fields:
    if not any(name.startswith(f"{_ADAPTERS}.") for name in options):
        return {"max_loras": 0, "num_loras": 0, "lora_rank": 0}
    most = int(options[f"{_ADAPTERS}.max_loras"])
    return {
        "max_loras": most,
        "num_loras": int(options.get(f"{_ADAPTERS}.max_cpu_loras", most)),
        "lora_rank": int(options[f"{_ADAPTERS}.max_lora_rank"]),
    }


def _write_drafts(served: ServedOptions) -> Options:
    count = served.num_draft_tokens
    settings: dict[str, dict[str, object]] = {
        "": {},
        "layers": {"decoding_type": "MTP", "num_nextn_predict_layers": count},
        "ngram": {
            "decoding_type": "NGram",
            "max_draft_len": count,
            "max_matching_ngram_size": _NGRAM_SIZE,
        },
        "eagle": {
            "decoding_type": "Eagle",
            "max_draft_len": count,
            "speculative_model_dir": served.draft_model,
        },
        "draft_model": {
            "decoding_type": RELEASES[NEWEST].draft_model,
            "max_draft_len": count,
            "speculative_model_dir": served.draft_model,
        },
    }
    return {f"{DRAFTING}.{name}": it for name, it in settings[served.drafts].items()}


def _read_drafts(options: Options) -> Fields:
    kind = options.get(f"{DRAFTING}.decoding_type", "")
    if not kind:
        return NO_DRAFTS
    known = {"NGram": "ngram"} | {each.draft_model: "draft_model" for each in RELEASES.values()}
    count = options.get(f"{DRAFTING}.num_nextn_predict_layers")
    num_tokens = int(count or options[f"{DRAFTING}.max_draft_len"])
    path = f"{DRAFTING}.speculative_model_dir"
    return drafting_fields(known.get(kind, "layers"), num_tokens, options, path)


def _setting(name: str, flag: str, *, default: bool) -> Link:
    """Link a field with a setting of the file that is true or false."""
    return value(name, f"{FILE}.{flag}", bool, default=default)


_LAYOUT_LINKS = (
    Link(
        flags=("tp-size", _ATTENTION_DP),
        write=_write_ranks,
        read=_read_ranks,
        aliases={
            **dict.fromkeys(("tensor-parallel-size", f"{FILE}.tensor_parallel_size"), "tp-size"),
            **dict.fromkeys(("cp-size", "context-parallel-size"), _CONTEXTS),
            "enable-attention-dp": _ATTENTION_DP,
        },
    ),
    Link(
        flags=(
            *(_CONTEXTS, *_BLOCKS),
            *(
                f"{_SPLITTING}.{name}"
                for name in ("cp_type", "use_nccl_for_alltoall", "fifo_version")
            ),
        ),
        read=_read_splitting,
    ),
    value(
        "pp",
        "pp-size",
        default=1,
        aliases=("pipeline-parallel-size", f"{FILE}.pipeline_parallel_size"),
    ),
    Link(
        flags=("ep-size",),
        write=lambda it: {"ep-size": it.ep if it.ep > 1 else None},
        read=_read_experts,
        aliases=dict.fromkeys(
            ("moe-expert-parallel-size", f"{FILE}.moe_expert_parallel_size"), "ep-size"
        ),
    ),
    Link(read=_read_sharing),
)
_STEP_LINKS = (
    value("max_num_seqs", "max-batch-size", aliases=(f"{FILE}.max_batch_size",)),
    value("max_num_batched_tokens", "max-num-tokens", aliases=(f"{FILE}.max_num_tokens",)),
    value("max_tokens", "max-seq-len", aliases=(f"{FILE}.max_seq_len",)),
    word("dtype", f"{FILE}.dtype", DTYPE_WORDS),
    Link(
        flags=(_CHUNKED,),
        write=lambda it: {_CHUNKED: True if it.max_chunk_tokens else None},
        read=_read_chunks,
        aliases={"enable-chunked-prefill": _CHUNKED},
    ),
    Link(
        flags=(GRAPHS, f"{GRAPHS}.enable_padding", f"{GRAPHS}.max_batch_size"),
        write=_write_graphs,
        read=lambda options: {"has_graphs": options.get(GRAPHS) != OFF},
    ),
    value("batch_wait_iters", f"{FILE}.batch_wait_timeout_iters", default=0),
    value("batch_wait_tokens_ratio", f"{FILE}.batch_wait_max_tokens_ratio", float, default=0.0),
    Link(
        flags=tuple(
            f"{_BALANCING}.{name}"
            for name in ("enable_balance", "timeout_iters", "batching_wait_iters")
        ),
        write=_write_balance,
        read=_read_balance,
    ),
)
_MEMORY_LINKS = (
    value(
        "memory_utilization_ratio",
        f"{_KV}.free_gpu_memory_fraction",
        float,
        default=0.0,
        aliases=("kv-cache-free-gpu-memory-fraction", "free-gpu-memory-fraction"),
    ),
    _setting("has_prefix_caching", "kv_cache_config.enable_block_reuse", default=True),
    word("kv_dtype", f"{_KV}.dtype", {DType.FP8: "fp8", DType.FP4: "nvfp4"}, also={"auto": None}),
    # How fast blocks come back no setting says.
    Link(write=lambda it: {f"{_KV}.host_cache_size": it.host_bytes or None}),
)
_MORE_LINKS = (
    Link(
        flags=(
            f"{FILE}.moe_config.backend",
            f"{_BALANCER}.num_slots",
            f"{_BALANCER}.layer_updates_per_iter",
        ),
        write=_write_copies,
        read=_read_copies,
    ),
    Link(
        flags=tuple(
            f"{DRAFTING}.{name}"
            for name in (
                *("decoding_type", "num_nextn_predict_layers", "max_draft_len"),
                *("max_matching_ngram_size", "speculative_model_dir"),
            )
        ),
        write=_write_drafts,
        read=_read_drafts,
        aliases={f"{DRAFTING}.speculative_model": f"{DRAFTING}.speculative_model_dir"},
    ),
    Link(
        flags=tuple(
            f"{_ADAPTERS}.{name}"
            for name in ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
        ),
        write=_write_adapters,
        read=_read_adapters,
    ),
    Link(
        flags=(f"{_TRANSFER}.backend", f"{_TRANSFER}.max_tokens_in_buffer", _NO_OVERLAP),
        write=_write_role,
        read=_read_role,
    ),
)


OPTIONS = OptionMap(
    links=(
        # The model is the command's own word, not an option of it; it is read as one.
        Link(
            flags=("model",),
            read=lambda options: {"model_id": options["model"]} if "model" in options else {},
        ),
        constant({"host": SERVER_HOST, "port": SERVER_PORT, "backend": "pytorch"}),
        *_LAYOUT_LINKS,
        *_STEP_LINKS,
        *_MEMORY_LINKS,
        *_MORE_LINKS,
    ),
    documented="trtllm-serve",
)


def find_release(profile: EngineProfile) -> tuple[str, Release]:
    """Return the series that a profile names, the newest where it names none of TensorRT-LLM."""
    asked = profile.software.rpartition(" ")[2] if profile.engine == "trtllm" else ""
    series = ".".join((asked.rpartition("-")[2] or NEWEST).split(".")[:2])
    if series not in RELEASES:
        known = ", ".join(RELEASES)
        why = f"files are written for TensorRT-LLM {known}, not for {series}: name one of them"
        raise InvalidRequestError.of_field("engine.profile", why)
    return series, RELEASES[series]
