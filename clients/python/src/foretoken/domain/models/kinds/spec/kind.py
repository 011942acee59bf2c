"""What a kind of layer says of itself: its dimensions, its weights and what a request keeps."""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules

if TYPE_CHECKING:
    from foretoken.domain.lowering.graph import OperatorNode
    from foretoken.domain.lowering.node_builder import NodeBuilder
    from foretoken.domain.models.architecture import ModelArchitecture
    from foretoken.domain.models.layer import LayerPart

Dims = Mapping[str, int]
# A half of a layer, and with what is around it.
Around = Callable[["NodeBuilder", "LayerPart", Iterator["OperatorNode"]], Iterator["OperatorNode"]]
# Parts, and the layers each is in.
Placed = Mapping["LayerPart", tuple[int, ...]]


class Place(enum.Enum):
    """Where a kind stands in a model."""

    MIXER = 1  # the first half of a layer, between tokens
    FEED_FORWARD = 2  # the second half of a layer, every token for itself
    MODEL = 3  # outside the layers: an encoder, extra embeddings, streams of the residual


@dataclass(frozen=True, slots=True)
class KindDim:
    """A dimension of a kind; `default` is None where it must be given."""

    name: str
    meaning: str
    default: int | None = None
    minimum: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of one layer that are stored alike.

    `part` is what a checkpoint stores in a scheme of its own (`quantization.PARTS`), empty for what
    always stays in 16 bits: norms, routers, biases; or in `bits`, where a kind has a format of its
    own. A token passes through `active` of them (None: all).
    """

    total: int
    part: str = ""
    active: int | None = None
    bits: float = 0.0

    @property
    def num_active(self) -> int:
        """Parameters that a token passes through."""
        return self.total if self.active is None else self.active


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestState:
    """What one layer keeps of one request on a rank.

    Of every token of its context it keeps `token_elements` in the format of the KV cache and
    `token_bytes` in one of its own; of the last `window_tokens`, `window_elements` each. With a
    recurrent state it keeps `request_bytes`, however long the context is.
    """

    token_elements: float = 0.0
    token_bytes: float = 0.0
    window_elements: float = 0.0
    window_tokens: int = 0
    request_bytes: float = 0.0


def _stateless(_dims: Dims, _tp: int) -> RequestState:
    return RequestState()


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSpec:
    """A kind of layer.

    `weights` returns what one layer has, in any order. `state` returns what a rank of `tp` keeps of
    a request. `approximated` says what is not as it runs, and why; nothing where nothing is.
    `backward` says what its backward pass is and whose; empty where it has none, and `untrained`
    then why. `whole_sequences` says why ranks cannot split a sequence between them; empty where
    they can.
    `lower` yields the operators of the layers a builder is for; of parts that differ in `varying`
    alone it gets all, with the layers of each; of a part outside the layers, what it runs after
    them all. `split_heads` names dimensions that tensor
    parallelism must divide, `rotary_dim` returns the features of a head that turn with the
    position. `around` yields a half of a layer with what a part outside the layers
    runs before and after it.
    `matrices` are some of each part's that `weights` name, as checkpoints of the field call them.
    `varying` names dimensions in which layers may differ that share all but their kernels.
    """

    name: str
    place: Place
    summary: str
    source: str
    dims: tuple[KindDim, ...]
    weights: Callable[[Dims, "ModelArchitecture"], Iterator[Weights]]
    state: Callable[[Dims, int], RequestState] = _stateless
    check: Callable[[Dims], Mapping[str, tuple[bool, str]]] = lambda _: {}
    lower: Callable[["NodeBuilder", "Placed"], Iterator["OperatorNode"]] | None = None
    around: Around | None = None
    split_heads: tuple[str, ...] = ()
    rotary_dim: Callable[[Dims], int] = lambda _: 0
    approximated: str = ""
    backward: str = ""
    untrained: str = ""
    whole_sequences: str = ""
    varying: tuple[str, ...] = ()
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def complete(self, dims: Dims) -> dict[str, int]:
        """Return all dimensions, in the kind's order.

        Raises:
            InvalidRequestError: with one violation for each that is unknown, missing or wrong.

        """
        known = {dim.name: dim for dim in self.dims}
        violations = [
            FieldViolation(name, f"no dimension of {self.name}; it has {', '.join(known)}")
            for name in dims
            if name not in known
        ]
        complete: dict[str, int] = {}
        for dim in self.dims:
            value = dims.get(dim.name, dim.default)
            if value is None:
                violations.append(FieldViolation(dim.name, f"required by {self.name}"))
            elif isinstance(value, bool) or not isinstance(value, int) or value < dim.minimum:
                violations.append(FieldViolation(dim.name, f"must be at least {dim.minimum}"))
            else:
                complete[dim.name] = value
        if not violations:
            broken = self.check(complete).items()
            violations = [FieldViolation(name, said) for name, (holds, said) in broken if not holds]
        if violations:
            raise InvalidRequestError.of_violations(violations, f"layers of kind {self.name}")
        return complete


def find_kind(name: str) -> KindSpec:
    """Return the kind of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_kinds(), "kind", "kind of layer")


def all_kinds() -> Mapping[str, KindSpec]:
    """Return every kind by name: one file each in `models/kinds`."""
    return scan_modules("foretoken.domain.models.kinds", "KIND")
