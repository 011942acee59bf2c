"""How long steps take, for many at once: the few points queried, and times between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.cost.answer import NUM_BOUNDS
from foretoken.simulator.cost.family import Axes
from foretoken.simulator.cost.ffn_apart import count_micro_batches, together_us
from foretoken.simulator.cost.form import SurfaceForm
from foretoken.simulator.cost.latency_surfaces import fetch_forms, query_of, replica_ranks
from foretoken.simulator.cost.padding import padded_tokens
from foretoken.simulator.cost.surface import LatencySurfaces, Surface, SurfaceSpec
from foretoken.simulator.cost.tables import DECODE, MIXED
from foretoken.simulator.grid import Floats, Ints, interpolate, spaced_integers
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.serving.load import LoadProfile

# The estimate, its lower and its upper bound.
NUM_VARIANTS = 1 + NUM_BOUNDS


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSteps:
    """Steps that compute prompts, one entry of each array a step.

    `num_prefills` pieces of `piece_tokens` come after `piece_context` tokens each, all of them
    alike; `num_decodes` sequences decode with them. `num_group_tokens` counts the tokens of all
    engines in lock step.
    """

    num_prefills: Floats
    piece_tokens: Floats
    piece_context: Floats
    num_decodes: Floats
    raggedness: Floats
    num_group_tokens: Floats


class DecodeSteps(NamedTuple):
    """Steps in which sequences decode alone, one entry of each array a step."""

    num_decodes: Floats
    raggedness: Floats
    num_group_tokens: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMix:
    """The steps that a request takes in steady state, one entry of each array a replica.

    So many steps like `prompts` compute prompts, and so many like `decodes` do not; requests that
    share a step take a part of it each.
    """

    prompts: MixedSteps
    prompts_per_request: Floats
    decodes: DecodeSteps
    decodes_per_request: Floats


class StepTimes:
    """Times of an engine's steps in µs as [variant, stage, step]; variants as in `NUM_VARIANTS`.

    A decoding sequence computes the next of its tokens and what was proposed after it. The
    `draft` (None: proposals take no time), on one stage, then runs over all tokens of the step and
    over one of each sequence for every other token that it proposes.
    """

    def __init__(
        self,
        spec: SurfaceSpec,
        surfaces: LatencySurfaces,
        draft: "StepTimes | None" = None,
    ) -> None:
        self._surfaces, self._draft = surfaces, draft
        self._tokens_per_seq = spec.rows_per_seq
        most = spec.limits.num_tokens
        graphs = spec.graphs
        self._padded: tuple[Ints, Ints] = (
            padded_tokens(most, graphs.decode_sizes),
            padded_tokens(most, graphs.mixed_sizes),
        )
        self._values = {
            name: self._variants(getattr(surfaces, name))
            for name in ("tokens", "rows", "decode", "mixed", "prefill", "prefill_more")
        }
        self._shared = self._variants(surfaces.group) if surfaces.group else None
        self._sent = self._variants(surfaces.apart.sent) if surfaces.apart else None
        self._micro_batches, self._num_engines = spec.micro_batches, spec.layout.dp

    @property
    def model_version(self) -> str:
        """The version of the predictor's model."""
        return self._surfaces.model_version

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return len(self._surfaces.tokens.values)

    def decode_us(self, num_decodes: Floats, raggedness: Floats, num_group: Floats) -> Floats:
        """Return the time of steps in which so many sequences decode."""
        num_tokens = num_decodes * self._tokens_per_seq
        own = self.pass_us(num_tokens, num_tokens, num_decodes, raggedness, num_group)
        if self._draft is None:
            return own
        first = self._draft.pass_us(num_tokens, num_decodes, num_decodes, raggedness, num_group)
        num_all = num_group / self._tokens_per_seq
        return own + first + self._other_drafts_us(num_decodes, raggedness, num_all)

    def pass_us(
        self,
        num_tokens: Floats,
        num_rows: Floats,
        num_seqs: Floats,
        raggedness: Floats,
        num_group: Floats,
    ) -> Floats:
        """Return the time of passes over so many tokens of sequences, sampled from at some."""
        axes = self._surfaces.decode.axes
        at = (num_seqs, np.full_like(num_seqs, float(axes[1][0])), raggedness)
        total = self._tokens_us(DECODE, num_tokens) + self._rows_us(num_rows)
        total = total + interpolate(axes, self._values["decode"], at)
        return self._with_shared_us(self._floored(DECODE, num_tokens, total), num_group)

    def mixed_us(self, steps: MixedSteps) -> Floats:
        """Return the time of steps that compute prompts."""
        num_tokens = steps.num_decodes * self._tokens_per_seq
        own = self.mixed_pass_us(steps, num_tokens)
        if self._draft is None:
            return own
        first = self._draft.mixed_pass_us(steps, num_tokens, has_rows_of_drafts=False)
        num_seqs = steps.num_decodes + steps.num_prefills
        all_tokens = num_tokens + steps.num_prefills * steps.piece_tokens
        num_all = steps.num_group_tokens * num_seqs / np.maximum(all_tokens, 1.0)
        return own + first + self._other_drafts_us(num_seqs, steps.raggedness, num_all)

    def mixed_pass_us(
        self, steps: MixedSteps, num_decode_tokens: Floats, *, has_rows_of_drafts: bool = True
    ) -> Floats:
        """Return the time of passes over prompts and so many tokens of decoding sequences."""
        num_tokens = num_decode_tokens + steps.num_prefills * steps.piece_tokens
        total = self._tokens_us(MIXED, num_tokens)
        num_rows = num_decode_tokens if has_rows_of_drafts else steps.num_decodes
        total = total + self._rows_us(num_rows + steps.num_prefills)
        at = (steps.piece_tokens, steps.piece_context)
        prefill = self._surfaces.prefill.axes
        alone = interpolate(prefill, self._values["prefill"], at)
        more = interpolate(prefill, self._values["prefill_more"], at)
        total = total + alone * np.minimum(steps.num_prefills, 1.0)
        total = total + more * np.maximum(steps.num_prefills - 1.0, 0.0)
        total = total + self._beside_us(steps)
        own_us = self._floored(MIXED, num_tokens, total)
        return self._with_shared_us(own_us, steps.num_group_tokens)

    def _other_drafts_us(self, num_seqs: Floats, raggedness: Floats, num_all: Floats) -> Floats:
        """Return the time of the draft's passes after its first, a token of each sequence."""
        num_others = self._tokens_per_seq - 2
        if self._draft is None or num_others < 1:
            return np.zeros(1)
        each = self._draft.pass_us(num_seqs, num_seqs, num_seqs, raggedness, num_all)
        return num_others * each

    def _beside_us(self, steps: MixedSteps) -> Floats:
        """Return what decoding sequences add to a step with prompts."""
        axes = self._surfaces.mixed.axes
        context = np.full_like(steps.num_decodes, float(axes[2][0]))
        at = (steps.piece_tokens, steps.num_decodes, context, steps.raggedness)
        # Below the smallest batch that was asked about time falls with the sequences, to none.
        part = np.minimum(steps.num_decodes / float(axes[1][0]), 1.0)
        return interpolate(axes, self._values["mixed"], at) * part

    def _tokens_us(self, kind: int, num_tokens: Floats) -> Floats:
        padded = self._padded[kind]
        # Between whole counts, which padding rounds up, both neighbours count.
        below = np.clip(np.floor(num_tokens), 1, len(padded) - 1).astype(np.int64)
        above = np.minimum(below + 1, len(padded) - 1)
        ratio = np.clip(num_tokens - below, 0.0, 1.0)
        axes, values = self._surfaces.tokens.axes, self._values["tokens"]
        lower = interpolate(axes, values, (padded[below].astype(np.float64),))
        upper = interpolate(axes, values, (padded[above].astype(np.float64),))
        mean: Floats = lower * (1 - ratio) + upper * ratio
        return mean

    def _rows_us(self, num_rows: Floats) -> Floats:
        return interpolate(self._surfaces.rows.axes, self._values["rows"], (num_rows,))

    def _floored(self, kind: int, num_tokens: Floats, total_us: Floats) -> Floats:
        floor = self._surfaces.floor_us
        if not floor.any():
            return total_us
        index = np.clip(np.rint(num_tokens), 0, floor.shape[2] - 1).astype(np.int64)
        return np.maximum(total_us, floor[None, :, kind, index])

    def _with_shared_us(self, own_us: Floats, num_group_tokens: Floats) -> Floats:
        """Return the time of steps with what engines in lock step share."""
        if self._shared is None or self._surfaces.group is None:
            return own_us
        axes, at = self._surfaces.group.axes, (num_group_tokens,)
        shared_us = interpolate(axes, self._shared, at)
        if self._sent is None:
            return own_us + shared_us
        return self._together_us(
            own_us, shared_us, interpolate(axes, self._sent, at), num_group_tokens
        )

    def _together_us(
        self, own_us: Floats, experts_us: Floats, sent_us: Floats, num_group_tokens: Floats
    ) -> Floats:
        """Return the time of steps whose experts are apart."""
        num_parts = count_micro_batches(num_group_tokens / self._num_engines, self._micro_batches)
        num_layers = self._surfaces.apart.num_layers if self._surfaces.apart else 1
        whole_us: Floats = together_us(own_us, experts_us, sent_us, num_parts, num_layers)
        return whole_us

    def _variants(self, surface: Surface) -> Floats:
        """Return [variant, stage, grid point] of a surface."""
        num_groups = len(self._surfaces.groups)
        estimate = surface.values[:, :num_groups].sum(axis=1)
        bounds = surface.values[:, num_groups : num_groups + NUM_BOUNDS]
        return np.ascontiguousarray(
            np.concatenate((estimate[None], np.moveaxis(bounds, 1, 0)), axis=0)
        )


