"""Tables composed of rows that measure operators alone: which points make up each column."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.exporters.fasop.table import ProfileTable, TableKey
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS, RankShape
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_MS
from foretoken.wire.arrow import dims_to_columns

_DEGREES = (1, 2, 4, 8)
# Source: MBS_OPTIONS in `fasop/config.py`.
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

# An operator and its dimensions in canonical order.
Point = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Call:
    """A measured point and the share of its time that counts."""

    point: Point
    share: float = 1.0


# A part of a column runs one of several sequences of calls; the first that is measured counts.
Part = Sequence[Sequence[Call]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """A model, the tokens of its sequences and its number format."""

    model: ModelArchitecture
    seq_len: int
    dtype: DType

    def __post_init__(self) -> None:
        """Check that the model's layers are those FASOP has columns for."""
        if not self.model.is_gated or self.model.moe or self.model.mla:
            raise InvalidRequestError.of_field(
                "options.model", f"{self.model.name} has no dense gated MLP, as FASOP's columns do"
            )

    def shapes(self) -> Iterator[tuple[RankShape, int]]:
        """Yield every split and micro batch size that a table may have."""
        model = self.model
        for tp in _DEGREES:
            if not any(n % tp for n in (model.num_heads, model.num_kv_heads, model.intermediate)):
                for micro_batch in _MICRO_BATCHES:
                    yield RankShape(model, tp, micro_batch * self.seq_len), micro_batch

    def wanted_points(self) -> dict[str, set[tuple[int, ...]]]:
        """Return the points that any table needs, by operator."""
        found: dict[str, set[tuple[int, ...]]] = {}
        for shape, micro_batch in self.shapes():
            for parts in self.parts_by_column(shape, micro_batch).values():
                for call in (call for part in parts for calls in part for call in calls):
                    operator, dims = call.point
                    found.setdefault(operator, set()).add(dims)
        return found

    def parts_by_column(self, shape: RankShape, micro_batch: int) -> Mapping[str, Sequence[Part]]:
        """Return what runs in each column."""
        dims = {column.name: column.dims(shape) for column in COLUMNS}
        norm = list(self._before_a_norm(shape))
        qkv = shape.q_width + 2 * shape.kv_width
        fused_qkv = shape.gemm(qkv, shape.model.hidden)
        fused_up = shape.gemm(2 * shape.intermediate, shape.model.hidden)
        q_share, kv_share = shape.q_width / qkv, shape.kv_width / qkv
        return {
            "embed": [_one("embedding", dims["embed"])],
            "attn_q": [*norm, _linear(dims["attn_q"], fused_qkv, q_share)],
            "attn_k": [_linear(dims["attn_k"], fused_qkv, kv_share)],
            "attn_v": [_linear(dims["attn_v"], fused_qkv, kv_share)],
            "attn_o": [*self._attention(shape, micro_batch), _one("gemm", dims["attn_o"])],
            "mlp_gate": [*norm, _linear(dims["mlp_gate"], fused_up, 0.5)],
            # With the product that FASOP counts to mlp_down.
            "mlp_act_fn": [_one("silu_mul", dims["mlp_act_fn"])],
            "mlp_up": [_linear(dims["mlp_up"], fused_up, 0.5)],
            "mlp_down": [_one("gemm", dims["mlp_down"])],
            "lm_head": [*norm, _one("gemm", dims["lm_head"])],
        }

    def _before_a_norm(self, shape: RankShape) -> Iterator[Part]:
        """Yield what runs between a linear layer and the next: sum over ranks, residual, norm."""
        wide = {"num_tokens": shape.tokens, "hidden": self.model.hidden}
        if shape.tp > 1:
            message_bytes = self.dtype.bytes_of(shape.tokens * self.model.hidden)
            group = {"devices_per_node": shape.tp, "num_nodes": 1}
            yield _one("all_reduce", {"message_bytes": message_bytes, **group})
        apart = [_call("residual_add", wide), _call(self.model.norm, wide)]
        is_fused = self.model.norm == "rms_norm"
        yield [[_call("add_rms_norm", wide)], apart] if is_fused else [apart]

    def _attention(self, shape: RankShape, micro_batch: int) -> Iterator[Part]:
        model = self.model
        heads = {
            "num_heads": model.num_heads // shape.tp,
            "num_kv_heads": model.num_kv_heads // shape.tp,
            "head_dim": model.head_dim,
        }
        if model.position == "rope":
            yield _one("rope", {"num_tokens": shape.tokens, **heads})
        yield _one("attention_prefill", {**prefill_dims(micro_batch, self.seq_len, 0), **heads})


