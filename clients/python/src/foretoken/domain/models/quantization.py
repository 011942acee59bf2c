"""Quantisation schemes: how engines store the weights of a model, and in what they multiply.

A scheme goes by the name of its rows in the catalog. Embedding, router, norms and the head stay in
the model's own format under all of them, as the engines load such checkpoints.
Source: vLLM 0.19, `model_executor/layers/quantization`; TensorRT-LLM's modes as AIConfigurator's
tables name them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """What a scheme does to dense projections, to experts, and to latent attention (None: dense).

    An empty `StoredWeight` leaves the weights as they are.
    """

    dense: StoredWeight = StoredWeight()
    experts: StoredWeight = StoredWeight()
    latent: StoredWeight | None = None


# One scale of 4 bytes for a block of 128 by 128; of 2 bytes for a group of 128 weights, with a zero
# point of 4 bits; of 1 byte for 16 weights (NVFP4) or 32 (MXFP4). A scale for a whole row or tensor
# does not show. Source: DeepSeek-V3, section 3.3; GPTQ and AWQ checkpoints; NVIDIA ModelOpt; OCP
# Microscaling Formats 1.0.
_BLOCK_BITS = 8 + 32 / (128 * 128)
_GROUP_BITS = 4 + 20 / 128
_NVFP4_BITS = 4 + 8 / 16
_MXFP4_BITS = 4 + 8 / 32


def _everywhere(weight: StoredWeight) -> Quantization:
    return Quantization(dense=weight, experts=weight)


_FP8_BLOCK = StoredWeight(dtype=DType.FP8, variant="fp8_block", bits=_BLOCK_BITS)
_MXFP4 = StoredWeight(variant="w4a16_mxfp4", bits=_MXFP4_BITS)
_NVFP4 = StoredWeight(dtype=DType.FP4, variant="nvfp4", bits=_NVFP4_BITS)
_NVFP4_WO = StoredWeight(variant="nvfp4_wo", bits=_NVFP4_BITS)

_SCHEMES: Mapping[str, Quantization] = MappingProxyType(
    {
        "fp8": _everywhere(StoredWeight(dtype=DType.FP8, bits=8)),
        "fp8_static": _everywhere(StoredWeight(dtype=DType.FP8, variant="fp8_static", bits=8)),
        "fp8_block": _everywhere(_FP8_BLOCK),
        "int8_wo": _everywhere(StoredWeight(variant="int8_wo", bits=8)),
        "int4_wo": _everywhere(StoredWeight(variant="int4_wo", bits=_GROUP_BITS)),
        "sq": _everywhere(StoredWeight(dtype=DType.INT8, variant="sq", bits=8)),
        # NVIDIA's FP4 checkpoints of latent attention models leave its projections as they are.
        "nvfp4": Quantization(dense=_NVFP4, experts=_NVFP4, latent=StoredWeight()),
        "nvfp4_wo": Quantization(dense=_NVFP4_WO, experts=_NVFP4_WO, latent=StoredWeight()),
        # MXFP4 and W4AFP8 checkpoints quantise experts alone, the second along with FP8 blocks.
        "mxfp4": Quantization(experts=_MXFP4),
        "w4a16_mxfp4": Quantization(experts=_MXFP4),
        "w4a8_mxfp4_mxfp8": Quantization(
            experts=StoredWeight(dtype=DType.FP8, variant="w4a8_mxfp4_mxfp8", bits=_MXFP4_BITS)
        ),
        "w4afp8": Quantization(
            dense=_FP8_BLOCK,
            experts=StoredWeight(dtype=DType.FP8, variant="w4afp8", bits=_GROUP_BITS),
        ),
    }
)


def all_quantizations() -> Mapping[str, Quantization]:
    """Return every scheme by name."""
    return _SCHEMES


def find_quantization(name: str) -> Quantization:
    """Return the scheme of that name; nothing is quantised without a name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    if not name:
        return Quantization()
    return UnknownPluginError.look_up(name, _SCHEMES, "quantization", "quantisation")


# What engines run instead of a scheme whose format the device does not multiply in: the same bits
# of weights, widened to 16 as they are read. Source: vLLM 0.19, `quantization/utils/
# marlin_utils_fp8.py` and `marlin_utils_fp4.py`; SGLang 0.5, `quantization/marlin_utils_fp8.py`.
_FP8_AS_WEIGHTS = {"fp8": "int8_wo", "fp8_static": "int8_wo", "fp8_block": "int8_wo"}
_EMULATED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"vllm": {**_FP8_AS_WEIGHTS, "nvfp4": "nvfp4_wo"}, "sglang": _FP8_AS_WEIGHTS}
)
# Marlin kernels need compute capability 8.0.
_WITH_MARLIN = frozenset({"ampere", "ada", "hopper", "blackwell"})


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
    scheme = find_quantization(name)
    stored = (scheme.dense, scheme.experts, scheme.latent)
    formats = dict.fromkeys(weight.dtype for weight in stored if weight and weight.dtype)
    missing = [reason for dtype in formats if (reason := device.find_missing_format(dtype))]
    if not missing:
        return ExecutedQuantization(name)
    instead = _EMULATED.get(engine, {}).get(name)
    if instead is None or device.architecture not in _WITH_MARLIN:
        problem = f"{name}: {missing[0]}; {engine} has no kernel that emulates it"
        raise InvalidRequestError.of_field("quantization", problem)
    return ExecutedQuantization(
        instead,
        f"{missing[0]}: {engine} runs {name} with Marlin kernels, as {instead}: narrow weights,"
        " products in 16 bits",
    )
