"""Quantisation schemes: how engines store the weights of a model, and in what they multiply.

A scheme goes by the name of its rows in the catalog. Checkpoints that store parts of a layer in
several name the part of each, `attention=fp8+experts=nvfp4`, and leave the others as they are.
Embedding, router, norms and the head stay in the model's own format under all of them, as the
engines load such checkpoints; but weights alone in so many bits (`wo4.5bit`), as GGUF files have
them, may be those of embedding and head too.
Source: vLLM 0.19, `model_executor/layers/quantization`; TensorRT-LLM's modes as AIConfigurator's
tables name them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """How a matrix product holds its weights.

    `dtype` is the format of the activations that go in (None: the model's own), `variant` the
    scheme where that does not say it, `bits` what a weight takes with its share of the scales.
    """

    dtype: DType | None = None
    variant: str = ""
    bits: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What a scheme does to the matrix products of a layer, by the part they belong to.

    An empty `StoredWeight` leaves the weights as they are. `latent` and `recurrent` are what it
    does to latent attention and to layers with a recurrent state, where that is not what it does
    to `attention` (None).
    """

    attention: StoredWeight = StoredWeight()
    mlp: StoredWeight = StoredWeight()
    shared_experts: StoredWeight = StoredWeight()
    experts: StoredWeight = StoredWeight()
    latent: StoredWeight | None = None
    recurrent: StoredWeight | None = None
    embedding: StoredWeight = StoredWeight()
    head: StoredWeight = StoredWeight()

    def weight_of(self, part: str) -> StoredWeight:
        """Return how a part is stored, one of `PARTS`."""
        weight: StoredWeight | None = getattr(self, part)
        return self.attention if weight is None else weight

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The formats it multiplies in, but for the model's own; those of most products first."""
        stored = (self.mlp, self.experts, self.attention, self.shared_experts, self.latent)
        return tuple(
            dict.fromkeys(part.dtype for part in (*stored, self.recurrent) if part and part.dtype)
        )


# One scale of 4 bytes for a block of 128 by 128; of 2 bytes for a group of 128 weights (or 32, 64),
# with a zero point of 4 bits; of 1 byte for 16 weights (NVFP4) or 32 (MXFP4). A scale for a whole
# row or tensor does not show. Source: DeepSeek-V3, section 3.3; GPTQ and AWQ checkpoints; NVIDIA
# ModelOpt; OCP Microscaling Formats 1.0.
_BLOCK_BITS = 8 + 32 / (128 * 128)
_GROUP_BITS = 4 + 20 / 128
_GROUP_OF_64_BITS = 4 + 20 / 64
# Symmetric, as compressed-tensors packs them: without zero points.
_GROUP_OF_32_BITS = 4 + 16 / 32
_NVFP4_BITS = 4 + 8 / 16
_MXFP4_BITS = 4 + 8 / 32


def _stored(
    weight: StoredWeight, experts: StoredWeight | None = None, latent: StoredWeight | None = None
) -> Quantization:
    """Return a scheme of all parts; of latent attention and routed experts where they differ."""
    return Quantization(
        attention=weight,
        mlp=weight,
        shared_experts=weight,
        experts=weight if experts is None else experts,
        latent=latent,
    )


_FP8_BLOCK = StoredWeight(dtype=DType.FP8, variant="fp8_block", bits=_BLOCK_BITS)
_MXFP4 = StoredWeight(variant="w4a16_mxfp4", bits=_MXFP4_BITS)
_NVFP4 = StoredWeight(dtype=DType.FP4, variant="nvfp4", bits=_NVFP4_BITS)
_NVFP4_WO = StoredWeight(variant="nvfp4_wo", bits=_NVFP4_BITS)

_SCHEMES: Mapping[str, Quantization] = MappingProxyType(
    {
        "fp8": _stored(StoredWeight(dtype=DType.FP8, bits=8)),
        # Experts of 8 bits per tensor have scales known before in either case.
        "fp8_static": _stored(
            StoredWeight(dtype=DType.FP8, variant="fp8_static", bits=8),
            experts=StoredWeight(dtype=DType.FP8, bits=8),
        ),
        "fp8_block": _stored(_FP8_BLOCK),
        # Blocks of 32 by 32 with a scale of a byte: products as of blocks of 128 (DeepSeek-V4.1).
        "fp8_block_32": _stored(
            StoredWeight(dtype=DType.FP8, variant="fp8_block", bits=8 + 8 / (32 * 32))
        ),
        "int8_wo": _stored(StoredWeight(variant="int8_wo", bits=8)),
        "int4_wo": _stored(StoredWeight(variant="int4_wo", bits=_GROUP_BITS)),
        "int4_wo_g64": _stored(StoredWeight(variant="int4_wo", bits=_GROUP_OF_64_BITS)),
        "int4_wo_g32": _stored(StoredWeight(variant="int4_wo", bits=_GROUP_OF_32_BITS)),
        # Blocks of 32 with a scale of one byte: products as of blocks of 128, at one byte a weight.
        # Source: AIConfigurator, which measures MiniMax-M3's attention so (`sdk/utils.py`).
        "mxfp8": _stored(StoredWeight(dtype=DType.FP8, variant="fp8_block", bits=8 + 8 / 32)),
        "sq": _stored(StoredWeight(dtype=DType.INT8, variant="sq", bits=8)),
        # NVIDIA's FP4 checkpoints of latent attention models leave its projections as they are.
        "nvfp4": _stored(_NVFP4, latent=StoredWeight()),
        "nvfp4_wo": _stored(_NVFP4_WO, latent=StoredWeight()),
        # MXFP4 and W4AFP8 checkpoints quantise experts alone, the second along with FP8 blocks.
        "mxfp4": Quantization(experts=_MXFP4),
        "w4a16_mxfp4": Quantization(experts=_MXFP4),
        "w4a8_mxfp4_mxfp8": Quantization(
            experts=StoredWeight(dtype=DType.FP8, variant="w4a8_mxfp4_mxfp8", bits=_MXFP4_BITS)
        ),
        "w4afp8": _stored(
            _FP8_BLOCK,
            experts=StoredWeight(dtype=DType.FP8, variant="w4afp8", bits=_GROUP_BITS),
        ),
    }
)


# Parts of a layer that checkpoints store in schemes of their own: fields of a `Quantization`.
PARTS = (
    *("attention", "latent", "recurrent", "mlp", "shared_experts", "experts"),
    *("embedding", "head"),
)
# Weights alone, in so many bits with their scales; they are multiplied as the nearest measured
# scheme that is not narrower in whole bits.
_WEIGHT_ONLY = re.compile(r"wo(\d{1,2}(?:\.\d{1,4})?)bit")
_INT4_MOST_BITS = 5.0
_ALL_PARTS = ""
# What a user says to run a quantised checkpoint's model in its own 16 bits.
UNQUANTIZED = "none"
_NUM_BYTES_16_BIT = 2


def all_quantizations() -> Mapping[str, Quantization]:
    """Return every scheme by name."""
    return _SCHEMES


def find_quantization(name: str) -> Quantization:
    """Return the scheme of that name, or that of each part; `none` and no name quantise nothing.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.
        InvalidRequestError: there is no such part, or its scheme leaves it as it is.

    """
    if name in ("", UNQUANTIZED):
        return Quantization()
    schemes = {part: _find_scheme(scheme) for part, scheme in _split_parts(name).items()}
    if _ALL_PARTS in schemes:
        return schemes[_ALL_PARTS]
    stored = {part: scheme.weight_of(part) for part, scheme in schemes.items()}
    for part, weight in stored.items():
        if weight == StoredWeight():
            problem = f"{name!r}: that scheme leaves {part} as they are"
            raise InvalidRequestError.of_field("quantization", problem)
    return Quantization(**stored)


def name_weight_only(bits: float) -> str:
    """Return the scheme of weights alone that take so many bits each."""
    return f"wo{round(bits, 4):g}bit"


def _find_scheme(name: str) -> Quantization:
    match = _WEIGHT_ONLY.fullmatch(name)
    if match is None:
        return UnknownPluginError.look_up(name, _SCHEMES, "quantization", "quantisation")
    bits = float(match[1])
    variant = "int4_wo" if bits < _INT4_MOST_BITS else "int8_wo"
    weight = StoredWeight(variant=variant, bits=bits)
    return replace(_stored(weight), embedding=weight, head=weight)


def join_parts(schemes: Mapping[str, str]) -> str:
    """Return the name of what stores the parts of a layer so; parts without a scheme are left out.

    Raises:
        UnknownPluginError: there is no such scheme.
        InvalidRequestError: a scheme does not store that part.

    """
    named = {part: schemes[part] for part in PARTS if schemes.get(part)}
    name = "+".join(f"{part}={scheme}" for part, scheme in named.items())
    stored = find_quantization(name)
    # Checkpoints whose parts are stored as one scheme does are known by its name.
    for one in dict.fromkeys(named.values()):
        if all(_find_scheme(one).weight_of(part) == stored.weight_of(part) for part in schemes):
            return one
    return name


def settle_quantization(name: str, stored: str, dtype: DType) -> str:
    """Return the scheme that is meant: without a name that of the checkpoint, `none` for none.

    A checkpoint is not read as it is stored where `dtype` is a narrow format itself.
    """
    if not stored:
        return "" if name == UNQUANTIZED else name
    return name or (stored if dtype.num_bytes >= _NUM_BYTES_16_BIT else UNQUANTIZED)


def _split_parts(name: str) -> dict[str, str]:
    """Return the schemes of a name by the part they belong to.

    Raises:
        InvalidRequestError: there is no such part, or one is named twice.

    """
    if "=" not in name:
        return {_ALL_PARTS: name}
    pairs = [word.split("=", 1) for word in name.split("+") if "=" in word]
    schemes = {pair[0].strip(): pair[1].strip() for pair in pairs}
    if len(schemes) != name.count("+") + 1 or not schemes.keys() <= set(PARTS):
        problem = f"{name!r}: write {PARTS[0]}=fp8+experts=nvfp4; parts are {', '.join(PARTS)}"
        raise InvalidRequestError.of_field("quantization", problem)
    return schemes


# What engines run instead of a scheme whose format the device does not multiply in: the same bits
# of weights, widened to 16 as they are read. Source: vLLM 0.19, `quantization/utils/
# marlin_utils_fp8.py` and `marlin_utils_fp4.py`; SGLang 0.5, `quantization/marlin_utils_fp8.py`.
_FP8_AS_WEIGHTS = {"fp8": "int8_wo", "fp8_static": "int8_wo", "fp8_block": "int8_wo"}
_EMULATED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"vllm": {**_FP8_AS_WEIGHTS, "nvfp4": "nvfp4_wo"}, "sglang": _FP8_AS_WEIGHTS}
)
# Marlin kernels need compute capability 8.0.
_WITH_MARLIN = frozenset({"ampere", "ada", "hopper", "blackwell"})


