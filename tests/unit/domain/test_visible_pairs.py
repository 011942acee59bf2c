"""How many keys queries see under a limit, against counting them."""

from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.operators.spec.visible_pairs import block_pairs, limited_pairs

_LENGTHS, _LIMITS = st.integers(0, 60), st.integers(1, 20)


@given(q_len=_LENGTHS, context_len=_LENGTHS, limit=_LIMITS)
def test_a_query_sees_as_many_keys_as_there_are_up_to_the_limit(
    q_len: int, context_len: int, limit: int
) -> None:
    positions = range(context_len + 1, context_len + q_len + 1)
    expected = sum(min(position, limit) for position in positions)
    assert expected == limited_pairs(q_len, context_len, limit)


@given(q_len=_LENGTHS, context_len=_LENGTHS, block=st.integers(1, 9), limit=st.integers(0, 20))
def test_a_query_sees_as_many_complete_blocks_up_to_the_limit(
    q_len: int, context_len: int, block: int, limit: int
) -> None:
    positions = range(context_len + 1, context_len + q_len + 1)
    expected = sum(min(position // block, limit) for position in positions)
    assert expected == block_pairs(q_len, context_len, block, limit)
