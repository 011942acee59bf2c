"""Sparse attention blocks: against the definition, query by query, on what the indexer chooses."""

from collections.abc import Iterable, Mapping

import pytest
import torch
from latent_reference import WIDTHS, normalize, run_sequence

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.compressed_attention_prefill_module import compressed_prefill_dims
from foretoken.profiler.attention.batch import read_decode_batch, read_prefill_batch
from foretoken.profiler.attention.compressed import CompressedBlock
from foretoken.profiler.attention.dsa import Indexer
from foretoken.profiler.attention.latent import LatentBlock
from foretoken.profiler.attention.msa import MsaBlock
from foretoken.profiler.attention.pooled import PooledIndexer, bind_pooled_block, make_pooled_block
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.attention.selected import by_rows
from foretoken.profiler.kernel import TensorFactory, all_kernels, kernel_of_call

_CPU = torch.device("cpu")
# With few heads many scores would be the same: none of them positive.
_INDEXER = {"index_num_heads": 8, "index_head_dim": 4, "index_topk": 5}
_POOLED = {name: size for name, size in WIDTHS.items() if name != "qk_rope_head_dim"}
_POOLED |= {**_INDEXER, "index_topk": 7, "index_pool": 3}
_NONE = {"index_num_heads": 0, "index_head_dim": 0, "index_topk": 0}
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


_POOL_BATCHES = [
    ("prefill", _prefill((9, 9), (13, 13))),
    ("prefill", _prefill((9, 4, 3), (0, 7, 20))),
    ("decode", {"num_seqs": 3, "kv_tokens": 63, "kv_tokens_max": 21, "selected_tokens": 18}),
    ("decode", {"num_seqs": 3, "kv_tokens": 40, "kv_tokens_max": 20, "selected_tokens": 18}),
    # None has a complete pool.
    ("prefill", _prefill((2, 1), (0, 0))),
    ("decode", {"num_seqs": 2, "kv_tokens": 4, "kv_tokens_max": 2, "selected_tokens": 4}),
    # As many pools each, of contexts that are not equal.
    ("decode", {"num_seqs": 2, "kv_tokens": 7, "kv_tokens_max": 4, "selected_tokens": 7}),
]
_NUM_BLOCK_INPUTS = len(LatentBlock._fields)


