"""Experts with weights in 4 bit that Marlin's kernels multiply, whatever the format.

A format was timed in one layer only, MXFP4 in one of 896 experts, INT4 in one of 384, and what a
call takes besides its weights goes with the layer: 60 and 40 us of an H200 under vLLM. Of another
layer both tables are beyond what they have, and each tells as much as it is sure.
Source: AIConfigurator's tables of vLLM 0.24 and SGLang 0.5.14 on H100, H200 and B200.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.domain.units import Quantity
from foretoken.simulator.cost.answer import covered_rows
from foretoken.simulator.grid import Floats

# The kernel of each format, as an engine's tables name it.
_KERNELS: Sequence[Mapping[str, str]] = (
    {
        "w4a16_mxfp4": "vllm_compressedtensorsw4a4mxfp4moe_marlin_marlinexperts_situ_as_silu",
        "int4_wo": "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts",
    },
    {
        "w4a16_mxfp4": "vllm_compressedtensorsw4a4mxfp4moe_marlin_marlinexperts",
        "int4_wo": "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts",
    },
    {
        "w4a16_mxfp4": "sglang_marlin_moe_situ_as_silu",
        "int4_wo": "sglang_marlin_moe",
    },
)
# No interval is narrower, in log units.
_LEAST_LOG = 1e-6


def in_other_formats(table: OperatorTable) -> Sequence[OperatorTable]:
    """Return how to ask about experts as if their weights were in another format of 4 bit."""
    facts = parse_variant(table.variant)
    scheme = facts.get("quant", "")
    named = next((each for each in _KERNELS if each.get(scheme) == table.kernel), {})
    return tuple(
        replace(
            table,
            kernel=kernel,
            variant=format_variant({**facts, "quant": other}) or "",
            tentative=True,
        )
        for other, kernel in named.items()
        if other != scheme
    )


def weigh(own: LatencyColumns, others: Sequence[LatencyColumns]) -> LatencyColumns:
    """Return an answer where it is covered, else the mean of all as far as each is sure.

    Means are of logarithms, by the inverse squares of the intervals.
    """
    answers = (own, *others)
    low, middle, high = (
        np.log(np.stack([np.maximum(getattr(each, name), _LEAST_LOG) for each in answers]))
        for name in ("low_us", "latency_us", "high_us")
    )
    weights = 1.0 / np.maximum(high - low, _LEAST_LOG) ** 2
    weights /= weights.sum(axis=0)
    is_own = covered_rows(own)

    def mean(logs: Floats, known: Quantity) -> Floats:
        return np.where(is_own, np.asarray(known), np.exp((weights * logs).sum(axis=0)))

    return LatencyColumns(
        latency_us=mean(middle, own.latency_us),
        low_us=mean(low, own.low_us),
        high_us=mean(high, own.high_us),
        provenance=own.provenance,
        other_framework=own.other_framework,
    )
