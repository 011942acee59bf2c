"""Variants are written one way, read back, and say how narrow the data are."""

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.variant import (
    format_variant,
    least_element_bytes,
    parse_variant,
    stored_dtype,
)


def test_a_variant_is_sorted_and_read_back() -> None:
    facts = {"quant": "int4_wo", "kv": "fp8", "lane": ""}
    assert "kv=fp8;quant=int4_wo" == format_variant(facts)
    assert {"kv": "fp8", "quant": "int4_wo"} == parse_variant("kv=fp8;quant=int4_wo")


def test_the_plain_case_has_no_text() -> None:
    assert None is format_variant({})
    assert {} == parse_variant(None) == parse_variant("")


@pytest.mark.parametrize("text", ["quant", "=fp8", "quant=fp8;", "a=b=c"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not key=value"):
        parse_variant(text)


@pytest.mark.parametrize("facts", [{"a=b": "c"}, {"a": "b;c"}, {"": "c"}])
def test_what_could_not_be_read_back_is_not_written(facts: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="holds '=' or ';'"):
        format_variant(facts)


@pytest.mark.parametrize(
    ("dtype", "variant", "num_bytes"),
    [
        (DType.BF16, None, 2.0),
        (DType.BF16, "routing=balanced", 2.0),
        (DType.BF16, "quant=int8_wo", 1.0),
        (DType.BF16, "kv=fp8;quant=w4a16_mxfp4", 0.5),
        (DType.FP8, "quant=fp8_block", 1.0),
        (DType.FP4, "kv=bfloat16", 0.5),
        (DType.BF16, "quant=of_tomorrow", 0.5),
    ],
)
def test_the_smallest_elements_decide_the_traffic(
    dtype: DType, variant: str | None, num_bytes: float
) -> None:
    assert num_bytes == least_element_bytes(dtype, variant)


def test_schemes_go_by_any_case() -> None:
    assert DType.FP4 is stored_dtype("NVFP4")
    assert None is stored_dtype("of_tomorrow")
