"""Typical efficiency, for calls that nothing like them was measured on the device asked about.

It is learned from every other device (or operator) on three dimensionless quantities only; more of
them fit the devices known and miss the next one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.jobs.executor import Executor
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.intervals.calibration import quantiles
from foretoken.predictor.regression.light_imports import load_lightgbm
from foretoken.predictor.regression.trees import Trees, boost
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.transfer.device_columns import element_bits
from foretoken.predictor.transfer.link_band import is_within_links
from foretoken.predictor.transfer.row_band import is_row_operator
from foretoken.predictor.transfer.siblings import name_chip
from foretoken.predictor.transfer.support import UNMEASURED_DEVICE_LOG, Support

# Used before anything is measured: the middle, and the ends, of latency over base latency.
# Source: medians of the operators of the A30, A100 and H100 profiles are 1.0 to 5.0, mostly
# 1.5 to 2.8.
_DEFAULT_LOG_RATIO = float(np.log(1.8))
_DEFAULT_LOW_LOG, _DEFAULT_HIGH_LOG = float(np.log(0.5)), float(np.log(3.0))

# Operators made of matrix products; the others stream their tensors through memory.
_MATRIX_GROUPS = frozenset({"gemm", "attention", "moe"})

# What a variant may say that makes it other work than the plain operator's, of which it tells
# nothing: how many kernels it takes, and what they get.
_OTHER_WORK = frozenset({"form", "gradients", "sampling"})
# What a variant may say of where inputs lay: its times are estimated from the plain operator's, and
# tell nothing of them.
_OTHER_PLACE = frozenset({"cache"})

# Their times are those of the host or of its link; the device's memory does not bound them.
_GROUPS_OFF_DEVICE = frozenset({"host", "kv_transfer"})
_KIND = "any "

# A series of a collective teaches others if at least this part of it is what its links explain.
_MIN_SHARE_TOLD = 0.5
# Of many series fewer rows each tell as much: they count alike, however many rows they have.
# Source: seven operators of one of five GPUs estimated from the other four, 625 series: twice the
# rows err 0.2 % less on average (at most 0.5), in 1.4 times as long.
_MAX_ROWS_PER_SERIES, _MIN_ROWS_PER_SERIES, _MAX_ROWS = 500, 50, 5_000
_MIN_ROWS = 100
# From how many times as long on, in the median, as others tell of it, a series is of kernels of
# another kind. Source: 50 names of the starter with a series three times as slow, each device left
# out with all that is learned: errors of 44 instead of 61 %, intervals of 3.1 times the answer
# instead of 61, which hold 88 % of what is not set apart (before, 86 % of all).
_APART_LOG = float(np.log(4.0))
_PARAMETERS = {
    "objective": "regression_l1",
    "num_leaves": 8,
    "learning_rate": 0.1,
    "min_data_in_leaf": 40,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}
# Source: 45 names that series of at least three GPUs or operators of the starter catalog tell, one
# left out at a time: twice as many in steps of half the size err 0.6 % more on average (2.6 % less
# at most), in 1.7 times as long.
_NUM_TREES = 30


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Log ratio of a call from its transfer columns, with the bounds around it."""

    trees: Trees
    low_log: float
    high_log: float
    support: Support

    def predict(self, design: Design) -> FloatColumn:
        """Return the log ratio of every call."""
        return self.trees.predict(design.transfer)

    def for_device(self, spec: OperatorSpec, device: DeviceSpec) -> "TransferModel":
        """Return the model, no surer than without any measurement where these tell little.

        That is where the devices left out to learn the uncertainty were nearer to each other. On a
        device whose own times were set apart the upper bound holds them.
        """
        support = self.support
        if device.name not in support.devices and support.slow_kernels(device):
            return replace(self, high_log=max(self.high_log, support.apart_log))
        if support.can_tell(spec, device):
            return self
        return replace(
            self,
            low_log=min(self.low_log, _DEFAULT_LOW_LOG),
            high_log=max(self.high_log, _DEFAULT_HIGH_LOG),
        )


@dataclass(frozen=True)
class _Sample:
    key: SeriesKey
    group: str
    transfer: Matrix
    log_ratio: FloatColumn

    @cached_property
    def middle_log(self) -> float:
        """The median: samples are looked at again with every group that is left out."""
        return float(np.median(self.log_ratio))

    def first(self, count: int) -> "_Sample":
        """Return the sample of its first rows, which are in no order."""
        return replace(self, transfer=self.transfer[:count], log_ratio=self.log_ratio[:count])


# A sample, and log(truth / what others say of it).
_LeftOut = tuple[_Sample, FloatColumn]


