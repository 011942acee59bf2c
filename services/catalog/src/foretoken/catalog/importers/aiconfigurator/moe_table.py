"""`moe_perf`: the expert MLPs of one rank, and what routing leaves to it.

The tables name a distribution; the collector draws the experts of every token from it and times
rank 0. Source: `balanced_logits` and `power_law_logits_v3` in AIConfigurator's collector/helper.py.

`moe_tp_size` ranks split every expert's width, `moe_ep_size` ranks the experts. The rows hold the
widths and experts of the whole layer and all tokens; the rank timed has its share of the width and
of the experts, and the tokens that the routing sends to these.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretoken.catalog.dims import Integers, group_rows
from foretoken.catalog.importers.aiconfigurator.formats import split_scheme
from foretoken.catalog.importers.aiconfigurator.perf_table import (
    Circumstances,
    Coded,
    Described,
    PerfTable,
)
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.domain.hardware.device import find_device

Counts = npt.NDArray[np.int64]

# The collector averages five draws; more give the expectation, and few experts need more.
_DRAWN_MAX = 1 << 13
_NUM_DRAWS_MAX = 64
_SEED = 0
# Experts times chosen experts of one layer, far above any model.
_CELLS_MAX = 1 << 20

_POWER_LAW = re.compile(r"power_law_(\d+(?:\.\d+)?)")


@dataclass(frozen=True, order=True, slots=True)
class Routing:
    """A router's load: `num_tokens` tokens to `top_k` of `num_experts` on `num_ranks` ranks."""

    num_tokens: int
    top_k: int
    num_experts: int
    num_ranks: int
    distribution: str

    @property
    def fault(self) -> str:
        """What makes the load impossible, empty if nothing does."""
        if not 1 <= self.top_k <= self.num_experts:
            return f"topk is {self.top_k} of {self.num_experts} experts"
        if self.num_ranks < 1 or self.num_experts % self.num_ranks:
            return f"{self.num_experts} experts on {self.num_ranks} ranks"
        if self.num_tokens < 1 or self.top_k * self.num_experts > _CELLS_MAX:
            return f"{self.num_tokens} tokens to {self.top_k} of {self.num_experts} experts"
        return ""


@dataclass(frozen=True, slots=True)
class LocalLoad:
    """Pairs of a token and an expert on the timed rank, and that rank's experts with a token."""

    num_pairs: int
    num_active: int


def is_known_distribution(name: str) -> bool:
    """Return whether the load of this distribution can be computed."""
    return name in ("balanced", "uniform") or _POWER_LAW.fullmatch(name) is not None


@lru_cache(maxsize=1 << 16)
def local_load(routing: Routing) -> LocalLoad:
    """Return the load of the timed rank: what is drawn, its expectation, in whole numbers.

    With a power law that is the rank with the most tokens, which the collector makes rank 0.
    """
    if routing.distribution == "uniform":
        return _uniform_load(routing)
    if routing.distribution == "balanced":
        counts = _balanced_counts(routing)[None, :]
        ranks = np.zeros(1, dtype=np.int64)
    else:
        counts = _power_law_counts(routing)
        ranks = _by_rank(counts, routing).sum(axis=2).argmax(axis=1)
    of_rank = _by_rank(counts, routing)[np.arange(len(counts)), ranks]
    num_pairs = float(of_rank.sum(axis=1).mean())
    num_active = float((of_rank > 0).sum(axis=1).mean())
    return LocalLoad(max(1, round(num_pairs)), max(1, round(num_active)))


def _by_rank(counts: Counts, routing: Routing) -> Counts:
    """Return counts of shape (draws, ranks, experts of a rank)."""
    return counts.reshape(len(counts), routing.num_ranks, -1)


def _uniform_load(routing: Routing) -> LocalLoad:
    """Return the load where every expert is as likely: a token misses it with 1 - k/E."""
    missed = (1 - routing.top_k / routing.num_experts) ** routing.num_tokens
    num_local = routing.num_experts // routing.num_ranks
    num_pairs = routing.num_tokens * routing.top_k / routing.num_ranks
    return LocalLoad(max(1, round(num_pairs)), max(1, round(num_local * (1 - missed))))


