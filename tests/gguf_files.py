"""Small GGUF files: the head alone, for what nobody reads is not written."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, MXFP4 = 0, 1, 2, 8, 12, 14, 39
Tensors = Mapping[str, tuple[tuple[int, ...], int]]


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Tensors, version: int = 3
) -> Path:
    """Write a file with these keys, and tensors of these shapes and types without their data."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), *_value(value)]
    for name, (shape, kind) in tensors.items():
        parts += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", kind, 0))
    path.write_bytes(b"".join(parts))
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: object) -> Iterator[bytes]:
    if isinstance(value, bool):
        yield struct.pack("<I?", 7, value)
    elif isinstance(value, int):
        yield struct.pack("<II", 4, value)
    elif isinstance(value, float):
        yield struct.pack("<If", 6, value)
    elif isinstance(value, str):
        yield struct.pack("<I", 8) + _text(value)
    elif isinstance(value, Sequence):
        is_text = isinstance(value[0], str)
        yield struct.pack("<IIQ", 9, 8 if is_text else 4, len(value))
        for item in value:
            yield _text(item) if is_text else struct.pack("<I", item)


def under(architecture: str, keys: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata of an architecture."""
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a", "b"], **own}


def decoder_keys(**changes: object) -> dict[str, object]:
    """Return the keys of a small decoder: 2 layers of 4 heads and 2 key heads of 64."""
    return {
        "embedding_length": 256,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 512,
        "context_length": 4096,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }


def trunk_tensors(kind: int, *, has_output: bool = True) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return embedding, head and the last norm, of 1,024 tokens."""
    found = {"token_embd.weight": ((256, 1024), kind), "output_norm.weight": ((256,), F32)}
    return {**found, **({"output.weight": ((256, 1024), kind)} if has_output else {})}


def attention_tensors(
    layer: int, kind: int, **changes: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return attention of grouped heads and its norm; `changes` are the types of some matrices."""
    shapes = {"q": (256, 256), "k": (256, 128), "v": (256, 128), "output": (256, 256)}
    return {
        f"blk.{layer}.attn_norm.weight": ((256,), F32),
        **{
            f"blk.{layer}.attn_{name}.weight": (shape, changes.get(name, kind))
            for name, shape in shapes.items()
        },
    }


def mlp_tensors(layer: int, kind: int, **changes: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return a gated dense half and its norm."""
    shapes = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}
    return {
        f"blk.{layer}.ffn_norm.weight": ((256,), F32),
        **{
            f"blk.{layer}.ffn_{name}.weight": (shape, changes.get(name, kind))
            for name, shape in shapes.items()
        },
    }


def expert_tensors(
    layer: int, kind: int, count: int, width: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return gated experts with their router and norm."""
    return {
        f"blk.{layer}.ffn_norm.weight": ((256,), F32),
        f"blk.{layer}.ffn_gate_inp.weight": ((256, count), F32),
        f"blk.{layer}.ffn_gate_exps.weight": ((256, width, count), kind),
        f"blk.{layer}.ffn_up_exps.weight": ((256, width, count), kind),
        f"blk.{layer}.ffn_down_exps.weight": ((width, 256, count), kind),
    }
