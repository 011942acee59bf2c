"""What the weights of a checkpoint in safetensors files take, by their index or their headers.

Source: huggingface/safetensors, README "Format" (a file is eight bytes with the length of its
header, the header, the tensors; the header is JSON with the `data_offsets` of each), and
transformers 5, `modeling_utils.py`: `metadata.total_size` of an index is the sum of the tensors.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.text_file import is_there, parse_json, read_json

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_LENGTH = struct.Struct("<Q")
# Source: safetensors, `src/tensor.rs`: longer headers are refused.
_LONGEST_HEADER = 100_000_000


def checkpoint_bytes(folder: Path) -> int:
    """Return the bytes of all tensors of a checkpoint; 0 where its files do not say.

    Files that are damaged, or stand for others that were not fetched, do not say.
    """
    try:
        if not is_there(folder / _INDEX):
            return _tensor_bytes(folder / _ONE_FILE)
        index = _mapping(read_json(folder / _INDEX, "model"))
        total = _mapping(index.get("metadata")).get("total_size")
        if isinstance(total, int | float):
            return int(total)
        names = {Path(str(name)).name for name in _mapping(index.get("weight_map")).values()}
        sizes = [_tensor_bytes(folder / name) for name in names]
        return sum(sizes) if all(sizes) else 0
    except (InvalidRequestError, LookupError, OSError, OverflowError, TypeError, ValueError):
        return 0


def _tensor_bytes(path: Path) -> int:
    """Return the bytes of the tensors of a file, 0 where it is not there."""
    if not is_there(path):
        return 0
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (0,)
        if not 0 < length <= _LONGEST_HEADER:
            return 0
        tensors = _mapping(parse_json(file.read(length), "model"))
    offsets = [of["data_offsets"] for name, of in tensors.items() if name != "__metadata__"]
    return sum(end - start for start, end in offsets)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
