"""What a trainer's kernels take, where those that were measured are servers'.

Attention is as fast as its library was published to be. Products in 8 bit were measured from an
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
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.steps.attention_library import (
    PUBLISHED_SPREAD_LOG,
    has_published,
    published_flops_per_s,
)

_ATTENTION = "attention_prefill"
_PRODUCTS = ("gemm", "grouped_gemm", "grouped_gemm_wgrad")
_COVERED = tuple(member.value for member in Provenance if member.is_covered)


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
                found[index] = _publish(table, found[index], trainer.attention_library, device)
    if trainer.fp8_software:
        _take_off_conversions(query, found, own, trainer.fp8_software, predictor)
    return found


def _key(table: OperatorTable) -> tuple[str, DType, str]:
    return table.operator, table.dtype, table.variant


def _covered(answer: LatencyColumns) -> Flags:
    return np.isin(np.asarray(answer.provenance), _COVERED)


def _publish(
    table: OperatorTable, answer: LatencyColumns, library: str, device: DeviceSpec
) -> LatencyColumns:
    """Return attention as fast as its library was published to be, in formats it was."""
    if not has_published(library, device, table.dtype):
        return answer
    spec = find_operator(table.operator)
    flops = spec.flops(table.columns, table.dtype.num_bytes) * spec.work_ratio(table.phase)
    rate = published_flops_per_s(library, device, table.phase, table.columns)
    latency_us = np.asarray(flops, dtype=np.float64) / rate * US_PER_S + device.launch_latency_us
    return LatencyColumns(
        latency_us=latency_us,
        low_us=latency_us * np.exp(-PUBLISHED_SPREAD_LOG),
        high_us=latency_us * np.exp(PUBLISHED_SPREAD_LOG),
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
