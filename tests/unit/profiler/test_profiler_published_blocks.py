"""Attention blocks against the modelling files that their models were published with."""

from collections.abc import Mapping

import pytest
import torch
from latent_reference import WIDTHS

from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.profiler.attention.batch import read_prefill_batch
from foretoken.profiler.attention.latent import LatentBlock
from foretoken.profiler.attention.pooled import (
    PooledIndexer,
    bind_pooled_block,
    make_pooled_block,
)
from foretoken.profiler.kernel import TensorFactory

_LENGTH = 23
_POOLED = {name: size for name, size in WIDTHS.items() if name != "qk_rope_head_dim"}
_POOLED |= {"index_num_heads": 8, "index_head_dim": 4, "index_topk": 6, "index_pool": 3}
_NUM_BLOCK_INPUTS = len(LatentBlock._fields)


@pytest.mark.slow
def test_a_block_of_pools_is_that_of_its_modelling_file() -> None:
    """Of 23 tokens at once, of which all but the first see fewer than there are."""
    published = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    dims = {**prefill_dims(1, _LENGTH, 0), "selected_pairs": _LENGTH, **_POOLED}
    batch = read_prefill_batch(dims)
    inputs = make_pooled_block(dims, batch, TensorFactory(torch.device("cpu"), torch.float32, 1))
    config = configuration.Glm5NextTextConfig(
        hidden_size=dims["hidden"],
        num_attention_heads=dims["num_heads"],
        num_key_value_heads=dims["num_heads"],
        q_lora_rank=dims["q_lora_rank"],
        kv_lora_rank=dims["kv_lora_rank"],
        qk_nope_head_dim=dims["qk_nope_head_dim"],
        v_head_dim=dims["v_head_dim"],
        index_n_heads=dims["index_num_heads"],
        index_head_dim=dims["index_head_dim"],
        index_topk=dims["index_topk"],
        index_kpool=dims["index_pool"],
        rms_norm_eps=torch.finfo(torch.float32).eps,
        num_hidden_layers=4,
        attn_implementation="eager",
    )
    module = published.Glm5NextTextAttention(config, layer_idx=0)
    block = LatentBlock(*inputs[:_NUM_BLOCK_INPUTS])
    module.load_state_dict(_weights(block, PooledIndexer(*inputs[_NUM_BLOCK_INPUTS:]), dims))
    everywhere = torch.ones(1, _LENGTH, dtype=torch.bool)
    with torch.no_grad():
        expected = module.eval()(block.hidden.unsqueeze(0), everywhere)[0].squeeze(0)
    torch.testing.assert_close(
        expected, bind_pooled_block(dims, batch)(*inputs), rtol=1e-3, atol=1e-3
    )


def _weights(
    block: LatentBlock, indexer: PooledIndexer, dims: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the weights as the modelling file names them, matrices [out, in]."""
    low, latent = block.down.T.split((dims["q_lora_rank"], dims["kv_lora_rank"]))
    key, gate = indexer.key.T.chunk(2)
    return {
        "q_a_proj.weight": low,
        "q_a_layernorm.weight": block.query_norm,
        "q_b_proj.weight": block.query_up.T,
        "kv_a_proj_with_mqa.weight": latent,
        "kv_a_layernorm.weight": block.latent_norm,
        "kv_b_proj.weight": block.latent_up.T,
        "o_proj.weight": block.out.T,
        "indexer.wq_b.weight": indexer.query.T,
        "indexer.wk.weight": key,
        "indexer.k_norm.weight": indexer.key_norm,
        "indexer.k_norm.bias": indexer.key_bias,
        "indexer.weights_proj.weight": indexer.weight.T,
        "indexer.index_kpool_compress_ape": indexer.offsets,
        "indexer.index_kpool_compress_gate": gate,
    }
