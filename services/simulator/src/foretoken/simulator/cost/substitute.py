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
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    OperatorTable,
    Provenance,
)
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.domain.units import US_PER_S, Quantity, ceil_divide
from foretoken.simulator.cost.answer import (
    Answers,
    Questions,
    covered_rows,
    is_measured_here,
    table_of_node,
)
from foretoken.simulator.cost.expert_padding import (
    add_padding,
    kernel_tables,
    padding_tables,
)
from foretoken.simulator.cost.marlin_experts import in_other_formats, weigh
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
    model's. In another format than its holder's, as routers in fp32 are, it is none of it: nobody
    having measured it there says nothing.
    """
    return frozenset(role for role, holders in _HOLDERS.items() if _is_held(role, holders, answers))


def _is_held(
    role: str, holders: Sequence[str], answers: Sequence[tuple[OperatorNode, LatencyColumns]]
) -> bool:
    own = [(node.dtype, answer) for node, answer in answers if node.role == role]
    formats = {
        node.written_dtype
        for node, answer in answers
        if node.operator in holders and is_measured_here(answer)
    }
    is_like = all(dtype in formats for dtype, _ in own)
    return bool(formats) and is_like and not any(is_measured_here(answer) for _, answer in own)


# vLLM and SGLang sum tensors below this size with a kernel of their own, whether or not NCCL is
# faster; here by engine, as profilers name it.
# Source: custom_all_reduce.py of both, max_size and should_custom_ar (SGLang's is adapted from
# vLLM's).
_OWN_ALL_REDUCE_BYTES = 8192 * 1024
_OWN_ALL_REDUCE_KERNELS = {"vllm": "vllm_custom", "sglang": "sglang_customallreduce"}
# Where that kernel runs, inside a CUDA graph or outside: profilers record it by the kernel source,
# or by the variant.
_LANES = ("graph", "eager")
_BALANCED = "balanced"
_MXFP4, _MXFP4_WITH_MXFP8 = "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"
# vLLM pads MXFP4 experts for Marlin: a rank's features to whole 128s, the model's to 256s.
# Source: vLLM 0.18 to 0.24, `layers/quantization/mxfp4.py` and `fused_moe/oracle/mxfp4.py`.
_MARLIN, _MARLIN_TILES = "marlin", {"hidden": 256, "intermediate": 128}
_STATIC_SCALE, _SCALE, _CONVERT = "fp8_static", "part=scale", "part=convert"
# Of the smallest products on H200 TensorRT-LLM spends 7.5 of 11.9 us to find the scale, and 2.1 of
# the other 4.4 to convert.
_SCALE_SHARE_MAX, _CONVERT_SHARE_MAX = 7.5 / 11.9, 2.1 / 4.4


class Substitute:
    """The ways to ask about an operator of a deployment.

    `is_captured` says which of its calls run inside a CUDA graph.
    """

    def __init__(self, node: OperatorNode, spec: SurfaceSpec, is_captured: Flags) -> None:
        kernel = dict(spec.kernels).get(node.operator, "")
        self._plain = replace(table_of_node(node), kernel=kernel)
        self._device = find_device(spec.device)
        self._is_vllm = spec.engine == "vllm"
        own = _OWN_ALL_REDUCE_KERNELS.get(spec.engine, "")
        self._experts: Sequence[OperatorTable] = ()
        self._formats: Sequence[OperatorTable] = ()
        self._padding: Sequence[OperatorTable] = ()
        self._sums: Sequence[tuple[OperatorTable, Flags]] = ()
        self._scaled: Sequence[OperatorTable] = ()
        self._ungated: Sequence[OperatorTable] = ()
        self._is_fused = _find_fused(node, self._plain, spec)
        if node.is_experts:
            if self._is_vllm and _MARLIN in kernel:
                self._plain = _padded_experts(self._plain)
            if _has_no_gates(spec.model):
                self._ungated = _ungated_tables(self._plain)
            named = kernel_tables(self._plain, spec)
            others = _expert_tables(self._plain, self._device)
            self._experts = (*named, *self._ungated, self._plain, *others)
            self._formats = in_other_formats(self._plain)
            self._padding = padding_tables(self._plain, spec)
        elif node.operator == "gemm":
            self._scaled = _scaled_tables(self._plain, is_converted=_is_converted(node, spec))
        elif node.operator == "all_reduce" and own and not kernel:
            self._sums = _sum_tables(self._plain, own, is_captured)

    def ask(self, questions: Questions) -> None:
        """Ask all ways."""
        sums = (table for table, _ in self._sums)
        experts = (*self._experts, *self._formats, *self._padding)
        for table in (self._plain, *experts, *self._scaled, *sums):
            questions.add(table)

    def answer(self, answers: Answers) -> LatencyColumns:
        """Return the best answer, with the time of what goes with the operator."""
        answer = self._find(answers)
        return add_padding(answer, [*map(answers.of, self._padding)]) if self._padding else answer

    def _find(self, answers: Answers) -> LatencyColumns:
        """Return the plain answer, or the first that was measured on the device where it holds."""
        answer = answers.of(self._plain)
        for table in self._experts:
            other = answers.of(table)
            if is_measured_here(other):
                is_whole = table.operator != self._plain.operator
                return self._with_remote(other) if is_whole and self._is_vllm else other
        for table in self._ungated:
            other = answers.of(table)
            if (np.asarray(other.provenance) == Provenance.EXTRAPOLATED.value).all():
                return other
        if self._formats:
            answer = weigh(answer, [answers.of(table) for table in self._formats])
        if self._scaled and not is_measured_here(answer):
            answer = _without_scale(answer, *map(answers.of, self._scaled))
        for table, holds in self._sums:
            other = answers.of(table)
            answer = _merge(answer, other, holds & covered_rows(other))
        return _without_rows(answer, self._is_fused) if self._is_fused.any() else answer

    def _with_remote(self, local: LatencyColumns) -> LatencyColumns:
        """Return what the experts of a rank take in a kernel that is also given the other pairs."""
        remote_us = _remote_us(self._plain, self._device)
        return _longer(local, remote_us, remote_us, remote_us)


def _longer(
    answer: LatencyColumns, low_us: Quantity, latency_us: Quantity, high_us: Quantity
) -> LatencyColumns:
    return LatencyColumns(
        latency_us=answer.latency_us + latency_us,
        low_us=answer.low_us + low_us,
        high_us=answer.high_us + high_us,
        provenance=answer.provenance,
        other_framework=answer.other_framework,
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


def _sum_tables(
    table: OperatorTable, kernel: str, is_captured: Flags
) -> Sequence[tuple[OperatorTable, Flags]]:
    """Return how to ask about an engine's own sums, and for which calls each way holds."""
    is_own = np.asarray(table.columns["message_bytes"]) < _OWN_ALL_REDUCE_BYTES
    if len(is_captured) != table.num_rows:  # not of the tokens of one engine's step
        is_captured = np.zeros(table.num_rows, dtype=np.bool_)
    return tuple(
        (other, is_own & (is_captured if lane == "graph" else ~is_captured))
        for lane in _LANES
        for other in (
            replace(table, variant=f"lane={lane}", tentative=True),
            replace(table, kernel=f"{kernel}_{lane}", tentative=True),
        )
    )


