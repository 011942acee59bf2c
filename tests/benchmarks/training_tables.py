"""What the predictor learns for training steps: the shared measurements, without what only serves.

GPUModeling's operators, forward and backward, and collectives on A100 and GH200; AIConfigurator's
tables of 16-bit GEMM, prefill attention and NCCL on A100, H200 and GB200; and operators on a B200
as SimuMax publishes them, in `b200_operators` next to this file.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.domain.ports import CatalogPort

# Every second of the collector's token counts is one more than the one before; these are enough.
_GEMM_TOKENS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def _one_of(**columns: Sequence[object]) -> pc.Expression:
    masks = [pc.field(name).isin(values) for name, values in columns.items()]
    return functools.reduce(operator.and_, masks)


_B200 = Path(__file__).resolve().parent / "b200_operators"
_BF16 = ["bfloat16"]
# None of the steps ran on it.
_OTHER_DEVICE = "l40s"
# The rows of each table that training needs; other tables are left out.
_PICKS: Mapping[str, pc.Expression] = {
    "gemm_perf": _one_of(m=_GEMM_TOKENS, gemm_dtype=_BF16),
    "context_attention_perf": _one_of(
        attn_dtype=_BF16, kv_cache_dtype=_BF16, head_dim=[64, 128, 192]
    ),
    "context_mla_perf": _one_of(kv_cache_dtype=_BF16),
    "nccl_perf": _one_of(nccl_dtype=["half"]),
}


def import_training_tables(catalog: CatalogPort, data: Path, scratch: Path) -> None:
    """Record the measurements; `scratch` is a new folder for the thinned tables."""
    _thin(data / "aiconfigurator" / "systems", scratch)
    for importer, path in (("gpumodeling", data / "gpumodeling"), ("aiconfigurator", scratch)):
        record_files(catalog, importer, ImportRequest(path=path))
    mapping = {"mapping": str(_B200 / "mapping.yaml")}
    record_files(catalog, "generic", ImportRequest(path=_B200, options=mapping))


def record_files(catalog: CatalogPort, importer: str, request: ImportRequest) -> None:
    """Record what an importer reads."""
    plan = find_importer(importer).read(request)
    list(catalog.record(plan.run, plan.batches))


def _thin(systems: Path, thinned: Path) -> None:
    """Write the picked rows in the same layout."""
    thinned.mkdir(parents=True)
    for path in (*systems.glob("*.yaml"), *systems.rglob("collection_meta.yaml")):
        _place(path, systems, thinned).write_bytes(path.read_bytes())
    for path in sorted(systems.rglob("*.parquet")):
        if path.stem in _PICKS and _OTHER_DEVICE not in path.parts:
            table = pq.read_table(path).filter(_PICKS[path.stem])
            if "window_size" in table.column_names:
                table = table.filter(_one_of(window_size=[0]))
            pq.write_table(table, _place(path, systems, thinned))


def _place(path: Path, systems: Path, thinned: Path) -> Path:
    place = thinned / path.relative_to(systems)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
