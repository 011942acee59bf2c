# ruff: noqa: T201 - a program
"""Make the starter's dataset from NVIDIA's wheels: `python starter/make_starter.py --wheel FILE`.

The wheels' tables are imported into a catalog of their own; of what can be trained on, the series
of the newest software, and of older where it is another, are thinned (see `thinning.py`) and
published as a dataset, with an index of its series, models of typical efficiency, and what leaving
points out taught of series. The same wheels and the same release of the program give the same
bytes.
"""

import argparse
import csv
import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from thinning import choose_points, choose_software

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dataset import MANIFEST_NAME, format_part_path, parse_part_path
from foretoken.catalog.installing import (
    MEASURED_RUNS,
    NVIDIA,
    NVIDIA_VERSION,
    InstallRequest,
    download_wheel,
    open_install,
    publish_rows,
)
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementBatch, MeasurementFilter
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet, own_heads
from foretoken.predictor.model_store import write_models
from foretoken.predictor.regression.curves import has_curves
from foretoken.predictor.series import Series, SeriesKey, round_latency
from foretoken.predictor.starter import (
    PRIOR_NAME,
    TUNING_NAME,
    StarterEntry,
    StarterSeries,
    write_index,
)
from foretoken.predictor.trainer import tune
from foretoken.predictor.training_rows import group_rows, keep_usable, read_fastest
from foretoken.predictor.transfer import train_transfers
from foretoken.predictor.transfer.siblings import find_siblings
from foretoken.predictor.tuning import Tuning, write_tunings
from foretoken.wire.arrow import STORED_SCHEMA, read_table

TARGET = Path(__file__).resolve().parent / "src" / "foretoken_starter" / "data"
SYSTEMS = (
    "a100_sxm",
    "b200_sxm",
    "b300_sxm",
    "gb200",
    "h100_sxm",
    "h200_sxm",
    "l40s",
    "rtx_pro_6000_server",
)
# Of devices whose chip is that of another here, only what the other does not tell: collectives, and
# formats in which their tensor cores differ.
_SAME_CHIP = {"b300": "b200", "gb200": "b200"}
_ENGINES = ("sglang", "trtllm", "vllm")
# An older wheel, with tables of releases that the newer one lacks. Of these what later
# releases compute by another kernel: vLLM's products in NVFP4, FlashInfer's CUTLASS until CuTe DSL
# became the default (vllm-project/vllm pull request 42235).
_OLDER = ("aiconfigurator", "0.8.0")
_OLDER_SYSTEMS, _OLDER_ENGINES = ("b200_sxm",), ("vllm/0.17.0",)
_OLDER_TABLES = ("gemm fp4",)
_LICENCE = "Apache-2.0"
# How hard zstd compresses, from 1 to 22: 12 to 17 % smaller than by 1.
_LEVEL = "19"
# Bits of the mantissa of a latency in single precision that are dropped: 10 of 23 are kept, which
# is within five parts in ten thousand. A point that is measured again is off by ten times as much.
_DROPPED_BITS = 13
# A series of fewer points is soon trained in full; so many go to a worker at a time.
_MIN_TUNED, _CHUNK = 500, 8
# When NVIDIA built the wheel: the same every time.
_BUILT = datetime(2026, 10, 27, tzinfo=UTC)
_RUN_ID = "starter"


def make(wheel: Path | None, older: Path | None, version: str, target: Path) -> None:
    """Write the dataset in place of the one that is there."""
    request = InstallRequest(
        dataset=NVIDIA,
        systems=",".join(SYSTEMS),
        engines=",".join(_ENGINES),
        wheel=wheel,
        version=version,
    )
    with (
        tempfile.TemporaryDirectory(prefix="foretoken-starter-") as name,
        CatalogOf(Path(name)) as catalog,
        open_install(request) as plan,
    ):
        for _ in catalog.record(plan.run, plan.batches):
            pass
        wheel = older or download_wheel(*_OLDER, Path(name))
        older_request = replace(
            request,
            wheel=wheel,
            systems=",".join(_OLDER_SYSTEMS),
            engines=",".join(_OLDER_ENGINES),
        )
        with open_install(older_request) as other:
            for _ in catalog.record(other.run, map(keep_changed, other.batches)):
                pass
        write_dataset(catalog, target)
        (runs,) = (table for table in plan.raw_tables if table.facts["table"] == MEASURED_RUNS)
        write_runs(runs.read(), target)
    write_learned(target)


