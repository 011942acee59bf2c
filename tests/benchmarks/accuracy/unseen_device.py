"""GEMM on a device left out of training, with none to many of its points measured after all."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from accuracy.asking import Extent, Say, make_rng
from accuracy.line import Figure, Line, Scores
from accuracy.source import AICONFIGURATOR, Measurements
from accuracy.table import MeasuredTable, split_into_tables, take
from accuracy.trial import CONFIG, Score, ask, score
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.trainer import SeriesModel, train_series
from foretoken.predictor.training_rows import Series
from foretoken.predictor.transfer import train_transfers

NAME = "GEMM on unseen device"
# One table of each: bf16 as vLLM runs it, with no weights in another format.
_DEVICES = ("a100_sxm_80", "h200_sxm", "l40s", "gb200")
_NUM_ASKED = 4_000
# Measured points, what a model of that device alone and a pooled prototype reach, and the goal.
_STEPS: tuple[tuple[int, str, Figure | None], ...] = (
    (0, "", None),
    (20, "alone 25, pool 8.6", Figure(8)),
    (100, "alone 10, pool 6", Figure(6)),
    (1_000, "alone 5.6, pool 4.9", Figure(4.8)),
)


def ask_unseen(measurements: Measurements, extent: Extent, say: Say) -> Iterator[Line]:
    """Yield a line per number of points measured on the device left out."""
    tables = {device: _find_table(measurements, device) for device in _DEVICES}
    scores = {step: Scores() for step, *_ in _STEPS}
    for seed in range(extent.num_seeds):
        thinned = {name: table.thin(extent.max_points, seed) for name, table in tables.items()}
        models = {name: train_series(table.series, CONFIG, seed) for name, table in thinned.items()}
        for device in _DEVICES:
            say(f"{NAME}, seed {seed}: {device}")
            others = [models[name] for name in _DEVICES if name != device]
            for step, result in _ask_device(tables[device].series, others, seed).items():
                scores[step].add(device, seed, result)
    for step, peer, goal in _STEPS:
        line = scores[step].summarise(NAME, f"{step:,} points", peer, goal)
        if line is not None:
            yield line
    for device in _DEVICES:
        for step, _, _ in _STEPS:
            one = Scores({device: scores[step].by_table[device]})
            line = one.summarise(NAME, f"{device}, {step:,}", "", None)
            if line is not None:
                yield line


def _find_table(measurements: Measurements, device: str) -> MeasuredTable:
    rows = measurements.read(AICONFIGURATOR, "gemm", device)
    plain = [
        table
        for table in split_into_tables(rows, 1_000)
        if table.series.key.dtype == "bf16"
        and table.series.key.framework.startswith("vllm")
        and "quant=" not in table.name
    ]
    return plain[0]


def _ask_device(series: Series, others: Sequence[SeriesModel], seed: int) -> Mapping[int, Score]:
    """Return the score with every number of measured points, on the same other points."""
    order = make_rng(seed, series.key.device).permutation(len(series.points))
    asked = take(series, np.sort(order[-_NUM_ASKED:]))
    found: dict[int, Score] = {}
    for step, *_ in _STEPS:
        own = {}
        if step:
            known = take(series, np.sort(order[:step]))
            own = {series.key: train_series(known, CONFIG, seed)}
        models = ModelSet(
            version="benchmark",
            series=own,
            transfers=train_transfers([*others, *own.values()], CONFIG, seed),
        )
        found[step] = score(asked.latency_us, ask(models, series.key, asked.points))
    return found
