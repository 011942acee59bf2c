"""Questions that nothing could answer truly are refused, whatever was measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from predictor_fakes import Rows, gemm_rows

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.measurements.estimate import DType, LatencyQuery, LatencyReply, OperatorTable
from foretoken.predictor.service import PredictorService


@pytest.fixture
def predictor(make_predictor: Callable[[Rows], PredictorService]) -> PredictorService:
    return make_predictor(gemm_rows())


def _ask(predictor: PredictorService, **changes: Any) -> LatencyReply:
    table = OperatorTable(
        operator="gemm", dtype=DType.BF16, columns={"m": [8], "n": [64], "k": [64]}
    )
    device = str(changes.pop("device", "a100"))
    return predictor.predict(LatencyQuery(device=device, tables=(replace(table, **changes),)))  # type: ignore[arg-type]


def test_a_format_the_device_does_not_multiply_in_is_refused(predictor: PredictorService) -> None:
    for dtype, device in ((DType.FP8, "a100"), (DType.FP4, "h100"), (DType.FP8, "v100_pcie_16")):
        with pytest.raises(InvalidRequestError, match=f"dtype: .* has no {dtype.name.lower()}"):
            _ask(predictor, dtype=dtype, device=device)
    # Values of a cache are moved, not multiplied.
    columns = {"num_tokens": [8], "num_kv_heads": [8], "head_dim": [64]}
    _ask(predictor, operator="kv_cache_write", dtype=DType.FP8, columns=columns)
    _ask(predictor, dtype=DType.FP8, device="l40s")
    _ask(predictor, dtype=DType.FP4, device="rtx_pro_6000")


def test_a_quantisation_there_is_not_is_refused(predictor: PredictorService) -> None:
    with pytest.raises(UnknownPluginError, match=r"variant\.quant: unknown format 'bananas'"):
        _ask(predictor, variant="quant=bananas")
    with pytest.raises(UnknownPluginError, match="did you mean fp8"):
        _ask(predictor, variant="kv=fp88")
    _ask(predictor, variant="quant=int4_wo")


def test_a_quantisation_that_the_device_cannot_multiply_in_is_refused(
    predictor: PredictorService,
) -> None:
    """Whatever format of activations is asked about: FP8 blocks are no weights alone."""
    for scheme in ("fp8_static", "fp8_block", "nvfp4"):
        with pytest.raises(InvalidRequestError, match=r"variant\.quant: a100_sxm_80 .* has no fp"):
            _ask(predictor, variant=f"quant={scheme}")
    _ask(predictor, variant="quant=nvfp4_wo")


def test_a_quantisation_in_a_format_that_is_not_its_own_is_refused(
    predictor: PredictorService,
) -> None:
    """It would be answered by the plain operator: there are no such rows, nor can there be."""
    with pytest.raises(
        InvalidRequestError, match="fp8_block multiplies in fp8, not in bf16: ask for dtype=fp8"
    ):
        _ask(predictor, variant="quant=fp8_block", device="h200")
    _ask(predictor, variant="quant=fp8_block", dtype=DType.FP8, device="h200")


def test_dimensions_that_contradict_each_other_are_refused(predictor: PredictorService) -> None:
    columns = {"num_tokens": [8, 8], "num_experts": [8, 8], "top_k": [2, 9]}
    with pytest.raises(InvalidRequestError, match="top_k: 9 is more than the 8 of num_experts"):
        _ask(predictor, operator="moe_topk", columns=columns)


def test_more_ranks_on_a_node_than_it_has_devices_are_refused(predictor: PredictorService) -> None:
    columns = {"message_bytes": [1024, 1024], "devices_per_node": [8, 16], "num_nodes": [2, 1]}
    with pytest.raises(InvalidRequestError, match="16 is more than the 8 of a node of h100_dgx"):
        _ask(predictor, operator="all_reduce", columns=columns, device="h100")
    columns = {name: values[:1] for name, values in columns.items()}
    _ask(predictor, operator="all_reduce", columns=columns, device="h100")
