"""Training steps that others measured and published as one figure each: tokens/s of a GPU.

`published_steps.csv` has a step a row, with its source: model, device, format of the products,
lengths, devices, degrees of parallelism, and the framework. Nothing is fitted to them.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.validation.published_run import is_alike, ratio_log

_FILE, _FIGURE = "published_steps.csv", "tokens_per_s_per_gpu"
_AXES = ("tp", "pp", "cp", "ep")
# What is before the name of a format whose elements share scales.
_SCALED = ("mx", "nv")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedStep:
    """A measured step; a `global_batch_size` of 0 was not stated."""

    model: str
    device: str
    dtype: str
    sequence_length: int
    num_devices: int
    global_batch_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    framework: str
    tokens_per_s_per_gpu: float
    source: str

    def describe(self) -> str:
        """Return the step in a line."""
        degrees = [f"{axis}{getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1]
        batch = f"{self.global_batch_size:,} sequences" if self.global_batch_size else "sequences"
        return (
            f"{self.tokens_per_s_per_gpu:,.0f} tokens/s per GPU: {self.model} in {self.dtype} on"
            f" {self.num_devices:,} {self.device}, {' '.join(degrees) or 'dp alone'}, {batch} of"
            f" {self.sequence_length:,} tokens, {self.framework} ({self.source})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedStep:
    """What a step is compared with: the model, what it runs on, and the layout."""

    model: ModelArchitecture
    device: str
    dtype: str
    sequence_length: int
    num_devices: int
    layout: ParallelLayout


@cache
def read_published_steps() -> tuple[PublishedStep, ...]:
    """Return the steps of the file, in its order."""
    lines = files(__package__).joinpath(_FILE).read_text("utf-8").splitlines()
    return tuple(_read_row(row) for row in csv.DictReader(lines))


def _read_row(row: dict[str, Any]) -> PublishedStep:
    counts = ("sequence_length", "num_devices", "global_batch_size", *_AXES)
    whole = {name: int(row[name]) for name in counts}
    return PublishedStep(**{**row, **whole, _FIGURE: float(row[_FIGURE])})


def find_nearest_step(steps: Sequence[PublishedStep], asked: AskedStep) -> PublishedStep | None:
    """Return the step of the model and device that is most like what is asked; None: none is alike.

    The size of the format counts first, then lengths, then how many devices there are, then the
    layout. A model of another name is the same where its layers are.
    """
    alike = [
        step
        for step in steps
        if step.device == asked.device
        and is_alike(step.sequence_length, asked.sequence_length)
        and _is_same_model(step.model, asked.model)
    ]
    return min(alike, key=lambda step: _distance(step, asked), default=None)


def _distance(step: PublishedStep, asked: AskedStep) -> tuple[float, ...]:
    sizes = _num_bytes(step.dtype), _num_bytes(asked.dtype)
    axes = [ratio_log(getattr(step, axis), asked.layout.degree(axis)) for axis in _AXES]
    return (
        ratio_log(*sizes),
        round(ratio_log(step.sequence_length, asked.sequence_length), 2),
        round(ratio_log(step.num_devices, asked.num_devices), 2),
        sum(axes),
        step.dtype != asked.dtype,
    )


def _num_bytes(name: str) -> float:
    """Return the bytes of an element: formats of one size are alike."""
    for scaled in _SCALED:
        name = name.removeprefix(scaled)
    return DType[name.upper()].num_bytes


def _is_same_model(name: str, asked: ModelArchitecture) -> bool:
    return name == asked.name or _shape_of(find_model(name)) == _shape_of(asked)


def _shape_of(model: ModelArchitecture) -> tuple[object, ...]:
    attention = (model.num_heads, model.num_kv_heads, model.head_dim)
    layers = (model.num_layers, model.intermediate, model.moe, model.mla, model.layers)
    return model.hidden, model.vocab, model.has_tied_embedding, *attention, *layers, model.pattern