def _expert_tables(table: OperatorTable, device: DeviceSpec) -> Sequence[OperatorTable]:
    """Return other ways to ask about experts.

    The spread of tokens over experts may have gone unrecorded, another that hits as many experts
    takes as long at few tokens (see `measured_routing`), and engines choose the format of the
    activations that MXFP4 weights meet by their device, of those it has. Of a rank's experts one
    can ask as of a device that holds all: it hits as many, with as many pairs of token and expert.
    """
    tables = [_without_routing(table), *_evenly_routed(table)]
    facts = parse_variant(table.variant)
    if facts.get("quant") == _MXFP4 and not device.find_missing_format(DType.FP8):
        variant = format_variant({**facts, "quant": _MXFP4_WITH_MXFP8}) or ""
        other = replace(table, dtype=DType.FP8, variant=variant, tentative=True)
        tables += [other, *_evenly_routed(other)]
    if table.operator == "moe_experts":
        return tables
    columns = table.columns
    num_tokens = ceil_divide(columns["num_local_pairs"], columns["top_k"])
    names = ("top_k", "num_experts", "num_active_experts", "hidden", "intermediate")
    kept = {"num_tokens": num_tokens, **{name: columns[name] for name in names}}
    whole = [
        replace(one, operator="moe_experts", columns=kept, tentative=True)
        for one in (table, *tables)
    ]
    return (*tables, *whole)


def _padded_experts(table: OperatorTable) -> OperatorTable:
    """Return the experts with the rows and columns of zeros that an engine pads them with."""
    if parse_variant(table.variant).get("quant") != _MXFP4:
        return table
    padded = {
        name: ceil_divide(table.columns[name], tile) * tile for name, tile in _MARLIN_TILES.items()
    }
    return replace(table, columns={**table.columns, **padded})


def _evenly_routed(table: OperatorTable) -> Sequence[OperatorTable]:
    facts = parse_variant(table.variant)
    if facts.get("routing", _BALANCED) == _BALANCED:
        return ()
    variant = format_variant({**facts, "routing": _BALANCED}) or ""
    return (replace(table, variant=variant, tentative=True),)


def _without_routing(table: OperatorTable) -> OperatorTable:
    facts = {key: value for key, value in parse_variant(table.variant).items() if key != "routing"}
    return replace(table, variant=format_variant(facts) or "", tentative=True)