def default_transfer() -> TransferModel:
    """Return the model that knows no measurement."""
    trees = Trees(_DEFAULT_LOG_RATIO)
    return TransferModel(trees, _DEFAULT_LOW_LOG, _DEFAULT_HIGH_LOG, Support())


def transfer_names(
    spec: OperatorSpec, device: DeviceSpec, variant: str = "", dtype: DType | None = None
) -> tuple[str, ...]:
    """Return under which names a model may be found, the most telling first.

    The same operator on other devices of the kind (GPU, CPU), in the variant first if there is one,
    then in formats of the same width, for kernels of another reach other shares of their peak;
    other operators of the family on the same device; those on any device of the kind. How tokens
    were routed to experts makes no other variant here. A variant that is other work, such as a
    chain of kernels in place of one, neither tells the plain operator nor is estimated from it.
    """
    facts = {name: value for name, value in parse_variant(variant).items() if name != "routing"}
    essence = format_variant(facts)
    is_other_work = not _OTHER_WORK.isdisjoint(facts)
    families = _families_of(spec)[-1:] if is_other_work else _families_of(spec)
    in_width = ""
    if dtype is not None and spec.group in _MATRIX_GROUPS and not is_other_work:
        in_width = f"{spec.name} in {element_bits(dtype)} bits on any {device.kind}"
    return (
        *((f"{spec.name} ({essence}) on any {device.kind}",) if essence else ()),
        *((in_width,) if in_width else ()),
        *(() if is_other_work else (f"{spec.name} on any {device.kind}",)),
        *(f"{_KIND}{family} on {device.name}" for family in families),
        *(f"{_KIND}{family} on any {device.kind}" for family in families),
    )


def _families_of(spec: OperatorSpec) -> tuple[str, ...]:
    """Return which operators are estimated from one another, the nearest kind first.

    Kernels built around matrix products reach far less of a data sheet in small calls than those
    that stream through memory once, which take a launch: estimated from GEMM and attention alone, a
    small norm of the H200 would take five launches. Of those, one kernel that treats all rows alike
    is not estimated from chains of several, as frameworks run a rotary embedding. What does not run
    on the device is estimated from nothing but itself.
    """
    if spec.is_collective:
        return ("collective",)
    if spec.group in _MATRIX_GROUPS:
        return ("matrix operator",)
    if spec.group in _GROUPS_OFF_DEVICE:
        return ()
    return (*(("row operator",) if is_row_operator(spec) else ()), "streaming operator")


def train_transfers(
    found: Iterable[Series], config: PredictorConfig, seed: int, executor: Executor | None = None
) -> Mapping[str, TransferModel]:
    """Return a model under every name that series can speak for, in this thread or by workers."""
    samples: dict[str, list[_Sample]] = {}
    for series in found:
        key = series.key
        place = key.topology or name_chip(key.target.device)
        names = _taught_names(key)
        # What is left out to learn the uncertainty: a chip for the same operator, else an operator.
        groups = [key.operator if name.startswith(_KIND) else place for name in names]
        sample = _sample(series, seed)
        if sample is None:
            continue
        for name, group in zip(names, groups, strict=True):
            samples.setdefault(name, []).append(replace(sample, group=group))
    items = [
        (_thin(own), _support(own, is_of_kind=name.startswith(_KIND)))
        for name, own in sorted(samples.items())
    ]
    trained = dict((executor or InlineExecutor()).run(_train, items, (config, seed)))
    return {name: trained[place] for place, name in enumerate(sorted(samples))}


