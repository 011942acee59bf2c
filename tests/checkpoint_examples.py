"""Made-up files of checkpoints, in the real formats."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def write_safetensors(path: Path, tensors: Mapping[str, tuple[int, int]]) -> None:
    """Write the header of a file whose tensors lie from byte to byte; the bytes are left out."""
    header = {"__metadata__": {"format": "pt"}} | {
        name: {"dtype": "BF16", "shape": [(end - start) // 2], "data_offsets": [start, end]}
        for name, (start, end) in tensors.items()
    }
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)


def write_index(folder: Path, files: Mapping[str, str], **metadata: object) -> None:
    """Write the index that says which file each tensor is in."""
    index = {"metadata": metadata, "weight_map": dict(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
