"""What operators read and write, counted by hand."""

from typing import Any

import pytest

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.steps.held.tensor_size import read_bytes, written_bytes

_REST: dict[str, Any] = {"group": "x", "section": Section.LAYER, "dtype": DType.BF16}
_MLA = {
    "q_tokens": 7,
    "kv_tokens": 11,
    "num_heads": 3,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 96,
}
_ATTENTION = {"q_tokens": 7, "kv_tokens": 11, "num_heads": 6, "num_kv_heads": 2, "head_dim": 128}
_ROPE = {"num_tokens": 7, "num_heads": 6, "num_kv_heads": 2, "head_dim": 128}
_CASES = {
    "gemm": ({"m": 3, "n": 5, "k": 7}, 21, 15),
    "grouped_gemm": ({"m": 3, "n": 5, "k": 7}, 21, 15),
    "batched_gemm": ({"batch": 2, "m": 3, "n": 5, "k": 7}, 2 * (3 + 5) * 7, 2 * 3 * 5),
    "silu_mul": ({"num_tokens": 3, "intermediate": 5}, 30, 15),
    "rms_norm": ({"num_tokens": 3, "hidden": 5}, 15, 15),
    "rope": (_ROPE, 7 * 8 * 128, 7 * 8 * 128),
    "causal_softmax": ({"num_matrices": 3, "length": 5}, 75, 75),
    "attention_prefill": (_ATTENTION, (7 * 6 + 2 * 11 * 2) * 128, 7 * 6 * 128),
    "mla_prefill": (_MLA, 3 * (7 * 192 + 11 * (192 + 96)), 7 * 3 * 96),
    "moe_permute": ({"num_tokens": 3, "top_k": 2, "hidden": 5}, 15, 30),
    "moe_unpermute": ({"num_tokens": 3, "top_k": 2, "hidden": 5}, 30, 15),
}


@pytest.mark.parametrize("operator", _CASES)
def test_an_operator_reads_and_writes_its_tensors(operator: str) -> None:
    dims, num_read, num_written = _CASES[operator]
    node = OperatorNode(operator=operator, role="x", dims=dims, **_REST)
    assert (2 * num_read, 2 * num_written) == (read_bytes(node), written_bytes(node))


def test_a_collective_reads_only_where_tokens_are_exchanged() -> None:
    link = {"message_bytes": 100, "devices_per_node": 2, "num_nodes": 1}
    exchange = OperatorNode(operator="all_to_all", role="x", dims=link, **_REST)
    reduce = OperatorNode(operator="all_reduce", role="x", dims=link, **_REST)
    assert (100.0, 0.0) == (read_bytes(exchange), read_bytes(reduce))


def test_what_has_no_rows_or_no_width_reads_nothing() -> None:
    for dims in ({"num_params": 9}, {"num_tokens": 3, "num_experts": 8}, {"hidden": 5}):
        node = OperatorNode(operator="adam", role="x", dims=dims, **_REST)
        assert (0.0, 0.0) == (read_bytes(node), written_bytes(node))
