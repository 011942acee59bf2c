"""The layers of a model, each of a kind: what everything that needs the layers reads.

Models whose layers are alike, or dense before and expert after some layer, say so in a few fields;
others name their layers and the pattern they are in. Both are the same here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindSpec,
    Placed,
    RequestState,
    Weights,
    find_kind,
)
from foretoken.domain.models.layer import FrozenDims, LayerKind, LayerPart, every_nth, read_pattern


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The layers of a model in order, and the parts outside them.

    `mixers` are what mixes tokens, by the layers each is in, in order of appearance;
    `feed_forwards` what each token passes through. Their groups have together what differs in
    nothing but what the kind says may vary.
    """

    layers: tuple[LayerKind, ...]
    extras: tuple[LayerPart, ...] = ()
    mixers: Placed = field(init=False, compare=False)
    feed_forwards: Placed = field(init=False, compare=False)
    mixer_groups: tuple[Placed, ...] = field(init=False, compare=False)
    feed_forward_groups: tuple[Placed, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Place the halves of the layers."""
        mixers = _placed(layer.mixer for layer in self.layers)
        halves = _placed(layer.feed_forward for layer in self.layers)
        object.__setattr__(self, "mixers", mixers)
        object.__setattr__(self, "feed_forwards", halves)
        object.__setattr__(self, "mixer_groups", _alike(mixers))
        object.__setattr__(self, "feed_forward_groups", _alike(halves))

    @property
    def experts(self) -> Placed:
        """Feed-forward halves that route tokens."""
        placed = self.feed_forwards.items()
        return {part: layers for part, layers in placed if part.kind == "experts"}

    @property
    def parts(self) -> Iterator[tuple[LayerPart, tuple[int, ...]]]:
        """Every half of a layer with the layers it is in."""
        yield from self.mixers.items()
        yield from self.feed_forwards.items()

    @property
    def kinds(self) -> tuple[KindSpec, ...]:
        """The kinds there are, in order of appearance."""
        names = [part.kind for part, _ in self.parts] + [part.kind for part in self.extras]
        return tuple(find_kind(name) for name in dict.fromkeys(names))

    @property
    def window(self) -> int:
        """Tokens that the widest layer with a window keeps; 0 where none has one."""
        parts = self.mixers
        return max((state_of(part).window_tokens for part in parts), default=0)

    @property
    def split_heads(self) -> tuple[int, ...]:
        """How many heads mixers have, of those that tensor parallelism must divide."""
        heads = {part[dim] for part in self.mixers for dim in find_kind(part.kind).split_heads}
        return tuple(sorted(heads))


def weights_of(part: LayerPart, model: ModelArchitecture) -> tuple[Weights, ...]:
    """Return the weights of one layer's part, or of a part outside the layers."""
    return tuple(w for w in find_kind(part.kind).weights(part.dims, model) if w.total)


def state_of(part: LayerPart, tp: int = 1) -> RequestState:
    """Return what one layer keeps of a request on one of `tp` ranks."""
    return find_kind(part.kind).state(part.dims, tp)


@lru_cache(maxsize=256)
def stack_of(model: ModelArchitecture) -> LayerStack:
    """Return the layers of a model."""
    if model.layers:
        named = {layer.name: layer for layer in model.layers}
        layers = tuple(named[name] for name in read_pattern(model.pattern))
        return LayerStack(layers, model.extras)
    num_dense = model.moe.num_dense_layers if model.moe else model.num_layers
    sees_all = every_nth(model.num_layers, model.full_attention_period)
    mixers = [_mixer(model, 0 if is_full else model.sliding_window) for is_full in sees_all]
    halves = [_mlp(model)] * num_dense + [_experts(model)] * (model.num_layers - num_dense)
    return LayerStack(
        tuple(
            LayerKind(name="layer", mixer=mixer, feed_forward=half)
            for mixer, half in zip(mixers, halves, strict=True)
        ),
        model.extras,
    )


def _mixer(model: ModelArchitecture, window: int) -> LayerPart:
    if model.mla is not None:
        widths = {each.name: getattr(model.mla, each.name) for each in fields(model.mla)}
        return LayerPart(kind="latent", dims={"num_heads": model.num_heads, **widths})
    dims: Dims = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "window": window,
        "has_rope": int(model.position == "rope"),
        "has_qkv_bias": int(model.has_qkv_bias or model.has_bias),
        "has_out_bias": int(model.has_bias),
        "qk_norm": int(model.has_qk_norm),
    }
    return LayerPart(kind="attention", dims=dims)


def _mlp(model: ModelArchitecture) -> LayerPart | None:
    if not model.intermediate:
        return None
    dims = {
        "intermediate": model.intermediate,
        "is_gated": int(model.is_gated),
        "has_bias": int(model.has_bias),
    }
    return LayerPart(kind="mlp", dims=dims)


def _experts(model: ModelArchitecture) -> LayerPart | None:
    moe = model.moe
    if moe is None:
        return None
    dims = {
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "intermediate": moe.expert_intermediate,
        "shared_intermediate": moe.num_shared_experts * moe.expert_intermediate,
        "is_gated": int(model.is_gated),
        "has_bias": int(model.has_bias),
        "num_groups": moe.num_groups,
        "top_k_groups": moe.top_k_groups,
    }
    return LayerPart(kind="experts", dims=dims)


def _placed(parts: Iterator[LayerPart | None]) -> Placed:
    placed: dict[LayerPart, list[int]] = {}
    for layer, part in enumerate(parts):
        if part is not None:
            placed.setdefault(part, []).append(layer)
    return {part: tuple(layers) for part, layers in placed.items()}


def _alike(placed: Placed) -> tuple[Placed, ...]:
    """Return the parts in groups that differ in nothing but what their kinds say may vary."""
    groups: dict[tuple[str, FrozenDims], dict[LayerPart, tuple[int, ...]]] = {}
    for part, layers in placed.items():
        varying = find_kind(part.kind).varying
        same = {name: value for name, value in part.dims.items() if name not in varying}
        groups.setdefault((part.kind, FrozenDims(same)), {})[part] = layers
    return tuple(groups.values())
