"""What runs attention: batches from an operator's dimensions, inputs in libraries' layouts.

A `AttentionCode` is one way to run attention, whatever the operator; `attention_kernel` makes the
kernels of an operator from those that can run it.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.attention.ragged import Batch, decode_batch, prefill_batch
from foretoken.profiler.kernel import PLAIN_DTYPES, Inputs, Kernel, TensorFactory

HALF_DTYPES = frozenset({DType.FP16, DType.BF16})
# Positions of queries, keys and values in the inputs of every layout of one batch.
QUERY_KEY_VALUE = (0, 1, 2)
# A mask or a matrix of scores with more elements does not fit in addition to what is measured.
_SCORES_MAX = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """Batches that one call runs, and the heads they have.

    The last `shared_key_dim` features of a key are the same in all heads. `window` counts the
    tokens that a query sees, itself included (0: all).
    """

    batches: tuple[Batch, ...]
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    shared_key_dim: int = 0
    window: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether the sequences of each batch are alike."""
        return all(batch.is_equal for batch in self.batches)

    @property
    def joined(self) -> Batch:
        """All sequences in one batch."""
        first, *others = self.batches
        for other in others:
            first = first.joined(other)
        return first

    @property
    def is_grouped(self) -> bool:
        """Whether heads of queries share heads of keys."""
        return self.num_heads != self.num_kv_heads

    @property
    def is_narrow(self) -> bool:
        """Whether keys and values are as wide as each other, and as fused kernels take them."""
        return self.key_dim == self.value_dim <= 256 and self.key_dim % 8 == 0  # noqa: PLR2004

    @property
    def num_padded_scores(self) -> int:
        """Query-key pairs of a head if all sequences were as long as the longest of their batch."""
        return sum(batch.num_seqs * math.prod(batch.lengths) for batch in self.batches)

    @property
    def has_small_scores(self) -> bool:
        """Whether the scores of all heads fit in memory."""
        return self.num_padded_scores * self.num_heads <= _SCORES_MAX


ReadCase = Callable[[Mapping[str, int]], AttentionCase]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCode:
    """One way to run attention: a kernel of every operator whose cases `can_run` accepts.

    `make_inputs` gives queries, keys and values first if it is `differentiable`.
    """

    source: str
    make_inputs: Callable[[AttentionCase, TensorFactory], Inputs]
    bind: Callable[[AttentionCase], Callable[..., Any]]
    is_present: Callable[[torch.device], bool] = lambda _: True
    can_run: Callable[[AttentionCase], bool] = lambda _: True
    dtypes: frozenset[DType] = PLAIN_DTYPES
    variant: str = ""
    is_differentiable: bool = False


def attention_kernel(
    operator: str, read: ReadCase, codes: Sequence[AttentionCode], *, has_backward: bool = False
) -> Kernel:
    """Return the first code as the operator's kernel, the others as its alternatives."""
    first, *others = (_kernel_of(operator, read, code, has_backward) for code in codes)
    return replace(first, alternatives=tuple(others))


def _kernel_of(operator: str, read: ReadCase, code: AttentionCode, has_backward: bool) -> Kernel:
    def can_run(dims: Mapping[str, int]) -> bool:
        try:
            case = read(dims)
        except InvalidRequestError:
            # Making the inputs says what is wrong with them.
            return True
        return code.can_run(case)

    return Kernel(
        operator=operator,
        source=code.source,
        make_inputs=lambda dims, tensors: code.make_inputs(read(dims), tensors),
        bind=lambda dims: code.bind(read(dims)),
        differentiable=QUERY_KEY_VALUE if has_backward and code.is_differentiable else (),
        dtypes=code.dtypes,
        variant=code.variant,
        is_present=code.is_present,
        can_run=can_run,
    )


def read_prefill(dims: Mapping[str, int]) -> AttentionCase:
    """Return the case of `attention_prefill`, or with a window of `attention_prefill_window`."""
    return _plain_case(dims, read_prefill_batch(dims), window=dims.get("window", 0))


