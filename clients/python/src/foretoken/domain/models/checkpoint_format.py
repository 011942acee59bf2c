"""How a checkpoint stores its weights and expects its KV cache, from its configuration files.

Read are `quantization_config` of a `config.json` (Hugging Face's FP8, GPTQ, AWQ, MXFP4,
compressed-tensors, ModelOpt) and ModelOpt's own `hf_quant_config.json`. A part of the layers, such
as the projections of attention, is stored as most of its matrices in most of its layers are.
Source: transformers 5, `utils/quantization_config.py`; vLLM 0.24, `quantization/modelopt.py` and
`compressed_tensors/utils.py` (which names are left out); ModelOpt 0.45, `export/quant_utils.py`.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.quantization import join_parts

# Names that other families have for the same, which their patterns use.
_SAME_NAMES = (
    (re.compile(r"(model\.language_model|language_model\.model|backbone)\."), "model."),
    (re.compile(r"^layers\."), "model.layers."),
    (
        re.compile(r"block_sparse_moe|\bffn\b|\bmixer(?=\.(shared_)?experts|\.(up|down)_proj)"),
        "mlp",
    ),
    (re.compile(r"\bmixer(?=\.[qkvo]_proj)|(?<=\.)attn(?=\.|$)"), "self_attn"),
    (re.compile(r"shared_expert(?!s)"), "shared_experts"),
    (re.compile(r"\.w1$"), ".gate_proj"),
    (re.compile(r"\.w2$"), ".down_proj"),
    (re.compile(r"\.w3$"), ".up_proj"),
)
_MODELOPT = {
    "FP8": "fp8_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4_wo",
    "W4A16_AWQ": "int4_wo",
    "W4A8_AWQ": "w4afp8",
    "W8A16": "int8_wo",
    "W8A8_SQ_PER_CHANNEL": "sq",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}
_INTEGER_GROUPS = {128: "int4_wo", 64: "int4_wo_g64", 32: "int4_wo_g32"}
_FP8_BLOCKS = {128: "fp8_block", 32: "fp8_block_32"}
# Expressions of files are matched with what takes no time to: no group is repeated, and few parts.
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_MAX_REPEATS = 4


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The scheme that a checkpoint is stored in, and the format of its KV cache (None: its own)."""

    quantization: str = ""
    kv_dtype: DType | None = None


def read_checkpoint_format(
    config: Mapping[str, Any], parts: Mapping[str, Sequence[str]], modelopt: object = None
) -> CheckpointFormat:
    """Return how the checkpoint of a `config.json` is stored.

    Args:
        config: the parsed file.
        parts: the matrices of each part of `PARTS`, by their full names in most checkpoints
            (`model.layers.3.self_attn.q_proj`).
        modelopt: the parsed `hf_quant_config.json` next to it, None without one.

    Raises:
        InvalidRequestError: the method or format is not known; weights would be read as others.

    """
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = config.get("quantization_config") or nested
    if not found and isinstance(modelopt, Mapping):
        found = {"quant_method": "modelopt", **_mapping(modelopt.get("quantization"))}
    if not found:
        return CheckpointFormat()
    stored = _mapping(found)
    method = str(stored.get("quant_method") or ("modelopt" if "quant_algo" in stored else ""))
    if stored.get("quant_algo") and method != "fp8":
        method = "modelopt"
    if method not in _METHODS:
        raise _refuse("quant_method", f"{method!r} is none of {', '.join(_METHODS)}")
    scheme_of, is_left_out = _METHODS[method](stored), _is_left_out(stored)
    experts = _experts_of_fp8(config, stored) if method == "fp8" else ""
    if experts:
        # The rest is as it was before its experts were stored anew: nothing is left in 16 bits.
        scheme_of, is_left_out = _with_experts(scheme_of, experts), lambda _: False
    schemes = {
        part: _usual(is_left_out, scheme_of, names) for part, names in parts.items() if names
    }
    return CheckpointFormat(join_parts(schemes), _kv_dtype(stored))


# What stores a matrix of that name.
_SchemeOf = Callable[[str], str]


def _usual(is_left_out: Callable[[str], bool], scheme_of: _SchemeOf, names: Sequence[str]) -> str:
    """Return the scheme of most of a part's matrices, nothing where they are left as they are."""
    schemes = Counter("" if is_left_out(name) else scheme_of(name) for name in names)
    return schemes.most_common(1)[0][0]


