"""GEMM on a device left out of training, with none to many of its points measured after all."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from accuracy.asking import Extent, Say, make_rng
from accuracy.line import Figure, Line, Scores
from accuracy.source import AICONFIGURATOR, Measurements
from accuracy.table import MeasuredTable, split_into_tables, take
from accuracy.trial import CONFIG, Score, ask, score
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.training_rows import Series
from foretoken.predictor.transfer import TransferModel, train_transfers
from foretoken.predictor.transfer.device_transfer import train_transfer_series
from foretoken.predictor.transfer.library import DonorLibrary
from foretoken.predictor.transfer.pool import DonorPool

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
    tables = _find_tables(measurements)
    plain = {device: _pick(tables, device) for device in _DEVICES}
    scores = {step: Scores() for step, *_ in _STEPS}
    for seed in range(extent.num_seeds):
        thinned = {name: table.thin(extent.max_points, seed) for name, table in plain.items()}
        library = DonorLibrary.of([table.series for table in tables], seed)
        for device in _DEVICES:
            say(f"{NAME}, seed {seed}: {device}")
            series = plain[device].series
            others = [thinned[name].series for name in _DEVICES if name != device]
            borrowed = _Borrowed(library.find(series.key), train_transfers(others, CONFIG, seed))
            for step, result in _ask_device(series, borrowed, seed).items():
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


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """What is known of other devices: every GEMM table of theirs, and typical efficiencies."""

    pool: DonorPool | None
    transfers: Mapping[str, TransferModel]


def _find_tables(measurements: Measurements) -> list[MeasuredTable]:
    """Return the tables of all devices, frameworks and formats, but those of other weights."""
    rows = measurements.read(AICONFIGURATOR, "gemm")
    return [table for table in split_into_tables(rows, 1_000) if "quant=" not in table.name]


def _pick(tables: Iterable[MeasuredTable], device: str) -> MeasuredTable:
    return next(
        table
        for table in tables
        if table.series.key.device == device
        and table.series.key.dtype == "bf16"
        and table.series.key.framework.startswith("vllm")
    )


def _ask_device(series: Series, borrowed: _Borrowed, seed: int) -> Mapping[int, Score]:
    """Return the score with every number of measured points, on the same other points."""
    order = make_rng(seed, series.key.device).permutation(len(series.points))
    asked = take(series, np.sort(order[-_NUM_ASKED:]))
    found: dict[int, Score] = {}
    for step, *_ in _STEPS:
        own = {}
        if step:
            known = take(series, np.sort(order[:step]))
            own = {series.key: train_transfer_series(known, borrowed.pool, CONFIG, seed)}
        models = ModelSet(version="benchmark", series=own, transfers=borrowed.transfers)
        found[step] = score(asked.latency_us, ask(models, series.key, asked.points))
    return found
