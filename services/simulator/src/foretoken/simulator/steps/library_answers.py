"""What a trainer's kernels take, where those that were measured are servers'.

Attention is as fast as its library was published to be: servers' kernels are measured with paged
keys and values, and on Hopper with FlashAttention 3, where a trainer calls cuDNN or FlashAttention
2. Products in 8 bit were measured from an
input in 16 bit: servers find its scale and convert it in the same call, for which a training step
has operators of its own, so that both would be counted twice.

Source: AIConfigurator, `sdk/operations/gemm.py`: what a product takes whose input is converted is
its row less those of `compute_scale` and `scale_matrix`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.hardware.sustained import SLOWED_SPREAD_LOG, slowed_ratio
from foretoken.domain.measurements.estimate import (
    COVERED_PROVENANCES,
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import Dims, find_operator
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource

# How far such figures are apart, by who timed them and by release: FlashAttention 3 without a mask
# at 8,192 tokens is at 646 TFLOP/s in its paper and at 614 in PyTorch's benchmark of it (pytorch/
# benchmark, pull request 2391), at 512 tokens at 467 and 430; cuDNN behind a causal mask at 529 on
# H100 in 2024 (same paper) and at 644 on H200 in 2026, backward at 457 and 541 (NVIDIA/
# cudnn-frontend, benchmark/sdpa_benchmark_training, h200_919_only_cudnn).
PUBLISHED_SPREAD_LOG = 0.2
_NARROW_HEAD = 64


@dataclass(frozen=True, slots=True)
class _Curves:
    """TFLOP/s in 16 bit by the length of a sequence, heads of 128.

    `backward` is without a mask. `narrow_ratio` is how fast heads of 64 are compared with these.
    """

    causal: tuple[float, ...]
    full: tuple[float, ...]
    backward: tuple[float, ...]
    narrow_ratio: float
    narrow_backward_ratio: float


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Source: Shah et al., FlashAttention-3, arXiv 2407.08608, figures 5 and 6: H100 80 GB SXM5, 16,384
# tokens in all, hidden 2,048. Ratios of heads of 64 are those at 8,192 tokens without a mask.
_HOPPER: Mapping[str, _Curves] = {
    "flash_2": _Curves(
        causal=(191, 260, 298, 319, 333, 335),
        full=(309, 350, 362, 368, 370, 370),
        backward=(214, 260, 291, 310, 318, 322),
        narrow_ratio=322 / 370,
        narrow_backward_ratio=287 / 318,
    ),
    "cudnn": _Curves(
        causal=(315, 410, 484, 518, 529, 539),
        full=(497, 574, 617, 609, 600, 595),
        backward=(305, 408, 465, 499, 518, 516),
        narrow_ratio=412 / 600,
        narrow_backward_ratio=432 / 518,
    ),
    "flash_3": _Curves(
        causal=(292, 423, 521, 579, 602, 616),
        full=(467, 565, 625, 638, 646, 648),
        backward=(316, 424, 501, 542, 559, 561),
        narrow_ratio=496 / 646,
        narrow_backward_ratio=472 / 559,
    ),
}
# Source: NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training: GB200, cuDNN 9.19, 64 heads over
# 8 (results/gb200_919_only_cudnn/llama3.1), backward as measured without a mask; 512 and 1,024
# tokens of its artifacts of GB200 (128 heads over 8), which have masks alone, less what a mask
# costs at 2,048. Heads of 64 forward at 8,192: Dao-AILab/flash-attention, pull request 2605, 1,147;
# backward taken to be as much slower.
_BLACKWELL: Mapping[str, _Curves] = {
    "cudnn": _Curves(
        causal=(408, 733, 1042, 1335, 1598, 1687),
        full=(487, 876, 1245, 1593, 1709, 1769),
        backward=(393, 630, 1089, 1287, 1409, 1455),
        narrow_ratio=1147 / 1709,
        narrow_backward_ratio=1147 / 1709,
    ),
}


@dataclass(frozen=True, slots=True)
class _Chip:
    """What was published of libraries on a device, and the devices of as many bytes a FLOP."""

    reference: str
    curves: Mapping[str, _Curves]
    alike: tuple[str, ...] = ()

    def covers(self, device: DeviceSpec) -> bool:
        return device.name in self.alike or not self.alike


# Blackwells for desks have no tensor memory, and other kernels.
_PUBLISHED: Mapping[str, _Chip] = {
    "hopper": _Chip("h100_sxm", _HOPPER),
    "blackwell": _Chip("gb200", _BLACKWELL, ("b200", "gb200", "b300", "gb300")),
}


def has_published(library: str, device: DeviceSpec, dtype: DType) -> bool:
    """Tell whether a library's attention was published for devices like this one."""
    chip = _PUBLISHED.get(device.architecture)
    is_half = dtype in (DType.BF16, DType.FP16)
    return is_half and chip is not None and library in chip.curves and chip.covers(device)


