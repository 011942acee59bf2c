"""Answers that know more than the plain one: measured in another form, or as part of others.

Profilers that time modules count the write to the KV cache into the attention, and the router into
the experts. Their rows look like any other's, so what else was measured tells them.

Where engines choose a kernel by size the fastest measured one is not what they run, and some work
was measured under another name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.domain.units import US_PER_S, ceil_divide
from foretoken.simulator.cost.answer import (
    Answers,
    Questions,
    covered_rows,
    is_measured_here,
    table_of_node,
)
from foretoken.simulator.cost.surface import SurfaceSpec
from foretoken.simulator.grid import Flags, Floats

# Role of an operator: the operators that can hold it.
_HOLDERS: Mapping[str, tuple[str, ...]] = {
    "kv_cache_write": ("attention_decode", "attention_decode_window", "mla_decode"),
    "moe_router": ("moe_experts", "moe_local_experts"),
}


def find_folded(answers: Sequence[tuple[OperatorNode, LatencyColumns]]) -> frozenset[str]:
    """Return the roles of operators that are counted in others and must not be added.

    One is where its holder was measured on the device, and it was not, in any size near the
    model's.
    """
    return frozenset(
        role
        for role, holders in _HOLDERS.items()
        if any(is_measured_here(a) for node, a in answers if node.operator in holders)
        and not any(is_measured_here(a) for node, a in answers if node.role == role)
    )


# vLLM sums tensors below this size with its own kernel, whether or not NCCL is faster.
# Source: vllm/distributed/device_communicators/custom_all_reduce.py, max_size and should_custom_ar.
_OWN_ALL_REDUCE_BYTES = 8192 * 1024
# Where that kernel runs, inside a CUDA graph or outside: profilers record it by the kernel source,
# or by the variant.
_LANES = ("graph", "eager")
_EXPERTS = ("moe_experts", "moe_local_experts")


class Substitute:
    """The ways to ask about an operator of a deployment.

    `is_captured` says which of its calls run inside a CUDA graph.
    """

    def __init__(self, node: OperatorNode, spec: SurfaceSpec, is_captured: Flags) -> None:
        kernel = dict(spec.kernels).get(node.operator, "")
        self._plain = replace(table_of_node(node), kernel=kernel)
        self._device = find_device(spec.device)
        self._is_vllm = spec.engine == "vllm"
        self._experts: Sequence[OperatorTable] = ()
        self._sums: Sequence[tuple[OperatorTable, Flags]] = ()
        if node.operator in _EXPERTS:
            self._experts = _expert_tables(self._plain)
        elif node.operator == "all_reduce" and self._is_vllm and not kernel:
            self._sums = _sum_tables(self._plain, is_captured)

    def ask(self, questions: Questions) -> None:
        """Ask all ways."""
        for table in (self._plain, *self._experts, *(table for table, _ in self._sums)):
            questions.add(table)

    def answer(self, answers: Answers) -> LatencyColumns:
        """Return the plain answer, or the first that was measured on the device where it holds."""
        answer = answers.of(self._plain)
        for table in self._experts:
            other = answers.of(table)
            if is_measured_here(other) and not is_measured_here(answer):
                is_whole = table.operator != self._plain.operator
                return self._with_remote(other) if is_whole and self._is_vllm else other
        for table, holds in self._sums:
            other = answers.of(table)
            answer = _merge(answer, other, holds & covered_rows(other))
        return answer

    def _with_remote(self, local: LatencyColumns) -> LatencyColumns:
        """Return what the experts of a rank take in a kernel that is also given the other pairs."""
        remote_us = _remote_us(self._plain, self._device)
        return LatencyColumns(
            latency_us=local.latency_us + remote_us,
            low_us=local.low_us + remote_us,
            high_us=local.high_us + remote_us,
            provenance=local.provenance,
            other_framework=local.other_framework,
        )


def _remote_us(table: OperatorTable, device: DeviceSpec) -> Floats:
    """Return what vLLM's kernels take for pairs of a token and an expert of another rank.

    Both products write zeros for them, the activation runs on the first, the sum over experts reads
    the second. Source: vLLM 0.19, `fused_moe/fused_moe.py`, `TritonExperts.apply` and
    `write_zeros_to_output`.
    """
    columns = table.columns
    num_pairs = columns["num_tokens"] * columns["top_k"] - columns["num_local_pairs"]
    elements = num_pairs * (5 * columns["intermediate"] + 2 * columns["hidden"])
    moved = np.asarray(table.dtype.bytes_of(elements), dtype=np.float64)
    remote_us: Floats = moved / device.memory_bandwidth_bytes_per_s * US_PER_S
    return remote_us


def _sum_tables(table: OperatorTable, is_captured: Flags) -> Sequence[tuple[OperatorTable, Flags]]:
    """Return how to ask about vLLM's own sums, and for which calls each way holds."""
    is_own = np.asarray(table.columns["message_bytes"]) < _OWN_ALL_REDUCE_BYTES
    if len(is_captured) != table.num_rows:  # not of the tokens of one engine's step
        is_captured = np.zeros(table.num_rows, dtype=np.bool_)
    return tuple(
        (other, is_own & (is_captured if lane == "graph" else ~is_captured))
        for lane in _LANES
        for other in (
            replace(table, variant=f"lane={lane}", tentative=True),
            replace(table, kernel=f"vllm_custom_{lane}", tentative=True),
        )
    )


def _expert_tables(table: OperatorTable) -> Sequence[OperatorTable]:
    """Return other ways to ask about experts.

    The spread of tokens over experts may have gone unrecorded. Of a rank's experts one can ask as
    of a device that holds all: it hits as many, with as many pairs of token and expert.
    """
    facts = {key: value for key, value in parse_variant(table.variant).items() if key != "routing"}
    table = replace(table, tentative=True)
    unrecorded = replace(table, variant=format_variant(facts) or "")
    if table.operator == "moe_experts":
        return (unrecorded,)
    columns = table.columns
    num_tokens = ceil_divide(columns["num_local_pairs"], columns["top_k"])
    names = ("top_k", "num_experts", "num_active_experts", "hidden", "intermediate")
    kept = {name: columns[name] for name in names}
    whole = replace(table, operator="moe_experts", columns={"num_tokens": num_tokens, **kept})
    return (unrecorded, whole, replace(whole, variant=unrecorded.variant))


def _merge(plain: LatencyColumns, other: LatencyColumns, takes_other: Flags) -> LatencyColumns:
    return LatencyColumns(
        latency_us=np.where(takes_other, other.latency_us, plain.latency_us),
        low_us=np.where(takes_other, other.low_us, plain.low_us),
        high_us=np.where(takes_other, other.high_us, plain.high_us),
        provenance=np.where(takes_other, other.provenance, plain.provenance),
        other_framework=(other if takes_other.all() else plain).other_framework,
    )
