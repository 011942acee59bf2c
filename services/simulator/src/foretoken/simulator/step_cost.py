"""How long a serving step takes, from latency surfaces held in memory."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.estimate import Provenance
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats, grid_weights
from foretoken.simulator.latency_surfaces import LatencySurfaces, Surface
from foretoken.simulator.serving.batch import StepShape
from foretoken.simulator.serving.step_log import StepColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAccount:
    """Busy time of many steps in s, summed over pipeline stages."""

    time_s_by_group: Mapping[str, float]
    time_s_by_provenance: Mapping[str, float]
    low_s: float
    high_s: float

    @property
    def busy_s(self) -> float:
        """Busy time at the operators' estimates."""
        return sum(self.time_s_by_group.values())


class SurfaceCost:
    """Adds what a step's tokens, sequences, decoding contexts and prefills cost.

    Several prefills in a step are added one by one: their kernels fill the device differently, so
    no single equivalent prefill stands for them.
    """

    def __init__(self, surfaces: LatencySurfaces, max_num_tokens: int) -> None:
        self._surfaces = surfaces
        self._num_groups = len(surfaces.groups)
        token_points = surfaces.tokens.axes[0]
        # Counts between two points cost as much as the upper one.
        self._token_index = np.searchsorted(token_points, np.arange(max_num_tokens + 1))
        self._tokens_us: list[list[float]] = self._total_us(surfaces.tokens)[
            :, self._token_index
        ].tolist()
        self._rows_us: list[list[float]] = np.pad(
            self._total_us(surfaces.rows), ((0, 0), (1, 0))
        ).tolist()
        self._decode = [
            _DecodePlanes(surfaces.decode.axes, v) for v in self._total_us(surfaces.decode)
        ]
        self._prefill = [
            _Plane(surfaces.prefill.axes, values) for values in self._total_us(surfaces.prefill)
        ]

    @property
    def num_stages(self) -> int:
        """Pipeline stages of a replica."""
        return len(self._tokens_us)

    def stage_us(self, shape: StepShape) -> Sequence[float]:
        """Return the time of a step on each stage, in µs."""
        return [self._one_stage_us(stage, shape) for stage in range(self.num_stages)]

    def decode_us(self, num_decodes: int, kv_tokens: int, kv_tokens_max: int) -> float:
        """Return the time on the first stage of a step that only decodes, in µs."""
        return (
            self._tokens_us[0][num_decodes]
            + self._rows_us[0][num_decodes]
            + self._decode[0].at(num_decodes, kv_tokens, kv_tokens_max)
        )

    def account(self, steps: StepColumns) -> StepAccount:
        """Return where the time of these steps goes and what it rests on."""
        surfaces = self._surfaces
        token_counts = np.bincount(
            self._token_index[steps.num_tokens], minlength=len(surfaces.tokens.axes[0])
        )
        row_counts = np.bincount(steps.num_rows, minlength=len(surfaces.rows.axes[0]) + 1)[1:]
        has_decodes = steps.num_decodes > 0
        num, kv = steps.num_decodes[has_decodes], steps.decode_kv_tokens[has_decodes]
        longest = steps.decode_kv_tokens_max[has_decodes]
        decode_weights = grid_weights(
            surfaces.decode.axes, (num.astype(np.float64), kv / num, longest * num / kv)
        )
        prefill_weights = grid_weights(
            surfaces.prefill.axes,
            (steps.prefill_tokens.astype(np.float64), steps.prefill_context.astype(np.float64)),
        )
        channels_s = (
            surfaces.tokens.values @ token_counts
            + surfaces.rows.values @ row_counts
            + surfaces.decode.values @ decode_weights
            + surfaces.prefill.values @ prefill_weights
        ).sum(axis=0) / US_PER_S
        by_group, (low_s, high_s), by_provenance = np.split(
            channels_s, (self._num_groups, self._num_groups + 2)
        )
        return StepAccount(
            time_s_by_group=dict(zip(surfaces.groups, by_group.tolist(), strict=True)),
            time_s_by_provenance={
                member.name.lower(): value
                for member, value in zip(Provenance, by_provenance.tolist(), strict=True)
            },
            low_s=float(low_s),
            high_s=float(high_s),
        )

    def _total_us(self, surface: Surface) -> Floats:
        total: Floats = surface.values[:, : self._num_groups].sum(axis=1)
        return total

    def _one_stage_us(self, stage: int, shape: StepShape) -> float:
        total_us = self._tokens_us[stage][shape.num_tokens] + self._rows_us[stage][shape.num_rows]
        if shape.num_decodes:
            total_us += self._decode[stage].at(
                shape.num_decodes, shape.decode_kv_tokens, shape.decode_kv_tokens_max
            )
        for num_tokens, context in shape.prefills:
            total_us += self._prefill[stage].at(num_tokens, context)
        return total_us


class _Plane:
    """A two-dimensional grid that answers one point at a time."""

    def __init__(self, axes: Sequence[NDArray[Any]], values: Floats) -> None:
        self._first: list[float] = axes[0].tolist()
        self._second: list[float] = axes[1].tolist()
        self._rows: list[list[float]] = values.reshape([len(axis) for axis in axes]).tolist()

    def at(self, first: float, second: float) -> float:
        """Return the linear interpolation; outside the grid its edge counts."""
        i, j, ratio_i = 0, 0, 0.0
        row = self._rows
        if len(self._first) > 1:
            i, ratio_i = _locate(self._first, first)
        j, ratio_j = _locate(self._second, second)
        lower = row[i][j] + (row[i][j + 1] - row[i][j]) * ratio_j
        if ratio_i == 0.0:
            return lower
        upper = row[i + 1][j] + (row[i + 1][j + 1] - row[i + 1][j]) * ratio_j
        return lower + (upper - lower) * ratio_i


class _DecodePlanes:
    """Decode attention: a plane of (mean context, raggedness) for every number of sequences."""

    def __init__(self, axes: Sequence[NDArray[Any]], values: Floats) -> None:
        self._num_seqs, self._mean, self._raggedness = axes
        self._values = values.reshape([len(axis) for axis in axes])
        self._planes: dict[int, _Plane] = {}

    def at(self, num_seqs: int, kv_tokens: int, kv_tokens_max: int) -> float:
        plane = self._planes.get(num_seqs)
        if plane is None:
            plane = self._planes[num_seqs] = self._cut_plane(num_seqs)
        mean = kv_tokens / num_seqs
        return plane.at(mean, kv_tokens_max / mean)

    def _cut_plane(self, num_seqs: int) -> _Plane:
        weights = grid_weights((self._num_seqs,), (np.array([float(num_seqs)]),))
        return _Plane((self._mean, self._raggedness), np.tensordot(weights, self._values, 1))


def _locate(axis: list[float], wanted: float) -> tuple[int, float]:
    last = len(axis) - 2
    if wanted >= axis[-1]:
        return last, 1.0
    index = bisect_right(axis, wanted) - 1
    if index < 0:
        return 0, 0.0
    return index, (wanted - axis[index]) / (axis[index + 1] - axis[index])