def keep_changed(batch: MeasurementBatch) -> MeasurementBatch:
    """Return a batch of the older wheel with only the rows that newer wheels lack."""
    rows = read_table(batch.rows)
    texts = (rows[name].cast(pa.string()) for name in ("operator", "dtype"))
    named = pc.binary_join_element_wise(*texts, " ")
    return replace(batch, rows=rows.filter(pc.is_in(named, pa.array(_OLDER_TABLES))))


def write_dataset(catalog: CatalogService, target: Path) -> None:
    """Write the thinned rows of a catalog that holds NVIDIA's tables, and their index."""
    origins = sorted((found.run for found in catalog.list_runs()), key=lambda run: run.source)
    hashes = [origin.environment["archive_sha256"] for origin in origins]
    run = replace(
        origins[-1],
        run_id=_RUN_ID,
        source=f"{' and '.join(origin.source for origin in origins)}, thinned",
        licence=_LICENCE,
        environment={"archive_sha256": " ".join(hashes)},
    )
    thinned = Thinned(catalog)
    rows = pa.RecordBatchReader.from_batches(STORED_SCHEMA, thinned.batches())
    shutil.rmtree(target, ignore_errors=True)
    operators = sorted({found.operator for found in catalog.describe_coverage()})
    options = {"level": _LEVEL, "operators": ",".join(operators)}
    report = publish_rows(rows, [run], target, MeasurementFilter(), options)
    write_index(target, list(_place(thinned.entries, target)))
    print(f"{report.num_rows:,} rows of {len(thinned.entries)} series in {target}")


def _place(entries: Sequence[StarterEntry], target: Path) -> Iterator[StarterEntry]:
    """Yield entries with the parts of their partitions that they lie in, each whole in one."""
    manifest = json.loads((target / MANIFEST_NAME).read_text(encoding="utf-8"))
    parts: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for file in manifest["files"]:
        found = parts.setdefault(parse_part_path(file["path"]), [])
        found.append((file["path"], file["num_rows"]))
    for entry in entries:
        first = entry.first
        for path, num_rows in parts[parse_part_path(entry.file)]:
            if first < num_rows:
                yield replace(entry, file=path, first=first)
                break
            first -= num_rows


