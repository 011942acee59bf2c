"""Times of modules that a training scenario names by a file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.catalog.importers.fasop import profile_file
from foretoken.catalog.importers.fasop.profile_rows import (
    COLUMNS,
    DEVICES,
    LEGACY_EMBEDDING,
    LEGACY_HEAD,
    LEGACY_LAYER,
    PRESETS,
)
from foretoken.catalog.sources.content import (
    parse_source_json,
    parse_source_yaml,
)
from foretoken.catalog.sources.file import SourceFile, read_source_file, refuse
from foretoken.domain import schema
from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownDeviceError,
    UnknownModelError,
)
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes
from foretoken.domain.models.architecture import find_model
from foretoken.domain.units import US_PER_MS

_NAME = re.compile(r"(?P<model>[^_]+)_(?P<gpu>[^_]+)_(?P<tp>[1-9]\d{0,3})(?:_(?P<other>[^_]+))?")
# Every rank of a FASOP profile computes the whole vocabulary.
_UNSPLIT = "lm_head"


def read_module_times(path: Path, facts: Mapping[str, Any]) -> ModuleTimes:
    """Read a profile: FASOP's `.npz`, `.npy` or profile JSON, or JSON or YAML of `ModuleTimes`.

    `facts` are fields of `ModuleTimes` that replace what the file says or leaves out.

    Raises:
        InvalidRequestError: the file is none of these, or a value in it cannot be used.

    """
    try:
        found = _read_content(path)
    except InvalidRequestError as err:
        # Readers of any file name the path only, not the scenario's key.
        reasons = [FieldViolation("module_times", item.description) for item in err.violations]
        raise InvalidRequestError.of_violations(reasons) from err
    content = {"source": path.name, **found, **facts}
    return schema.decode(ModuleTimes, content, f"module_times ({path.name})")


def _read_content(path: Path) -> Mapping[str, Any]:
    source = read_source_file(path, path)
    match path.suffix:
        case ".npz":
            return _read_table(source, path)
        case ".npy":
            return _read_legacy(source, path)
        case ".json":
            content = parse_source_json(source, path)
            if profile_file.is_profile(content):
                return _read_profile(content, path)
        case ".yaml" | ".yml":
            content = parse_source_yaml(source, path)
        case _:
            refuse(path, "a profile of modules is a .npz, .npy, .json or .yaml file")
    if not isinstance(content, Mapping):
        refuse(path, "is no mapping with `times`")
    return content


def _read_table(source: SourceFile, path: Path) -> dict[str, Any]:
    """Return the content of an `.npz`: a row per micro batch 1, 2, 4, ..., ms per column."""
    data = profile_file.read_table_ms(source, path)
    times = [
        _time(column.name, 2**row, data[row, place])
        for row in range(len(data))
        for place, column in enumerate(COLUMNS)
    ]
    return {**_file_facts(path), "times": times}


def _read_legacy(source: SourceFile, path: Path) -> dict[str, Any]:
    """Return the content of an `.npy`: embedding, every layer, head; ms of one sample."""
    data = profile_file.read_numbers(source.content, path)
    if data.ndim != 1 or len(data) < 3:  # noqa: PLR2004 - embedding, a layer, head
        refuse(path, f"an array of shape {data.shape}, not embedding, layers and head")
    layers = [
        _time(LEGACY_LAYER.name, 1, value, layer=layer) for layer, value in enumerate(data[1:-1])
    ]
    first = _time(LEGACY_EMBEDDING.name, 1, data[0])
    return {
        **_file_facts(path),
        "times": [first, *layers, _time(LEGACY_HEAD.name, 1, data[-1])],
    }


def _read_profile(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a profile JSON: medians of steps, means of ranks."""
    num_layers = profile_file.read_setting(content, "num_layers", path)
    name = _preset_name(profile_file.model_name(content, path))
    size = profile_file.read_setting(content, "micro_batch_size", path)
    found: dict[tuple[str, int], list[float]] = {}
    for column, layer, times_ms in profile_file.list_entries(content, path, ("median",)):
        found.setdefault((column.name, layer), []).append(times_ms["median"])
    # A shortened model's layers stand for all layers of the whole one.
    has_all = num_layers == _num_layers(name)
    times = [
        _time(module, size, sum(values) / len(values), layer=layer if has_all else -1)
        for (module, layer), values in found.items()
    ]
    tp = profile_file.read_setting(content, "tp_size", path)
    return {**_fasop_facts(tp), "model": name, "times": times}


def _time(module: str, micro_batch_size: int, time_ms: float, layer: int = -1) -> ModuleTime:
    return ModuleTime(
        module=module,
        micro_batch_size=micro_batch_size,
        forward_us=float(time_ms) * US_PER_MS,
        layer=layer,
        is_whole=module == _UNSPLIT,
    )


def _file_facts(path: Path) -> dict[str, Any]:
    """Return what a file's name says: `{model}_{gpu}_{tp}`."""
    match = _NAME.fullmatch(path.stem)
    if match is None:
        refuse(path, "is not named {model}_{gpu}_{tp}, as FASOP's profiles are")
    facts = _fasop_facts(int(match["tp"]))
    facts["model"] = _preset_name(match["other"] or match["model"])
    gpu = DEVICES.get(match["gpu"], match["gpu"])
    try:
        facts["device"] = find_device(gpu).name
    except UnknownDeviceError:
        facts["device"] = gpu
    return facts


def _fasop_facts(tp: int) -> dict[str, Any]:
    return {"tp": tp, "has_communication": tp > 1, "measures": "intervals"}


def _preset_name(name: str) -> str:
    preset = PRESETS.get(name, name)
    try:
        return find_model(preset).name
    except UnknownModelError:
        return preset


def _num_layers(model: str) -> int:
    try:
        return find_model(model).num_layers
    except UnknownModelError:
        return 0
