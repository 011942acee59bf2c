"""What experts keep of the tokens that are routed to them."""

import math

import numpy as np
import pytest

from foretoken.domain.lowering.expert_capacity import ExpertCapacity


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("num_tokens", [256, 4096])
def test_what_is_kept_is_the_mean_of_what_chance_leaves(factor: float, num_tokens: int) -> None:
    """Every token goes to one of eight experts, which drop beyond their capacity."""
    capacity = ExpertCapacity(factor=factor, num_tokens=num_tokens, top_k=1, num_experts=8)
    most = math.ceil(num_tokens / 8 * factor)
    kept = sum(min(count, most) * _chance(count, num_tokens, 1 / 8) for count in range(num_tokens))
    # Eight experts of as many ranks that route.
    assert pytest.approx(64 * kept, rel=0.003) == capacity.keep(8 * num_tokens, 64)


def _chance(count: int, num_tokens: int, share: float) -> float:
    ways = (
        math.lgamma(num_tokens + 1) - math.lgamma(count + 1) - math.lgamma(num_tokens - count + 1)
    )
    return math.exp(ways + count * math.log(share) + (num_tokens - count) * math.log(1 - share))


def test_a_capacity_is_of_an_even_share_whatever_an_expert_gets() -> None:
    capacity = ExpertCapacity(factor=1.0, num_tokens=1024, top_k=2, num_experts=8)
    assert [pytest.approx(count, rel=0.02) for count in (128, 256, 256)] == [
        capacity.keep(pairs, 1) for pairs in (128, 320, 1000)
    ]


def test_every_token_on_every_expert_is_a_share_that_never_varies() -> None:
    capacity = ExpertCapacity(factor=1.0, num_tokens=64, top_k=8, num_experts=8)
    assert 64 * 8 == capacity.keep(64 * 8, 8)


def test_a_column_is_as_its_rows() -> None:
    tokens = np.array([16, 64, 5000])
    columns = ExpertCapacity(factor=1.1, num_tokens=tokens, top_k=2, num_experts=16)
    rows = [
        ExpertCapacity(factor=1.1, num_tokens=int(count), top_k=2, num_experts=16)
        for count in tokens
    ]
    pairs = tokens * 2
    expected = [row.keep(int(own), 16) for row, own in zip(rows, pairs, strict=True)]
    assert expected == columns.keep(pairs, 16).tolist()
