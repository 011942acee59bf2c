"""Measurements that others publish: NVIDIA's tables, and datasets as `catalog publish` writes them.

NVIDIA's tables come in a wheel, from the package index that pip has on this machine.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.parser import HeaderParser
from functools import partial
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import urlopen

from foretoken.catalog.dataset import DATASET_TOOL, MANIFEST_NAME, parse_part_path
from foretoken.catalog.exporters.parquet import removed_on_failure
from foretoken.catalog.exporting import ExportReport, ExportRequest, find_exporter
from foretoken.catalog.importing import (
    RAW_TABLE,
    ImportPlan,
    ImportRequest,
    RawTable,
    find_importer,
)
from foretoken.catalog.sources.file import refuse
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import ArrowStream, MeasurementFilter, Run
from foretoken.domain.name import path_inside
from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.option import describe, option
from foretoken.domain.text_file import DEFLATE_RATIO_MAX, Archive, UnpackBudget

NVIDIA = "nvidia"
# What imports before this one kept as files, for lack of operators.
KEPT = "kept"
_KEPT_TOOL = "aiconfigurator"
_PROJECT = "aisimulate"
# The newest whose wheel has the tables; the stable ones are stubs.
NVIDIA_VERSION = "0.13.0.dev202610270000000085"
# The table of measured serving runs in the wheel, and its name among the raw tables of a catalog.
MEASURED_RUNS = "silicon_sample"
# Where a wheel says its licence; the first that is there.
_LICENCES = ("License-Expression", "License")
_MAX_BYTES = 8 * 2**30
_BUDGET = UnpackBudget(max_bytes=_MAX_BYTES, max_ratio=DEFLATE_RATIO_MAX)
_MAX_METADATA_BYTES = 2**20
_PIECE_BYTES = 2**20
# A server that says nothing for so long is given up.
_SILENCE_S = 60.0
_TICK_S = 0.2
_MEGA = 1e6
_CARD = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """What to install: `nvidia`, `kept`, or the folder, ZIP archive or URL of a dataset.

    `kept` are the tables of earlier imports that were kept as files, as no operator was what they
    measured, as far as there are operators now.

    `systems` and `engines` narrow NVIDIA's tables, as the options of their importer do. `wheel` is
    a file that is at hand; without it `version` is downloaded.
    """

    dataset: str = field(
        metadata=describe(
            f"`{NVIDIA}`, `{KEPT}` (what earlier imports kept raw), or a dataset: a folder, a ZIP"
            " archive or a URL.",
            argument="dataset",
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


# Learns how far a download is, as a ratio (0 where its length is not known) and in words, several
# times a second; what it raises ends the download.
Heard = Callable[[float, str], None]


def hear_nothing(_ratio: float, _said: str) -> None:
    """Let a download go on."""


@contextmanager
def open_install(request: InstallRequest, hear: Heard = hear_nothing) -> Iterator[ImportPlan]:
    """Yield the plan of what is to be installed; what was downloaded is gone afterwards.

    Raises:
        InvalidRequestError: it cannot be fetched or read, or the wheel is a stub.
        as `hear`.

    """
    with tempfile.TemporaryDirectory(prefix="foretoken-install-") as name:
        scratch = Path(name)
        if request.dataset == NVIDIA:
            wheel = request.wheel or download_wheel(_PROJECT, request.version, scratch, hear)
            yield _plan_wheel(wheel, request)
        else:
            folder = _fetch_dataset(request.dataset, scratch, hear)
            yield find_importer(DATASET_TOOL).read(ImportRequest(path=folder))


def download_wheel(project: str, version: str, folder: Path, hear: Heard = hear_nothing) -> Path:
    """Return a wheel that pip brings into a folder.

    Raises:
        InvalidRequestError: pip has none.
        as `hear`.

    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--dest", str(folder), f"{project}=={version}"]
    # What pip leaves when it is killed goes with the folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603
        try:
            while _is_running(pip):
                hear(0.0, f"downloading: {_held_bytes(folder) / _MEGA:,.0f} MB so far")
        finally:
            # Of a download that ended nothing is there to be killed.
            pip.kill()
            pip.wait()
        log.seek(0)
        said = log.read().strip().splitlines()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = (said or ["no wheel came"])[-1]
        raise InvalidRequestError.of_field(
            "version",
            f"pip has no wheel of {project} {version}: {reason}; --wheel names a file",
        )
    return wheels[0]


