"""Build the sequences of a batch of which only sums are known.

Operators describe a batch of attention by its sums; to run it, every sequence needs a length. The
same sums always give the same lengths, in a random order drawn from the sums.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.attention_decode import BATCH_RELATIONS

# How uneven the shares of a batch may get, as exponents of evenly spaced numbers: from equal ones
# to all for one sequence, however many there are.
_EXPONENTS = (0.0, *(2.0**power for power in range(-4, 14)))
_NUM_BISECTIONS = 40
# Tokens move between this many sequences at most when pairs are brought to their number.
_NUM_MOVERS = 12
_NUM_MOVES = 24
_NUM_FIRSTS = 64
# A batch whose pairs are further off is not the one that was asked for.
_PAIRS_TOLERANCE_RATIO = 0.02
# One that is nearer than this is not worth a less usual one that is nearer still.
_GOOD_RATIO = 1e-4

Lengths = tuple[int, ...]
# New tokens and cached tokens of every sequence.
_Split = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of a batch: their new tokens, and the tokens these see, themselves included."""

    q_lens: Lengths
    kv_lens: Lengths

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.q_lens)

    @property
    def is_equal(self) -> bool:
        """Whether all sequences are alike."""
        return len(set(self.q_lens)) == 1 and len(set(self.kv_lens)) == 1

    @property
    def lengths(self) -> tuple[int, int]:
        """New and visible tokens of the longest sequences."""
        return max(self.q_lens), max(self.kv_lens)

    def joined(self, other: "Batch") -> "Batch":
        """Return the batch of these sequences and those of `other`."""
        return Batch(self.q_lens + other.q_lens, self.kv_lens + other.kv_lens)

    def score_pairs(self, window: int = 0) -> int:
        """Return the query-key pairs left by causality and by a window (0: none)."""
        return sum(
            _pairs(q_len, kv_len - q_len, window)
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
        )


@lru_cache(maxsize=1024)
def decode_batch(num_seqs: int, kv_tokens: int, kv_tokens_max: int) -> Batch:
    """Return sequences of one new token; their contexts' sum and maximum are exact.

    One context is the longest; the others fall off from it towards 1 as a power that gives the sum.

    Raises:
        InvalidRequestError: no contexts of at least one token have this sum and maximum.

    """
    sums = {"num_seqs": num_seqs, "kv_tokens": kv_tokens, "kv_tokens_max": kv_tokens_max}
    found = [relation.find_violation(sums) for relation in BATCH_RELATIONS]
    if violations := [violation for violation in found if violation is not None]:
        raise InvalidRequestError.of_violations(violations)
    rest = num_seqs - 1
    lengths = [kv_tokens_max]
    if rest:
        others = kv_tokens - kv_tokens_max
        weights = _weights(rest, kv_tokens_max * rest / others - 1)
        lengths += _apportion(others, weights, 1, kv_tokens_max)
    _order((num_seqs, kv_tokens, kv_tokens_max)).shuffle(lengths)
    return Batch((1,) * num_seqs, tuple(lengths))


@lru_cache(maxsize=1024)
def prefill_batch(
    num_seqs: int, q_tokens: int, kv_tokens: int, score_pairs: int, window: int = 0
) -> Batch:
    """Return sequences of new tokens behind cached ones.

    Their number, their new tokens and their visible tokens (`kv_tokens`) are exact. `score_pairs`
    is met exactly, or as nearly as moving tokens from one sequence to another, pair after pair,
    gets. Where equal sequences meet all four, they are equal; else new and cached tokens are
    spread, long prefills with long contexts if there are more pairs than equal sequences have.

    Raises:
        InvalidRequestError: no such batch has about these sums.

    """
    cached = kv_tokens - q_tokens
    room = (window - 1) * num_seqs if window else cached
    if q_tokens < num_seqs or not 0 <= cached <= room:
        raise InvalidRequestError(
            f"no {num_seqs} sequences have {q_tokens} new tokens that see {kv_tokens}"
        )
    problem = _Problem(num_seqs, q_tokens, cached, score_pairs, window)
    equal = _equal_split(problem)
    new, old = equal or _nearest_split(problem)
    gap = problem.gap((new, old))
    if abs(gap) > _PAIRS_TOLERANCE_RATIO * score_pairs:
        raise InvalidRequestError(
            f"no {num_seqs} sequences of {q_tokens} new and {cached} cached tokens have "
            f"{score_pairs} query-key pairs; the nearest have {score_pairs + gap}"
        )
    pairs = list(zip(new, old, strict=True))
    _order((num_seqs, q_tokens, kv_tokens, score_pairs, window)).shuffle(pairs)
    return Batch(tuple(q for q, _ in pairs), tuple(q + c for q, c in pairs))