def _thin(samples: Sequence[_Sample]) -> Sequence[_Sample]:
    count = max(_MAX_ROWS // len(samples), _MIN_ROWS_PER_SERIES)
    return [sample.first(count) for sample in samples]


def _taught_names(key: SeriesKey) -> tuple[str, ...]:
    """Return the names of the models that a series tells."""
    names = transfer_names(key.spec, key.target.device, key.variant, key.target.dtype)
    return names if _OTHER_PLACE.isdisjoint(parse_variant(key.variant)) else names[:1]


def _sample(series: Series, seed: int) -> _Sample | None:
    """Return some rows of a series, of a collective those that its links explain; or None.

    Links that were far slower than their topology's file says tell nothing of others'.
    """
    key = series.key
    num_points = len(series.points)
    num_rows = min(num_points, _MAX_ROWS_PER_SERIES)
    rows = np.random.default_rng(seed).choice(num_points, num_rows, replace=False)
    drawn = series.take(rows)
    design = drawn.design
    topology = key.target.topology
    if topology is not None:
        times_us = drawn.latency_us
        is_told = is_within_links(key.spec, drawn.columns, topology, design, times_us)
        if is_told.mean() < _MIN_SHARE_TOLD:
            return None
        drawn, design = drawn.take(is_told), design.take(np.flatnonzero(is_told))
    return _Sample(key, "", design.transfer, np.log(drawn.latency_us / design.base_us))


def _train(
    item: tuple[Sequence[_Sample], Support], shared: tuple[PredictorConfig, int]
) -> TransferModel:
    (samples, support), (config, seed) = item, shared
    found = _leave_out(samples, config, seed)
    if not found:
        trees = _grow(samples, config, seed)
        return TransferModel(trees, _DEFAULT_LOW_LOG, _DEFAULT_HIGH_LOG, support)
    apart: Sequence[_Sample] = ()
    if not support.is_of_kind:
        found, apart = _set_apart(found, config, seed)
    kept = [sample for sample, _ in found]
    trees = _grow(kept, config, seed)
    # Every series speaks with one voice, however many points it has.
    voices = np.concatenate([np.quantile(error, np.linspace(0, 1, 101)) for _, error in found])
    low, high = quantiles(voices, np.arange(len(voices)))
    low_log, high_log = min(low, -UNMEASURED_DEVICE_LOG), max(high, UNMEASURED_DEVICE_LOG)
    if apart:
        off_log = [np.quantile(it.log_ratio - trees.predict(it.transfer), 0.95) for it in apart]
        keys = {sample.key for sample in apart}
        named = tuple(sorted({(key.device, key.framework, key.variant) for key in keys}))
        support = replace(
            _support(kept, is_of_kind=False), apart=named, apart_log=float(max(off_log))
        )
    return TransferModel(trees, low_log, high_log, support)


def _leave_out(
    samples: Sequence[_Sample], config: PredictorConfig, seed: int
) -> Sequence[_LeftOut]:
    """Return by how much every sample is off what those of other groups tell; of one group none."""
    groups = sorted({sample.group for sample in samples})
    errors: list[_LeftOut] = []
    for group in groups if len(groups) > 1 else ():
        others = _grow([s for s in samples if s.group != group], config, seed)
        errors += [
            (s, s.log_ratio - others.predict(s.transfer)) for s in samples if s.group == group
        ]
    return errors


def _set_apart(
    found: Sequence[_LeftOut], config: PredictorConfig, seed: int
) -> tuple[Sequence[_LeftOut], Sequence[_Sample]]:
    """Return the errors of samples but those of kernels of another kind, and these samples.

    They take several times as long as all else tells: where an engine lacks a device's kernels it
    takes chains of small ones, on all products of the chip. Where they would be most samples, or
    all but one group's, none is.
    """
    kept: Sequence[_LeftOut] = found
    apart: list[_Sample] = []
    while slow := {_kernel(sample) for sample, error in kept if np.median(error) > _APART_LOG}:
        apart += [sample for sample, _ in kept if _kernel(sample) in slow]
        rest = [sample for sample, _ in kept if _kernel(sample) not in slow]
        kept = _leave_out(rest, config, seed)
        if not kept or 2 * len(apart) > len(found):
            return found, ()
    return kept, apart


def _kernel(sample: _Sample) -> tuple[str, str, str, str]:
    """Return what all products of a chip run the same kernels of."""
    key = sample.key
    return sample.group, key.framework, key.dtype, key.variant


def _support(samples: Sequence[_Sample], *, is_of_kind: bool) -> Support:
    devices = [sample.key.target.device for sample in samples]
    return Support(
        operators=tuple(sorted({sample.key.operator for sample in samples})),
        devices=tuple(sorted({device.name for device in devices})),
        architectures=tuple(sorted({device.architecture for device in devices})),
        is_of_kind=is_of_kind,
    )


def _grow(samples: Sequence[_Sample], config: PredictorConfig, seed: int) -> Trees:
    transfer = np.concatenate([sample.transfer for sample in samples])
    log_ratio = np.concatenate([sample.log_ratio for sample in samples])
    constant = float(np.mean([sample.middle_log for sample in samples]))
    if len(log_ratio) < _MIN_ROWS:
        return Trees(constant)
    shares = [np.full(len(s.log_ratio), 1.0 / len(s.log_ratio)) for s in samples]
    weights = np.concatenate(shares)
    data = load_lightgbm().Dataset(
        transfer, log_ratio, weight=weights * len(weights) / weights.sum()
    )
    parameters = {**_PARAMETERS, "seed": seed, "num_threads": config.num_threads}
    return Trees.of_booster(boost(parameters, data, _NUM_TREES), constant)
