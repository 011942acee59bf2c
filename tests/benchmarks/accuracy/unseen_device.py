"""Operators on a device left out of training, with none to many of its points measured after all.

As the product answers: all other devices' tables are there, those of the same chip among them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from accuracy.asking import Extent, Say, make_rng
from accuracy.line import Figure, Line, Scores
from accuracy.source import AICONFIGURATOR, Measurements
from accuracy.table import Integers, take
from accuracy.trial import CONFIG, Score, ask, score
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.series import Series, SeriesHead, SeriesKey
from foretoken.predictor.software import parse_software
from foretoken.predictor.trainer import SeriesModel, train_series
from foretoken.predictor.transfer import TransferModel, train_transfers
from foretoken.predictor.transfer.device_transfer import train_transfer_series
from foretoken.predictor.transfer.library import DonorLibrary
from foretoken.predictor.transfer.pool import DonorPool

NAME = "unseen device"
# The operators, each at the plain table of vLLM's newest version in bf16 on every device.
_OPERATORS: Mapping[str, str] = {
    "gemm": "",
    "attention_prefill": "",
    "attention_decode": "",
    "moe_experts": "routing=balanced",
}
_NUM_ASKED = 2_000
# Numbers of measured points, and the goals by device.
_STEPS = (0, 20, 100, 1_000)
_GOALS: Mapping[str, Sequence[float]] = {
    "h100_sxm": (6.0, 5.0, 4.5, 3.5),
    "b200": (12.0, 8.0, 6.0, 4.5),
}
_MIN_POINTS = 1_000


def ask_unseen(measurements: Measurements, extent: Extent, say: Say) -> Iterator[Line]:
    """Yield a line per operator, device and number of points measured on the device left out.

    Of devices there are at most as many as tables shall be asked, those with goals first.
    """
    num_asked = min(_NUM_ASKED, extent.max_points)
    for operator, variant in _OPERATORS.items():
        every = measurements.read_series(AICONFIGURATOR, operator)
        for series in _pick(every, variant)[: extent.max_tables]:
            device = series.key.device
            others = [item for item in every if item.key.device != device]
            scores = {step: Scores() for step in _STEPS}
            for seed in range(extent.num_seeds):
                say(f"{NAME}, seed {seed}: {operator} on {device}")
                for step, result in _ask_device(series, others, seed, num_asked).items():
                    scores[step].add(device, seed, result)
            for step, goal in zip(_STEPS, _GOALS.get(device, ()) or (None,) * 4, strict=True):
                wanted = None if goal is None else Figure(goal)
                split = f"{device}, {step:,}"
                line = scores[step].summarise(f"{operator} unseen", split, "", wanted)
                if line is not None:
                    yield line


def _pick(every: Sequence[Series], variant: str) -> Sequence[Series]:
    """Return the newest plain table of every device, those with goals first."""
    newest: dict[str, Series] = {}
    for series in every:
        key = series.key
        is_plain = (key.dtype, key.variant, key.kernel) == ("bf16", variant, "")
        software = parse_software(key.framework)
        if not is_plain or software.name != "vllm" or series.num_points < _MIN_POINTS:
            continue
        have = newest.get(key.device)
        if have is None or software.first > parse_software(have.key.framework).first:
            newest[key.device] = series
    return sorted(newest.values(), key=lambda series: series.key.device not in _GOALS)


@dataclass
class _TrainedWhenAsked(Mapping[SeriesKey, SeriesModel]):
    """Series, each trained when it is first asked for."""

    series: Mapping[SeriesKey, Series]
    models: dict[SeriesKey, SeriesModel]
    seed: int
    heads: Mapping[SeriesKey, SeriesHead] = field(init=False)

    def __post_init__(self) -> None:
        self.heads = {key: item.head(item.content_hash) for key, item in self.series.items()} | {
            key: model.head for key, model in self.models.items()
        }

    def __getitem__(self, key: SeriesKey) -> SeriesModel:
        if key not in self.models:
            self.models[key] = train_series(self.series[key], CONFIG, self.seed)
        return self.models[key]

    def __iter__(self) -> Iterator[SeriesKey]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)


def _ask_device(
    series: Series, others: Sequence[Series], seed: int, num_asked: int
) -> Mapping[int, Score]:
    """Return the score with every number of measured points, on the same other points."""
    single = [item for item in others if item.key.framework and not item.key.kernel]
    transfers = train_transfers(single, CONFIG, seed)
    pool = DonorLibrary.of(others, seed).find(series.key)
    order = make_rng(seed, series.key.operator, series.key.device).permutation(series.num_points)
    asked = take(series, np.sort(order[-min(num_asked, series.num_points // 2) :]))
    trained: dict[SeriesKey, SeriesModel] = {}
    found: dict[int, Score] = {}
    for step in _STEPS:
        if step > series.num_points // 2:
            continue
        own = _train_own(series, order[:step], pool, seed) if step else {}
        known = {item.key: item for item in others}
        models = _TrainedWhenAsked(known, trained | own, seed)
        found[step] = _score(asked, models, transfers)
        trained = {key: model for key, model in models.models.items() if key not in own}
    return found


def _train_own(
    series: Series, rows: Integers, pool: DonorPool | None, seed: int
) -> dict[SeriesKey, SeriesModel]:
    known = take(series, np.sort(rows))
    return {series.key: train_transfer_series(known, pool, CONFIG, seed)}


def _score(
    asked: Series, series: Mapping[SeriesKey, SeriesModel], transfers: Mapping[str, TransferModel]
) -> Score:
    models = ModelSet(version="benchmark", series=series, transfers=transfers)
    return score(asked.latency_us, ask(models, asked.key, asked.points, is_preferred=True))
