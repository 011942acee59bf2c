"""Operators' work at one point, summed by hand: that of sparse and of linear attention here."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorWork:
    """An operator's work at one point, in half precision."""

    dims: Mapping[str, int]
    flops: int = 0
    moved_bytes: float = 0
    num_weights: int = 0
    saved_elements: int = 0


# Three new tokens after five cached ones: 3 * 5 pairs with the cache, 1 + 2 + 3 among themselves.
PREFILL = {"num_seqs": 1, "q_tokens": 3, "kv_tokens": 8, "score_pairs": 21}
_DECODE = {"num_seqs": 2, "kv_tokens": 10, "kv_tokens_max": 6}
LATENT = {
    "num_heads": 4,
    "hidden": 32,
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 2,
    "v_head_dim": 8,
}
# 32 x (8 + 16 + 2) down, 8 x 4 x 10 for the queries, 4 x 8 x 32 for the output, and 16 x 4 x 16
# between the latent vector and the heads.
LATENT_TOKEN_WEIGHTS, LATENT_UNPACKING_WEIGHTS = 2176, 1024
# Two heads of four features from eight, and a weight for each from 32; one key from 32.
_INDEXER = {"index_num_heads": 2, "index_head_dim": 4, "index_topk": 4}
_DSA_WEIGHTS = 3200 + 2 * (8 * 4 + 32) + 32 * 4
_POOLED = {**{name: it for name, it in LATENT.items() if name != "qk_rope_head_dim"}, **_INDEXER}
_POOLED |= {"index_pool": 4}
# 32 x (8 + 16) down, 8 x 4 x 8 for the queries, 4 x 8 x 32 for the output, 16 x 4 x 16 between; the
# indexer, and for its pools a gate from 32 and a feature for each place.
_POOLED_WEIGHTS = 768 + 256 + 1024 + 1024 + 2 * (8 * 4 + 32) + 32 * 4 + 4 * (32 + 4)
_COMPRESSED = {
    "compress_ratio": 4,
    "window": 3,
    "num_heads": 4,
    "hidden": 32,
    "q_lora_rank": 8,
    "head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 3,
    **_INDEXER,
    "index_topk": 2,
}
# Queries, the shared key, the groups' outputs; two compressors of twice the features, two matrices
# each; the indexer's queries.
_COMPRESSED_WEIGHTS = 8 * 64 + 32 * 8 + 4 * 8 * 3 + 2 * 3 * 32 + 2 * 32 * 2 * (8 + 4) + 128
_MSA = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "hidden": 32,
    "index_num_heads": 2,
    "index_head_dim": 4,
    "block_size": 2,
    "topk_blocks": 2,
}
_MSA_WEIGHTS = 32 * ((2 * 4 + 2 * 2) * 8 + 3 * 4)
_NEW, _NEXT = {"num_seqs": 2, "num_tokens": 6}, {"num_seqs": 2, "num_tokens": 2}
_DELTA = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 3, "head_v_dim": 5}
_KDA = {"num_heads": 2, "head_dim": 3}
_MAMBA = {"num_heads": 4, "head_dim": 3, "num_groups": 2, "state_dim": 5}
_CHANNELS = {"channels": 4, "state_dim": 3}
_CONV = {"channels": 8, "kernel_size": 4}
_STREAMS = {"num_tokens": 3, "num_streams": 2, "hidden": 8}

