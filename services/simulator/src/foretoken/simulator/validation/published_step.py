"""Training steps that others measured and published as one figure each: tokens/s of a GPU.

`published_steps.csv` has a step a row, with its source: model, device, format of the products,
lengths, devices, degrees of parallelism, and the framework. Nothing is fitted to them.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.layout import ParallelLayout

_FILE, _FIGURE = "published_steps.csv", "tokens_per_s_per_gpu"
_AXES = ("tp", "pp", "cp", "ep")
# Bytes of an element: formats of one size are alike.
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "fp4": 0.5, "nvfp4": 0.5}
# Sequences that are longer or shorter by more than this factor make another step.
_ALIKE_RATIO = 2.5


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
        and _apart(step.sequence_length, asked.sequence_length) <= math.log(_ALIKE_RATIO)
        and _is_same_model(step.model, asked.model)
    ]
    return min(alike, key=lambda step: _distance(step, asked), default=None)


def _distance(step: PublishedStep, asked: AskedStep) -> tuple[float, ...]:
    sizes = _BYTES.get(step.dtype, 4.0), _BYTES.get(asked.dtype, 4.0)
    axes = [_apart(getattr(step, axis), asked.layout.degree(axis)) for axis in _AXES]
    return (
        _apart(*sizes),
        round(_apart(step.sequence_length, asked.sequence_length), 2),
        round(_apart(step.num_devices, asked.num_devices), 2),
        sum(axes),
        step.dtype != asked.dtype,
    )


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / max(other, 1e-9)))


def _is_same_model(name: str, asked: ModelArchitecture) -> bool:
    return name == asked.name or _shape_of(find_model(name)) == _shape_of(asked)


def _shape_of(model: ModelArchitecture) -> tuple[object, ...]:
    attention = (model.num_heads, model.num_kv_heads, model.head_dim)
    layers = (model.num_layers, model.intermediate, model.moe, model.mla, model.layers)
    return model.hidden, model.vocab, model.has_tied_embedding, *attention, *layers, model.pattern
