"""Measurements that others publish: NVIDIA's tables, and datasets as `catalog publish` writes them.

NVIDIA's tables come in a wheel, from the package index that pip has on this machine.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foretoken.catalog.dataset import DATASET_TOOL, MANIFEST_NAME, parse_part_path
from foretoken.catalog.exporting import ExportReport, ExportRequest, find_exporter
from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.sources.file import refuse
from foretoken.domain.archive import DEFLATE_RATIO_MAX, Archive, UnpackBudget
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.option import describe, option

NVIDIA = "nvidia"
_PROJECT = "aisimulate"
# The newest whose wheel has the tables; the stable ones are stubs.
NVIDIA_VERSION = "0.13.0.dev202610270000000085"
# Where a wheel says its licence; the first that is there.
_LICENCES = ("License-Expression", "License")
_MAX_BYTES = 8 * 2**30
_CARD = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """What to install: `nvidia`, or the folder, ZIP archive or URL of a dataset.

    `systems` and `engines` narrow NVIDIA's tables, as the options of their importer do. `wheel` is
    a file that is at hand; without it `version` is downloaded.
    """

    dataset: str = field(
        metadata=describe(
            f"`{NVIDIA}`, or a dataset: a folder, a ZIP archive or a URL.", argument="dataset"
        )
    )
    systems: str = option("", "Only these devices of NVIDIA's tables.")
    engines: str = option("", "Only these: `vllm`, or `vllm/0.24.0,trtllm` for a version.")
    wheel: Path | None = option(None, "The wheel with NVIDIA's tables, if it is at hand.")
    version: str = option(NVIDIA_VERSION, "Which wheel to download.")

    def __post_init__(self) -> None:
        """Refuse what only NVIDIA's tables have."""
        narrowed = self.systems or self.engines or self.wheel or self.version != NVIDIA_VERSION
        if self.dataset != NVIDIA and narrowed:
            reason = f"systems, engines, wheel and version are those of `{NVIDIA}`"
            raise InvalidRequestError.of_field("dataset", reason)


@contextmanager
def open_install(request: InstallRequest) -> Iterator[ImportPlan]:
    """Yield the plan of what is to be installed; what was downloaded is gone afterwards.

    Raises:
        InvalidRequestError: it cannot be fetched or read, or the wheel is a stub.

    """
    with tempfile.TemporaryDirectory(prefix="foretoken-install-") as name:
        scratch = Path(name)
        if request.dataset == NVIDIA:
            wheel = request.wheel or _download_wheel(request.version, scratch)
            yield _plan_wheel(wheel, request)
        else:
            folder = _fetch_dataset(request.dataset, scratch)
            yield find_importer(DATASET_TOOL).read(ImportRequest(path=folder))


def _download_wheel(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--dest", str(folder), f"{_PROJECT}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise InvalidRequestError.of_field(
            "version",
            f"pip has no wheel of {_PROJECT} {version}: {reason}; --wheel names a file",
        )
    return wheels[0]


def _plan_wheel(wheel: Path, request: InstallRequest) -> ImportPlan:
    about = _read_metadata(wheel)
    named = f"{about.get('Name', wheel.name)} {about.get('Version', '')}".strip()
    licence = next((about[key] for key in _LICENCES if key in about), "")
    options = {"systems": request.systems, "engines": request.engines}
    options |= {"source": named, "licence": licence}
    return find_importer("aiconfigurator").read(
        ImportRequest(path=wheel, options={key: value for key, value in options.items() if value})
    )


def _read_metadata(wheel: Path) -> Mapping[str, str]:
    """Return what a wheel says of itself; refuse one without tables."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            found = [name for name in names if name.endswith(".dist-info/METADATA")]
            text = archive.read(found[0]).decode("utf-8", "replace") if found else ""
    except (OSError, zipfile.BadZipFile) as err:
        refuse(wheel, f"is no wheel that can be read: {err}")
    if not any(name.endswith("_perf.parquet") for name in names):
        refuse(wheel, f"is a stub without tables; version {NVIDIA_VERSION} has them")
    return dict(HeaderParser().parsestr(text))


def _fetch_dataset(place: str, scratch: Path) -> Path:
    """Return the folder of a dataset, unpacked and downloaded where it has to be."""
    path = Path(place)
    if urlsplit(place).scheme in ("http", "https"):
        path = scratch / "dataset.zip"
        try:
            with urllib.request.urlopen(place) as reply, path.open("wb") as file:  # noqa: S310
                shutil.copyfileobj(reply, file)
        except OSError as err:
            raise InvalidRequestError.of_field("dataset", f"{place}: {err}") from err
    if not path.is_file():
        return path
    archive = Archive.open(path, UnpackBudget(max_bytes=_MAX_BYTES, max_ratio=DEFLATE_RATIO_MAX))
    for name in archive:
        target = scratch / "dataset" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive[name])
    manifests = sorted((scratch / "dataset").rglob(MANIFEST_NAME))
    return manifests[0].parent if manifests else scratch / "dataset"


def publish_dataset(
    catalog: CatalogPort, path: Path, selection: MeasurementFilter, licence: str
) -> ExportReport:
    """Write a dataset with the licences of its runs and a card.

    Raises:
        InvalidRequestError: nothing is selected, or nobody said the licence of a run.

    """
    runs = [
        replace(found.run, licence=found.run.licence or licence) for found in catalog.list_runs()
    ]
    request = ExportRequest(path=path, selection=selection, runs=runs)
    report = find_exporter(DATASET_TOOL).write(catalog.read_measurements(selection), request)
    manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    unsaid = [run["run_id"] for run in manifest["runs"] if not run["licence"]]
    if unsaid:
        shutil.rmtree(path)
        reason = f"{', '.join(unsaid)}: nobody said the licence; --licence does"
        raise InvalidRequestError.of_field("licence", reason)
    (path / _CARD).write_text(_format_card(manifest), encoding="utf-8")
    return replace(report, files=(*report.files, _CARD))


def _format_card(manifest: Mapping[str, Any]) -> str:
    licences = sorted({run["licence"] for run in manifest["runs"]})
    rows: Counter[tuple[str, str]] = Counter()
    for file in manifest["files"]:
        rows[parse_part_path(file["path"])] += file["num_rows"]
    lines = [
        "---",
        "license:",
        *(f"- {licence.lower()}" for licence in licences),
        "---",
        f"# {manifest['num_rows']:,} measurements of operators",
        "",
        f"Content {manifest['content_hash']}. `foretoken catalog install FOLDER` reads it; so does",
        "anything that reads Parquet: a folder for each device and operator, times in µs.",
        "",
        "| device | operator | rows |",
        "|---|---|---|",
        *(f"| {device} | {name} | {count:,} |" for (device, name), count in sorted(rows.items())),
        "",
        "| run | tool | source | licence |",
        "|---|---|---|---|",
        *(
            f"| {run['run_id']} | {run['tool']} | {run['source']} | {run['licence']} |"
            for run in manifest["runs"]
        ),
    ]
    return "\n".join(lines) + "\n"