def _balanced_counts(routing: Routing) -> Counts:
    """Return tokens by expert: choice i of token t is expert t + i * stride, around the end.

    With fewer tokens than a stride they spread over it.
    """
    num_tokens, num_experts = routing.num_tokens, routing.num_experts
    stride = -(-num_experts // routing.top_k)
    offsets = np.arange(routing.top_k) * stride
    if num_tokens >= stride:
        places = (np.arange(num_experts)[:, None] - offsets) % num_experts
        of_choice = num_tokens // num_experts + (places < num_tokens % num_experts)
        return np.asarray(of_choice.sum(axis=1), dtype=np.int64)
    starts = np.arange(num_tokens)[:, None] * stride / num_tokens
    chosen = ((starts + offsets) % num_experts).astype(np.int64)
    return np.bincount(chosen.reshape(-1), minlength=num_experts)


def _power_law_counts(routing: Routing) -> Counts:
    """Return tokens by expert, one row a draw.

    No expert gets a token twice: what is over goes to others.
    """
    num_tokens, num_pairs = routing.num_tokens, routing.num_tokens * routing.top_k
    wanted = _wanted_counts(num_tokens, routing.top_k, routing.num_experts, routing.distribution)
    num_draws = len(wanted)
    counts = np.minimum(wanted, num_tokens)
    # Ranks take turns in what is missing or over; what a rank cannot take is left to all.
    missing = num_pairs - counts.sum(axis=1)
    turns = np.arange(routing.num_ranks)
    quotas = np.abs(missing)[:, None] // routing.num_ranks
    quotas = quotas + (turns < np.abs(missing)[:, None] % routing.num_ranks)
    quotas *= np.sign(missing)[:, None]
    of_ranks = counts.reshape(num_draws * routing.num_ranks, -1)
    counts = _deal(of_ranks, quotas.reshape(-1), num_tokens).reshape(num_draws, -1)
    return _deal(counts, num_pairs - counts.sum(axis=1), num_tokens)


# Tables have the same tokens on other numbers of ranks next to each other.
@lru_cache(maxsize=8)
def _wanted_counts(num_tokens: int, top_k: int, num_experts: int, distribution: str) -> Counts:
    """Return how many tokens each expert should get, one row a draw.

    Shares follow a power law between 1 and 0.8 of the tokens (between 0.01 and 2 for so few tokens
    that not every expert gets one).
    """
    match = _POWER_LAW.fullmatch(distribution)
    exponent = 1 - float(match[1] if match else 0)
    num_pairs = num_tokens * top_k
    low, high = (1.0, 0.8 * num_tokens) if num_pairs > num_experts else (0.01, 2.0)
    num_draws = max(1, min(_DRAWN_MAX // num_experts, _NUM_DRAWS_MAX))
    drawn = np.random.default_rng(_SEED).random((num_draws, num_experts))
    shares = _invert(drawn, low, max(high, low), exponent)
    wanted = np.rint(shares / shares.sum(axis=1, keepdims=True) * num_pairs)
    return np.asarray(wanted, dtype=np.int64)


def _invert(
    drawn: npt.NDArray[np.float64], low: float, high: float, exponent: float
) -> npt.NDArray[np.float64]:
    """Return values whose density falls as x**(exponent - 1) between `low` and `high`."""
    if exponent == 0:
        return np.asarray(low * (high / low) ** drawn)
    span = high**exponent - low**exponent
    return np.asarray((span * drawn + low**exponent) ** (1 / exponent))


def _deal(counts: Counts, missing: Counts, most: int) -> Counts:
    """Add `missing` to each row at its emptiest experts, or take it away at the fullest.

    No count leaves 0 to `most`; a row without room gets less.
    """
    filled = _level(counts, np.maximum(missing, 0), most)
    return -_level(-filled, np.maximum(-missing, 0), 0)


def _level(counts: Counts, missing: Counts, most: int) -> Counts:
    """Raise the smallest counts of every row to one level until `missing` more are there."""
    rows = np.flatnonzero(missing)
    if not len(rows):
        return counts
    if len(rows) < len(counts):
        leveled = counts.copy()
        leveled[rows] = _level(counts[rows], missing[rows], most)
        return leveled
    ordered = np.sort(counts, axis=1)
    sums = np.cumsum(ordered, axis=1)
    widths = np.arange(1, counts.shape[1] + 1)
    # What it takes to raise the first few to the largest of them: they rise while there is enough.
    num_rising = (widths * ordered - sums <= missing[:, None]).sum(axis=1)
    rising_sum = np.take_along_axis(sums, num_rising[:, None] - 1, axis=1)[:, 0]
    level = np.minimum((rising_sum + missing) // num_rising, most)[:, None]
    raised = np.maximum(counts, level)
    left = missing - (raised - counts).sum(axis=1)
    can_rise = (raised == level) & (raised < most)
    return np.asarray(raised + (can_rise & (np.cumsum(can_rise, axis=1) <= left[:, None])))


# The name under which the collector for vLLM 0.19 logged calls of `fused_experts` with weights in 4
# bits, which are Triton's. vLLM runs Marlin's wherever it takes a layer, whose tables (vLLM 0.24
# and 0.25, SGLang 0.5.10 and 0.5.14) agree within a tenth and take half to a fifth of the time.
# Source: ai-dynamo/aiconfigurator, collector/vllm (int4_w4a16_moe_quant_config); vLLM 0.16 to 0.19,
# quantization/compressed_tensors/compressed_tensors_moe.py.
_NOT_MARLIN = "vllm_marlin_int4_moe"
# The same collector calls FlashInfer's experts in NVFP4 itself, without the tuning that vLLM starts
# with: on B200 2,048 tokens on a quarter of 384 experts take 1.54 ms and 6,144 take 0.51, in its
# tables of 0.24 and 0.25, of another collector, 0.44 and 0.55.
# Source: ai-dynamo/aiconfigurator, collector/vllm/collect_moe.py (_run_nvfp4_once);
# vllm-project/vllm, model_executor/warmup/kernel_warmup.py (flashinfer_autotune).
_UNTUNED = "vllm_flashinfer_trtllm_moe_fp4"
# It also calls Triton's for gated experts in blocks of FP8, for which vLLM has FlashInfer and
# DeepGEMM on Blackwell (fused_moe/oracle/fp8.py), as the tables of 0.24 and 0.25 say: 256 tokens
# on a quarter of 256 experts take 0.17 ms there, and 0.36 here. On Hopper it has Triton only for
# experts whose width is split, and FlashInfer's where each rank has some of them (same file, since
# 0.17): on H200 the tables of 0.24 and 0.25 agree with this one on one rank within a tenth, and
# take 0.87 to 0.55 of its times on several.
_TRITON, _TRITON_UNLIKE = "vllm_fused_moe", ("b200", "b300", "gb200", "gb300")
_TRITON_OF_WHOLE = "hopper"
# How TensorRT-LLM's kernels say that the experts have no gate.
_UNGATED = "_nongated"
# (hidden, top_k, experts) of models without gates, the Nemotron 3 family. Other engines' rows do
# not say whether the kernel timed had one: by their times some had, and some had not.
_UNGATED_LAYERS = ((2688, 6, 128), (2048, 22, 512), (4096, 22, 512), (8192, 22, 512))


def read_moe(table: PerfTable) -> Iterator[Points]:
    """Yield `moe_experts` of rows on one rank, `moe_local_experts` of those on several."""
    tp, ep = table.integers("moe_tp_size"), table.integers("moe_ep_size")
    derived = {"mlp": _mlp_kinds(table), "spread": ((ep > 1).astype(np.int64), ["", "spread"])}
    described = table.describe(("moe_dtype", "distribution"), _describe, derived)
    width = table.integers("inter_size")
    tp_ranks = np.maximum(tp, 1)
    described = table.without(
        described, (tp < 1) | (width % tp_ranks != 0), "moe_tp_size does not divide inter_size"
    )
    described, pairs, active = _loads(table, described, ep)
    num_experts = table.integers("num_experts")
    dims = {
        "num_tokens": table.integers("num_tokens"),
        "top_k": table.integers("topk"),
        "num_experts": num_experts,
        "num_active_experts": active,
        "hidden": table.integers("hidden_size"),
        "intermediate": width // tp_ranks,
    }
    yield make_points("moe_experts", table, described.where(ep == 1), dims)
    dims |= {"num_local_experts": num_experts // np.maximum(ep, 1), "num_local_pairs": pairs}
    yield make_points("moe_local_experts", table, described.where(ep != 1), dims)


def _describe(said: Mapping[str, str]) -> Circumstances | str:
    if said["kernel_source"] == _NOT_MARLIN:
        return f"kernel {_NOT_MARLIN!r} is not the one it names, nor the one that vLLM runs"
    if said["kernel_source"] == _UNTUNED:
        return f"kernel {_UNTUNED!r} was timed without the tuning that vLLM serves with"
    scheme = split_scheme(said["moe_dtype"])
    if scheme is None:
        return f"moe_dtype {said['moe_dtype']!r} is unknown here"
    if not is_known_distribution(said["distribution"]):
        return f"the tokens' distribution {said['distribution']!r} is unknown here"
    dtype, quant = scheme
    if said["kernel_source"] == _TRITON and quant == "fp8_block" and _runs_flashinfer(said):
        return f"kernel {_TRITON!r} is not what vLLM multiplies blocks of FP8 with on this device"
    facts = {"quant": quant, "routing": said["distribution"], "mlp": said["mlp"]}
    return Circumstances.of(said, dtype, facts)


def _runs_flashinfer(said: Mapping[str, str]) -> bool:
    """Return whether vLLM multiplies experts in blocks of FP8 with FlashInfer there."""
    if said["device"] in _TRITON_UNLIKE:
        return not said["mlp"]
    return bool(said["spread"]) and find_device(said["device"]).architecture == _TRITON_OF_WHOLE


def _mlp_kinds(table: PerfTable) -> Coded:
    """Return what kind of MLP the experts are, nothing for the gated ones."""
    kernels, names = table.coded("kernel_source")
    is_ungated = np.array([name.endswith(_UNGATED) for name in names], dtype=bool)[kernels]
    columns = [table.integers(name) for name in ("hidden_size", "topk", "num_experts")]
    may_be = np.zeros(table.origin.num_rows, dtype=bool)
    for layer in _UNGATED_LAYERS:
        may_be |= np.logical_and.reduce(
            [column == value for column, value in zip(columns, layer, strict=True)]
        )
    codes = np.where(is_ungated, 1, np.where(may_be, 2, 0))
    return codes.astype(np.int64), ["", "ungated", "unsaid"]


def _loads(
    table: PerfTable, described: Described, ep: Integers
) -> tuple[Described, Integers, Integers]:
    """Return the rows that can be, and by row of the file what the rank timed has.

    That is its pairs of a token and an expert, and its active experts; 1 where a row is not read.
    """
    codes, names = table.coded("distribution")
    counts = [table.integers(name) for name in ("num_tokens", "topk", "num_experts")]
    keys = [*counts, ep, codes]
    order, starts = group_rows([column[described.rows] for column in keys])
    pairs, active = (np.ones(table.origin.num_rows, dtype=np.int64) for _ in range(2))
    faults: dict[str, list[Integers]] = {}
    for start, stop in itertools.pairwise([*starts.tolist(), len(order)]):
        rows = described.rows[order[start:stop]]
        num_tokens, top_k, num_experts, num_ranks, code = (int(key[rows[0]]) for key in keys)
        routing = Routing(num_tokens, top_k, num_experts, num_ranks, names[code])
        if routing.fault:
            faults.setdefault(routing.fault, []).append(rows)
            continue
        load = local_load(routing)
        pairs[rows], active[rows] = load.num_pairs, load.num_active
    for fault, places in faults.items():
        is_bad = np.zeros(table.origin.num_rows, dtype=bool)
        is_bad[np.concatenate(places)] = True
        described = table.without(described, is_bad, fault)
    return described, pairs, active
