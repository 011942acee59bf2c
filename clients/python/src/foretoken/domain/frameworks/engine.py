"""Serving engines: the rules of each at a version, what it can, what a scenario changes."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.device_rules import DeviceRules
from foretoken.domain.frameworks.engine_capability import EngineCapabilities
from foretoken.domain.frameworks.host_time import (
    HOST_TIMES,
    HOST_TIMES_BY_KIND,
    scale_host_times,
)
from foretoken.domain.frameworks.kv_tier import KvTier, read_tiers
from foretoken.domain.frameworks.profile_folder import load_profiles, read_rule
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.option import option

# How engines in lock step hand tokens to the ranks of their experts; see `parallelism/ep.py`.
EXPERT_EXCHANGES = ("all_gather", "all_to_all", "deepep_normal", "deepep_low_latency")


# The profile of a scenario that names none.
DEFAULT_PROFILE = "vllm-0.28"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile:
    """The rules of a serving engine at its versions; one file each in `engines/`.

    A file that `extends` another profile says what differs from it; see `load_profiles`. The first
    of its `versions` was `released` on a day of PyPI's ("": of no software).

    Limits: `max_num_seqs` requests run at once, a step computes at most `max_num_batched_tokens`,
    of one prompt `max_chunk_tokens` (0: as the budget allows), of `max_num_prefills` (0: any).

    With `counts_padding` a batch of prompts counts against the budget as if all were as long as the
    longest. For `max_decode_run` steps of decoding (0: none) waiting requests are not looked at.
    Next to requests that decode, prompts are left for later: for `batch_wait_iters` steps until a
    batch has `batch_wait_tokens_ratio` of `max_num_batched_tokens`; of engines that share experts
    (which with `deals_requests` share new requests before every step, by the tokens of prompts) for
    `balance_timeout_iters` steps (0: none) until each has a prompt, and then for
    `balance_wait_iters` more; and all but every `prefill_interval`-th step, unless some were left
    over by the last. New requests are looked for every `receive_interval` steps of decoding.
    With `has_priority_scheduling` waiting requests go by priority, then by arrival. With
    `mixes_prefill` requests decode along with the prompts of an engine that else computes prompts
    in batches of their own.

    KV cache, in blocks of `block_size` tokens, or that many on each of `decode_context_parallel`
    ranks that split a context, each of which gathers the queries of the others or computes them as
    well (`repeats_queries`): to be admitted a request needs room for what `admission` says
    (`chunk`: its first piece; `prompt`: the whole prompt; `answer`: prompt and answer; `context`:
    as many tokens as the model takes; `share`: the prompt and a share of the answer; `peak`: the
    most that all running requests will ever hold at once), and leave `watermark_ratio` of all
    blocks free. When blocks run out, a running request is preempted by `preemption` (`recompute`
    or `swap`). With `has_prefix_caching` full blocks are found by content until overwritten.

    Layers with a window lie in the same memory as others, or with `window_tokens_ratio` in some of
    their own, for that share of the others' tokens (1: they keep every token). With
    `shares_states` so do the recurrent states of running requests; else there is one for each of
    `max_num_seqs`. With `follows_kv_scales` the cache is in the format that a checkpoint has scales
    for, unless a scenario has another. That of latent attention to chosen tokens is else in
    `sparse_kv_dtypes`, by the device's architecture.

    Steps: with `has_async_scheduling` a step is scheduled while the one before it runs. Batches of
    `graph_capture_sizes` tokens were captured: a smaller one is padded to the next, without
    `pads_to_graphs` it runs outside a graph (`full` where every request decodes, `piecewise` around
    the attention; `graph_mode` names those in use, joined by a plus sign, or `none`), up to
    `graph_tokens_per_seq` tokens for each of `max_num_seqs` (0: all of them), and so many, too,
    with `captures_largest` where a size is larger. The residual addition runs inside the norm
    kernel with `fuses_add_norm`, both inside the all-reduce before it with `fuses_all_reduce_norm`,
    where `frameworks/all_reduce_norm.py` says so. With `fuses_static_quantize` attention with a
    cache in FP8 and the activation of a gated MLP write in FP8 what a product with a known scale
    reads.

    Experts: those in blocks of FP8 are padded by `expert_block_rows` less one on Hopper, or run in
    `expert_block_kernel` where ranks split them. Engines in lock step hand tokens to them by
    `expert_exchange`, one of `EXPERT_EXCHANGES`. With `has_expert_balancing` ranks hold experts as
    their load says, with `num_redundant_experts` copies. Those with `two_batch_tokens` (0: never)
    compute two halves, one's exchange behind the other. They have memory for `expert_chunk_tokens`
    of all ranks (0: all), which they compute at a time. With `ffn_devices` (0: none) their experts
    lie on so many devices apart, for steps in `ffn_micro_batches` (`parallelism/ffn.py`).

    Time that no kernel takes: the host needs `host_us` and `host_us_per_seq` to prepare a step,
    `admission_us_per_token` for each token of the prompts that join it, cached or not, and
    `output_us` after it; the device waits for what the asynchronous engine does not hide. An output
    server next to the engine hands tokens out, `output_us_per_seq` each and
    `output_us_per_past_token` for each before it of the same answer, one step's after the other's
    (0: at once): clients wait for it, the engine does not. A step outside a graph cannot be
    faster than its launches: `launch_us` a kernel, but for experts, which as one call take
    `expert_call_us` by the format of their weights (`other`: of those not named; empty: their
    kernels), and `eager_us` outside the layers; nor one captured in pieces than `piece_us` a layer;
    ranks wait for the slowest of them, whose hosts take longer or shorter by `launch_spread_ratio`
    (a standard deviation). Where a step with prompts has as many tokens as none before it, the host
    compiles kernels first: `compile_us` for each kind of layer. One that `is_fresh` compiles
    DeepGEMM's (`deep_gemm.py`), too, `product_compile_us` for each that is the first of its kind. A
    server in front of the engine tokenizes one prompt after the other,
    `frontend_us_per_token` for each token, and hands them over to the executor one after the other,
    `executor_us_per_token`; `frontend_ms` more of a request keep no other waiting (0: the engine is
    called in process). All of these last `host_time_ratio` times as long as the profile says (0: as
    on the hosts of the device), but for what a scenario sets itself.

    Memory: the engine takes `memory_utilization_ratio` of the device (`memory_rule`
    `utilization`: for everything; `static`: for weights and KV cache, the rest is for activations
    and graphs; `free`: of what weights and activations leave, for the KV cache), and of that
    `reserved_bytes` for itself and the driver, `collective_bytes` more where ranks communicate,
    `graph_bytes_ratio` of the weights for graphs, and `sampler_bytes_per_logit` for each row and
    entry of the vocabulary while it samples.

    `by_device` are rules that the engine chooses by its device where nobody sets them, the first
    that holds. `can` bounds the deployments the engine has; nothing else depends on it.
    """

    name: str
    engine: str
    extends: str = ""
    versions: str = ""
    released: str = ""
    source: str = ""
    scheduler: str = "chunked_prefill"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int = 0
    max_num_prefills: int = 0
    counts_padding: bool = False
    max_decode_run: int = 0
    mixes_prefill: bool = False
    batch_wait_iters: int = 0
    batch_wait_tokens_ratio: float = 0.0
    deals_requests: bool = False
    balance_timeout_iters: int = 0
    balance_wait_iters: int = 0
    prefill_interval: int = 1
    receive_interval: int = 1
    has_priority_scheduling: bool = False
    block_size: int = 16
    decode_context_parallel: int = 1
    repeats_queries: bool = False
    admission: str = "chunk"
    watermark_ratio: float = 0.0
    preemption: str = "recompute"
    has_prefix_caching: bool = False
    window_tokens_ratio: float = 0.0
    shares_states: bool = False
    follows_kv_scales: bool = False
    sparse_kv_dtypes: Mapping[str, DType] = field(default_factory=dict, hash=False)
    has_async_scheduling: bool = False
    graph_mode: str = "none"
    graph_capture_sizes: tuple[int, ...] = ()
    graph_tokens_per_seq: int = 0
    captures_largest: bool = False
    pads_to_graphs: bool = True
    fuses_add_norm: bool = True
    fuses_all_reduce_norm: bool = False
    fuses_static_quantize: bool = False
    expert_block_rows: int = 0
    expert_block_kernel: str = ""
    expert_exchange: str = "all_gather"
    has_expert_balancing: bool = False
    num_redundant_experts: int = 0
    two_batch_tokens: int = 0
    expert_chunk_tokens: int = 0
    ffn_devices: int = 0
    ffn_micro_batches: int = 3
    host_us: float = 0.0
    host_us_per_seq: float = 0.0
    admission_us_per_token: float = 0.0
    output_us: float = 0.0
    output_us_per_seq: float = 0.0
    output_us_per_past_token: float = 0.0
    launch_us: float = 0.0
    expert_call_us: Mapping[str, float] = field(default_factory=dict, hash=False)
    eager_us: float = 0.0
    piece_us: float = 0.0
    launch_spread_ratio: float = 0.0
    compile_us: Mapping[str, float] = field(default_factory=dict, hash=False)
    product_compile_us: float = 0.0
    is_fresh: bool = False
    frontend_ms: float = 0.0
    frontend_us_per_token: float = 0.0
    executor_us_per_token: float = 0.0
    host_time_ratio: float = 0.0
    memory_rule: str = "utilization"
    memory_utilization_ratio: float = 0.9
    reserved_bytes: int = 0
    collective_bytes: int = 0
    graph_bytes_ratio: float = 0.0
    sampler_bytes_per_logit: float = 14.0
    by_device: tuple[DeviceRules, ...] = field(default=(), hash=False)
    can: EngineCapabilities = field(default_factory=EngineCapabilities, hash=False)

    def on_device(self, device: DeviceSpec, tp: int) -> "EngineProfile":
        """Return the profile with what the engine sets by itself on a device."""
        for each in self.by_device:
            if each.holds_for(device, tp):
                origin = f"engine {self.name} on {device.name}"
                return _change(self, each.list_rules(device), origin)
        return self

    def compile_us_of(self, kinds: Iterable[str]) -> float:
        """Return what the host compiles for a new number of tokens of layers of such kinds."""
        return sum(self.compile_us.get(kind, 0.0) for kind in set(kinds))

    @property
    def software(self) -> str:
        """Whose measurements time this engine: its name and versions ("vllm 0.14-0.16").

        A profile asked for at another version of its range ("vllm-0.15") is of that version. Empty
        where a profile gives rules and no release of a software.
        """
        if not self.versions:
            return ""
        asked = self.name.removeprefix(f"{self.engine}-")
        is_of_file = self.name in all_engines() or not _version_numbers(asked)
        return f"{self.engine} {self.versions if is_of_file else asked}"

    def __post_init__(self) -> None:
        """Refuse limits and rules no engine can follow."""
        violations = [
            FieldViolation(name, "must be at least 1")
            for name in _AT_LEAST_ONE
            if getattr(self, name) < 1
        ]
        amounts = {name: getattr(self, name) for name in _NOT_NEGATIVE}
        amounts |= {
            f"{name}.{kind}": time_us
            for name in HOST_TIMES_BY_KIND
            for kind, time_us in getattr(self, name).items()
        }
        violations += [
            FieldViolation(name, "must not be negative")
            for name, amount in amounts.items()
            if not amount >= 0
        ]
        violations += [
            FieldViolation(name, f"must be one of {', '.join(allowed)}")
            for name, allowed in _ALLOWED.items()
            if getattr(self, name) not in allowed
        ]
        if not 0 < self.memory_utilization_ratio <= 1:
            violations.append(
                FieldViolation("memory_utilization_ratio", "must be above 0 and at most 1")
            )
        if self.num_redundant_experts and not self.has_expert_balancing:
            violations.append(
                FieldViolation("num_redundant_experts", "needs has_expert_balancing: set it true")
            )
        if self.ffn_devices and self.two_batch_tokens:
            violations.append(FieldViolation("two_batch_tokens", "must be 0 with ffn_devices"))
        if any(size < 1 for size in self.graph_capture_sizes):
            violations.append(FieldViolation("graph_capture_sizes", "must all be at least 1"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"engine {self.name}")


_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "decode_context_parallel",
    "ffn_micro_batches",
    "prefill_interval",
    "receive_interval",
)
_NOT_NEGATIVE = (
    "batch_wait_iters",
    "batch_wait_tokens_ratio",
    "balance_timeout_iters",
    "balance_wait_iters",
    "max_chunk_tokens",
    "max_num_prefills",
    "max_decode_run",
    "watermark_ratio",
    "window_tokens_ratio",
    *HOST_TIMES,
    "launch_spread_ratio",
    "host_time_ratio",
    "graph_tokens_per_seq",
    "expert_block_rows",
    "reserved_bytes",
    "collective_bytes",
    "sampler_bytes_per_logit",
    "graph_bytes_ratio",
    "num_redundant_experts",
    "two_batch_tokens",
    "expert_chunk_tokens",
    "ffn_devices",
)
_ALLOWED = {
    "admission": ("chunk", "prompt", "answer", "context", "share", "peak"),
    "memory_rule": ("utilization", "static", "free"),
    "preemption": ("recompute", "swap"),
    "graph_mode": ("none", "piecewise", "full", "full+piecewise"),
    "expert_exchange": EXPERT_EXCHANGES,
}
# What a scenario may set: requests have room each, tokens and blocks are counted in 32 bits.
_MOST = {"max_num_seqs": 2**20, "max_num_batched_tokens": 2**31 - 1, "num_kv_blocks": 2**31 - 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The engine of a scenario: a profile, and what differs from it.

    The limits that users set most have fields of their own; 0 takes the profile's. `rules` changes
    any other rule of `EngineProfile` by its name, its value as YAML: `{has_prefix_caching: false}`.
    `num_kv_blocks` overrides the capacity computed from device memory (0: compute it). `kv_tiers`
    keep evicted blocks, the fastest first; all are shared by replicas, or none.
    """

    profile: str = option(DEFAULT_PROFILE, "`foretoken list engines`")
    max_num_seqs: int = option(0, "0: the profile's")
    max_num_batched_tokens: int = option(0, "tokens that a step computes at most; 0: the profile's")
    memory_utilization_ratio: float = option(0.0, "share of the device's memory; 0: the profile's")
    num_kv_blocks: int = option(0, "0: computed from the device's memory")
    rules: Mapping[str, str] = option(
        {}, "any other rule of the profile: {has_prefix_caching: false}"
    )
    kv_tiers: tuple[KvTier, ...] = option(
        (),
        "memory for evicted blocks: [{name: cpu, capacity_bytes: 64e9,"
        " read_bytes_per_s: 25e9, write_bytes_per_s: 25e9}]; is_shared: true for a store of all"
        " replicas",
    )

    def __post_init__(self) -> None:
        """Refuse limits below zero, and beyond what places are counted in."""
        violations = [
            FieldViolation(name, "must not be negative; 0 takes the profile's")
            for name in (*_LIMITS, "num_kv_blocks")
            if not getattr(self, name) >= 0
        ]
        violations += [
            FieldViolation(name, f"may be {most:,} at most")
            for name, most in _MOST.items()
            if getattr(self, name) > most
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, "engine")

    def resolve(self, device: DeviceSpec | None = None, tp: int = 1) -> EngineProfile:
        """Return the profile with this engine's changes; `device` is where it runs, if known.

        Raises:
            UnknownPluginError: no such profile; the message names the nearest.
            InvalidRequestError: a rule there is not, or a value it cannot have.

        """
        profile = find_engine(self.profile)
        profile = profile.on_device(device, tp) if device else profile
        changes: dict[str, Any] = {
            name: getattr(self, name) for name in _LIMITS if getattr(self, name)
        }
        for name, text in self.rules.items():
            if name in (*_FIXED, *_LIMITS):
                problem = f"set engine.{name}" if name in _LIMITS else "is fixed"
                raise InvalidRequestError.of_field(f"engine.rules.{name}", problem)
            changes[name] = read_rule(text, f"engine.rules.{name}")
        resolved = _change(profile, changes, "engine.rules")
        ratio = resolved.host_time_ratio or (device.host_time_ratio if device else 1.0)
        if ratio != 1:
            times = {item.name: getattr(resolved, item.name) for item in fields(resolved)}
            resolved = replace(resolved, **scale_host_times(times, ratio, self.rules))
        if resolved.decode_context_parallel > 1:
            block_size = resolved.block_size * resolved.decode_context_parallel
            resolved = replace(resolved, block_size=block_size)
        self._check_tiers(resolved)
        if "graph_capture_sizes" in self.rules:
            return resolved
        return replace(resolved, graph_capture_sizes=_captured(resolved))

    def with_rules(self, text: str) -> "EngineSpec":
        """Return the engine with the rules of a text too, `a=1+b=2`; `none` and nothing have none.

        Raises:
            InvalidRequestError: a rule has no value.

        """
        # A value may have a plus itself: `graph_mode=full+piecewise`.
        parts = [] if text in ("", "none") else re.split(r"\+(?=[^+=]*=)", text)
        pairs = [part.partition("=") for part in parts]
        if unsaid := [name for name, _, value in pairs if not value.strip()]:
            raise InvalidRequestError.of_field("rules", f"{unsaid[0]!r}: write rule=value")
        named = {name.strip(): value.strip() for name, _, value in pairs}
        return replace(self, rules={**self.rules, **named})

    def with_tiers(self, text: str) -> "EngineSpec":
        """Return the engine above the tiers of a text, as `read_tiers` reads it; nothing: its own.

        Raises:
            InvalidRequestError: the text says no tiers.

        """
        return replace(self, kv_tiers=read_tiers(text)) if text else self

    def _check_tiers(self, resolved: EngineProfile) -> None:
        """Refuse swapping to nowhere, and tiers in part shared."""
        is_swapping = resolved.preemption == "swap"
        num_shared = sum(tier.is_shared for tier in self.kv_tiers)
        if num_shared and (is_swapping or num_shared < len(self.kv_tiers)):
            why = "one that is_shared stands with no others, nor under engines that swap"
            raise InvalidRequestError.of_field("engine.kv_tiers", why)
        if is_swapping and not self.kv_tiers:
            raise InvalidRequestError.of_field(
                "engine.kv_tiers", "an engine that preempts by swapping needs a tier to swap to"
            )