class ProvenanceTimes(StepTimes):
    """Times of an engine's steps as [provenance, stage, step], in the order of `Provenance`.

    What the host's launches add rests on no operator and is left out.
    """

    def time_request_us(self, mix: StepMix) -> Floats:
        """Return the time of all stages for a request, as [provenance, replica]."""
        prompts_us = self.mixed_us(mix.prompts).sum(axis=1)
        decodes_us = self.decode_us(*mix.decodes).sum(axis=1)
        total: Floats = mix.prompts_per_request * prompts_us + mix.decodes_per_request * decodes_us
        return total

    def _floored(self, kind: int, num_tokens: Floats, total_us: Floats) -> Floats:
        del kind, num_tokens
        return total_us

    def _together_us(
        self, own_us: Floats, experts_us: Floats, sent_us: Floats, num_group_tokens: Floats
    ) -> Floats:
        """Return what all operators take, whatever hides behind what."""
        del num_group_tokens
        return own_us + experts_us + sent_us

    def _variants(self, surface: Surface) -> Floats:
        first = len(self._surfaces.groups) + NUM_BOUNDS
        return np.ascontiguousarray(np.moveaxis(surface.values[:, first:], 1, 0))


# Points per doubling. Between captured batches matrix products are close to linear.
_TOKENS_PER_OCTAVE = 3
_PREFILL_PER_OCTAVE = 2
_MIXED_PER_OCTAVE = 1
_SHORTEST_PREFILL = 64
# Contexts before a piece of a prompt: its cost is linear in them.
_NUM_CONTEXTS = 3
# Longest context of a batch over the mean.
_RAGGEDNESS = np.array([1.0, 1.5, 4.0])


