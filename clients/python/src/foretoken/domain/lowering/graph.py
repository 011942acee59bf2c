"""The operator graph of one rank: what runs in a step, without any times."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import Quantity


class Partition(enum.Enum):
    """How tensor parallelism splits an operator."""

    REPLICATED = 1
    COLUMN = 2  # a GEMM by its output features
    ROW = 3  # a GEMM by its reduced dimension; its output must be summed
    QKV = 4  # a column-split projection whose key and value heads may have to be repeated
    HEADS = 5  # by attention heads
    WIDTH = 6  # an elementwise operator by its features
    VOCAB = 7  # by rows of the vocabulary
    QUERIES = 8  # by query heads, over keys that every rank holds
    STATES = 9  # by the heads of a recurrent state, with all that belongs to each


class Section(enum.Enum):
    """Which part of the model an operator belongs to."""

    EMBEDDING = 1
    LAYER = 2
    HEAD = 3
    BOUNDARY = 4  # between pipeline stages
    GRADIENT = 5  # once per training step: gradient reduction
    OPTIMIZER = 6  # once per training step: parameter update


class Overlap(enum.Enum):
    """How the communication of a training pass lies to its computation, on a stream of its own."""

    EXPOSED = 1  # after all before it, and all after it waits
    CONCURRENT = 2  # with the operators of one role in the same layer; the rest waits for both
    PREFETCH = 3  # begun a layer ahead of where it stands; what follows waits until it has ended
    DEFERRED = 4  # begun where it stands, and only the end of the step waits for it


class Placement(TypedDict):
    """Fields of a node that say in which layers it runs."""

    repeat: int
    first_layer: int
    layer_stride: int
    places: tuple[int, ...]


def in_order(groups: Iterable[Sequence[int]]) -> Sequence[int]:
    """Return the layers of all groups in ascending order; a range where they are a progression."""
    layers = sorted(layer for group in groups for layer in group)
    first = layers[0] if layers else 0
    stride = layers[1] - first if len(layers) > 1 else 1
    even = range(first, first + len(layers) * stride, stride)
    return even if layers == list(even) else layers


def place(layers: Sequence[int]) -> Placement:
    """Return the fields that put a node into those layers, in ascending order."""
    even = layers if isinstance(layers, range) else in_order([layers])
    is_even = isinstance(even, range)
    return {
        "repeat": len(layers),
        "first_layer": layers[0] if layers else 0,
        "layer_stride": even.step if isinstance(even, range) else 1,
        "places": () if is_even else tuple(layers),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorNode:
    """One operator of a step, run `repeat` times. `dims` may be columns.

    `role` is what the model calls it ("mlp_down_proj"); `group` what a breakdown shows it under.
    In the section LAYER it runs in `repeat` layers from `first_layer` on, in every
    `layer_stride`-th, or in those of `places` where they are no progression. A product of queries,
    keys and values has `kv_heads`: how many of its heads are keys', and the features of a key and
    its value together. With `shares_weights` its weights are another operator's (a tied embedding)
    and count there.

    `dtype` and `variant` say what latency to ask for (see `operators/spec/variant.py`);
    `output_dtype` is the format of what it writes, where that differs, and `weight_bits` are those
    a stored weight takes with its share of the scales (0: as `dtype`). With `is_group_wide`
    it depends on the tokens of all engines that run in lock step, and on nothing else of the batch.

    A collective belongs to the `axis` of the layout whose ranks it connects ("tp"). `overlap` says
    what of a training pass it may hide behind; `overlaps_with` is the role it overlaps with.
    `num_sharing` groups at a time go through each network port it uses, itself included.

    A GEMM with `has_bias` adds a bias as it writes; its weights are `num_matrices`, reported as one
    where they multiply the same. `share` is the part of the call's time that is
    this node's: a backward GEMM is measured as a whole and reported as its two halves; an older
    kernel than the one measured takes a multiple. `num_kernels` are those of its forward and its
    backward pass where the host launches a chain of them.
    """

    role: str
    group: str
    section: Section
    operator: str
    dims: Mapping[str, Quantity]
    dtype: DType
    phase: Phase = Phase.FORWARD
    partition: Partition = Partition.REPLICATED
    repeat: int = 1
    first_layer: int = 0
    layer_stride: int = 1
    places: tuple[int, ...] = ()
    kv_heads: tuple[int, int] = (0, 0)
    shares_weights: bool = False
    variant: str = ""
    output_dtype: DType | None = None
    weight_bits: float = 0.0
    is_group_wide: bool = False
    axis: str = ""
    overlap: Overlap = Overlap.EXPOSED
    overlaps_with: str = ""
    num_sharing: int = 1
    share: float = 1.0
    has_bias: bool = False
    num_matrices: int = 1
    num_kernels: tuple[int, int] = (1, 1)

    @property
    def layers(self) -> Sequence[int]:
        """The layers it runs in, none outside of layers."""
        if self.section is not Section.LAYER:
            return range(0)
        if self.places:
            return self.places
        stop = self.first_layer + self.repeat * self.layer_stride
        return range(self.first_layer, stop, self.layer_stride)

    @property
    def placement(self) -> Placement:
        """What says in which layers it runs, for an operator that runs in the same ones."""
        return {
            "repeat": self.repeat,
            "first_layer": self.first_layer,
            "layer_stride": self.layer_stride,
            "places": self.places,
        }

    def in_layers(self, layers: Sequence[int]) -> "OperatorNode":
        """Return the operator in those layers, in ascending order."""
        return dataclasses.replace(self, **place(layers))

    @property
    def is_experts(self) -> bool:
        """Whether it is all experts of a layer as one call, those of a rank or of all."""
        return self.operator in ("moe_experts", "moe_local_experts")

    @property
    def num_tensors(self) -> int:
        """Tensors that one repetition's parameters are in, those it shares included."""
        return self.num_matrices + self.has_bias

    @property
    def num_weights(self) -> Quantity:
        """Parameters held by all repetitions together."""
        if self.shares_weights:
            return 0
        if self.operator == "batched_gemm" and self.partition is Partition.QUERIES:
            # One matrix for every head; elsewhere both factors are activations.
            return self.dims["batch"] * self.dims["n"] * self.dims["k"] * self.repeat
        num_biases = self.dims["n"] if self.has_bias else 0
        return (find_operator(self.operator).num_weights(self.dims) + num_biases) * self.repeat

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights as they are stored, scales included."""
        bits = self.weight_bits or 8 * self.dtype.num_bytes
        return float(self.num_weights * bits / 8)

    @property
    def call(self) -> OperatorCall:
        """The call it makes; its dimensions must be numbers, not columns."""
        return OperatorCall(
            operator=self.operator,
            dtype=self.dtype,
            phase=self.phase,
            dims={name: int(value) for name, value in self.dims.items()},
            variant=self.variant,
        )

    @property
    def written_dtype(self) -> DType:
        """Number format of its output."""
        return self.output_dtype or self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """Prefilling part of a batch; the dimensions of `attention_prefill`. Fields may be columns."""

    num_seqs: Quantity
    q_tokens: Quantity
    kv_tokens: Quantity
    score_pairs: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """Decoding part of a batch; the dimensions of `attention_decode`. Fields may be columns."""

    num_seqs: Quantity
    kv_tokens: Quantity
    kv_tokens_max: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What a forward pass is run on. Fields may be columns, of one length.

    `num_tokens` rows go through the layers, `num_output_rows` through the head. Engines that run in
    lock step share experts: these see `num_group_tokens` of all engines (None: as many on each).
    """

    num_tokens: Quantity
    num_output_rows: Quantity
    prefill: PrefillShape | None = None
    decode: DecodeShape | None = None
    num_group_tokens: Quantity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The rank a graph is lowered for: its place in the layout and in the machine.

    `stage` is the run of layers it is lowered for. Stages that are not even have `layers_by_stage`,
    one entry per run of layers in the order of the model, which are more than ranks of the pipeline
    where a rank holds several. A node has `ports_per_node` network ports (0: one for each device).
    """

    model: ModelArchitecture
    layout: ParallelLayout
    devices_per_node: int
    stage: int = 0
    layers_by_stage: tuple[int, ...] = ()
    ports_per_node: int = 0

    @property
    def has_lock_step(self) -> bool:
        """Whether the engines of the data-parallel ranks share experts and step together."""
        return self.layout.shares_experts

    @property
    def moe_tp(self) -> int:
        """Ranks that split each expert: those of the group that expert parallelism leaves."""
        num_engines = self.layout.dp if self.has_lock_step else 1
        return max(1, self.layout.tp * num_engines // self.layout.ep)

    @property
    def stage_layers(self) -> range:
        """Layers of this stage; the first stages take one more where they do not divide."""
        if self.layers_by_stage:
            start = sum(self.layers_by_stage[: self.stage])
            return range(start, start + self.layers_by_stage[self.stage])
        whole, rest = divmod(self.model.num_layers, self.layout.pp)
        start = self.stage * whole + min(self.stage, rest)
        return range(start, start + whole + (1 if self.stage < rest else 0))

    @property
    def num_stage_layers(self) -> int:
        """Number of layers of this stage."""
        return len(self.stage_layers)

    @property
    def num_stages(self) -> int:
        """Runs of layers the model is cut into."""
        return len(self.layers_by_stage) or self.layout.pp

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage holds the head."""
        return self.stage == self.num_stages - 1