# Formats that an engine chooses by device for the activations that a scheme says nothing of: by
# engine and architecture. Source: TensorRT-LLM, `_torch/model_config.py` (get_mxfp4_quant_algo).
_CHOSEN: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType(
    {("trtllm", "blackwell"): {"mxfp4": "w4a8_mxfp4_mxfp8"}}
)


@dataclass(frozen=True, slots=True)
class ExecutedQuantization:
    """The scheme that runs, and what to say where it is not the one that was asked for."""

    name: str
    remark: str = ""


def executed_quantization(name: str, device: DeviceSpec, engine: str) -> ExecutedQuantization:
    """Return the scheme that an engine (`vllm`, `sglang`, ...) runs on a device for one by name.

    Raises:
        UnknownPluginError: there is no such scheme.
        InvalidRequestError: the device has not its format, and the engine nothing instead.

    """
    missing = [
        reason
        for dtype in find_quantization(name).dtypes
        if (reason := device.find_missing_format(dtype))
    ]
    if not missing:
        return _chosen_quantization(name, device, engine)
    parts = {
        part: scheme
        if not any(map(device.find_missing_format, find_quantization(scheme).dtypes))
        else _EMULATED.get(engine, {}).get(scheme)
        for part, scheme in _split_parts(name).items()
    }
    if None in parts.values() or device.architecture not in _WITH_MARLIN:
        problem = f"{name}: {missing[0]}; {engine} has no kernel that emulates it"
        raise InvalidRequestError.of_field("quantization", problem)
    instead = _join_parts(parts)
    return ExecutedQuantization(
        instead,
        f"{missing[0]}: {engine} runs {name} with Marlin kernels, as {instead}: narrow weights,"
        " products in 16 bits",
    )


def _chosen_quantization(name: str, device: DeviceSpec, engine: str) -> ExecutedQuantization:
    """Return a scheme with the activations that an engine chooses on a device it can run on."""
    chosen = _CHOSEN.get((engine, device.architecture), {})
    parts = _split_parts(name)
    if not chosen.keys() & set(parts.values()):
        return ExecutedQuantization(name)
    instead = _join_parts({part: chosen.get(scheme, scheme) for part, scheme in parts.items()})
    return ExecutedQuantization(instead, f"{engine} runs {name} on {device.name} as {instead}")


def _join_parts(parts: Mapping[str, str | None]) -> str:
    return "+".join(f"{part}={scheme}" if part else f"{scheme}" for part, scheme in parts.items())