@dataclass(frozen=True, slots=True)
class _Problem:
    num_seqs: int
    q_tokens: int
    cached_tokens: int
    score_pairs: int
    window: int

    @property
    def cached_max(self) -> int:
        return self.window - 1 if self.window else self.cached_tokens

    def gap(self, split: _Split) -> int:
        """Return by how many pairs a split has too many."""
        new, old = split
        pairs = (_pairs(q, c, self.window) for q, c in zip(new, old, strict=True))
        return sum(pairs) - self.score_pairs


def _pairs(q_len: int, cached_len: int, window: int) -> int:
    """Return the keys that each new token of a sequence sees, summed."""
    if not window:
        return q_len * cached_len + q_len * (q_len + 1) // 2
    # Tokens that still see all before them; the others see a full window.
    in_window = min(max(window - cached_len, 0), q_len)
    growing = in_window * cached_len + in_window * (in_window + 1) // 2
    return growing + (q_len - in_window) * window


def _order(seed: tuple[int, ...]) -> random.Random:
    return random.Random(str(seed))  # noqa: S311 - an order to run in, not a secret


def _weights(count: int, exponent: float) -> list[float]:
    """Return the middles of `count` equal parts of 0 to 1, to a power; the largest is 1."""
    top = 2 * count - 1
    return [((2 * index + 1) / top) ** exponent for index in range(count)]