def read_decode(dims: Mapping[str, int]) -> AttentionCase:
    """Return the case of `attention_decode`."""
    return _plain_case(dims, read_decode_batch(dims))


def read_window_decode(dims: Mapping[str, int]) -> AttentionCase:
    """Return the case of `attention_decode_window`: what lies in the windows, nothing else.

    The cache before them is never read: it would take memory, and hide from the rotation of inputs
    how little a call reads.
    """
    longest = min(dims["kv_tokens_max"], dims["window"])
    return _plain_case(dims, decode_batch(dims["num_seqs"], dims["visible_tokens"], longest))


def read_mixed(dims: Mapping[str, int]) -> AttentionCase:
    """Return the case of `attention_mixed`: prefills, then decoding sequences."""
    decodes = decode_batch(
        dims["num_decode_seqs"], dims["decode_kv_tokens"], dims["decode_kv_tokens_max"]
    )
    return _plain_case(dims, read_prefill_batch(dims), decodes)


def read_latent_prefill(dims: Mapping[str, int]) -> AttentionCase:
    """Return the case of `mla_prefill`: every head's key has a copy of the shared part."""
    return AttentionCase(
        batches=(read_prefill_batch(dims),),
        num_heads=dims["num_heads"],
        num_kv_heads=dims["num_heads"],
        key_dim=dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"],
        value_dim=dims["v_head_dim"],
        shared_key_dim=dims["qk_rope_head_dim"],
    )


def read_decode_batch(dims: Mapping[str, int]) -> Batch:
    """Return the sequences of a decode."""
    return decode_batch(dims["num_seqs"], dims["kv_tokens"], dims["kv_tokens_max"])


def is_ragged_decode(dims: Mapping[str, int]) -> bool:
    """Return whether contexts of a decode differ; what no batch can have counts as equal."""
    return _is_ragged(read_decode_batch, dims)


def is_ragged_prefill(dims: Mapping[str, int]) -> bool:
    """Return whether sequences of a prefill differ; what no batch can have counts as equal."""
    return _is_ragged(read_prefill_batch, dims)


def _is_ragged(read: Callable[[Mapping[str, int]], Batch], dims: Mapping[str, int]) -> bool:
    try:
        return not read(dims).is_equal
    except InvalidRequestError:
        # Making the inputs says what is wrong with them.
        return False


def read_prefill_batch(dims: Mapping[str, int]) -> Batch:
    """Return the sequences of a prefill, behind a window if there is one."""
    sums = (dims[name] for name in ("num_seqs", "q_tokens", "kv_tokens", "score_pairs"))
    return prefill_batch(*sums, dims.get("window", 0))


def _plain_case(dims: Mapping[str, int], *batches: Batch, window: int = 0) -> AttentionCase:
    return AttentionCase(
        batches=batches,
        num_heads=dims["num_heads"],
        num_kv_heads=dims["num_kv_heads"],
        key_dim=dims["head_dim"],
        value_dim=dims["head_dim"],
        window=window,
    )


