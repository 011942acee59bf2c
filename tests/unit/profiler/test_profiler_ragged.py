"""Batches rebuilt from their sums have these sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.profiler.attention.ragged import Batch, decode_batch, prefill_batch

LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 20_000)), min_size=1, max_size=40)
# Pairs may be off by what the docstring of the batch allows.
TOLERANCE_RATIO = 0.02


@st.composite
def _prefills(draw: st.DrawFn) -> tuple[Batch, int]:
    """Draw a batch that can be, and its window (0: none)."""
    window = draw(st.sampled_from((0, 0, 1, 7, 128)))
    q_lens = draw(st.lists(st.integers(1, 3_000), min_size=1, max_size=20))
    most = window - 1 if window else 5_000
    size = len(q_lens)
    cached = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    kv_lens = tuple(q_len + old for q_len, old in zip(q_lens, cached, strict=True))
    return Batch(tuple(q_lens), kv_lens), window


def _rebuilt(batch: Batch, window: int) -> Batch:
    pairs = batch.score_pairs(window)
    return prefill_batch(batch.num_seqs, sum(batch.q_lens), sum(batch.kv_lens), pairs, window)


@given(kv_lens=LENGTHS)
def test_a_decode_has_the_sum_and_the_maximum(kv_lens: list[int]) -> None:
    built = decode_batch(len(kv_lens), sum(kv_lens), max(kv_lens))
    assert (1,) * len(kv_lens) == built.q_lens
    assert sum(kv_lens) == sum(built.kv_lens)
    assert max(kv_lens) == max(built.kv_lens)
    assert min(built.kv_lens) >= 1


@given(drawn=_prefills())
def test_a_prefill_has_the_sums_and_about_the_pairs(drawn: tuple[Batch, int]) -> None:
    batch, window = drawn
    built = _rebuilt(batch, window)
    assert batch.num_seqs == built.num_seqs
    assert sum(batch.q_lens) == sum(built.q_lens)
    assert sum(batch.kv_lens) == sum(built.kv_lens)
    assert min(built.q_lens) >= 1
    cached = [kv - q for q, kv in zip(built.q_lens, built.kv_lens, strict=True)]
    assert min(cached) >= 0
    assert not window or max(cached) < window
    off = abs(batch.score_pairs(window) - built.score_pairs(window))
    assert off <= TOLERANCE_RATIO * batch.score_pairs(window)


@given(drawn=_prefills())
def test_the_same_sums_give_the_same_batch(drawn: tuple[Batch, int]) -> None:
    first = _rebuilt(*drawn)
    prefill_batch.cache_clear()
    assert first == _rebuilt(*drawn)


@given(count=st.integers(1, 64), q_len=st.integers(1, 4096), context=st.integers(0, 4096))
def test_equal_sequences_stay_equal(count: int, q_len: int, context: int) -> None:
    dims = prefill_dims(count, q_len, context)
    sums = (dims[name] for name in ("num_seqs", "q_tokens", "kv_tokens", "score_pairs"))
    assert Batch((q_len,) * count, (q_len + context,) * count) == prefill_batch(*sums)
    assert Batch((1,) * count, (q_len,) * count) == decode_batch(count, count * q_len, q_len)


@given(lens=st.tuples(st.integers(1, 2_000), st.integers(1, 2_000)))
def test_two_new_prompts_are_found_again(lens: tuple[int, int]) -> None:
    """The sum and the pairs of two lengths have one solution."""
    built = _rebuilt(Batch(lens, lens), 0)
    assert sorted(lens) == sorted(built.q_lens)
    assert built.q_lens == built.kv_lens


@given(q_len=st.integers(1, 60), context=st.integers(0, 60), window=st.integers(1, 40))
def test_pairs_are_the_keys_that_each_token_sees(q_len: int, context: int, window: int) -> None:
    seen = [context + position + 1 for position in range(q_len)]
    batch = Batch((q_len,), (q_len + context,))
    assert sum(seen) == batch.score_pairs()
    assert sum(min(number, window) for number in seen) == batch.score_pairs(window)


def test_a_ragged_batch_comes_in_a_random_order() -> None:
    built = decode_batch(32, 32 * 100, 400)
    assert list(built.kv_lens) != sorted(built.kv_lens)
    assert list(built.kv_lens) != sorted(built.kv_lens, reverse=True)


def test_contexts_fall_off_from_the_longest() -> None:
    """A batch twice as ragged has as many contexts, a longer longest and a shorter median."""
    medians = [sorted(decode_batch(33, 33 * 256, top).kv_lens)[16] for top in (256, 512, 1024)]
    assert medians == sorted(medians, reverse=True)
    assert len(set(medians)) == 3


@pytest.mark.parametrize("sums", [(2, 7, 3), (2, 7, 7), (3, 2, 1), (1, 5, 4)])
def test_a_decode_that_cannot_be_is_refused(sums: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"kv_tokens: . is (more|less) than"):
        decode_batch(*sums)


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        ((3, 2, 9, 9, 0), "new tokens that see"),
        ((1, 4, 3, 9, 0), "new tokens that see"),
        ((1, 4, 9, 18, 3), "new tokens that see"),
        ((2, 64, 64, 10, 0), "query-key pairs; the nearest have"),
        ((2, 64, 64, 10**6, 0), "query-key pairs; the nearest have"),
    ],
)
def test_a_prefill_that_cannot_be_is_refused(
    sums: tuple[int, int, int, int, int], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        prefill_batch(*sums)
