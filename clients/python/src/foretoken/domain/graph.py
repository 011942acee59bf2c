"""The operator graph of one rank: what runs in a step, before anyone asks how long it takes."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.estimate import DType, Phase
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operator import find_operator
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


class Section(enum.Enum):
    """Which part of the model an operator belongs to."""

    EMBEDDING = 1
    LAYER = 2
    HEAD = 3
    BOUNDARY = 4  # between pipeline stages
    GRADIENT = 5  # once per training step: gradient reduction
    OPTIMIZER = 6  # once per training step: parameter update


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorNode:
    """One operator of a step, run `repeat` times. `dims` may be columns.

    `role` is what the model calls it ("mlp_down_proj"); `group` what a breakdown shows it under.
    In the section LAYER it runs in `repeat` layers from `first_layer` on. With `shares_weights` its
    weights are another operator's (a tied embedding) and count there.
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
    shares_weights: bool = False

    @property
    def num_weights(self) -> Quantity:
        """Parameters held by all repetitions together."""
        if self.shares_weights:
            return 0
        return find_operator(self.operator).num_weights(self.dims) * self.repeat


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

    `num_tokens` rows go through the layers, `num_output_rows` through the head.
    """

    num_tokens: Quantity
    num_output_rows: Quantity
    prefill: PrefillShape | None = None
    decode: DecodeShape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The rank a graph is lowered for: its place in the layout and in the machine."""

    model: ModelArchitecture
    layout: ParallelLayout
    devices_per_node: int
    stage: int = 0

    @property
    def stage_layers(self) -> range:
        """Layers of this stage; the first stages take one more where they do not divide."""
        whole, rest = divmod(self.model.num_layers, self.layout.pp)
        start = self.stage * whole + min(self.stage, rest)
        return range(start, start + whole + (1 if self.stage < rest else 0))

    @property
    def num_stage_layers(self) -> int:
        """Number of layers of this stage."""
        return len(self.stage_layers)

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage holds the head."""
        return self.stage == self.layout.pp - 1
