"""Sparse attention blocks: against the definition, query by query, on what the indexer chooses."""

from collections.abc import Mapping

import pytest
import torch
from latent_reference import WIDTHS, normalize, run_sequence

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.profiler.attention.batch import read_decode_batch, read_prefill_batch
from foretoken.profiler.attention.dsa import Indexer
from foretoken.profiler.attention.latent import LatentBlock
from foretoken.profiler.attention.msa import MsaBlock
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.attention.selected import by_rows
from foretoken.profiler.kernel import TensorFactory, kernel_of_call

_CPU = torch.device("cpu")
# With few heads many scores would be the same: none of them positive.
_INDEXER = {"index_num_heads": 8, "index_head_dim": 4, "index_topk": 5}
_MSA = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "hidden": 16,
    "index_num_heads": 2,
    "index_head_dim": 4,
    "block_size": 3,
    "topk_blocks": 2,
}
_EQUAL = {"num_seqs": 2, "kv_tokens": 18, "kv_tokens_max": 9}
_RAGGED = {"num_seqs": 3, "kv_tokens": 20, "kv_tokens_max": 11}


def _prefill(q_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> dict[str, int]:
    batch = Batch(q_lens, tuple(map(sum, zip(q_lens, context_lens, strict=True))))
    return {
        "num_seqs": len(q_lens),
        "q_tokens": sum(q_lens),
        "kv_tokens": sum(batch.kv_lens),
        "score_pairs": batch.score_pairs(),
        "selected_pairs": sum(q_lens),
    }


_BATCHES = [
    ("prefill", _prefill((4, 4), (0, 0))),
    ("prefill", _prefill((3, 3), (6, 6))),
    ("prefill", _prefill((4, 1, 3), (0, 6, 2))),
    ("decode", {**_EQUAL, "selected_tokens": 10}),
    ("decode", {**_RAGGED, "selected_tokens": 10}),
]


def _run(
    operator: str, dims: Mapping[str, int]
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], Batch]:
    """Return a kernel's inputs as they were before it, its output by sequence, and the batch."""
    kernel = kernel_of_call(OperatorCall(operator=operator, dtype=DType.FP32, dims=dims), _CPU)
    inputs = kernel.make_inputs(dims, TensorFactory(_CPU, torch.float64, seed=1))
    before = tuple(tensor.clone() for tensor in inputs)
    batch = read_prefill_batch(dims) if "q_tokens" in dims else read_decode_batch(dims)
    return before, list(kernel.bind(dims)(*inputs).split(batch.q_lens)), batch


@pytest.mark.parametrize(("phase", "sums"), _BATCHES)
def test_a_sparse_latent_block_is_the_definition(phase: str, sums: Mapping[str, int]) -> None:
    """On the places whose scores, summed over weighted heads, are the largest up to the query's."""
    inputs, outputs, batch = _run(f"dsa_{phase}_module", {**sums, **WIDTHS, **_INDEXER})
    block, indexer = LatentBlock(*inputs[:-6]), Indexer(*inputs[-6:])
    for index, output in enumerate(outputs):
        hidden = block.hidden.split(batch.q_lens)[index]
        keys = indexer.cache.split(batch.kv_lens)[index].clone()
        keys[len(keys) - len(hidden) :] = hidden @ indexer.key
        low = normalize((hidden @ block.down)[:, :6], block.query_norm)
        chosen = []
        for place, vector in enumerate(low @ indexer.query):
            end = len(keys) - len(hidden) + place + 1
            weights = (hidden @ indexer.weight)[place]
            pairs = zip(weights, vector.view(8, 4), strict=True)
            scores = sum(weight * (keys[:end] @ head).clamp_min(0) for weight, head in pairs)
            chosen.append(scores.argsort(descending=True)[:5])
        torch.testing.assert_close(run_sequence(block, batch, index, chosen), output)


@pytest.mark.parametrize(("phase", "sums"), _BATCHES)
def test_a_block_without_an_indexer_sees_what_another_layer_chose(
    phase: str, sums: Mapping[str, int]
) -> None:
    dims = {**sums, **WIDTHS, **_INDEXER, "index_num_heads": 0}
    inputs, outputs, batch = _run(f"dsa_{phase}_module", dims)
    block, indexer = LatentBlock(*inputs[:-6]), Indexer(*inputs[-6:])
    assert min(5, max(batch.kv_lens)) == indexer.chosen.shape[1]
    for index, output in enumerate(outputs):
        chosen = list(indexer.chosen.split(batch.q_lens)[index])
        torch.testing.assert_close(run_sequence(block, batch, index, chosen), output)


@pytest.mark.parametrize("index_heads", [1, 2])
@pytest.mark.parametrize(("phase", "sums"), _BATCHES)
def test_a_block_sparse_block_is_the_definition(
    phase: str, sums: Mapping[str, int], index_heads: int
) -> None:
    """On the last block and the one whose best token scores highest."""
    dims = {**sums, **_MSA, "index_num_heads": index_heads}
    inputs, outputs, batch = _run(f"msa_{phase}_module", dims)
    block = MsaBlock(*inputs)
    widths = [16, 4 * index_heads, 8, 8, 4]
    for index, output in enumerate(outputs):
        hidden = block.hidden.split(batch.q_lens)[index]
        query, index_query, new_keys, new_values, new_index = (hidden @ block.inward).split(
            widths, 1
        )
        first = batch.kv_lens[index] - len(hidden)
        keys, values, index_keys = (
            torch.cat((kept.split(batch.kv_lens)[index][:first].flatten(1), new))
            for kept, new in (
                (block.keys, new_keys),
                (block.values, new_values),
                (block.index_keys, new_index),
            )
        )
        rows = []
        for place in range(len(hidden)):
            end = first + place + 1
            heads = []
            for head in range(4):
                kv_head = head // 2
                asked = index_query[place].view(index_heads, 4)[kv_head % index_heads]
                seen = torch.tensor(_see_blocks((index_keys[:end] @ asked).tolist()))
                own = slice(4 * kv_head, 4 * kv_head + 4)
                scores = keys[seen, own] @ query[place, 4 * head : 4 * head + 4] / 2
                heads.append(scores.softmax(0) @ values[seen, own])
            rows.append(torch.cat(heads))
        torch.testing.assert_close(torch.stack(rows) @ block.out, output)


def _see_blocks(scores: list[float]) -> list[int]:
    """Return the tokens of the last block of three and of the best one before it."""
    starts = range(0, len(scores), 3)
    *before, last = [range(start, min(start + 3, len(scores))) for start in starts]
    best = max(before, key=lambda block: max(scores[i] for i in block), default=range(0))
    return [*best, *last]


def test_rows_are_taken_together_as_far_as_they_fit() -> None:
    taken = []

    def attend(rows: slice) -> torch.Tensor:
        taken.append(rows)
        return torch.arange(5)[rows]

    assert torch.arange(5).tolist() == by_rows(5, 2**25, attend).tolist()
    assert 3 == len(taken)
