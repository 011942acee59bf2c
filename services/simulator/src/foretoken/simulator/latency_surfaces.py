"""Ask the predictor once for everything a deployment's steps can cost.

A step's operators depend on few numbers: most on its tokens, the head and sampler on the
sequences that get a token, attention on the contexts. Each such family is tabulated on a grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.domain.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.graph import BatchShape, DecodeShape, OperatorNode, PrefillShape, RankContext
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.lowering import LoweringOptions, Nodes, lower_rank
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.ports import PredictorPort
from foretoken.domain.scenario import ServingScenario
from foretoken.simulator.grid import Floats, Ints, cross_points, spaced_integers
from foretoken.simulator.rank import stage_ranks

# Token counts up to here are tabulated one by one, those above rounded up: GEMM kernels compute
# whole tiles of rows, so a count between two multiples costs as much as the upper one.
_EXACT_TOKENS = 512
# (token counts up to, rounded up to a multiple of)
_TILES = ((2048, 64), (4096, 128), (2**62, 256))
# How much longer than the mean the longest decoding context is.
_RAGGEDNESS = np.array([1.0, 1.5, 2.0, 4.0, 8.0, 16.0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceSpec:
    """What surfaces depend on; equal specifications share them under one model version."""

    model: ModelArchitecture
    device: str
    topology: str
    framework: str
    dtype: DType
    layout: ParallelLayout
    fuses_add_norm: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """µs on a grid. `values` is [stage, channel, grid point], grid points flat, last axis fastest.

    The channels are the operator groups, then the lower and the upper bound, then the part of the
    time that rests on each provenance.
    """

    axes: tuple[Any, ...]
    values: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySurfaces:
    """All surfaces of a deployment.

    Axes: `tokens` (tokens), `rows` (sequences), `decode` (sequences, mean context, longest context
    over mean), `prefill` (new tokens, context) of one sequence.
    """

    model_version: str
    groups: tuple[str, ...]
    tokens: Surface
    rows: Surface
    decode: Surface
    prefill: Surface


def surface_spec(scenario: ServingScenario, max_context: int) -> SurfaceSpec:
    """Return what the surfaces of a scenario depend on; contexts round up to a power of two."""
    return SurfaceSpec(
        model=scenario.model,
        device=scenario.device,
        topology=scenario.topology,
        framework=scenario.framework,
        dtype=scenario.dtype,
        layout=replace(scenario.layout, dp=1),  # replicas are alike
        fuses_add_norm=scenario.engine.fuses_add_norm,
        max_num_batched_tokens=scenario.engine.max_num_batched_tokens,
        max_num_seqs=scenario.engine.max_num_seqs,
        max_context=1 << max(max_context - 1, 1).bit_length(),
    )


def replica_ranks(scenario: ServingScenario | SurfaceSpec) -> tuple[RankContext, ...]:
    """Return one rank of every pipeline stage of a replica."""
    layout = replace(scenario.layout, dp=1)
    return stage_ranks(scenario.model, layout, scenario.device, scenario.topology)


def serving_options(dtype: DType, fuses_add_norm: bool) -> LoweringOptions:
    """Return how a serving engine runs a model."""
    return LoweringOptions(
        dtype=dtype, has_kv_cache=True, has_sampler=True, fuses_add_norm=fuses_add_norm
    )


def fetch_surfaces(spec: SurfaceSpec, predictor: PredictorPort) -> LatencySurfaces:
    """Return the surfaces of a deployment, in one query.

    Raises:
        InvalidRequestError: the layout does not fit the model.
        ForetokenError: whatever the predictor raises.

    """
    grids = _grids(spec)
    options = serving_options(spec.dtype, spec.fuses_add_norm)
    nodes = {
        family: [
            _varying(lower_rank(_shape_of_family(family, axes), options, rank))
            for rank in replica_ranks(spec)
        ]
        for family, axes in grids.items()
    }
    tables: dict[tuple[Any, ...], OperatorTable] = {}
    for stages in nodes.values():
        for node in (node for stage in stages for node in stage):
            table = _table_of(node)
            tables.setdefault(_key_of(table), table)
    query = LatencyQuery(
        device=spec.device,
        tables=tuple(tables.values()),
        topology=spec.topology,
        framework=spec.framework,
    )
    reply = predictor.predict(query)
    answers = dict(zip(tables, reply.tables, strict=True))
    groups = sorted({n.group for stages in nodes.values() for stage in stages for n in stage})
    surfaces = {
        family: Surface(axes=axes, values=_sum_channels(nodes[family], answers, groups))
        for family, axes in grids.items()
    }
    return LatencySurfaces(model_version=reply.model_version, groups=tuple(groups), **surfaces)


def _grids(spec: SurfaceSpec) -> dict[str, tuple[Any, ...]]:
    max_q = min(spec.max_num_batched_tokens, spec.max_context)
    context = np.concatenate(([0], spaced_integers(16, spec.max_context, 3)))
    return {
        "tokens": (_tile_points(spec.max_num_batched_tokens),),
        "rows": (np.arange(1, spec.max_num_seqs + 1),),
        "decode": (
            spaced_integers(1, spec.max_num_seqs, 3),
            spaced_integers(1, spec.max_context, 3),
            _RAGGEDNESS,
        ),
        "prefill": (spaced_integers(1, max_q, 4), context),
    }


def _tile_points(max_tokens: int) -> Ints:
    points = list(range(1, min(max_tokens, _EXACT_TOKENS) + 1))
    for limit, multiple in _TILES:
        while points[-1] < min(max_tokens, limit):
            points.append(points[-1] + multiple)
    return np.array(points, dtype=np.int64)


def _shape_of_family(family: str, axes: Sequence[Any]) -> BatchShape:
    points = cross_points(axes)
    if family == "tokens":
        return BatchShape(num_tokens=points[0], num_output_rows=1)
    if family == "rows":
        return BatchShape(num_tokens=1, num_output_rows=points[0])
    if family == "prefill":
        shape = PrefillShape(**prefill_dims(1 + 0 * points[0], points[0], points[1]))
        return BatchShape(num_tokens=1, num_output_rows=1, prefill=shape)
    num_seqs, mean, raggedness = points
    kv_tokens = num_seqs * mean
    # Every sequence has a context of at least one token.
    longest = np.rint(mean * raggedness).astype(np.int64)
    decode = DecodeShape(
        num_seqs=num_seqs,
        kv_tokens=kv_tokens,
        kv_tokens_max=np.minimum(longest, kv_tokens - num_seqs + 1),
    )
    return BatchShape(num_tokens=1, num_output_rows=1, decode=decode)


def _varying(nodes: Nodes) -> list[OperatorNode]:
    """Return the operators that depend on the grid; the others belong to another family."""
    return [n for n in nodes if any(isinstance(value, np.ndarray) for value in n.dims.values())]


def _table_of(node: OperatorNode) -> OperatorTable:
    arrays = np.broadcast_arrays(*(np.asarray(value) for value in node.dims.values()))
    columns = {
        name: np.rint(array).astype(np.int64) for name, array in zip(node.dims, arrays, strict=True)
    }
    return OperatorTable(
        operator=node.operator, dtype=node.dtype, phase=node.phase, columns=columns
    )


def _key_of(table: OperatorTable) -> tuple[Any, ...]:
    columns = tuple((name, column.tobytes()) for name, column in sorted(table.columns.items()))
    return (table.operator, table.dtype, table.phase, columns)


def _sum_channels(
    stages: Sequence[Sequence[OperatorNode]],
    answers: Mapping[tuple[Any, ...], LatencyColumns],
    groups: Sequence[str],
) -> Floats:
    num_points = next(_table_of(node).num_rows for stage in stages for node in stage)
    values = np.zeros((len(stages), len(groups) + 2 + len(Provenance), num_points))
    for index, stage in enumerate(stages):
        for node in stage:
            answer = answers[_key_of(_table_of(node))]
            values[index] += node.repeat * _channels(answer, groups.index(node.group), len(groups))
    return values


def _channels(answer: LatencyColumns, group: int, num_groups: int) -> Floats:
    latency_us = np.asarray(answer.latency_us, dtype=np.float64)
    provenance = np.asarray(answer.provenance)
    by_group = np.zeros((num_groups, len(latency_us)))
    by_group[group] = latency_us
    bounds = np.array([answer.low_us, answer.high_us], dtype=np.float64)
    by_provenance = [latency_us * (provenance == member.value) for member in Provenance]
    return np.concatenate((by_group, bounds, by_provenance))