@pytest.mark.parametrize(("phase", "sums"), [*_BATCHES, *_POOL_BATCHES])
def test_a_block_of_pools_is_the_definition(phase: str, sums: Mapping[str, int]) -> None:
    """On the tokens of the two complete pools that score highest, and of one not complete yet."""
    dims = {**sums, **_POOLED}
    kernel = all_kernels()[f"pooled_attention_{phase}_module"]
    inputs = kernel.make_inputs(dims, TensorFactory(_CPU, torch.float64, seed=1))
    batch = read_prefill_batch(dims) if phase == "prefill" else read_decode_batch(dims)
    block, indexer = _named(tensor.clone() for tensor in inputs)
    outputs = kernel.bind(dims)(*inputs).split(batch.q_lens)
    counts = [kv_len // 3 for kv_len in batch.kv_lens]
    written = _named(inputs)[1].pools.split(counts)
    for index, output in enumerate(outputs):
        hidden = block.hidden.split(batch.q_lens)[index]
        first = batch.kv_lens[index] - len(hidden)
        waiting = indexer.open.view(-1, 3, 8)[index][: first % 3]
        old = indexer.pools.split(counts)[index][: first // 3]
        pools = torch.cat((old, _pool(hidden, waiting, indexer)))
        torch.testing.assert_close(pools, written[index])
        low = normalize((hidden @ block.down)[:, :6], block.query_norm)
        chosen = []
        for place, vector in enumerate(low @ indexer.query):
            end = first + place + 1
            pairs = zip((hidden @ indexer.weight)[place], vector.view(8, 4), strict=True)
            seen = pools[: end // 3]
            scores = sum(weight * (seen @ head).clamp_min(0) for weight, head in pairs)
            best = [3 * int(pool) for pool in scores.argsort(descending=True)[:2]]
            tokens = [token for start in best for token in range(start, start + 3)]
            chosen.append(torch.tensor([*tokens, *range(end // 3 * 3, end)]))
        torch.testing.assert_close(run_sequence(block, batch, index, chosen), output)


def _named(inputs: Iterable[torch.Tensor]) -> tuple[LatentBlock, PooledIndexer]:
    tensors = tuple(inputs)
    return LatentBlock(*tensors[:_NUM_BLOCK_INPUTS]), PooledIndexer(*tensors[_NUM_BLOCK_INPUTS:])


def _pool(hidden: torch.Tensor, waiting: torch.Tensor, indexer: PooledIndexer) -> torch.Tensor:
    """Return the keys of the pools that tokens complete, with those that wait for them."""
    keys, gates = (hidden @ indexer.key).split(4, dim=1)
    centred = keys - keys.mean(1, keepdim=True)
    deviation = (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    keys = centred / deviation * indexer.key_norm + indexer.key_bias
    tokens = torch.cat((waiting, torch.cat((keys, gates), 1)))
    made = keys.new_empty(len(tokens) // 3, 4)
    for place, pool in enumerate(tokens[: 3 * len(made)].split(3) if len(made) else ()):
        shares = (pool[:, 4:] + indexer.offsets).exp()
        made[place] = (shares / shares.sum(0) * pool[:, :4]).sum(0)
    return made


def test_steps_one_after_another_see_what_one_step_sees() -> None:
    """A pool that is not complete waits: tokens 3 to 5 are one, of three steps."""
    dims, batch = _pooled_prefill(9, 0)
    block, indexer = _named(make_pooled_block(dims, batch, TensorFactory(_CPU, torch.float64, 1)))
    cache, pools, waiting = block.cache.clone(), indexer.pools.clone(), indexer.open.clone()
    expected = bind_pooled_block(dims, batch)(*block, *indexer)
    outputs = []
    for first, end in ((0, 4), (4, 5), (5, 9)):
        dims, batch = _pooled_prefill(end - first, first)
        fresh, places = _named(
            make_pooled_block(dims, batch, TensorFactory(_CPU, torch.float64, 1))
        )
        step = block._replace(
            hidden=block.hidden[first:end],
            cache=cache[:end],
            places=fresh.places,
            cos=fresh.cos,
            sin=fresh.sin,
            mask=fresh.mask,
        )
        scorer = indexer._replace(
            pools=pools[: end // 3],
            open=waiting,
            members=places.members,
            completed=places.completed,
            kept=places.kept,
            visible=places.visible,
        )
        outputs.append(bind_pooled_block(dims, batch)(*step, *scorer))
    torch.testing.assert_close(expected, torch.cat(outputs))


def _pooled_prefill(q_len: int, context_len: int) -> tuple[Mapping[str, int], Batch]:
    dims = {**_prefill((q_len,), (context_len,)), **_POOLED}
    return dims, read_prefill_batch(dims)


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


_SIZES = {
    "window": 3,
    "num_heads": 4,
    "hidden": 16,
    "q_lora_rank": 6,
    "head_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 3,
}
_RATIOS = {
    "window alone": {"compress_ratio": 0, **_NONE},
    "all entries": {"compress_ratio": 3, **_NONE},
    "chosen entries": {"compress_ratio": 3, **_INDEXER, "index_topk": 2},
}


@pytest.mark.parametrize(("q_len", "context_len"), [(11, 0), (10, 5), (1, 12), (1, 13)])
@pytest.mark.parametrize("kind", _RATIOS)
def test_a_compressed_block_is_the_definition(kind: str, q_len: int, context_len: int) -> None:
    """Softmax over the last tokens and complete entries, those made of new blocks made anew."""
    sizes = {**_RATIOS[kind], **_SIZES}
    dims = {**compressed_prefill_dims(2, q_len, context_len, sizes), **sizes}
    kernel = all_kernels()["compressed_attention_prefill_module"]
    inputs = kernel.make_inputs(dims, TensorFactory(_CPU, torch.float64, seed=1))
    block = CompressedBlock(*(tensor.clone() for tensor in inputs))
    outputs = kernel.bind(dims)(*inputs).chunk(2)
    for index, output in enumerate(outputs):
        hidden, keys, entries, index_entries = (
            tensor.chunk(2)[index].clone() if len(tensor) else tensor
            for tensor in (block.hidden, block.keys, block.entries, block.index_entries)
        )
        low, new = (hidden @ block.down).split((6, 4), 1)
        keys[context_len:] = new
        _compress(hidden @ block.compressor, entries, context_len, sizes)
        _compress(hidden @ block.index_compressor, index_entries, context_len, sizes)
        low = normalize(low, block.query_norm)
        rows = []
        for place in range(q_len):
            end = context_len + place + 1
            seen = torch.arange(end // sizes["compress_ratio"] if sizes["compress_ratio"] else 0)
            if sizes["index_topk"]:
                pairs = zip(
                    hidden[place] @ block.index_weight,
                    (low[place] @ block.index_query).view(8, 4),
                    strict=True,
                )
                every = [w * (index_entries[seen] @ head).clamp_min(0) for w, head in pairs]
                seen = sum(every).argsort(descending=True)[:2]
            context = torch.cat((keys[max(end - 3, 0) : end], entries[seen]))
            heads = (low[place] @ block.query_up).view(4, 4)
            attended = (heads @ context.T / 2).softmax(-1) @ context
            groups = [
                part.flatten() @ matrix
                for part, matrix in zip(attended.chunk(2), block.into_groups, strict=True)
            ]
            rows.append(torch.cat(groups) @ block.out)
        torch.testing.assert_close(torch.stack(rows), output)


def _compress(
    features: torch.Tensor, entries: torch.Tensor, first: int, sizes: Mapping[str, int]
) -> None:
    """Write the entries of blocks of new tokens, overlapping with the one before where indexed."""
    ratio, width = sizes["compress_ratio"], entries.shape[-1]
    if not ratio or not width:
        return
    parts = features.view(len(features), 2, -1, width)
    start = -first % ratio
    for place in range(start, len(features) - ratio + 1, ratio):
        own = parts[place : place + ratio, :, -1]
        if parts.shape[2] == 2 and place > start:
            own = torch.cat((parts[place - ratio : place, :, 0], own))
        weights = own[:, 1].softmax(0)
        entries[(first + place) // ratio] = (weights * own[:, 0]).sum(0)


def test_rows_are_taken_together_as_far_as_they_fit() -> None:
    taken = []

    def attend(rows: slice) -> torch.Tensor:
        taken.append(rows)
        return torch.arange(5)[rows]

    assert torch.arange(5).tolist() == by_rows(5, 2**25, attend).tolist()
    assert 3 == len(taken)