def _change(profile: EngineProfile, rules: Mapping[str, Any], origin: str) -> EngineProfile:
    return _change_as(profile, json.dumps(rules, default=str), origin)


# A search looks up the rules of its candidates thousands of times, and there are few.
@lru_cache(maxsize=1024)
def _change_as(profile: EngineProfile, rules_json: str, origin: str) -> EngineProfile:
    content = {item.name: getattr(profile, item.name) for item in fields(profile)}
    return schema.decode(EngineProfile, {**content, **json.loads(rules_json)}, origin)


def _captured(profile: EngineProfile) -> tuple[int, ...]:
    """Return the sizes an engine of these limits captures: none that cannot come."""
    most = profile.max_num_batched_tokens
    if profile.graph_tokens_per_seq:
        most = min(most, profile.graph_tokens_per_seq * profile.max_num_seqs)
    sizes = tuple(size for size in profile.graph_capture_sizes if size <= most)
    is_cut = len(sizes) < len(profile.graph_capture_sizes) and most not in sizes
    return (*sizes, most) if profile.captures_largest and is_cut else sizes


_FIXED = ("name", "extends")
# Source: PyPA, "Version specifiers".
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?$")
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "memory_utilization_ratio")


@cache
def all_engines() -> dict[str, EngineProfile]:
    """Return every profile by name: one file each in `engines/`."""
    return load_profiles(EngineProfile, "engines")


