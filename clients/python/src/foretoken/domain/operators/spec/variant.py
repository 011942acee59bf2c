"""What operator, dimensions and number format leave open about a measurement, as one text.

A variant is `key=value` pairs sorted by key and joined by `;`: `quant=int4_wo`, or
`kv=fp8;lane=eager`. The plain case has none. The number format of a row is that of the activations;
`quant` names the scheme of the weights, `kv` the format of the key-value cache.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType

# Of an operator that PyTorch runs as a chain of kernels.
EAGER_VARIANT = "form=eager"
# Formats of stored weights and caches by the names quantisation schemes go by, scales not counted.
# `wo` is weight-only, `wXaY` has X-bit weights and Y-bit activations, `sq` is SmoothQuant.
# Source: the quantisation modes of TensorRT-LLM and vLLM, as AIConfigurator's tables name them.
_STORED_DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "float32": DType.FP32,
        "float16": DType.FP16,
        "bfloat16": DType.BF16,
        "fp8": DType.FP8,
        "fp8_block": DType.FP8,
        "fp8_ootb": DType.FP8,
        "fp8_static": DType.FP8,
        "int8": DType.INT8,
        "int8_wo": DType.INT8,
        "sq": DType.INT8,
        "int4_wo": DType.INT4,
        "w4a16": DType.INT4,
        "w4a16_mxfp4": DType.FP4,
        "w4a16_mxfp4_cutlass": DType.FP4,
        "w4a16_nvfp4": DType.FP4,
        "w4a8_mxfp4_mxfp8": DType.FP4,
        "w4a8_mxfp4_mxfp8_trtllm": DType.FP4,
        "w4a8_nvfp4_fp8": DType.FP4,
        "w4afp8": DType.INT4,
        "mxfp4": DType.FP4,
        "nvfp4": DType.FP4,
        "nvfp4_wo": DType.FP4,
        **{dtype.name.lower(): dtype for dtype in DType},
    }
)
# The narrowest format there is: what a scheme nobody described may use at best.
_NARROWEST = DType.INT4


def format_variant(facts: Mapping[str, str]) -> str | None:
    """Return the text of these facts, None when there are none; empty values are left out.

    Raises:
        InvalidRequestError: a key or value holds `=` or `;`.

    """
    pairs = sorted((key, value) for key, value in facts.items() if value)
    for key, value in pairs:
        if not key or any(char in f"{key}{value}" for char in "=;"):
            raise InvalidRequestError.of_field("variant", f"{key!r}: {value!r} holds '=' or ';'")
    return ";".join(f"{key}={value}" for key, value in pairs) or None


def parse_variant(text: str | None) -> dict[str, str]:
    """Return the facts in a variant's text; none for the plain case.

    Raises:
        InvalidRequestError: a part is not `key=value`.

    """
    facts = {}
    for part in (text or "").split(";") if text else ():
        key, equals, value = part.partition("=")
        if not key or not equals or "=" in value:
            raise InvalidRequestError.of_field("variant", f"{text!r}: {part!r} is not key=value")
        facts[key] = value
    return facts


def stored_dtype(scheme: str) -> DType | None:
    """Return the format in which a quantisation scheme stores its values; None if not known."""
    return _STORED_DTYPES.get(scheme.lower())


def stored_schemes() -> Collection[str]:
    """Return the names of the schemes and formats whose storage is known."""
    return _STORED_DTYPES.keys()


def least_element_bytes(dtype: DType, variant: str | None) -> float:
    """Return the bytes of the smallest elements an operator of this variant reads.

    A bound of memory traffic must not assume more: activations have the row's format, weights and
    cache may be narrower. A scheme that is not known counts as the narrowest there is.

    Raises:
        InvalidRequestError: the variant is not `key=value` pairs.

    """
    facts = parse_variant(variant)
    schemes = [facts[key] for key in ("quant", "kv") if key in facts]
    stored = [stored_dtype(scheme) or _NARROWEST for scheme in schemes]
    return min(found.num_bytes for found in (dtype, *stored))
