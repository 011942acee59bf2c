"""Surfaces of latency over the numbers a step's time depends on."""

from dataclasses import dataclass

from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.image import EncodedImages
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.cost.family import Axes, StepLimits
from foretoken.simulator.cost.launching import LaunchRules
from foretoken.simulator.cost.padding import GraphRule
from foretoken.simulator.grid import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceSpec:
    """What surfaces depend on; equal specifications share them under one model version.

    `software` is the engine with its versions, whose measurements come first. `layout.dp` is above
    1 only where engines run in lock step and share experts. A sequence is sampled from at
    `rows_per_seq` of its tokens at most. Engines in lock step compute steps of `two_batch_tokens`
    each (0: none) in two halves, and steps go in `micro_batches` (0: whole) to experts on devices
    of their own. Devices are limited to `power_limit_w` (0: to what they are sold with), which
    steps with prompts meet as they last (see `lasting_steps.py`). A `correction` (empty: none) is
    multiplied to operators' times. `images` are those of every prompt (None: prompts are text).
    Sums over ranks of at most `fused_norm_bytes` are one kernel with the norm after them. With
    `fuses_static_quantize` attention and activations write what products read in FP8. Experts in
    blocks of FP8 compute blocks of `expert_block_rows` rows, 0 for those that tokens have, and run
    in `expert_block_kernel` (empty: in the engine's measured) where ranks split them; on Hopper.
    """

    model: ModelArchitecture
    device: str
    topology: str
    framework: str
    engine: str
    software: str
    kernels: tuple[tuple[str, str], ...]
    options: LoweringOptions
    layout: ParallelLayout
    graphs: GraphRule
    launches: LaunchRules
    piece_us: float
    max_num_batched_tokens: int
    max_num_seqs: int
    max_context: int
    rows_per_seq: int = 1
    two_batch_tokens: int = 0
    micro_batches: int = 0
    power_limit_w: float = 0.0
    correction: str = ""
    images: EncodedImages | None = None
    fused_norm_bytes: float = 0.0
    fuses_static_quantize: bool = False
    expert_block_rows: int = 0
    expert_block_kernel: str = ""

    @property
    def limits(self) -> StepLimits:
        """What bounds a step."""
        return StepLimits(
            num_tokens=self.max_num_batched_tokens,
            num_group_tokens=self.max_num_batched_tokens * self.layout.dp,
            num_seqs=self.max_num_seqs,
            num_rows=self.max_num_seqs * self.rows_per_seq,
            context=self.max_context,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """µs on a grid. `values` is [stage, channel, grid point], grid points flat, last axis fastest.

    The channels are the operator groups, then the lower and the upper bound, then the part of the
    time that rests on each provenance.
    """

    axes: Axes
    values: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class ApartExperts:
    """What steps have with experts on devices of their own, by points of the surface `group`.

    `sent` is what goes there and back, `num_parts` the micro-batches, `num_layers` those with
    experts.
    """

    sent: Surface
    num_parts: Ints
    num_layers: int


@dataclass(frozen=True, slots=True)
class PromptSurfaces:
    """Of the surfaces of a deployment those that depend on the tokens of prompts."""

    tokens: Surface
    prefill: Surface
    prefill_more: Surface
    group: Surface | None
    apart: ApartExperts | None
    encoding_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySurfaces:
    """All surfaces of a deployment.

    Axes: `tokens` (tokens), `rows` (sequences), `decode` (sequences, mean context, longest context
    over mean), `mixed` (new tokens of the longest prefill with them, then as `decode`), `prefill`
    (new tokens, context) of one sequence and `prefill_more` of each more in the same step, `group`
    (tokens of all engines in lock step; None where each runs on its own). `decode_tokens` and
    `mixed_tokens` give, from 0 tokens on, the point of `tokens` a step is padded to; `floor_us` by
    [stage, decode or mixed, tokens] is what its launches take. `notes` say whose measurements stand
    in for the engine's own. The images of one prompt take `encoding_us` to be encoded. Where
    experts are `apart`, `group` is what they compute alone (see `ffn_apart.py`). `steps` correct
    whole steps (None: nothing does), and are not in the surfaces.
    """

    model_version: str
    groups: tuple[str, ...]
    tokens: Surface
    rows: Surface
    decode: Surface
    mixed: Surface
    prefill: Surface
    prefill_more: Surface
    group: Surface | None
    decode_tokens: Ints
    mixed_tokens: Ints
    floor_us: Floats
    num_engines: int = 1
    notes: tuple[str, ...] = ()
    encoding_us: float = 0.0
    apart: ApartExperts | None = None
    steps: StepModel | None = None