def random_vectors(
    case: AttentionCase, num_queries: int, num_keys: int, tensors: TensorFactory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, token by token: [tokens, heads, features]."""
    own_dim = case.key_dim - case.shared_key_dim
    key = tensors.random(num_keys, case.num_kv_heads, own_dim)
    if case.shared_key_dim:
        shared = tensors.random(num_keys, 1, case.shared_key_dim)
        key = torch.cat((key, shared.expand(-1, case.num_kv_heads, -1)), dim=-1)
    return (
        tensors.random(num_queries, case.num_heads, case.key_dim),
        key,
        tensors.random(num_keys, case.num_kv_heads, case.value_dim),
    )


def dense_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    """Return per batch queries, keys, values [seqs, heads, tokens, features] and a mask.

    All sequences have the length of the longest. The mask [queries, keys] is empty where causality
    needs none.
    """
    inputs: list[torch.Tensor] = []
    for batch in case.batches:
        inputs += [*_padded_vectors(case, batch, tensors), _causal_mask(batch, tensors.device)]
    return tuple(inputs)


def padded_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    """Return what `dense_inputs` does, with masks that hide the padding and what no query sees.

    Sequences end where their batch does: what is missing is missing in front. Masks are
    [seqs, 1, queries, keys], of equal sequences [queries, keys].
    """
    inputs: list[torch.Tensor] = []
    for batch in case.batches:
        visible = visible_keys(*batch.lengths, case.window, tensors.device)
        mask = visible if batch.is_equal else _padding_mask(batch, visible)
        inputs += [*_padded_vectors(case, batch, tensors), mask]
    return tuple(inputs)


def _padding_mask(batch: Batch, visible: torch.Tensor) -> torch.Tensor:
    """Return what each sequence's queries see of its keys.

    A query that is none sees one key, as nothing to see would be no number.
    """
    q_max, kv_max = batch.lengths
    device = visible.device
    q_lens, kv_lens = (
        torch.tensor(lens, device=device)[:, None] for lens in (batch.q_lens, batch.kv_lens)
    )
    is_key = torch.arange(kv_max, device=device) >= kv_max - kv_lens
    is_query = torch.arange(q_max, device=device) >= q_max - q_lens
    mask = visible & is_key[:, None, :] & is_query[:, :, None]
    mask[..., -1] |= ~is_query
    return mask.unsqueeze(1)


def _padded_vectors(
    case: AttentionCase, batch: Batch, tensors: TensorFactory
) -> tuple[torch.Tensor, ...]:
    own_dim, (q_max, kv_max) = case.key_dim - case.shared_key_dim, batch.lengths
    num_seqs, num_kv_heads = batch.num_seqs, case.num_kv_heads
    query = tensors.random(num_seqs, case.num_heads, q_max, case.key_dim)
    key = tensors.random(num_seqs, num_kv_heads, kv_max, own_dim)
    if case.shared_key_dim:
        shared = tensors.random(num_seqs, 1, kv_max, case.shared_key_dim)
        key = torch.cat((key, shared.expand(-1, num_kv_heads, -1, -1)), dim=-1)
    return query, key, tensors.random(num_seqs, num_kv_heads, kv_max, case.value_dim)


def packed_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    """Return all sequences one after the other: [tokens, heads, features], and where each begins.

    The places [sequences + 1] are those of queries, then those of keys, int32.
    """
    batch = case.joined
    vectors = random_vectors(case, sum(batch.q_lens), sum(batch.kv_lens), tensors)
    return (
        *vectors,
        starts_of(batch.q_lens, tensors.device),
        starts_of(batch.kv_lens, tensors.device),
    )


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where each sequence begins, and where the last ends, int32."""
    ends = torch.tensor((0, *lengths), dtype=torch.int64).cumsum(0)
    return ends.to(torch.int32).to(device)


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return which keys each query sees; empty where torch's own causal flag says it."""
    if q_len in (1, kv_len):
        return torch.empty(0, dtype=torch.bool, device=device)
    return visible_keys(q_len, kv_len, 0, device)


def _causal_mask(batch: Batch, device: torch.device) -> torch.Tensor:
    return causal_mask(*batch.lengths, device)


def visible_keys(q_len: int, kv_len: int, window: int, device: torch.device) -> torch.Tensor:
    """Return which keys each query sees; queries are the last positions of their context.

    Its lower right corner is the same for shorter sequences.
    """
    offset = kv_len - q_len
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(offset)
    return visible.triu(offset - window + 1) if window else visible


def corner_mask(batch: Batch, device: torch.device, window: int = 0) -> torch.Tensor:
    """Return a mask whose lower right corners are the masks of all sequences that need one.

    Empty where causality is all there is to say.
    """
    masked = [
        lens
        for lens in zip(batch.q_lens, batch.kv_lens, strict=True)
        if window or lens[0] not in (1, lens[1])
    ]
    if not masked:
        return torch.empty(0, dtype=torch.bool, device=device)
    q_max, kv_max = (max(lens) for lens in zip(*masked, strict=True))
    return visible_keys(q_max, kv_max, window, device)


def sides_of_window(case: AttentionCase) -> tuple[int, int]:
    """Return how many tokens a query sees before and after itself; -1 is all."""
    return (case.window - 1, 0) if case.window else (-1, 0)


# Tokens of a page: vLLM's default, which flash-attn 3 and FlashInfer take as well.
PAGE_SIZE = 16
FP8 = torch.float8_e4m3fn
# The variant of calls on a cache in that format.
FP8_CACHE = "kv=fp8"


def num_pages_of(batch: Batch, page_size: int) -> list[int]:
    """Return how many pages each sequence's context fills."""
    return [-(-kv_len // page_size) for kv_len in batch.kv_lens]


def shuffled_pages(num_pages: int) -> list[int]:
    """Return page numbers in a random order, always the same one."""
    pages = list(range(num_pages))
    random.Random(num_pages).shuffle(pages)  # noqa: S311 - an order of pages, not a secret
    return pages


def _pages(
    case: AttentionCase, page_size: int, tensors: TensorFactory, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [pages, page_size, heads, features]."""
    num_pages = sum(num_pages_of(case.joined, page_size))
    shape = (num_pages, page_size, case.num_kv_heads)
    return (
        tensors.random(*shape, case.key_dim, dtype=dtype),
        tensors.random(*shape, case.value_dim, dtype=dtype),
    )


def _queries(
    case: AttentionCase, tensors: TensorFactory, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return tensors.random(sum(case.joined.q_lens), case.num_heads, case.key_dim, dtype=dtype)


def table_inputs(
    case: AttentionCase, page_size: int, tensors: TensorFactory, dtypes: Sequence[torch.dtype]
) -> Inputs:
    """Return queries, keys, values and tables of pages as flash-attn takes them.

    `dtypes` are those of queries and cache, the factory's own if empty. After keys and values come
    pages [seqs, longest], lengths of contexts [seqs] and where queries begin [seqs + 1], int32.
    """
    batch, device = case.joined, tensors.device
    q_dtype, kv_dtype = dtypes or (None, None)
    counts = num_pages_of(batch, page_size)
    pages = iter(shuffled_pages(sum(counts)))
    table = torch.zeros(batch.num_seqs, max(counts), dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([next(pages) for _ in range(count)], dtype=torch.int32)
    return (
        _queries(case, tensors, q_dtype),
        *_pages(case, page_size, tensors, kv_dtype),
        table.to(device),
        torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        starts_of(batch.q_lens, device),
    )


def list_inputs(
    case: AttentionCase, page_size: int, tensors: TensorFactory, kv_dtype: torch.dtype | None
) -> Inputs:
    """Return queries, keys, values and lists of pages as FlashInfer takes them.

    After keys and values come where each sequence's pages begin in the list [seqs + 1], the list
    [pages], tokens in each last page [seqs] and where queries begin [seqs + 1], int32.
    """
    batch, device = case.joined, tensors.device
    counts = num_pages_of(batch, page_size)
    last = [
        kv_len - (count - 1) * page_size
        for kv_len, count in zip(batch.kv_lens, counts, strict=True)
    ]
    return (
        _queries(case, tensors),
        *_pages(case, page_size, tensors, kv_dtype),
        starts_of(counts, device),
        torch.tensor(shuffled_pages(sum(counts)), dtype=torch.int32, device=device),
        torch.tensor(last, dtype=torch.int32, device=device),
        starts_of(batch.q_lens, device),
    )