def _call(operator: str, dims: Mapping[str, Any], share: float = 1.0) -> Call:
    names = find_operator(operator).dim_names
    return Call((operator, tuple(int(dims[name]) for name in names)), share)


def _one(operator: str, dims: Mapping[str, Any]) -> Part:
    return [[_call(operator, dims)]]


def _linear(dims: Mapping[str, Any], fused: Mapping[str, Any], share: float) -> Part:
    """Return a linear layer, alone or as its share of one that is fused with others."""
    return [[_call("gemm", dims)], [_call("gemm", fused, share)]]


_REMARK = (
    "is composed of operators measured alone: it has no host gaps, mlp_act_fn holds the product "
    "with up and mlp_down does not, projections measured as one count by their widths"
)


class MeasuredPoints:
    """The times of the points that a plan needs, by device."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.num_rows = 0
        self._wanted = plan.wanted_points()
        self._times_us: dict[str, dict[Point, list[float]]] = {}

    def take(self, rows: pa.RecordBatch) -> Mapping[str, int]:
        """Gather the rows that measure a wanted point in the plain way, unflagged.

        Return how many of each operator those are.
        """
        taken: dict[str, int] = {}
        for operator, points in self._wanted.items():
            spec = find_operator(operator)
            is_plain = _all(
                pc.equal(rows["operator"], operator),
                pc.equal(rows["phase"], "forward"),
                pc.equal(rows["status"], "ok"),
                pc.is_null(rows["variant"]),
                pc.fill_null(pc.equal(pc.list_value_length(rows["flags"]), 0), fill_value=True),
            )
            if not spec.is_collective:
                is_format = pc.equal(rows["dtype"], self.plan.dtype.name.lower())
                is_plain = pc.and_(is_plain, is_format)
            table = pa.Table.from_batches([rows.filter(is_plain)])
            if table.num_rows:
                columns = dims_to_columns(table, spec.dim_names)
                dims = zip(*(column.tolist() for column in columns.values()), strict=True)
                taken[operator] = self._keep(operator, points, table, list(dims))
        self.num_rows += sum(taken.values())
        return taken

    def _keep(
        self,
        operator: str,
        points: set[tuple[int, ...]],
        table: pa.Table,
        dims: list[tuple[int, ...]],
    ) -> int:
        num_kept = 0
        times_us = pc.coalesce(table["latency_us_mean"], table["latency_us_median"]).to_pylist()
        devices = table["device"].to_pylist()
        for device, time_us, point in zip(devices, times_us, dims, strict=True):
            if point in points:
                num_kept += 1
                found = self._times_us.setdefault(device, {})
                found.setdefault((operator, point), []).append(time_us)
        return num_kept

    def fill(self, tables: dict[TableKey, ProfileTable]) -> tuple[str, ...]:
        """Put what can be composed into tables that no profile has filled; return remarks."""
        composed: dict[TableKey, ProfileTable] = {}
        for device, times_us in self._times_us.items():
            for shape, micro_batch in self.plan.shapes():
                key = TableKey(self.plan.model.name, device, shape.tp)
                if key not in tables:
                    table = composed.setdefault(key, ProfileTable())
                    columns = self.plan.parts_by_column(shape, micro_batch)
                    _fill_row(table, micro_batch, columns, times_us)
        tables.update(composed)
        return tuple(
            f"{key.file_name} {_REMARK}" for key, table in composed.items() if len(table.to_array())
        )


def _fill_row(
    table: ProfileTable,
    micro_batch: int,
    columns: Mapping[str, Sequence[Part]],
    times_us: Mapping[Point, Sequence[float]],
) -> None:
    for column, parts in columns.items():
        time_us = _sum_of(parts, times_us)
        if time_us is not None:
            table.add(micro_batch, column, time_us / US_PER_MS)


def _sum_of(parts: Sequence[Part], times_us: Mapping[Point, Sequence[float]]) -> float | None:
    """Return the time of all parts, None where one was not measured."""
    total = 0.0
    for part in parts:
        measured = [calls for calls in part if all(call.point in times_us for call in calls)]
        if not measured:
            return None
        total += sum(median(times_us[call.point]) * call.share for call in measured[0])
    return total


def _all(*conditions: Any) -> Any:
    combined = conditions[0]
    for condition in conditions[1:]:
        combined = pc.and_(combined, condition)
    return combined
