"""Which measured points make up each column of a FASOP table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.catalog.importers.fasop.columns import COLUMNS, RankShape
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator

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