def _is_running(pip: "subprocess.Popen[bytes]") -> bool:
    """Wait a moment for the end of a download; false where it has ended."""
    try:
        pip.wait(_TICK_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _held_bytes(folder: Path) -> int:
    """Return what is in a folder; files that are moved meanwhile count as nothing."""
    held = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            held += path.stat().st_size
    return held


@contextmanager
def open_kept(catalog: CatalogPort) -> Iterator[ImportPlan]:
    """Yield the plan of the tables that a catalog kept as files and that are readable now.

    Raises:
        InvalidRequestError: it kept none, or there is still no operator for any of them.

    """
    with tempfile.TemporaryDirectory(prefix="foretoken-kept-") as name:
        yield _plan_kept(catalog, Path(name))


def _plan_kept(catalog: CatalogPort, folder: Path) -> ImportPlan:
    """Return the plan of the kept tables that are readable now, under the names they had."""
    files: dict[str, Path] = {}
    for artifact in catalog.list_artifacts(RAW_TABLE):
        facts = json.loads(artifact.metadata_json)
        if facts.get("tool") == _KEPT_TOOL:
            # Files of several imports may have one name.
            name = f"{artifact.content_hash[:16]}/{facts['source_file']}"
            files[name] = path_inside(folder, name, "source_file")
            files[name].parent.mkdir(parents=True, exist_ok=True)
            files[name].write_bytes(b"".join(catalog.read_artifact(RAW_TABLE, artifact.name)))
    if not files:
        raise InvalidRequestError.of_field("dataset", "the catalog kept no tables as files")
    runs = [summary.run for summary in catalog.list_runs() if summary.run.tool == _KEPT_TOOL]
    said = {"source": runs[0].source, "licence": runs[0].licence} if runs else {}
    options = {key: value for key, value in said.items() if value}
    importer, request = find_importer(_KEPT_TOOL), ImportRequest(path=folder, options=options)
    for table in importer.read(request).raw_tables:
        files[str(table.facts["source_file"])].unlink()
    return importer.read(request)


def _plan_wheel(wheel: Path, request: InstallRequest) -> ImportPlan:
    about = _read_metadata(wheel)
    named = f"{about.get('Name', wheel.name)} {about.get('Version', '')}".strip()
    licence = next((about[key] for key in _LICENCES if key in about), "")
    options = {"systems": request.systems, "engines": request.engines}
    options |= {"source": named, "licence": licence}
    plan = find_importer("aiconfigurator").read(
        ImportRequest(path=wheel, options={key: value for key, value in options.items() if value})
    )
    return replace(plan, raw_tables=(*plan.raw_tables, *_find_measured_runs(wheel, named)))


def _find_measured_runs(wheel: Path, source: str) -> Iterator[RawTable]:
    """Yield the table of serving runs that NVIDIA compares its own answers with."""
    archive = Archive.open(wheel, _BUDGET)
    for name in archive:
        if not name.endswith(f"/{MEASURED_RUNS}.csv"):
            continue
        text = archive[name]
        digest = hashlib.sha256(text).hexdigest()
        num_rows = text.count(b"\n") - 1
        yield RawTable(
            name=f"{MEASURED_RUNS}.{digest[:16]}",
            num_rows=num_rows,
            content_hash=digest,
            facts={
                "table": MEASURED_RUNS,
                "source": source,
                "source_file": name,
                "num_rows": num_rows,
            },
            read=partial(bytes, text),
        )


def _read_metadata(wheel: Path) -> Mapping[str, str]:
    """Return what a wheel says of itself; refuse one without tables."""
    try:
        archive = Archive.open(wheel, _BUDGET)
        found = next((name for name in archive if name.endswith(".dist-info/METADATA")), "")
        if found and archive.num_bytes_of(found) > _MAX_METADATA_BYTES:
            refuse(wheel, f"{found} unpacks to more than {_MAX_METADATA_BYTES} bytes")
        text = archive[found].decode("utf-8", "replace") if found else ""
    except InvalidRequestError as err:
        refuse(wheel, f"is no wheel that can be read: {err.message}")
    if not any(name.endswith(("_perf.parquet", "_perf.txt")) for name in archive):
        refuse(wheel, f"is a stub without tables; version {NVIDIA_VERSION} has them")
    return dict(HeaderParser().parsestr(text))


def _fetch_dataset(place: str, scratch: Path, hear: Heard) -> Path:
    """Return the folder of a dataset, unpacked and downloaded where it has to be."""
    path = Path(place)
    if place.startswith(("http://", "https://")):
        path = scratch / "dataset.zip"
        try:
            _download(place, path, hear)
        except (OSError, ValueError, HTTPException) as err:
            raise InvalidRequestError.of_field("dataset", f"{place}: {err}") from err
    if not path.is_file():
        return path
    try:
        archive = Archive.open(path, _BUDGET)
    except InvalidRequestError as err:
        reason = f"{place}: {err.message}; files of a dataset are read from the folder with their"
        raise InvalidRequestError.of_field("dataset", f"{reason} {MANIFEST_NAME}") from err
    try:
        for name in archive:
            hear(0.0, f"unpacking {name}")
            target = path_inside(scratch / "dataset", name, "dataset")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive[name])
    except OSError as err:  # such as a file where another has a folder
        raise InvalidRequestError.of_field("dataset", f"{place}: {err}") from err
    manifests = sorted((scratch / "dataset").rglob(MANIFEST_NAME))
    return manifests[0].parent if manifests else scratch / "dataset"