def write_runs(content: bytes, target: Path) -> None:
    """Write the measured serving runs of the GPUs here, without where they lay on whose disk."""
    rows = [
        row
        for row in csv.DictReader(io.StringIO(content.decode("utf-8")))
        if row["mode"] == "agg" and row["system"] in SYSTEMS
    ]
    text = io.StringIO(newline="")
    names = [name for name in rows[0] if name != "silicon_data_source"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    packed = gzip.compress(text.getvalue().encode(), mtime=0)
    (target / f"_{MEASURED_RUNS}.csv.gz").write_bytes(packed)


def write_learned(target: Path) -> None:
    """Write what the series of a dataset teach: typical efficiencies, and their own tunings."""
    config = PredictorConfig(state_folder="")
    series = StarterSeries(target, target, config)
    single = [head.key for head in own_heads(tuple(series.heads.values()))]
    transfers = train_transfers(map(series.read_series, single), config, seed=0)
    (target / PRIOR_NAME).write_bytes(write_models(ModelSet(transfers=transfers)))
    tuned = [
        head
        for head in series.heads.values()
        if head.num_points >= _MIN_TUNED and not has_curves(head.key.spec)
    ]
    with ProcessPoolExecutor() as pool:
        found = pool.map(_tune, ((target, head.key) for head in tuned), chunksize=_CHUNK)
        tunings = dict(zip((head.content_hash for head in tuned), found, strict=True))
    (target / TUNING_NAME).write_bytes(write_tunings(tunings))


def _tune(place: tuple[Path, SeriesKey]) -> Tuning:
    """Return what a training of a series learns by leaving points out."""
    folder, key = place
    return tune(StarterSeries(folder, folder, PredictorConfig(state_folder="")).train(key))


class CatalogOf:
    """A catalog in a folder, open while the context lasts."""

    def __init__(self, folder: Path) -> None:
        config = CatalogConfig(path=str(folder / "catalog.duckdb"), num_threads=1)
        self._service = CatalogService(config)

    def __enter__(self) -> CatalogService:
        """Open it."""
        self._service.open()
        return self._service

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._service.close()


class Thinned:
    """What is kept of a catalog's rows, device by device and operator by operator."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog
        self.entries: list[StarterEntry] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one series after the other, in the stored schema."""
        coverage = self._catalog.describe_coverage()
        for device, operator in sorted({(found.device, found.operator) for found in coverage}):
            first = 0
            for series in self._read(device, operator):
                entry = StarterEntry(
                    key=series.key,
                    kernels=series.kernels,
                    num_points=series.num_points,
                    noise_log=series.noise_log,
                    file=format_part_path(device, operator, 0),
                    first=first,
                )
                yield _to_rows(series, sum(known.num_points for known in self.entries))
                self.entries.append(entry)
                first += series.num_points

    def _read(self, device: str, operator: str) -> Iterator[Series]:
        selection = MeasurementFilter(device=device, operator=operator)
        table = keep_usable(read_table(self._catalog.read_measurements(selection)))
        found = {
            key: read_fastest(key, rows)
            for key, rows in group_rows(table).items()
            if not _is_told_by_sibling(key)
        }
        for key in sorted(choose_software(found)):
            yield found[key].take(choose_points(found[key]))


def _is_told_by_sibling(key: SeriesKey) -> bool:
    siblings = find_siblings(key.target.device, key.target.dtype)
    told_by = _SAME_CHIP.get(key.device)
    return not key.spec.is_collective and told_by in {device.name for device in siblings}


def _to_rows(series: Series, first: int) -> pa.RecordBatch:
    """Return a series as rows, each at one point the median of its fastest kernel."""
    num_rows, key = series.num_points, series.key
    names = key.spec.dim_names
    values = series.points.reshape(-1)
    dims = pa.MapArray.from_arrays(
        np.arange(num_rows + 1, dtype=np.int32) * len(names),
        pa.array(list(names) * num_rows, pa.string()),
        pa.array(values, pa.int64()),
    )
    said = _describe(key, series.kernels)
    columns = {
        "row_index": pa.array(np.arange(first, first + num_rows)),
        "dims": dims,
        "latency_us_median": pa.array(round_latency(series.latency_us, _DROPPED_BITS)),
        **{name: pa.repeat(value, num_rows) for name, value in said.items()},
    }
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(num_rows, field.type)
        for field in STORED_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=STORED_SCHEMA)


def _describe(key: SeriesKey, kernels: tuple[str, ...]) -> dict[str, pa.Scalar]:
    framework, _, version = key.framework.partition(" ")
    texts = {
        "run_id": _RUN_ID,
        "operator": key.operator,
        "phase": key.phase,
        # A collective's time depends on its bytes alone.
        "dtype": key.dtype or "bf16",
        "device": key.device,
        "topology": key.topology or None,
        "framework": framework,
        "framework_version": version,
        "kernel": kernels[0] if len(kernels) == 1 else None,
        "variant": key.variant or None,
        "status": "ok",
    }
    said = {name: pa.scalar(text, pa.string()) for name, text in texts.items()}
    return {
        **said,
        "batch_index": pa.scalar(0, pa.int64()),
        "recorded_at": pa.scalar(_BUILT.replace(tzinfo=None), pa.timestamp("us")),
    }


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is at hand")
    parser.add_argument("--older", type=Path, help="the older wheel, if it is at hand")
    parser.add_argument("--version", default=NVIDIA_VERSION, help="which wheel to download")
    parser.add_argument("--prior", action="store_true", help="learn from the dataset that is there")
    parser.add_argument("--out", type=Path, default=TARGET, help="the dataset's folder")
    options = parser.parse_args()
    if options.prior:
        write_learned(options.out)
    else:
        make(options.wheel, options.older, options.version, options.out)


if __name__ == "__main__":
    main()