def _apportion(total: int, weights: Sequence[float], low: int, high: int) -> list[int]:
    """Return integers from `low` to `high` with the sum, in proportion to weights where possible.

    `total` must lie between `low` and `high` times their number.
    """
    scale = total / sum(weights)
    sizes = [min(max(math.floor(weight * scale), low), high) for weight in weights]
    left = total - sum(sizes)
    while left:
        step = 1 if left > 0 else -1
        limit = high if left > 0 else low
        movable = [index for index, size in enumerate(sizes) if size != limit]
        # The largest first: they bear a change best.
        for index in sorted(movable, key=lambda index: -weights[index]):
            share = min(max(abs(left) // len(movable), 1), abs(limit - sizes[index]), abs(left))
            sizes[index] += step * share
            left -= step * share
            if not left:
                break
    return sizes


def _equal_split(problem: _Problem) -> _Split | None:
    """Return equal sequences where they meet the sums."""
    count = problem.num_seqs
    if problem.q_tokens % count or problem.cached_tokens % count:
        return None
    split = [problem.q_tokens // count] * count, [problem.cached_tokens // count] * count
    return split if problem.gap(split) == 0 else None


def _nearest_split(problem: _Problem) -> _Split:
    """Return the nearest of some families of splits, each from equal to uneven, refined.

    A later family has to be nearer than an earlier one, whose batches are more usual.
    """
    best: _Split | None = None
    for family in _families(problem):
        found = _refine(problem, *_best_of(problem, family))
        if best is None or abs(problem.gap(found)) < abs(problem.gap(best)):
            best = found
        if abs(problem.gap(best)) <= _GOOD_RATIO * problem.score_pairs:
            return best
    assert best is not None  # noqa: S101 - there is always a family
    return best


def _families(problem: _Problem) -> Iterator[Callable[[float], _Split]]:
    """Yield ways to spread a batch by an exponent; 0 spreads least."""
    count, q_tokens, cached = problem.num_seqs, problem.q_tokens, problem.cached_tokens

    def spread(new: float, old: float, sign: int = 1) -> _Split:
        weights = _weights(count, old)[::sign]
        return (
            _apportion(q_tokens, _weights(count, new), 1, q_tokens),
            _apportion(cached, weights, 0, problem.cached_max),
        )

    def opposed(num_cached: int) -> Callable[[float], _Split]:
        """Give some all that is cached, and fewer new tokens the larger the exponent."""

        def split(exponent: float) -> _Split:
            share = 2.0**-exponent
            weights = [share] * num_cached + [1.0] * (count - num_cached)
            old = [1.0] * num_cached + [0.0] * (count - num_cached)
            return (
                _apportion(q_tokens, weights, 1, q_tokens),
                _apportion(cached, old, 0, problem.cached_max),
            )

        return split

    yield lambda exponent: spread(exponent, exponent)
    yield lambda exponent: spread(exponent, 0.0)
    if cached:
        yield lambda exponent: spread(exponent, exponent, -1)
        num_cached = count // 2
        while num_cached and num_cached * problem.cached_max >= cached:
            yield opposed(num_cached)
            num_cached //= 2
    if count == 2:  # noqa: PLR2004 - of two sequences, one can go through all there are
        for first in range(1, q_tokens, max(q_tokens // _NUM_FIRSTS, 1)):
            half = min(cached // 2, problem.cached_max)
            split = [first, q_tokens - first], [half, cached - half]
            yield lambda _, split=split: split  # type: ignore[misc]


def _best_of(problem: _Problem, family: Callable[[float], _Split]) -> _Split:
    """Return the member of a family with the nearest number of pairs."""
    splits = [(exponent, family(exponent)) for exponent in _EXPONENTS]
    gaps = [problem.gap(split) for _, split in splits]
    nearest = min(range(len(gaps)), key=lambda index: abs(gaps[index]))
    for index in range(len(gaps) - 1):
        if gaps[index] * gaps[index + 1] < 0:
            return _bisect(problem, family, splits[index][0], splits[index + 1][0])
    return splits[nearest][1]


def _bisect(
    problem: _Problem, family: Callable[[float], _Split], low: float, high: float
) -> _Split:
    """Return the member between two exponents, on either side of the number of pairs."""
    is_below = problem.gap(family(low)) < 0
    best = family(low)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        split = family(middle)
        gap = problem.gap(split)
        if abs(gap) < abs(problem.gap(best)):
            best = split
        if abs(gap) <= _GOOD_RATIO * problem.score_pairs:
            break
        low, high = (middle, high) if (gap < 0) == is_below else (low, middle)
    return best


def _refine(problem: _Problem, new: list[int], old: list[int]) -> _Split:
    """Move tokens between two sequences at a time while that brings the pairs nearer."""
    split = (list(new), list(old))
    gap = problem.gap(split)
    for _ in range(_NUM_MOVES):
        if gap == 0:
            break
        moved = min(_moves(problem, split, gap), key=lambda move: abs(move.gap), default=None)
        if moved is None or abs(moved.gap) >= abs(gap):
            break
        tokens = split[moved.kind]
        tokens[moved.source] -= moved.size
        tokens[moved.target] += moved.size
        gap = moved.gap
    return split


@dataclass(frozen=True, slots=True)
class _Move:
    """Tokens of a kind (0: new, 1: cached) from one sequence to another, and the gap after it."""

    kind: int
    source: int
    target: int
    size: int
    gap: int


def _moves(problem: _Problem, split: _Split, gap: int) -> Iterator[_Move]:
    """Yield for pairs of sequences, spread over all sizes, the move that helps most."""
    new, old = split
    order = sorted(range(problem.num_seqs), key=lambda index: (new[index], old[index]))
    step = max(len(order) / _NUM_MOVERS, 1.0)
    movers = [order[int(index * step)] for index in range(min(len(order), _NUM_MOVERS))]
    for source in movers:
        for target in movers:
            if source != target:
                yield from _moves_between(problem, split, gap, (source, target))


def _moves_between(
    problem: _Problem, split: _Split, gap: int, ends: tuple[int, int]
) -> Iterator[_Move]:
    source, target = ends
    (q_source, c_source), (q_target, c_target) = (
        (split[0][index], split[1][index]) for index in ends
    )
    window = problem.window
    before = _pairs(q_source, c_source, window) + _pairs(q_target, c_target, window)

    def after(kind: int, size: int) -> int:
        new, old = (size, 0) if kind == 0 else (0, size)
        moved = _pairs(q_source - new, c_source - old, window)
        moved += _pairs(q_target + new, c_target + old, window)
        return gap + moved - before

    for kind, most in ((0, q_source - 1), (1, min(c_source, problem.cached_max - c_target))):
        if most > 0:
            size = _best_size(lambda size, kind=kind: after(kind, size), most)  # type: ignore[misc]
            yield _Move(kind, source, target, size, after(kind, size))


def _best_size(gap_of: Callable[[int], int], most: int) -> int:
    """Return the size from 1 to `most` with the smallest gap, where it changes sign or is least."""
    low, low_gap = 1, gap_of(1)
    best, best_gap = low, abs(low_gap)
    high = 2
    while low < most and best_gap:
        high = min(high, most)
        high_gap = gap_of(high)
        if abs(high_gap) < best_gap:
            best, best_gap = high, abs(high_gap)
        if low_gap * high_gap < 0:
            while high - low > 1:
                middle = (low + high) // 2
                middle_gap = gap_of(middle)
                if abs(middle_gap) < best_gap:
                    best, best_gap = middle, abs(middle_gap)
                if (middle_gap < 0) == (low_gap < 0):
                    low = middle
                else:
                    high = middle
            break
        low, low_gap, high = high, high_gap, 2 * high
    return best
