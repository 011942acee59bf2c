"""Read a model's architecture from the metadata of a GGUF file; from its tensors, how it is stored.

An architecture of llama.cpp is a family that `config.json` files have too: its keys are those under
another name, and the family's reader says what they mean.
Source: llama.cpp, `gguf-py/gguf/constants.py` (keys and names of tensors), `src/llama-model.cpp`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.gguf_file import GgufFile, GgufTensor, read_gguf
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.layer import every_nth
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.quantization import join_parts, name_weight_only

_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_LATENT = {
    **_KEYS,
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), "qk_head_dim"),
    "attention.key_length": "qk_head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Keys that run no operator: how positions turn, factors and limits; what tensors say themselves.
_INERT = re.compile(
    r"rope\..*|attention\.(layer_norm_(rms_)?epsilon|scale)|vocab_size"
    r"|expert_(gating_func|weights_(norm|scale)|group_(used_)?count)|(attn|final)_logit_softcapping"
)
_NUM_WIDE = 16
_NOTHING = (0, "", False)
# Parts of a model by the names of tensors, the first that fits.
_PARTS = (
    (re.compile(r"token_embd\.weight"), "embedding"),
    (re.compile(r"output\.weight"), "head"),
    (re.compile(r"blk\.\d+\.attn_(q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)\.weight"), "latent"),
    (re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.weight"), "attention"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight"), "experts"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)_shexp\.weight"), "shared_experts"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight"), "mlp"),
)
# How far the weights of a file may be from those of the model that it describes.
_COUNT_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """The model type of an architecture, its keys by name of llama.cpp, and what is always so.

    Every `period`-th layer sees all tokens and the others a window (0: as `sliding_window` says).
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _KEYS)
    period: int = 0


_FAMILIES: Mapping[str, _Family] = {
    "deepseek2": _Family(model_type="deepseek_v3", keys=_LATENT),
    "gemma": _Family(model_type="gemma"),
    # Of the same layers as the dense ones of Gemma 4.
    "gemma3": _Family(model_type="gemma4_text", period=6),
    "gpt-oss": _Family(
        model_type="gpt_oss",
        keys={**_KEYS, **_MIXTRAL, "expert_feed_forward_length": "intermediate_size"},
        period=2,
    ),
    "llama": _Family(model_type="llama"),
    "qwen2": _Family(model_type="qwen2"),
    "qwen2moe": _Family(
        model_type="qwen2_moe",
        keys={
            **_KEYS,
            **_EXPERTS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3": _Family(model_type="qwen3"),
    "qwen3moe": _Family(model_type="qwen3_moe", keys={**_KEYS, **_EXPERTS}),
}
_LLAMA_WITH_EXPERTS = _Family(model_type="mixtral", keys={**_KEYS, **_MIXTRAL})
_LLAMA_WITH_WINDOW = _Family(model_type="mistral")


def load_gguf(path: Path) -> ModelArchitecture:
    """Read the model of a GGUF file, or of all files it was split into; it is named after the file.

    Raises:
        InvalidRequestError: as `read_gguf`; its architecture is not supported, a key may change the
            operators and nobody reads it, or its tensors are not those of the model it describes.

    """
    file = read_gguf(path)
    name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    model = architecture_of_hf_config(_write_config(file, name), name)
    held = sum(tensor.num_elements for tensor in file.tensors)
    described = count_parameters(model).total
    if abs(held - described) > _COUNT_TOLERANCE * described:
        problem = f"its tensors hold {held:,} weights, and the model it describes {described:,}"
        raise InvalidRequestError.of_field("model", f"{name}: {problem}")
    return replace(model, quantization=_name_storage(file))


def _write_config(file: GgufFile, name: str) -> dict[str, object]:
    """Return what a `config.json` would say."""
    architecture = str(file.metadata.get("general.architecture"))
    stem = f"{architecture}."
    given = {
        key.removeprefix(stem): _settle(value)
        for key, value in file.metadata.items()
        if key.startswith(stem)
    }
    family = _find_family(architecture, given)
    if wrong := [key for key, value in given.items() if _is_wrong(key, value, family)]:
        raise InvalidRequestError.of_violations(
            [
                FieldViolation(
                    stem + key,
                    f"{file.metadata[stem + key]!r:.60} may change the operators: only"
                    f" {', '.join(sorted(family.keys))} of a {architecture} model are read",
                )
                for key in wrong
            ],
            f"GGUF metadata of {name}",
        )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    config = {family.keys[key]: value for key, value in given.items() if key in family.keys}
    config |= {"model_type": family.model_type, "_name_or_path": name}
    embedding = tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[-1] if embedding else None
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if family.model_type in ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gpt_oss"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if family.period:
        config["layer_types"] = _layer_types(int(str(given.get("block_count", 0))), family.period)
    if family.keys is _LATENT:
        config |= _write_latent(given)
    elif config.get("v_head_dim") == config.get("head_dim"):
        # Any other width of values is refused with the keys that nobody reads.
        config.pop("v_head_dim", None)
    return config


def _is_wrong(key: str, value: object, family: "_Family") -> bool:
    """Tell whether a key has no value for all layers, or one that nobody reads."""
    if key in family.keys:
        return value is None
    return not _INERT.fullmatch(key) and value not in _NOTHING


def _settle(value: object) -> object:
    """Return a value; of one for each layer that of all, or None where they differ."""
    if isinstance(value, tuple):
        return value[0] if len(set(value)) == 1 else None
    return value


def _find_family(architecture: str, given: Mapping[str, object]) -> _Family:
    if architecture not in _FAMILIES:
        problem = f"{architecture!r} is not supported; supported are {', '.join(_FAMILIES)}"
        raise InvalidRequestError.of_field("general.architecture", problem)
    if architecture == "llama" and given.get("expert_count"):
        return _LLAMA_WITH_EXPERTS
    if architecture == "llama" and given.get("attention.sliding_window"):
        return _LLAMA_WITH_WINDOW
    return _FAMILIES[architecture]


def _layer_types(num_layers: int, period: int) -> list[str]:
    kinds = {True: "full_attention", False: "sliding_attention"}
    return [kinds[is_full] for is_full in every_nth(num_layers, period)]


def _write_latent(given: Mapping[str, object]) -> dict[str, object]:
    """Return the widths of latent attention's heads, which newer files have under names of its own.

    There `key_length` and `value_length` are those of the vectors in the cache.
    """
    lengths = [
        given.get(f"attention.{name}_length_mla") or given.get(f"attention.{name}_length") or 0
        for name in ("key", "value")
    ]
    key_dim, value_dim = (int(str(length)) for length in lengths)
    rope_dim = int(str(given.get("rope.dimension_count", 0)))
    return {
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "num_key_value_heads": given.get("attention.head_count"),
    }


def _name_storage(file: GgufFile) -> str:
    """Return the scheme that the file's parts are stored in, by the mean bits of their weights."""
    held: dict[str, list[GgufTensor]] = {}
    names = {tensor.name for tensor in file.tensors}
    has_latent = any(".attn_kv_a_mqa." in name for name in names)
    for tensor in file.tensors:
        part = next((part for names, part in _PARTS if names.fullmatch(tensor.name)), "")
        if has_latent and part == "attention":
            part = "latent"
        held.setdefault(part, []).append(tensor)
    held.pop("", None)
    schemes = {}
    for part, tensors in held.items():
        num_bits = 8 * sum(tensor.num_bytes for tensor in tensors)
        bits = num_bits / sum(tensor.num_elements for tensor in tensors)
        schemes[part] = name_weight_only(bits) if bits < _NUM_WIDE else ""
    return join_parts(schemes)