SPARSE_AND_LINEAR_WORK = {
    "dsa_prefill_module": OperatorWork(
        # Each query sees four keys, fewer products in the latent space than on eight unpacked keys.
        dims={**PREFILL, "selected_pairs": 12, **LATENT, **_INDEXER},
        flops=2 * (12 * 4 * 34 + 3 * _DSA_WEIGHTS + 21 * 2 * 4),
        moved_bytes=(_DSA_WEIGHTS + 4 * 18 + 2 * 3 * 32) * 2 + 8 * (4 + 4),
        num_weights=_DSA_WEIGHTS,
    ),
    "dsa_decode_module": OperatorWork(
        dims={**_DECODE, "selected_tokens": 8, **LATENT, **_INDEXER},
        flops=2 * (8 * 4 * 34 + 2 * _DSA_WEIGHTS + 10 * 2 * 4),
        moved_bytes=(_DSA_WEIGHTS + 8 * 18 + 2 * 2 * 32) * 2 + 10 * (4 + 4),
        num_weights=_DSA_WEIGHTS,
    ),
    "pooled_attention_prefill_module": OperatorWork(
        # As above without the two features of positions; 21 pairs are five with pools of four.
        dims={**PREFILL, "selected_pairs": 12, **_POOLED},
        flops=2 * (12 * 4 * 32 + 3 * _POOLED_WEIGHTS + 5 * 2 * 4),
        moved_bytes=(_POOLED_WEIGHTS + 4 * 16 + 2 * 3 * 32) * 2 + 2 * (4 + 4),
        num_weights=_POOLED_WEIGHTS,
    ),
    "pooled_attention_decode_module": OperatorWork(
        dims={**_DECODE, "selected_tokens": 8, **_POOLED},
        flops=2 * (8 * 4 * 32 + 2 * _POOLED_WEIGHTS + 2 * 2 * 4),
        moved_bytes=(_POOLED_WEIGHTS + 8 * 16 + 2 * 2 * 32) * 2 + 2 * (4 + 4),
        num_weights=_POOLED_WEIGHTS,
    ),
    "compressed_attention_prefill_module": OperatorWork(
        # Positions 14 to 16: three tokens in the window each; three, three and four entries, of
        # which two each are seen.
        dims={
            "num_seqs": 1,
            "q_tokens": 3,
            "kv_tokens": 16,
            "num_entries": 4,
            "window_pairs": 9,
            "entry_pairs": 10,
            "selected_pairs": 6,
            **_COMPRESSED,
        },
        flops=2 * (2 * 15 * 4 * 8 + 3 * _COMPRESSED_WEIGHTS + 10 * 2 * 4),
        moved_bytes=(_COMPRESSED_WEIGHTS + (3 + 4) * 8 + 2 * 3 * 32) * 2 + 4 * (4 + 4),
        num_weights=_COMPRESSED_WEIGHTS,
    ),
    "compressed_attention_decode_module": OperatorWork(
        # Contexts of 16 and 14 tokens.
        dims={
            "num_seqs": 2,
            "kv_tokens": 30,
            "kv_tokens_max": 16,
            "num_entries": 7,
            "window_tokens": 6,
            "selected_entries": 4,
            **_COMPRESSED,
        },
        flops=2 * (2 * 10 * 4 * 8 + 2 * _COMPRESSED_WEIGHTS + 7 * 2 * 4),
        moved_bytes=(_COMPRESSED_WEIGHTS + 10 * 8 + 2 * 2 * 32) * 2 + 7 * (4 + 4),
        num_weights=_COMPRESSED_WEIGHTS,
    ),
    "msa_prefill_module": OperatorWork(
        dims={**PREFILL, "selected_pairs": 12, **_MSA},
        flops=2 * (2 * 12 * 4 * 8 + 3 * _MSA_WEIGHTS + 21 * 2 * 4),
        # Four keys and values of two heads, and a key of the indexer for each of eight tokens.
        moved_bytes=(_MSA_WEIGHTS + 2 * 4 * 16 + 8 * 4 + 2 * 3 * 32) * 2,
        num_weights=_MSA_WEIGHTS,
    ),
    "msa_decode_module": OperatorWork(
        dims={**_DECODE, "selected_tokens": 8, **_MSA},
        flops=2 * (2 * 8 * 4 * 8 + 2 * _MSA_WEIGHTS + 10 * 2 * 4),
        moved_bytes=(_MSA_WEIGHTS + 2 * 8 * 16 + 10 * 4 + 2 * 2 * 32) * 2,
        num_weights=_MSA_WEIGHTS,
    ),
    # Four states of 3 x 5; queries and keys of two heads, values, outputs and two gates of four.
    "gated_delta_prefill": OperatorWork(
        dims={**_NEW, **_DELTA},
        flops=6 * 7 * 60,
        moved_bytes=6 * (12 + 48) * 2 + 2 * 60 * 4,
        # Without outputs, with a row of 64 of what solves a chunk for each head.
        saved_elements=6 * (12 + 28 + 4 * 64),
    ),
    "gated_delta_decode": OperatorWork(
        dims={**_NEXT, **_DELTA}, flops=2 * 7 * 60, moved_bytes=2 * (12 + 48) * 2 + 2 * 2 * 60 * 4
    ),
    "kda_prefill": OperatorWork(
        dims={**_NEW, **_KDA},
        flops=6 * 7 * 18,
        moved_bytes=6 * 2 * 16 * 2 + 2 * 18 * 4,
        saved_elements=6 * 2 * (13 + 2 * 64),
    ),
    "kda_decode": OperatorWork(
        dims={**_NEXT, **_KDA}, flops=2 * 7 * 18, moved_bytes=2 * 2 * 16 * 2 + 2 * 2 * 18 * 4
    ),
    # Four states of 3 x 5; inputs, outputs and steps of four heads, B and C of two groups.
    "mamba2_prefill": OperatorWork(
        dims={**_NEW, **_MAMBA},
        flops=6 * 5 * 60,
        moved_bytes=6 * (28 + 20) * 2 + 2 * 60 * 4,
        saved_elements=6 * (28 + 20),
    ),
    "mamba2_decode": OperatorWork(
        dims={**_NEXT, **_MAMBA}, flops=2 * 5 * 60, moved_bytes=2 * (28 + 20) * 2 + 2 * 2 * 60 * 4
    ),
    # States of 3 for four channels; input, step, gate and output of each, B and C; A and D.
    "mamba_prefill": OperatorWork(
        dims={**_NEW, **_CHANNELS},
        flops=6 * 7 * 12,
        moved_bytes=(6 * 22 + 16) * 2 + 2 * 12 * 4,
        num_weights=16,
        saved_elements=6 * 22,
    ),
    "mamba_decode": OperatorWork(
        dims={**_NEXT, **_CHANNELS},
        flops=2 * 7 * 12,
        moved_bytes=(2 * 22 + 16) * 2 + 2 * 2 * 12 * 4,
        num_weights=16,
    ),
    # Three earlier tokens of eight channels are a sequence's state, in half precision.
    "causal_conv_prefill": OperatorWork(
        dims={**_NEW, **_CONV},
        flops=6 * 8 * (8 + 4),
        moved_bytes=(6 * 16 + 32 + 2 * 24) * 2,
        num_weights=32,
        saved_elements=6 * 8,
    ),
    "causal_conv_decode": OperatorWork(
        dims={**_NEXT, **_CONV},
        flops=2 * 8 * (8 + 4),
        moved_bytes=(2 * 16 + 32 + 2 * 2 * 24) * 2,
        num_weights=32,
    ),
    # Eight numbers a token, each from 16 features; five Sinkhorn steps on a matrix of 2 x 2.
    "mhc_pre": OperatorWork(
        dims={**_STREAMS, "sinkhorn_steps": 5},
        flops=3 * (2 * 128 + 4 * 16 + 4 * 5 * 4),
        moved_bytes=3 * 3 * 8 * 2 + (3 * 8 + 128) * 4,
        num_weights=128,
    ),
    "mhc_post": OperatorWork(dims=_STREAMS, flops=3 * 2 * 3 * 8 * 2, moved_bytes=3 * 5 * 8 * 2),
    # Sequences of three and of two tokens.
    "encoder_attention": OperatorWork(
        dims={"num_seqs": 2, "num_tokens": 5, "score_pairs": 13, "num_heads": 4, "head_dim": 8},
        flops=4 * 13 * 32,
        moved_bytes=4 * 5 * 32 * 2,
        saved_elements=3 * 5 * 32,
    ),
}