def _is_left_out(stored: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return what tells whether a matrix is left in 16 bits: by name, prefix, glob or `re:`."""
    patterns = [
        _same(pattern)
        for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
        for pattern in _texts(stored, key)
    ]
    exact = {pattern for pattern in patterns if not {"*", "?"} & set(pattern)}
    others = [pattern for pattern in patterns if pattern not in exact]
    exact_prefixes = tuple(f"{name}." for name in exact if not name.startswith("re:"))
    expressions = [_compile(name) for name in (*exact, *others) if name.startswith("re:")]
    globs = [name for name in others if not name.startswith("re:")]

    def is_left_out(name: str) -> bool:
        return (
            name in exact
            or name.startswith(exact_prefixes)
            or any(expression.match(name) for expression in expressions)
            # A glob names a module, and with it all that is inside.
            or any(fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*") for glob in globs)
        )

    return is_left_out


def _compile(pattern: str) -> re.Pattern[str]:
    expression = pattern.removeprefix("re:")
    num_repeats = sum(expression.count(sign) for sign in "*+{")
    if num_repeats > _MAX_REPEATS or _REPEATED_GROUP.search(expression):
        raise _refuse("ignore", f"{pattern:.80} is too involved to be matched")
    try:
        return re.compile(expression)
    except re.error as err:
        raise _refuse("ignore", f"{pattern:.80}: {err}") from err


def _same(name: str) -> str:
    for pattern, common in _SAME_NAMES:
        name = pattern.sub(common, name)
    return name


def _experts_of_fp8(config: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Return the scheme of experts that FP8 checkpoints may store narrower, nothing without one.

    Source: config.json of DeepSeek-V4 (`expert_dtype`) and of NVIDIA's checkpoints of it.
    """
    algorithm = stored.get("moe_quant_algo")
    narrow = config.get("expert_dtype", stored.get("expert_dtype"))
    if algorithm:
        return _modelopt_scheme(algorithm)
    if narrow not in (None, "fp8", "fp4"):
        raise InvalidRequestError.of_field("expert_dtype", f"{narrow!r} is not fp8 or fp4")
    return "mxfp4" if narrow == "fp4" else ""


def _with_experts(scheme_of: _SchemeOf, experts: str) -> _SchemeOf:
    return lambda name: experts if ".experts." in name else scheme_of(name)


def _fp8(stored: Mapping[str, Any]) -> _SchemeOf:
    block = stored.get("weight_block_size")
    blocks = {str([side, side]): scheme for side, scheme in _FP8_BLOCKS.items()}
    if block is not None and str(block) not in blocks:
        raise _refuse("weight_block_size", f"{block} is none of {', '.join(blocks)}")
    is_static = stored.get("activation_scheme") == "static"
    scheme = blocks[str(block)] if block else "fp8_static" if is_static else "fp8"
    return lambda _: scheme


def _integer(stored: Mapping[str, Any]) -> _SchemeOf:
    """Read GPTQ and AWQ: weights alone, in groups."""
    scheme = _integer_scheme(stored.get("bits") or stored.get("w_bit"), stored.get("group_size"))
    return lambda _: scheme


def _integer_scheme(bits: object, group: object) -> str:
    # One scale for a row (-1) takes as good as nothing: as the largest of the groups.
    size = group if isinstance(group, int) and group > 0 else max(_INTEGER_GROUPS)
    schemes = {8: "int8_wo", 4: _INTEGER_GROUPS.get(size)}
    if not isinstance(bits, int) or bits not in schemes:
        raise _refuse("bits", f"weights of {bits!r} bits are not known; 4 and 8 are")
    scheme = schemes[bits]
    if scheme is None:
        known = ", ".join(map(str, _INTEGER_GROUPS))
        raise _refuse("group_size", f"{group!r} is none of {known}")
    return scheme


def _mxfp4(_: Mapping[str, Any]) -> _SchemeOf:
    # transformers and vLLM read experts alone this way.
    return lambda name: "mxfp4" if ".experts." in name else ""


def _compressed_tensors(stored: Mapping[str, Any]) -> _SchemeOf:
    groups = [_mapping(group) for group in _mapping(stored.get("config_groups")).values()]
    schemes = [(_targets(group), _group_scheme(group, stored)) for group in groups]

    def scheme_of(name: str) -> str:
        return next((scheme for targets, scheme in schemes if targets(name)), "")

    return scheme_of


def _targets(group: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return what tells whether a group is for a matrix: `Linear` is for all."""
    targets = {_same(target) for target in _texts(group, "targets") or ["Linear"]}
    expressions = [_compile(name) for name in targets if name.startswith("re:")]
    return lambda name: (
        "Linear" in targets or name in targets or any(found.match(name) for found in expressions)
    )


def _group_scheme(group: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    weights, inputs = _mapping(group.get("weights")), group.get("input_activations")
    kind = (weights.get("type", "int"), weights.get("num_bits"))
    if kind == ("float", 4):
        form = str(group.get("format") or stored.get("format"))
        return "mxfp4" if form.startswith("mxfp4") else "nvfp4" if inputs else "nvfp4_wo"
    if kind == ("float", 8):
        if weights.get("strategy") == "block":
            return "fp8_block"
        return "fp8_static" if inputs and not _mapping(inputs).get("dynamic") else "fp8"
    if kind == ("int", 8) and inputs:
        return "sq"
    return _integer_scheme(kind[1], weights.get("group_size"))


def _modelopt(stored: Mapping[str, Any]) -> _SchemeOf:
    algorithm = stored.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        scheme = _modelopt_scheme(algorithm)
        return lambda _: scheme
    layers = {
        _same(name): _modelopt_scheme(_mapping(said).get("quant_algo"))
        for name, said in _mapping(stored.get("quantized_layers")).items()
    }

    def scheme_of(name: str) -> str:
        while name and name not in layers:
            name = name.rpartition(".")[0]
        return layers.get(name, "")

    return scheme_of


def _modelopt_scheme(algorithm: object) -> str:
    scheme = _MODELOPT.get(str(algorithm))
    if scheme is None:
        raise _refuse("quant_algo", f"{algorithm!r} is none of {', '.join(_MODELOPT)}")
    return scheme


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], _SchemeOf]] = {
    "fp8": _fp8,
    "gptq": _integer,
    "awq": _integer,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def _kv_dtype(stored: Mapping[str, Any]) -> DType | None:
    scheme = stored.get("kv_cache_quant_algo") or stored.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        scheme = "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else scheme
    if scheme not in (None, "FP8"):
        raise _refuse("kv_cache_scheme", f"{scheme!r} is not known; FP8 is")
    return DType.FP8 if scheme else None


def _mapping(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse("", f"expected an object, found {value!r:.80}")
    return value


def _texts(stored: Mapping[str, Any], key: str) -> list[str]:
    value = stored.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refuse(key, f"expected a list of texts, found {value!r:.80}")
    return value


def _refuse(key: str, problem: str) -> InvalidRequestError:
    name = f"quantization_config.{key}" if key else "quantization_config"
    return InvalidRequestError.of_field(name, problem)
