"""How many parameters a model has, from its layers."""

from dataclasses import dataclass

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Weights
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.stack import stack_of, weights_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCount:
    """A part of the model, how often it is there, and the weights of each time."""

    part: LayerPart
    num_layers: int
    weights: tuple[Weights, ...]

    @property
    def per_layer(self) -> int:
        """Parameters of it in one layer."""
        return sum(weights.total for weights in self.weights)

    @property
    def total(self) -> int:
        """Parameters of it in all layers."""
        return self.num_layers * self.per_layer

    @property
    def active_total(self) -> int:
        """Those that one token passes through."""
        return self.num_layers * sum(weights.num_active for weights in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters by part; `active_total` is what one token passes through.

    Some publish that number without the `embedding`, of which a token reads one row. A tied head
    counts in `embedding` alone. `norms` are those of layers, `parts` the kinds of their halves and
    what stands outside the layers.
    """

    embedding: int
    lm_head: int
    norms: int
    final_norm: int
    parts: tuple[PartCount, ...]
    total: int
    active_total: int

    def per_layer(self, kind: str) -> int:
        """Return the parameters of a layer's first part of that kind, 0 where there is none."""
        return next((part.per_layer for part in self.parts if part.part.kind == kind), 0)


def count_parameters(model: ModelArchitecture) -> ParameterCount:
    """Count the parameters of the main model: no draft heads, no buffers."""
    stack = stack_of(model)
    num_positions = model.max_position if model.position == "learned" else 0
    embedding = (model.vocab + num_positions) * model.hidden
    lm_head = 0 if model.has_tied_embedding else model.vocab * model.hidden
    norm = model.hidden * (2 if model.norm == "layer_norm" else 1)
    num_halves = sum(
        (layer.mixer is not None) + (layer.feed_forward is not None) for layer in stack.layers
    )
    # Phi shares one norm between its parallel branches; GPT-NeoX has two, 3e-5 of its total.
    norms = norm * (model.num_layers if model.has_parallel_residual else num_halves)
    placed = [(part, len(layers)) for part, layers in stack.parts]
    placed += [(part, 1) for part in stack.extras]
    parts = tuple(
        PartCount(part=part, num_layers=num_layers, weights=weights_of(part, model))
        for part, num_layers in placed
    )
    shared = embedding + lm_head + norm + norms
    return ParameterCount(
        embedding=embedding,
        lm_head=lm_head,
        norms=norms,
        final_norm=norm,
        parts=parts,
        total=shared + sum(part.total for part in parts),
        active_total=shared + sum(part.active_total for part in parts),
    )
