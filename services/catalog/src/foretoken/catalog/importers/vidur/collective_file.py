"""`network/<topology>/<collective>.csv`: times of collectives by message size in bytes."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.importers.vidur.layer_file import rows_of_op, split_column
from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.row import RowFacts
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.hardware.topology import find_topology

_COLUMNS = ("num_workers", "size", "collective", "devices_per_node")


def read_collective(source: SourceFile, path: Path, topology: str) -> tuple[SourceTable, pa.Table]:
    """Read the CSV file of a collective, named like it.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    operator = path.stem
    origin = parse_csv(source, path, _COLUMNS)
    per_node = origin.integers("devices_per_node")
    dims = {
        "message_bytes": origin.integers("size"),
        "devices_per_node": per_node,
        "num_nodes": split_column(origin, "num_workers", per_node),
    }
    facts = RowFacts(
        operator=operator,
        dtype="fp16",
        device=find_topology(topology).device,
        topology=topology,
        framework="vllm",
    )
    mask = origin.texts("collective") == operator
    if not mask.all():
        raise origin.fault(
            int(np.argmin(mask)), f"collective: not {operator}, as the file is named"
        )
    return origin, rows_of_op(origin, operator, facts, dims, mask)