def find_engine(name: str) -> EngineProfile:
    """Return the profile of that name, or of the engine and version it names (`vllm-0.16`).

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    engine, _, version = name.rpartition("-")
    found = [
        profile
        for profile in all_engines().values()
        if engine == profile.engine and _covers(profile, version)
    ]
    if name in all_engines() or not found:
        return UnknownPluginError.look_up(name, all_engines())
    # Of a release, or one of its series, and of a range of series, the narrower says more.
    narrowest = max(found, key=lambda it: ("-" not in it.versions, it.versions.count(".")))
    return replace(narrowest, name=name)


def find_engine_of_day(engine: str, day: str) -> EngineProfile | None:
    """Return the profile of an engine's last release by a day (`2025-10-29`; "": of all)."""
    released = [
        profile
        for profile in all_engines().values()
        if profile.engine == engine and profile.released and (not day or profile.released <= day)
    ]
    return max(released, key=lambda profile: profile.released, default=None)


def _covers(profile: EngineProfile, version: str) -> bool:
    """Whether a version lies in the profile's range ("0.14-0.18", both ends included)."""
    wanted = _version_numbers(version)
    first, _, last = profile.versions.partition("-")
    low, high = _version_numbers(first), _version_numbers(last or first)
    if not wanted or not low:
        return False
    return low <= wanted[: len(low)] and wanted[: len(high)] <= high


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, of what comes before one and after it (`1.2.0rc6.post1`)."""
    found = _RELEASE.match(version)
    return tuple(map(int, found[1].split("."))) if found else ()