def published_flops_per_s(library: str, device: DeviceSpec, phase: Phase, dims: Dims) -> Floats:
    """Return what a library's `attention_prefill` reaches, for every row of columns.

    A mask costs the backward pass what it costs the forward pass. Devices of one architecture are
    apart by their peaks.
    """
    chip = _PUBLISHED[device.architecture]
    curves = chip.curves[library]
    queries = np.asarray(dims["q_tokens"], dtype=np.float64)
    keys = np.asarray(dims["kv_tokens"], dtype=np.float64)
    num_seqs = np.asarray(dims["num_seqs"], dtype=np.float64)
    visible = np.asarray(dims["score_pairs"], dtype=np.float64) * num_seqs / (queries * keys)
    at = np.log2(queries / num_seqs)

    def read(curve: tuple[float, ...]) -> Floats:
        return np.interp(at, np.log2(_LENGTHS), curve)

    # Half of all pairs are behind a causal mask, all of them behind none.
    masked = np.clip(2 * (1 - visible), 0, 1)
    full, causal = read(curves.full), read(curves.causal)
    rate = full + masked * (causal - full)
    narrow = curves.narrow_ratio
    if phase is Phase.BACKWARD:
        rate, narrow = read(curves.backward) * rate / full, curves.narrow_backward_ratio
    rate = rate * np.where(np.asarray(dims["head_dim"]) <= _NARROW_HEAD, narrow, 1.0)
    peak = device.peak_flops(DType.BF16) / find_device(chip.reference).peak_flops(DType.BF16)
    return np.asarray(rate * 1e12 * peak, dtype=np.float64)


_ATTENTION = "attention_prefill"
_PRODUCTS = ("gemm", "grouped_gemm", "grouped_gemm_wgrad")


def answer_by_libraries(
    query: LatencyQuery,
    answers: Sequence[LatencyColumns],
    trainer: TrainerProfile,
    predictor: LatencySource,
) -> list[LatencyColumns]:
    """Return a query's answers, those of the trainer's own libraries in place of servers'.

    What was measured of the trainer's own software stays, and all of it where a scenario says whose
    measurements it wants.
    """
    found, device = list(answers), find_device(query.device)
    if query.framework:
        return found
    own = {
        _key(table)
        for table, answer in zip(query.tables, answers, strict=True)
        if trainer.software and not answer.other_framework and _covered(answer).any()
    }
    if has_published(trainer.attention_library, device, DType.BF16):
        for index, table in enumerate(query.tables):
            if table.operator == _ATTENTION and _key(table) not in own:
                found[index] = _publish(table, found[index], trainer.attention_library, query)
    if trainer.fp8_software:
        _take_off_conversions(query, found, own, trainer.fp8_software, predictor)
    return found


def _key(table: OperatorTable) -> tuple[str, DType, str]:
    return table.operator, table.dtype, table.variant


def _covered(answer: LatencyColumns) -> Flags:
    return np.isin(np.asarray(answer.provenance), COVERED_PROVENANCES)


def _publish(
    table: OperatorTable, answer: LatencyColumns, library: str, query: LatencyQuery
) -> LatencyColumns:
    """Return attention as fast as its library was published to be, in formats it was.

    It was timed in bursts: in work that lasts, power slows it.
    """
    device = find_device(query.device)
    if not has_published(library, device, table.dtype):
        return answer
    spec = find_operator(table.operator)
    flops = spec.flops(table.columns, table.dtype.num_bytes) * spec.work_ratio(table.phase)
    rate = published_flops_per_s(library, device, table.phase, table.columns)
    latency_us = np.asarray(flops, dtype=np.float64) / rate * US_PER_S + device.launch_latency_us
    spread_log = np.full(len(latency_us), PUBLISHED_SPREAD_LOG)
    if query.sustained:
        terms = compute_terms(spec, table.columns, table.dtype, table.phase, device)
        ratio = slowed_ratio(device, table.dtype, terms, latency_us, query.power_limit_w)
        latency_us = latency_us * ratio
        spread_log = np.hypot(spread_log, SLOWED_SPREAD_LOG * (np.asarray(ratio) > 1.0))
    return LatencyColumns(
        latency_us=latency_us,
        low_us=latency_us * np.exp(-spread_log),
        high_us=latency_us * np.exp(spread_log),
        provenance=np.full(len(latency_us), Provenance.TRANSFERRED.value),
        basis=f"{library} as published",
    )


