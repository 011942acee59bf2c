"""A whole layer but attention, as Vidur profiles it: the sum of its operators at a token count."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accuracy.asking import Extent, Say, make_rng
from accuracy.cut import Cut, dimension, hold_out_beyond, hold_out_gaps, hold_out_random
from accuracy.line import Figure, Line, Scores
from accuracy.source import VIDUR_A30, VIDUR_A100, VIDUR_H100, Measurements
from accuracy.table import Floats, Integers, Mask, read_points
from accuracy.trial import Score, can_ask, estimate, score
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.series import SeriesKey, build_series

NAME = "Vidur layer sum"
SOURCES = (VIDUR_A30, VIDUR_A100, VIDUR_H100)
_QUESTIONS: tuple[tuple[str, Cut, str, Figure], ...] = (
    ("random", hold_out_random, "Vidur 1.9/4.3", Figure(1.8, 3.7)),
    ("gaps", hold_out_gaps(dimension("num_tokens")), "Vidur 3.2/6.8", Figure(2, 4.5)),
    (
        "twice the tokens",
        hold_out_beyond(dimension("num_tokens")),
        "Vidur 33/49",
        Figure(2.5, 5),
    ),
)


@dataclass(frozen=True, slots=True)
class _Part:
    """One operator's rows of all layers; `layer` is the place of each row's layer."""

    key: SeriesKey
    points: Integers
    latency_us: Floats
    layer: Integers


@dataclass(frozen=True, slots=True)
class _Layers:
    """Rows of a profile: every one is a layer at a token count and tensor-parallel degree."""

    num_tokens: Integers
    parts: tuple[_Part, ...]


def ask_layers(measurements: Measurements, extent: Extent, say: Say) -> Iterator[Line]:
    """Yield a line per question over the profiles of all devices."""
    scores = {split: Scores() for split, *_ in _QUESTIONS}
    for source in SOURCES:
        layers = _read_layers(measurements.read(source))
        for seed in range(extent.num_seeds):
            say(f"{NAME}, seed {seed}: {source.device}, {len(layers.num_tokens)} layers")
            for split, cut, *_ in _QUESTIONS:
                rng = make_rng(seed, source.device, split)
                is_out = cut({"num_tokens": layers.num_tokens}, rng)
                if can_ask(is_out):
                    scores[split].add(source.device, seed, _hold_out(layers, is_out, seed))
    for split, _, peer, goal in _QUESTIONS:
        line = scores[split].summarise(NAME, split, peer, goal)
        if line is not None:
            yield line


def _read_layers(rows: pa.Table) -> _Layers:
    """Return the layers that every operator has a usable time for.

    The embedding is not part of a layer, and all-reduce and attention are in files of their own.
    """
    is_layer = pc.and_(pc.ends_with(rows["source_file"], "mlp.csv"), _is_no_embedding(rows))
    rows = rows.filter(is_layer)
    numbers = rows["source_row"].to_numpy()
    found, counts = np.unique(numbers, return_counts=True)
    kept = found[counts == counts.max()]
    rows = rows.filter(pa.array(np.isin(numbers, kept)))
    parts = tuple(
        _read_part(rows.filter(pc.equal(rows["operator"], name)), kept)
        for name in sorted(set(rows["operator"].to_pylist()))
    )
    gemm = next(part for part in parts if part.key.operator == "gemm")
    num_tokens = np.zeros(len(kept), dtype=np.int64)
    num_tokens[gemm.layer] = gemm.points[:, gemm.key.spec.dim_names.index("m")]
    return _Layers(num_tokens, parts)


def _is_no_embedding(rows: pa.Table) -> pa.Array:
    return pc.not_equal(rows["operator"], "embedding")


def _read_part(rows: pa.Table, layers: Integers) -> _Part:
    first = rows.slice(0, 1).to_pylist()[0]
    spec = find_operator(first["operator"])
    key = SeriesKey(spec.name, first["device"], "", first["dtype"], "forward", first["framework"])
    points, latency_us = read_points(rows)
    return _Part(key, points, latency_us, np.searchsorted(layers, rows["source_row"].to_numpy()))


def _hold_out(layers: _Layers, is_out: Mask, seed: int) -> Score:
    """Train every operator without the layers held out, and compare the sums over operators.

    The bounds of a sum are the sums of the bounds, as if all operators erred alike; its provenance
    is the weakest of theirs.
    """
    sums = np.zeros((4, len(is_out)))
    provenance = np.zeros(len(is_out), dtype=np.int64)
    for part in layers.parts:
        asked = is_out[part.layer]
        known = build_series(part.key, part.points[~asked], part.latency_us[~asked])
        found = estimate(known, part.points[asked], seed)
        columns = (part.latency_us[asked], found.latency_us, found.low_us, found.high_us)
        for place, column in enumerate(columns):
            np.add.at(sums[place], part.layer[asked], column)
        np.maximum.at(provenance, part.layer[asked], found.provenance)
    truth_us, latency_us, low_us, high_us = sums[:, is_out]
    total = LatencyColumns(
        latency_us=latency_us,
        low_us=low_us,
        high_us=high_us,
        provenance=provenance[is_out],
    )
    return score(truth_us, total)