def _has_no_gates(model: ModelArchitecture) -> bool:
    """Return whether a model's routed experts are two matrices, without a gate."""
    return any(part.kind == "experts" and not part["is_gated"] for part, _ in stack_of(model).parts)


def _ungated_tables(table: OperatorTable) -> Sequence[OperatorTable]:
    """Return how to ask about experts without a gate, which the model gives two thirds of a width.

    Some tables leave open whether what they timed had one.
    """
    columns = {**table.columns, "intermediate": (3 * table.columns["intermediate"] + 1) // 2}
    facts = parse_variant(table.variant)
    wide = [
        replace(
            table,
            columns=columns,
            variant=format_variant({**facts, "mlp": mlp}) or "",
            tentative=True,
        )
        for mlp in ("ungated", "unsaid")
    ]
    return [other for one in wide for other in (one, _without_routing(one))]


def _scaled_tables(table: OperatorTable, *, is_converted: bool) -> Sequence[OperatorTable]:
    """Return how to ask about a product whose input has a known scale: one that finds it, and that.

    Where the input `is_converted` already, also how to ask about what converts it.
    Source: AIConfigurator, `sdk/operations/gemm.py` (the static case by the dynamic one), and its
    collectors of `compute_scale`.
    """
    facts = parse_variant(table.variant)
    if facts.get("quant") != _STATIC_SCALE:
        return ()
    variant = format_variant({**facts, "quant": ""}) or ""
    columns = {"num_tokens": table.columns["m"], "hidden": table.columns["k"]}
    parts = (_SCALE, _CONVERT) if is_converted else (_SCALE,)
    return (
        replace(table, variant=variant, tentative=True),
        *(
            replace(table, operator="quantize", columns=columns, variant=part, tentative=True)
            for part in parts
        ),
    )


def _is_converted(node: OperatorNode, spec: SurfaceSpec) -> bool:
    """Return whether the kernel before a product writes its input in FP8."""
    if node.role == "attn_out_proj":
        return spec.fuses_static_quantize and spec.options.kv_dtype is DType.FP8
    return spec.fuses_static_quantize and node.role == "mlp_down_proj" and spec.model.is_gated


def _without_scale(
    plain: LatencyColumns, dynamic: LatencyColumns, *parts: LatencyColumns
) -> LatencyColumns:
    """Return a product less the parts that are not run, where the same software timed both."""
    if not is_measured_here(dynamic):
        return plain
    own_us = np.asarray(dynamic.latency_us)
    spared_us = 0.0 * own_us
    for part, share_max in zip(parts, (_SCALE_SHARE_MAX, _CONVERT_SHARE_MAX), strict=False):
        if part.other_framework == dynamic.other_framework:
            spared_us += np.minimum(part.latency_us, share_max * (own_us - spared_us))
    less = LatencyColumns(
        latency_us=dynamic.latency_us - spared_us,
        low_us=np.maximum(dynamic.low_us - spared_us, 0.0),
        high_us=dynamic.high_us,
        provenance=dynamic.provenance,
        other_framework=dynamic.other_framework,
    )
    return _merge(plain, less, covered_rows(dynamic))


# Norms of the residual stream, each of which comes after a sum over the ranks.
_SUMMED_NORMS = ("input_norm", "post_attention_norm", "final_norm")


def _find_fused(node: OperatorNode, table: OperatorTable, spec: SurfaceSpec) -> Flags:
    """Return which calls run inside the all-reduce before them and take no time of their own."""
    if node.role not in _SUMMED_NORMS or not spec.fused_norm_bytes:
        return np.zeros(table.num_rows, dtype=np.bool_)
    elements = table.columns["num_tokens"] * table.columns["hidden"]
    is_fused: Flags = np.asarray(node.written_dtype.bytes_of(elements)) <= spec.fused_norm_bytes
    return is_fused


def _without_rows(answer: LatencyColumns, rows: Flags) -> LatencyColumns:
    return LatencyColumns(
        latency_us=np.where(rows, 0.0, answer.latency_us),
        low_us=np.where(rows, 0.0, answer.low_us),
        high_us=np.where(rows, 0.0, answer.high_us),
        provenance=answer.provenance,
        other_framework=answer.other_framework,
    )


def _merge(plain: LatencyColumns, other: LatencyColumns, takes_other: Flags) -> LatencyColumns:
    return LatencyColumns(
        latency_us=np.where(takes_other, other.latency_us, plain.latency_us),
        low_us=np.where(takes_other, other.low_us, plain.low_us),
        high_us=np.where(takes_other, other.high_us, plain.high_us),
        provenance=np.where(takes_other, other.provenance, plain.provenance),
        other_framework=(other if takes_other.all() else plain).other_framework,
    )