def grid_axes(spec: SurfaceSpec, load: LoadProfile, batches: Sequence[int]) -> Mapping[str, Axes]:
    """Return the axes of every surface: the batches that are tried, at the load's mean context."""
    limits = spec.limits
    tried = np.unique(np.minimum(np.array(batches, dtype=np.int64), limits.num_seqs))
    longest = max(min(limits.num_tokens, load.longest), 1)
    context = np.array([max(round(load.context_mean), 1)])
    decode = (tried, context, _RAGGEDNESS)
    pieces = spaced_integers(min(_SHORTEST_PREFILL, longest), longest, _PREFILL_PER_OCTAVE)
    before = np.unique(np.linspace(0, load.longest, _NUM_CONTEXTS).astype(np.int64))
    axes: dict[str, Axes] = {
        "tokens": (_token_counts(spec, tried * spec.rows_per_seq),),
        "rows": (np.union1d(tried * spec.rows_per_seq, spaced_integers(1, limits.num_rows, 1)),),
        "decode": decode,
        "prefill": (pieces, before),
        "batched": (pieces, before),
        "mixed": (spaced_integers(int(pieces[0]), longest, _MIXED_PER_OCTAVE), *decode),
    }
    if spec.layout.dp > 1:
        most = limits.num_group_tokens
        axes["group"] = (
            np.union1d(tried * spec.rows_per_seq, spaced_integers(1, most, _TOKENS_PER_OCTAVE)),
        )
    return axes


def fetch_grids(
    wanted: Sequence[tuple[SurfaceSpec, Mapping[str, Axes]]], predictor: LatencySource
) -> list[LatencySurfaces]:
    """Return the surfaces of many engines; those of equal `query_of` are asked for at once.

    Raises:
        InvalidRequestError: a layout does not fit its model.
        ForetokenError: whatever the predictor raises.

    """
    forms = [SurfaceForm(spec, replica_ranks(spec), axes) for spec, axes in wanted]
    queries = [query_of(spec) for spec, _ in wanted]
    found: dict[int, LatencySurfaces] = {}
    for query in dict.fromkeys(queries):
        members = [index for index, other in enumerate(queries) if other == query]
        surfaces, steps = fetch_forms(query, [forms[index] for index in members], predictor)
        if steps is not None:
            reason = "corrects whole steps of one layout, and a search compares many: leave it out"
            raise InvalidRequestError.of_field("correction", reason)
        found.update(zip(members, surfaces, strict=True))
    return [found[index] for index in range(len(wanted))]


def _token_counts(spec: SurfaceSpec, batches: Ints) -> Ints:
    """Return token counts that cost what they cost by themselves, not by interpolation."""
    most = spec.limits.num_tokens
    whole = np.union1d(spaced_integers(1, most, _TOKENS_PER_OCTAVE), np.minimum(batches, most))
    ways = ((), spec.graphs.decode_sizes, spec.graphs.mixed_sizes)
    counts = [padded_tokens(most, sizes)[whole] for sizes in dict.fromkeys(ways)]
    return np.unique(np.concatenate(counts))
