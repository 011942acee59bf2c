"""What a model is, in figures: layers by kind, parameters, bytes as stored, what requests keep."""

from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Place, RequestState, find_kind
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.parameters import ParameterCount, PartCount, count_parameters
from foretoken.domain.models.quantization import Quantization, StoredWeight, find_quantization
from foretoken.domain.models.stack import stack_of, state_of
from foretoken.domain.units import GIB

_BITS = 16
# Counted and stored bytes that differ by no more are the same.
_NEAR = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFigures:
    """A part of a model: `num_layers` layers of it, or 1 where it stands outside the layers.

    `stored` names the schemes of its matrices. A request keeps `token_bytes` of every token, of the
    last `window_tokens` also `window_bytes`, and `request_bytes` however long it is.
    """

    part: str
    num_layers: int
    sizes: str
    num_parameters: int
    num_active: int
    num_bytes: float
    stored: str = ""
    token_bytes: float = 0.0
    window_bytes: float = 0.0
    window_tokens: int = 0
    request_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """A model in figures.

    Of the active parameters of a token there are three conventions: with the embedding, without it
    (a token reads one row), and without the head as well. `num_parameters` counts encoders, and no
    layers that predict further tokens. `num_bytes` follows from these and from how they are stored,
    `checkpoint_bytes` is what the files hold, 0 where that is not known. `approximations` say what
    is not simulated as it runs.
    """

    name: str
    num_layers: int
    pattern: str
    parts: tuple[PartFigures, ...]
    num_parameters: int
    num_active: int
    num_active_without_embedding: int
    num_active_in_layers: int
    num_bytes: float
    kv_dtype: str
    token_bytes: float
    window_bytes: float
    request_bytes: float
    approximations: tuple[str, ...]
    checkpoint_bytes: int = 0

    @property
    def difference(self) -> str:
        """What the files hold, where that is more than 1 % off what is counted; else empty."""
        ratio = self.checkpoint_bytes / self.num_bytes - 1
        if not self.checkpoint_bytes or abs(ratio) <= _NEAR:
            return ""
        held, counted = (
            f"{size / GIB:,.1f} GiB" for size in (self.checkpoint_bytes, self.num_bytes)
        )
        why = (
            "they may hold layers that predict further tokens, or weights stored otherwise"
            if ratio > 0
            else "its weights may be stored in fewer bits than its configuration says"
        )
        return f"its files hold {held}, {ratio:+.1%} of the {counted} that are counted: {why}"


def describe_model(model: ModelArchitecture, checkpoint_bytes: int = 0) -> ModelFigures:
    """Return the figures of a model as its checkpoint is stored, whole, on one device."""
    count, kv_dtype = count_parameters(model), model.kv_dtype or DType.BF16
    parts = (
        *_trunk(count, find_quantization(model.quantization)),
        *(_figures(part, model, kv_dtype) for part in count.parts),
    )
    without = count.active_total - count.embedding
    return ModelFigures(
        name=model.name,
        num_layers=model.num_layers,
        pattern=model.pattern,
        parts=parts,
        num_parameters=count.total,
        num_active=count.active_total,
        num_active_without_embedding=without,
        num_active_in_layers=without - count.lm_head,
        num_bytes=sum(part.num_bytes for part in parts),
        kv_dtype=kv_dtype.name.lower(),
        token_bytes=sum(part.token_bytes for part in parts),
        window_bytes=sum(part.window_bytes * part.window_tokens for part in parts),
        request_bytes=sum(part.request_bytes for part in parts),
        approximations=tuple(
            f"{kind.name}: {text}"
            for kind in stack_of(model).kinds
            for text in (
                kind.approximated,
                kind.untrained and f"it can be served only: {kind.untrained}",
            )
            if text
        ),
        checkpoint_bytes=checkpoint_bytes,
    )


def _trunk(count: ParameterCount, quantization: Quantization) -> Iterator[PartFigures]:
    norms = count.norms + count.final_norm
    for name, number, weight in (
        ("embedding", count.embedding, quantization.embedding),
        ("head", count.lm_head, quantization.head),
        ("norms", norms, StoredWeight()),
    ):
        yield PartFigures(
            part=name,
            num_layers=1,
            sizes="",
            num_parameters=number,
            num_active=number,
            num_bytes=number * (weight.bits or _BITS) / 8,
            stored=f"{name} {weight.bits:.4g} bit" if weight.bits and number else "",
        )


def _figures(count: PartCount, model: ModelArchitecture, kv_dtype: DType) -> PartFigures:
    quantization, kind = find_quantization(model.quantization), find_kind(count.part.kind)
    stored: dict[str, None] = {}
    num_bytes = 0.0
    for weights in count.weights:
        weight = quantization.weight_of(weights.part) if weights.part else None
        bits = weights.bits or (weight.bits if weight and weight.bits else _BITS)
        num_bytes += count.num_layers * weights.total * bits / 8
        if weight and weight.bits:
            stored[f"{weights.part} {weight.bits:.3g} bit"] = None
        elif weights.bits:
            stored[f"{kind.name} {weights.bits:.3g} bit"] = None
    state = state_of(count.part) if kind.place is Place.MIXER else RequestState()
    num_layers = count.num_layers
    return PartFigures(
        part=kind.name,
        num_layers=num_layers,
        sizes=_sizes(count.part),
        num_parameters=count.total,
        num_active=count.active_total,
        num_bytes=num_bytes,
        stored=", ".join(stored),
        token_bytes=num_layers
        * (float(kv_dtype.bytes_of(state.token_elements)) + state.token_bytes),
        window_bytes=num_layers * float(kv_dtype.bytes_of(state.window_elements)),
        window_tokens=state.window_tokens,
        request_bytes=num_layers * state.request_bytes,
    )


def _sizes(part: LayerPart) -> str:
    """Return the dimensions of a part that are not 0, in the order of its kind."""
    known = (dim.name for dim in find_kind(part.kind).dims)
    return ", ".join(f"{name} {part[name]:,}" for name in known if part[name])