def _download(
    place: str, path: Path, hear: Heard = hear_nothing, max_bytes: int = _MAX_BYTES
) -> None:
    """Write what an address has to a file.

    Raises:
        OSError, ValueError, HTTPException: it cannot be had, or is larger than any dataset.
        as `hear`.

    """
    num_left, num_done = max_bytes, 0
    with urlopen(place, timeout=_SILENCE_S) as reply, path.open("wb") as file:  # noqa: S310
        whole = reply.length or 0
        while piece := reply.read1(_PIECE_BYTES):
            num_left -= len(piece)
            num_done += len(piece)
            of_all = f" of {whole / _MEGA:,.0f}" if whole else ""
            hear(
                min(num_done / whole, 1.0) if whole else 0.0,
                f"downloading: {num_done / _MEGA:,.0f}{of_all} MB",
            )
            if num_left < 0:
                message = f"more than {max_bytes} bytes"
                raise ValueError(message)
            file.write(piece)
        if reply.length:  # reading in pieces does not mind
            message = f"ended {reply.length} bytes early"
            raise ValueError(message)


def publish_dataset(
    catalog: CatalogPort, path: Path, selection: MeasurementFilter, licence: str
) -> ExportReport:
    """Write the selected rows of a catalog, as `publish_rows` does.

    `licence` is that of runs that say none.
    """
    runs = [
        replace(found.run, licence=found.run.licence or licence) for found in catalog.list_runs()
    ]
    return publish_rows(catalog.read_measurements(selection), runs, path, selection)


def publish_rows(
    rows: ArrowStream,
    runs: Sequence[Run],
    path: Path,
    selection: MeasurementFilter,
    options: Mapping[str, str] = MappingProxyType({}),
) -> ExportReport:
    """Write a dataset of rows in the stored schema, with the licences of its runs and a card.

    `options` are the exporter's.

    Raises:
        InvalidRequestError: there is no row, or nobody said the licence of a run.

    """
    request = ExportRequest(path=path, selection=selection, runs=runs, options=options)
    is_new = not path.exists()
    report = find_exporter(DATASET_TOOL).write(rows, request)
    with removed_on_failure(path, (*report.files, _CARD), is_new=is_new):
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        unsaid = [run["run_id"] for run in manifest["runs"] if not run["licence"]]
        if unsaid:
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
