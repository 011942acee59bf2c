"""Measurements of other devices, from which a device with few of its own can borrow."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, Matrix, build_design
from foretoken.predictor.regression.light_imports import load_lightgbm
from foretoken.predictor.regression.trees import Trees, boost
from foretoken.predictor.roofline import FloatColumn, Target
from foretoken.predictor.series import Series
from foretoken.predictor.transfer.device_columns import describe_device, join_columns
from foretoken.predictor.transfer.device_law import (
    LAW_REVISION,
    DeviceLaw,
    average_laws,
    fit_device_law,
)
from foretoken.predictor.transfer.pooled_model import PooledModel

# Source of all that follows: GEMM in 16-bit formats of four devices, each left out in turn with 20
# and 100 of its points kept. More rows of a series gain less than 0.1 points.
_MAX_ROWS_PER_SERIES = 1_500
_NUM_TREES = 200
# Thresholds drawn at random: what trees split where one device has a step, another has not.
_PARAMETERS = {
    "objective": "regression",
    "num_leaves": 31,
    "learning_rate": 0.12,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "extra_trees": True,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}
# Every other device speaks with one voice. So does the device itself, and with one more for as many
# points of its own as this.
_ROWS_PER_OWN_VOICE = 500


@dataclass(frozen=True, slots=True)
class Donor:
    """Some points of a series of another device, and the law of its kernels there.

    `content_hash` is that of the whole series; empty for the points of the target itself.
    """

    content_hash: str
    device_name: str
    device: FloatColumn
    design: Design
    log_ratio: FloatColumn
    law: DeviceLaw


def draw_donor(series: Series, seed: int) -> Donor:
    """Return a series as others may borrow from it."""
    key = series.key
    rows = np.arange(len(series.points))
    if len(rows) > _MAX_ROWS_PER_SERIES:
        drawn = np.random.default_rng(seed).choice(rows, _MAX_ROWS_PER_SERIES, replace=False)
        rows = np.sort(drawn)
    columns = {name: column[rows] for name, column in series.columns.items()}
    design = build_design(key.spec, columns, key.target)
    log_ratio = np.log(series.latency_us[rows] / design.base_us)
    law = fit_device_law(design, log_ratio)
    return Donor(
        series.content_hash, key.device, describe_device(key.target), design, log_ratio, law
    )


@dataclass(frozen=True, slots=True)
class DonorPool:
    """Series of an operator on other devices than the target's."""

    operator: str
    target: Target
    donors: Sequence[Donor]

    @property
    def content_hash(self) -> str:
        """Identity of all that is lent, and to whom."""
        content = [repr(LAW_REVISION), repr(describe_device(self.target).tolist())]
        content += [donor.content_hash for donor in self.donors]
        return hashlib.sha256(" ".join(content).encode()).hexdigest()

    def fit(
        self, known: Design, log_ratio: FloatColumn, config: PredictorConfig, seed: int
    ) -> PooledModel:
        """Return the model of the pool and the target's own points, of which there may be none."""
        expected = average_laws([donor.law for donor in self.donors])
        law = fit_device_law(known, log_ratio, expected)
        device = describe_device(self.target)
        own = Donor("", self.target.device.name, device, known, log_ratio, law)
        voices = [*self.donors, own] if known.num_rows else list(self.donors)
        weights = np.concatenate(self._weigh(known.num_rows))
        parameters = {**_PARAMETERS, "seed": seed, "num_threads": config.num_threads}
        return PooledModel(
            over_base=_grow(voices, weights, parameters, is_over_law=False),
            over_law=_grow(voices, weights, parameters, is_over_law=True),
            law=law,
            device=device,
            basis=self._describe(known.num_rows),
        )

    def _weigh(self, num_own: int) -> list[FloatColumn]:
        names = [donor.device_name for donor in self.donors]
        sizes = [donor.design.num_rows for donor in self.donors]
        shares = [1.0 / names.count(name) for name in names]
        if num_own:
            sizes.append(num_own)
            shares.append(1.0 + num_own / _ROWS_PER_OWN_VOICE)
        scale = sum(sizes) / sum(shares)
        return [
            np.full(size, scale * share / size) for size, share in zip(sizes, shares, strict=True)
        ]

    def _describe(self, num_own: int) -> str:
        """Say in words what the answer rests on."""
        wanted = describe_device(self.target)
        apart = [float(np.abs(donor.device - wanted).sum()) for donor in self.donors]
        nearest = self.donors[int(np.argmin(apart))].device_name
        num_devices = len({donor.device_name for donor in self.donors})
        return (
            f"{len(self.donors)} {self.operator} series of {num_devices} other devices, "
            f"nearest {nearest}; {num_own:,} own points"
        )


def _grow(
    voices: Sequence[Donor],
    weights: FloatColumn,
    parameters: Mapping[str, object],
    *,
    is_over_law: bool,
) -> Trees:
    """Return trees over what the base latency, or each device's own law, leaves over."""
    features: list[Matrix] = []
    rests: list[FloatColumn] = []
    for voice in voices:
        law = voice.law if is_over_law else None
        features.append(join_columns(voice.design, voice.device, law))
        rests.append(voice.log_ratio - (law.log_ratio(voice.design) if law else 0.0))
    data = load_lightgbm().Dataset(np.vstack(features), np.concatenate(rests), weight=weights)
    return Trees.of_booster(boost(parameters, data, _NUM_TREES), 0.0)
