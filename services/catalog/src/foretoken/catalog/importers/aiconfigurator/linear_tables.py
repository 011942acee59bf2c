"""The tables of linear attention: gated delta net, Kimi delta attention and Mamba2.

A row is one kernel of a layer, in bf16; `kernel_source` says which. `phase` is `context` (prefill),
`generation` (a token per sequence) or `verify` (`seq_len` tokens that a draft proposed, the state
kept after each of them). Heads are those of a rank.
Source: collector/{sglang,trtllm,vllm}/collect_{gdn,kda,mamba2}.py.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from foretoken.catalog.dims import Integers
from foretoken.catalog.importers.aiconfigurator.perf_table import Circumstances, PerfTable
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.domain.measurements.estimate import DType

_CONV = "causal_conv1d"
# Queries, keys and values convolved by a call each.
_THREE_CALLS = "_qkv3"
# Decode kernels with the convolution before the recurrence and the norm after it.
_FUSED = ("fused_kda_decode", "kda_fused_decode")

SizesOf = Callable[[PerfTable], Mapping[str, Integers]]


def read_gated_delta(table: PerfTable) -> Iterator[Points]:
    """Yield scans and updates of gated delta nets, and the convolutions before them."""

    def channels(table: PerfTable) -> Integers:
        keys = table.integers("num_k_heads") * table.integers("head_k_dim")
        values = table.integers("num_v_heads") * table.integers("head_v_dim")
        # Of TensorRT-LLM's the collector convolves the keys alone.
        codes, names = table.coded("framework")
        is_keys = np.array([name.lower() == "trtllm" for name in names])[codes]
        return np.asarray(np.where(is_keys, keys, 2 * keys + values))

    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    return _read("gated_delta", table, channels, lambda table: _columns(table, *names))


def read_kda(table: PerfTable) -> Iterator[Points]:
    """Yield scans and updates of Kimi delta attention, and the convolutions before them."""

    def channels(table: PerfTable) -> Integers:
        return 3 * table.integers("num_v_heads") * table.integers("head_v_dim")

    def sizes(table: PerfTable) -> Mapping[str, Integers]:
        return {
            "num_heads": table.integers("num_v_heads"),
            "head_dim": table.integers("head_v_dim"),
        }

    return _read("kda", table, channels, sizes)


def read_mamba2(table: PerfTable) -> Iterator[Points]:
    """Yield scans and updates of Mamba2, and the convolutions before them."""

    def channels(table: PerfTable) -> Integers:
        inner = table.integers("nheads") * table.integers("head_dim")
        return inner + 2 * table.integers("n_groups") * table.integers("d_state")

    def sizes(table: PerfTable) -> Mapping[str, Integers]:
        return {
            "num_heads": table.integers("nheads"),
            "head_dim": table.integers("head_dim"),
            "num_groups": table.integers("n_groups"),
            "state_dim": table.integers("d_state"),
        }

    return _read("mamba2", table, channels, sizes)


def _read(
    kind: str, table: PerfTable, channels: Callable[[PerfTable], Integers], sizes: SizesOf
) -> Iterator[Points]:
    described = table.describe(("phase",), _describe)
    phases, phase_names = table.coded("phase")
    kernels, kernel_names = table.coded("kernel_source")
    batch = {"num_seqs": table.integers("batch_size"), "num_tokens": table.integers("num_tokens")}
    for phase, phase_name in enumerate(phase_names):
        for kernel, kernel_name in enumerate(kernel_names):
            rows = described.where((phases == phase) & (kernels == kernel))
            if not len(rows.rows):
                continue
            operator, dims = kind, {**batch, **sizes(table)}
            if kernel_name.startswith(_CONV):
                kernel_size = table.integers("d_conv")
                dims = {**batch, "channels": channels(table), "kernel_size": kernel_size}
                operator = "causal_conv"
            step = "prefill" if phase_name == "context" else "decode"
            yield make_points(f"{operator}_{step}", table, rows, dims)


def _describe(said: Mapping[str, str]) -> Circumstances | str:
    kernel, phase = said["kernel_source"], said["phase"]
    if phase not in ("context", "generation", "verify"):
        return f"phase {phase!r} is unknown here"
    facts = {
        "scope": "conv" if kernel.startswith(_FUSED) else "",
        "calls": "3" if kernel.endswith(_THREE_CALLS) else "",
        "step": "verify" if phase == "verify" else "",
    }
    return Circumstances.of(said, DType.BF16, facts)


def _columns(table: PerfTable, *names: str) -> Mapping[str, Integers]:
    return {name: table.integers(name) for name in names}
