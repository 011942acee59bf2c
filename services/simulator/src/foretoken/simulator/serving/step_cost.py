"""How long serving steps take, and what that time consists of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.measurements.estimate import Provenance
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cost.answer import NUM_BOUNDS
from foretoken.simulator.cost.ffn_apart import together_us
from foretoken.simulator.cost.step_scope import bounds_of, stretch_of
from foretoken.simulator.cost.surface import LatencySurfaces, Surface
from foretoken.simulator.cost.tables import DECODE, MIXED, PREFILL, CostTables, shared_table
from foretoken.simulator.grid import Floats, Ints, grid_corners, interpolate
from foretoken.simulator.serving.record import Ints as AnyInts
from foretoken.simulator.serving.record import StepRecord, split_steps

# The group of time in which the device waits for launches.
LAUNCH_GROUP = "launch"
# Steps whose shares of the surfaces are in memory at once.
_PIECE_STEPS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAccount:
    """Busy time of many steps in s, summed over pipeline stages; `stage_busy_s` is of each."""

    time_s_by_group: Mapping[str, float]
    time_s_by_provenance: Mapping[str, float]
    low_s: float
    high_s: float
    stage_busy_s: tuple[float, ...]

    @property
    def busy_s(self) -> float:
        """Busy time at the operators' estimates."""
        return sum(self.time_s_by_group.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Grid points of a surface that enter some steps, each with its weight."""

    surface: Surface
    steps: AnyInts
    points: AnyInts
    weights: Floats


class SurfaceCost:
    """The cost of an engine's steps: `tables` to look up one, methods to account for many."""

    def __init__(self, surfaces: LatencySurfaces) -> None:
        self._surfaces = surfaces
        self._num_groups = len(surfaces.groups)
        self._stretch = stretch_of(surfaces.steps)
        self._tables = self._make_tables()

    @property
    def tables(self) -> CostTables:
        """What compiled code looks up."""
        return self._tables

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return len(self._surfaces.tokens.values)

    def account(self, steps: StepRecord) -> StepAccount:
        """Return where the time of these steps goes and what it rests on.

        Engines in lock step are each charged for the tokens of all.
        """
        # Bit by bit: a step's share of every surface takes far more room than the step itself.
        channels = np.zeros((self.num_stages, self._surfaces.tokens.values.shape[1]))
        waits_s = np.zeros(self.num_stages)
        for piece in split_steps(steps, _PIECE_STEPS):
            channels += self._channels_us(piece).sum(axis=-1) / US_PER_S
            waits_s += self._waits_us(piece).sum(axis=-1) / US_PER_S
        groups, bounds, provenance = np.split(
            channels, (self._num_groups, self._num_groups + NUM_BOUNDS), axis=1
        )
        by_group = dict(zip(self._surfaces.groups, groups.sum(axis=0).tolist(), strict=True))
        wait_s = float(waits_s.sum())
        if wait_s:
            by_group[LAUNCH_GROUP] = wait_s
        low_s, high_s = bounds.sum(axis=0).tolist()
        if self._surfaces.steps is not None:
            low_s, high_s = self._bounds_s(steps) - wait_s
        by_provenance = provenance.sum(axis=0).tolist()
        names = [member.name.lower() for member in Provenance]
        return StepAccount(
            time_s_by_group=by_group,
            time_s_by_provenance=dict(zip(names, by_provenance, strict=True)),
            low_s=low_s + wait_s,
            high_s=high_s + wait_s,
            stage_busy_s=tuple((groups.sum(axis=1) + waits_s).tolist()),
        )

    def breakdown(self, steps: StepRecord) -> Mapping[str, Floats]:
        """Return the time of each step in µs by operator group, summed over stages.

        With several stages `stage_0`, `stage_1`, ... are the time of each on top.
        """
        pieces = [self._break_down(piece) for piece in split_steps(steps, _PIECE_STEPS)]
        names = dict.fromkeys(name for piece in pieces for name in piece)
        none = [np.zeros(len(next(iter(piece.values())))) for piece in pieces]
        return {
            name: np.concatenate(
                [piece.get(name, zero) for piece, zero in zip(pieces, none, strict=True)]
            )
            for name in names
        }

    def _break_down(self, steps: StepRecord) -> dict[str, Floats]:
        num_steps = len(steps.num_tokens)
        total = np.zeros((self._num_groups, num_steps))
        for part in self._parts(steps):
            values = part.surface.values[:, : self._num_groups].sum(axis=0)
            for group in range(self._num_groups):
                total[group] += np.bincount(
                    part.steps, values[group, part.points] * part.weights, minlength=num_steps
                )
        by_group = dict(zip(self._surfaces.groups, total, strict=True))
        waits_us = self._waits_us(steps)
        if waits_us.any():
            by_group[LAUNCH_GROUP] = waits_us.sum(axis=0)
        if self.num_stages > 1:
            stages_us = self._busy_us(steps) + waits_us
            by_group.update({f"stage_{stage}": us for stage, us in enumerate(stages_us)})
        return by_group

    def _channels_us(self, steps: StepRecord) -> Floats:
        """Return [stage, channel, 1] of all steps together."""
        total = np.zeros((self.num_stages, self._surfaces.tokens.values.shape[1], 1))
        for part in self._parts(steps):
            num_points = part.surface.values.shape[-1]
            weights = np.bincount(part.points, part.weights, minlength=num_points)
            total += part.surface.values @ weights[:, None]
        return total

    def _waits_us(self, steps: StepRecord) -> Floats:
        """Return [stage, step]: how much longer than its operators the launches take."""
        floor_us = self._surfaces.floor_us
        ratios, constants_us = self._stretch[_stretched_as(steps)].T
        if not floor_us.any():
            return np.tile(constants_us, (self.num_stages, 1))
        at_least_us = floor_us[:, _kinds(steps), steps.num_tokens] * ratios
        waits_us: Floats = np.maximum(at_least_us - self._busy_us(steps), 0.0) + constants_us
        return waits_us

    def _bounds_s(self, steps: StepRecord) -> Floats:
        """Return the least and the most of the steps together, as what was learned bounds each."""
        bounds, total_s = bounds_of(self._surfaces.steps), np.zeros(2)
        for piece in split_steps(steps, _PIECE_STEPS):
            step_us = (self._busy_us(piece) + self._waits_us(piece)).sum(axis=0)
            total_s += step_us @ bounds[_stretched_as(piece)] / US_PER_S
        return total_s

    def _busy_us(self, steps: StepRecord) -> Floats:
        """Return [stage, step]: what the operators take."""
        return self._sum_us(self._parts(steps), len(steps.num_tokens))

    def _sum_us(self, parts: Iterable[_Part], num_steps: int) -> Floats:
        busy_us = np.zeros((self.num_stages, num_steps))
        for part in parts:
            values = self._total_us(part.surface)
            for stage in range(self.num_stages):
                busy_us[stage] += np.bincount(
                    part.steps,
                    values[stage, part.points] * part.weights,
                    minlength=num_steps,
                )
        return busy_us

    def _parts(self, steps: StepRecord) -> Iterator[_Part]:
        own = list(self._own_parts(steps))
        if self._surfaces.steps is not None:
            ratios = self._stretch[_stretched_as(steps), 0]
            own = [replace(part, weights=part.weights * ratios[part.steps]) for part in own]
        yield from own
        if self._surfaces.group is not None:
            yield from self._shared_parts(steps, own, self._surfaces.group)

    def _shared_parts(
        self, steps: StepRecord, own: Sequence[_Part], group: Surface
    ) -> Iterator[_Part]:
        """Yield what engines in lock step share; of experts apart what attention does not hide."""
        apart, everyone = self._surfaces.apart, np.arange(len(steps.num_tokens))
        tokens = steps.num_group_tokens
        if tokens is None:  # as many on each
            tokens = steps.num_tokens * self._surfaces.num_engines
        points = np.searchsorted(group.axes[0], tokens)
        if apart is None:
            yield _points(group, everyone, points)
            return
        floor_us = self._surfaces.floor_us[0, _kinds(steps), steps.num_tokens]
        own_us = np.maximum(self._sum_us(own, len(everyone))[0], floor_us)
        experts_us, sent_us = (self._total_us(it)[0, points] for it in (group, apart.sent))
        num_parts = apart.num_parts[points]
        whole_us = together_us(own_us, experts_us, sent_us, num_parts, apart.num_layers)
        other_us = experts_us + sent_us
        seen = np.divide(whole_us - own_us, other_us, out=np.ones_like(own_us), where=other_us > 0)
        for surface in (group, apart.sent):
            yield _Part(surface=surface, steps=everyone, points=points, weights=seen)

    def _own_parts(self, steps: StepRecord) -> Iterator[_Part]:
        surfaces = self._surfaces
        everyone = np.arange(len(steps.num_tokens))
        index = np.where(
            _kinds(steps) == MIXED,
            surfaces.mixed_tokens[steps.num_tokens],
            surfaces.decode_tokens[steps.num_tokens],
        )
        yield _points(surfaces.tokens, everyone, index)
        with_rows = np.flatnonzero(steps.num_rows > 0)
        yield _points(surfaces.rows, with_rows, steps.num_rows[with_rows] - 1)
        yield from self._decode_parts(steps)
        yield from self._prefill_parts(steps)

    def _decode_parts(self, steps: StepRecord) -> Iterator[_Part]:
        kinds = _kinds(steps)
        longest = np.zeros(len(kinds), dtype=np.int64)
        np.maximum.at(longest, steps.prefill_step, steps.prefill_tokens)
        for kind, surface in ((DECODE, self._surfaces.decode), (MIXED, self._surfaces.mixed)):
            chosen = np.flatnonzero((kinds == kind) & (steps.num_decodes > 0))
            num, kv = steps.num_decodes[chosen], steps.decode_kv_tokens[chosen]
            ragged = steps.decode_kv_tokens_max[chosen] * num / np.maximum(kv, 1)
            at: tuple[Floats, ...] = (num.astype(np.float64), kv / num, ragged)
            if kind == MIXED:
                at = (longest[chosen].astype(np.float64), *at)
            yield from _corners(surface, chosen, at)

    def _prefill_parts(self, steps: StepRecord) -> Iterator[_Part]:
        """Yield the prefill of each step that takes longest as alone, every other as one more."""
        alone, more = self._surfaces.prefill, self._surfaces.prefill_more
        owners = steps.prefill_step
        at = (steps.prefill_tokens.astype(np.float64), steps.prefill_context.astype(np.float64))
        alone_us = interpolate(alone.axes, self._total_us(alone)[0], at)
        order = np.lexsort((-alone_us, owners))
        firsts = order[np.diff(owners[order], prepend=-1) > 0]
        others = np.setdiff1d(order, firsts, assume_unique=True)
        for surface, chosen in ((alone, firsts), (more, others)):
            yield from _corners(surface, owners[chosen], (at[0][chosen], at[1][chosen]))

    def _make_tables(self) -> CostTables:
        surfaces = self._surfaces
        tokens_us = self._total_us(surfaces.tokens)
        by_kind = (tokens_us[:, surfaces.decode_tokens], tokens_us[:, surfaces.mixed_tokens])
        return CostTables(
            tokens_us=np.ascontiguousarray(np.stack(by_kind, axis=1)),
            rows_us=np.pad(self._total_us(surfaces.rows), ((0, 0), (1, 0))),
            decode_seqs=_floats(surfaces.decode.axes[0]),
            decode_mean=_floats(surfaces.decode.axes[1]),
            decode_raggedness=_floats(surfaces.decode.axes[2]),
            decode_us=self._shaped_us(surfaces.decode),
            mixed_prefill=_floats(surfaces.mixed.axes[0]),
            mixed_us=self._shaped_us(surfaces.mixed),
            prefill_tokens=_floats(surfaces.prefill.axes[0]),
            prefill_context=_floats(surfaces.prefill.axes[1]),
            prefill_us=self._shaped_us(surfaces.prefill),
            prefill_more_us=self._shaped_us(surfaces.prefill_more),
            floor_us=np.ascontiguousarray(surfaces.floor_us),
            shared=self._shared_table(),
            stretch=self._stretch,
        )

    def _shared_table(self) -> Floats:
        """Return what engines in lock step share, by all tokens of theirs."""
        group, apart = self._surfaces.group, self._surfaces.apart
        if group is None:
            return shared_table(np.zeros((self.num_stages, 1)))
        counts = group.axes[0]
        index = np.searchsorted(counts, np.arange(counts[-1] + 1))
        shared_us = self._total_us(group)[:, index]
        if apart is None:
            return shared_table(shared_us)
        sent_us = self._total_us(apart.sent)[:, index]
        return shared_table(shared_us, sent_us, apart.num_parts[index], apart.num_layers)

    def _total_us(self, surface: Surface) -> Floats:
        total: Floats = surface.values[:, : self._num_groups].sum(axis=1)
        return total

    def _shaped_us(self, surface: Surface) -> Floats:
        lengths = [len(axis) for axis in surface.axes]
        return np.ascontiguousarray(self._total_us(surface).reshape(-1, *lengths))


def _kinds(steps: StepRecord) -> Ints:
    return np.where(steps.num_prefills > 0, MIXED, DECODE)


def _stretched_as(steps: StepRecord) -> Ints:
    """Return the row of `CostTables.stretch` that each step goes by."""
    kinds = _kinds(steps)
    return np.where((kinds == MIXED) & (steps.num_decodes == 0), PREFILL, kinds)


def _points(surface: Surface, steps: AnyInts, points: AnyInts) -> _Part:
    return _Part(surface=surface, steps=steps, points=points, weights=np.ones(len(points)))


def _corners(surface: Surface, steps: AnyInts, at: tuple[Floats, ...]) -> Iterator[_Part]:
    for points, weights in grid_corners(surface.axes, at):
        yield _Part(surface=surface, steps=steps, points=points, weights=weights)


def _floats(axis: Ints) -> Floats:
    return np.ascontiguousarray(axis, dtype=np.float64)
