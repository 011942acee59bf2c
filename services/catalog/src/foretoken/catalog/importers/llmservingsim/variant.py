"""One profiled model on one device: its files, those of each degree, and its `meta.yaml`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Mask
from foretoken.catalog.importing import ImportNotes, ImportRequest
from foretoken.catalog.sources.content import parse_source_yaml
from foretoken.catalog.sources.file import SourceFile, read_source_file, refuse
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError, UnknownModelError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_FRAMEWORK = "vllm"
_DEGREE = re.compile(r"tp([1-9]\d{0,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDims:
    """The model's dimensions on one of `tp` ranks; `logits` is the whole vocabulary."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    logits: int

    @classmethod
    def of(cls, model: ModelArchitecture, tp: int) -> "RankDims":
        """Return the share of a rank; where heads are fewer than ranks, each has a copy of one."""
        return cls(
            hidden=model.hidden,
            num_heads=model.num_heads // tp,
            num_kv_heads=max(model.num_kv_heads // tp, 1),
            head_dim=model.head_dim,
            intermediate=model.intermediate // tp,
            vocab=model.vocab // tp,
            logits=model.vocab,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A `<hardware>/<org>/<model>/<dtype>` folder. `num_iterations` is timings per point."""

    root: Path
    folder: Path
    meta_file: SourceFile
    hardware: str
    device: str
    model: ModelArchitecture
    dtype: str
    framework: str
    framework_version: str
    num_iterations: int
    degrees: tuple[int, ...]
    environment: Mapping[str, str]


def find_variants(request: ImportRequest) -> tuple[Variant, ...]:
    """Return the variants under the path, narrowed to a device and model where given.

    Raises:
        InvalidRequestError: there is none, or a `meta.yaml` does not fit its model.
        UnknownDeviceError, UnknownModelError: it names one without a file; tells which.

    """
    paths = sorted(request.path.rglob("meta.yaml"))
    if not paths:
        raise InvalidRequestError.of_field(
            "path", f"no meta.yaml under {request.path}; give profiler/perf or a folder above it"
        )
    variants = list(_read_variants(paths, request))
    if not variants:
        wanted = " ".join(filter(None, (request.device, request.model)))
        found = ", ".join(str(path.parent.relative_to(request.path)) for path in paths)
        raise InvalidRequestError.of_field("path", f"nothing of {wanted} among {found}")
    return tuple(variants)


def _read_variants(paths: list[Path], request: ImportRequest) -> Iterator[Variant]:
    device = find_device(request.device).name if request.device else ""
    model = find_model(request.model).name if request.model else ""
    for path in paths:
        variant = _read_variant(path, request.path)
        if device in ("", variant.device) and model in ("", variant.model.name):
            yield variant


def _read_variant(path: Path, root: Path) -> Variant:
    source = read_source_file(path, root)
    meta = parse_source_yaml(source, path)
    hardware, gpu, name = (_text(meta, key, path) for key in ("hardware", "gpu", "model"))
    try:
        device, model = find_device(gpu).name, find_model(name)
    except (UnknownDeviceError, UnknownModelError) as err:
        raise type(err)(f"{path}: {err.message}", **err.details) from err
    dtype = path.parent.name
    if dtype.upper() not in DType.__members__:
        raise InvalidRequestError.of_field("path", f"{path.parent}: {dtype!r} is no number format")
    degrees = _list_degrees(path.parent)
    _check_overrides(meta, model, max(degrees, default=1), path)
    return Variant(
        root=root,
        folder=path.parent,
        meta_file=source,
        hardware=hardware,
        device=device,
        model=model,
        dtype=dtype.lower(),
        framework=_FRAMEWORK,
        framework_version=_text(meta, f"{_FRAMEWORK}_version", path),
        num_iterations=_read_count(meta, "measurement_iterations", path),
        degrees=degrees,
        environment={"gpu": gpu, "cuda": str(meta.get("cuda_version", ""))},
    )


def _text(meta: Mapping[str, Any], key: str, path: Path) -> str:
    if key not in meta:
        refuse(path, f"{key} is missing")
    return str(meta[key])


def _read_count(meta: Mapping[str, Any], key: str, path: Path) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or value < 1:
        refuse(path, f"{key} is {value!r}, not a count")
    return value


def _list_degrees(folder: Path) -> tuple[int, ...]:
    names = [match for child in folder.iterdir() if (match := _DEGREE.fullmatch(child.name))]
    return tuple(sorted(int(match[1]) for match in names))


def _check_overrides(
    meta: Mapping[str, Any], model: ModelArchitecture, tp: int, path: Path
) -> None:
    """Check the sizes the profiler gave vLLM: they are those of one rank of the last degree."""
    engine = meta.get("engine_effective", {})
    overrides = engine.get("hf_overrides", {}) if isinstance(engine, Mapping) else None
    if not isinstance(overrides, Mapping):
        refuse(path, "engine_effective.hf_overrides is no mapping")
    rank = RankDims.of(model, tp)
    expected = {
        "num_attention_heads": rank.num_heads,
        "num_key_value_heads": rank.num_kv_heads,
        "vocab_size": rank.vocab,
    }
    if model.moe is None:  # a mixture of experts has no layer of the dense width
        expected["intermediate_size"] = rank.intermediate
    wrong = [
        f"{key} is {overrides[key]}, {model.name} on {tp} ranks has {value}"
        for key, value in expected.items()
        if key in overrides and overrides[key] != value
    ]
    if wrong:
        raise InvalidRequestError.of_field("path", f"{path}: hf_overrides: {'; '.join(wrong)}")


Rows = tuple[SourceTable, pa.Table]


@dataclass(frozen=True, slots=True)
class Degree:
    """One `tp<N>` folder; `notes` gathers what was not read and why."""

    variant: Variant
    tp: int
    notes: ImportNotes

    @property
    def rank(self) -> RankDims:
        """The model's dimensions on one rank."""
        return RankDims.of(self.variant.model, self.tp)

    def list_stems(self) -> list[str]:
        """Return the names of the CSV files, without their ending."""
        folder = self.variant.folder / f"tp{self.tp}"
        return sorted(path.stem for path in folder.glob("*.csv"))

    def open(self, stem: str, required: tuple[str, ...]) -> SourceTable:
        """Read a file.

        Raises:
            InvalidRequestError: it is not a CSV file with the required columns.

        """
        path = self.variant.folder / f"tp{self.tp}" / f"{stem}.csv"
        return parse_csv(read_source_file(path, self.variant.root), path, required)

    def note(self, stem: str, text: str) -> None:
        """Say what of a file was not read, or how."""
        folder = self.variant.folder.relative_to(self.variant.root).as_posix()
        self.notes.add(f"{folder}/tp{self.tp}/{stem}.csv", text)

    def facts(self, operator: str, *, kernel: str | None = None, flag: str = "") -> RowFacts:
        """Return what rows of an operator have in common."""
        return RowFacts(
            operator=operator,
            dtype=self.variant.dtype,
            device=self.variant.device,
            framework=self.variant.framework,
            framework_version=self.variant.framework_version,
            kernel=kernel,
            model=self.variant.model.name,
            num_samples=self.variant.num_iterations,
            flag=flag,
        )


def take_rows(
    facts: RowFacts, origin: SourceTable, mask: Mask, dims: Mapping[str, Any], times_us: Floats
) -> pa.Table:
    """Return measurement rows for the rows of a file under a mask.

    The one time a source gives, a mean of a few iterations, stands as median and mean.
    """
    taken = {name: np.broadcast_to(value, len(mask))[mask] for name, value in dims.items()}
    latency_us = {"median": times_us[mask], "mean": times_us[mask]}
    return build_rows(facts, origin, np.flatnonzero(mask), taken, latency_us)


def join_rows(pieces: list[pa.Table]) -> pa.Table:
    """Return the rows of all pieces in one table, which may be empty."""
    return pa.concat_tables(pieces) if pieces else MEASUREMENT_SCHEMA.empty_table()