def _take_off_conversions(
    query: LatencyQuery,
    found: list[LatencyColumns],
    own: set[tuple[str, DType, str]],
    software: str,
    predictor: LatencySource,
) -> None:
    """Put products in 8 bit whose input is converted before in the place of servers'."""
    asked = {
        index: _Product.of_table(table)
        for index, table in enumerate(query.tables)
        if table.operator in _PRODUCTS
        and table.dtype is DType.FP8
        and not table.variant
        and _key(table) not in own
        # What was measured as a product of groups has rows of converted input.
        and not (table.operator != "gemm" and _covered(found[index]).any())
    }
    tables = [table for product in asked.values() for table in product.tables]
    if not tables:
        return
    reply = predictor.predict(
        replace(query, preferred_framework=software, tables=tuple(tables))
    ).tables
    device, start = find_device(query.device), 0
    for index, product in asked.items():
        stop = start + len(product.tables)
        found[index] = product.answer(found[index], reply[start:stop], device)
        start = stop


@dataclass(frozen=True, slots=True)
class _Product:
    """A table of products as forward calls of single products, each after its conversion."""

    calls: tuple[Mapping[str, Floats], ...]

    @classmethod
    def of_table(cls, table: OperatorTable) -> "_Product":
        columns, spec = table.columns, find_operator("gemm")
        if table.operator != "gemm":
            proxy = find_operator(table.operator).proxy_operator
            columns = proxy(columns)[1] if proxy else columns
        calls: tuple[Mapping[str, Any], ...] = (columns,)
        if table.phase is Phase.BACKWARD and spec.backward_calls:
            calls = spec.backward_calls(columns)
        length = len(next(iter(table.columns.values())))
        return cls(
            tuple(
                {name: np.broadcast_to(value, length) for name, value in call.items()}
                for call in calls
            )
        )

    @property
    def tables(self) -> tuple[OperatorTable, ...]:
        """What to ask for: of every call the product, and the parts of converting its input."""
        return tuple(
            table
            for call in self.calls
            for table in (
                OperatorTable(operator="gemm", dtype=DType.FP8, columns=call),
                *(
                    OperatorTable(
                        operator="quantize",
                        dtype=DType.FP8,
                        variant=variant,
                        columns={"num_tokens": call["m"], "hidden": call["k"]},
                        tentative=True,
                    )
                    for variant in ("part=scale", "part=convert")
                ),
            )
        )

    def answer(
        self, plain: LatencyColumns, parts: Sequence[LatencyColumns], device: DeviceSpec
    ) -> LatencyColumns:
        """Return the products less their conversions, where the same software timed all three."""
        spec = find_operator("gemm")
        totals_us = [np.zeros(len(plain.latency_us)) for _ in range(3)]
        is_known = np.ones(len(plain.latency_us), dtype=bool)
        for number, call in enumerate(self.calls):
            product, scale, convert = parts[3 * number : 3 * number + 3]
            converted_us = np.asarray(scale.latency_us) + np.asarray(convert.latency_us)
            floor_us = compute_terms(spec, call, DType.FP8, Phase.FORWARD, device).compute_us
            bounds = (product.latency_us, product.low_us, product.high_us)
            totals_us = [
                total + np.maximum(np.asarray(bound) - converted_us, floor_us)
                for total, bound in zip(totals_us, bounds, strict=True)
            ]
            is_known &= _is_of_one(product, scale, convert)
        latency_us, low_us, high_us = totals_us
        return LatencyColumns(
            latency_us=np.where(is_known, latency_us, plain.latency_us),
            low_us=np.where(is_known, low_us, plain.low_us),
            high_us=np.where(is_known, high_us, plain.high_us),
            provenance=plain.provenance,
            other_framework=plain.other_framework,
        )


def _is_of_one(*answers: LatencyColumns) -> Flags:
    """Return where measurements of the software that was asked for are behind all answers."""
    flags = [
        (np.asarray(answer.provenance) != Provenance.ANALYTICAL.value)
        & (not answer.other_framework)
        for answer in answers
    ]
    return np.asarray(np.logical_and.reduce(flags), dtype=bool)
