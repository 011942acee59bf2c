"""What a map of options writes, it reads back: the fields are the same."""

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.frameworks.engine import EXPERT_EXCHANGES
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.engines.trtllm import ENGINE as TRTLLM
from foretoken.simulator.launch.options import text_arguments
from foretoken.simulator.launch.server import ServedOptions, all_servers

# What no command says: how much a store holds is in the environment, the rest is the model's, or
# how fast blocks come back is not there.
_NOWHERE = {"store_bytes", "host_bytes", "num_experts"}
# Waits and pieces of prompts that TensorRT-LLM alone has settings for.
_PROMPTS = {
    *("max_chunk_tokens", "batch_wait_iters", "batch_wait_tokens_ratio"),
    *("balance_timeout_iters", "balance_wait_iters"),
}
# What a server has no option for.
_UNSAID = {
    "vllm": {
        *("mixes_prefill", "receive_interval", "window_tokens_ratio", "encoder_urls"),
        *(_NOWHERE | _PROMPTS),
    },
    "sglang": {
        *("num_loras", "prefill_interval"),
        *(_NOWHERE | _PROMPTS),
    },
    "trtllm": {
        *("mixes_prefill", "receive_interval", "prefill_interval", "window_tokens_ratio"),
        *("encoder_urls", "expert_exchange", "two_batch_tokens"),
        *("has_priority_scheduling", "fuses_all_reduce_norm", "quantization"),
        *_NOWHERE,
    },
}
# Experts in a layer of the models that are drawn.
_NUM_EXPERTS = {"me/a model": 0, "/models/x=1": 0, "llama-3.1-8b": 0, "qwen3-30b-a3b": 128}


@st.composite
def _served(draw: st.DrawFn) -> ServedOptions:
    degrees = st.sampled_from([1, 2, 4, 8])
    tp, dp = draw(degrees), draw(degrees)
    counts = st.integers(1, 10**6)
    ep = draw(st.sampled_from([1, tp * dp]))
    # Experts on one rank are exchanged with no other.
    exchanges = EXPERT_EXCHANGES if ep == tp * dp else EXPERT_EXCHANGES[:1]
    drafts = draw(st.sampled_from(["", "ngram", "layers", "draft_model"]))
    max_loras = draw(st.integers(0, 8))
    urls = st.lists(
        st.sampled_from(["http://encoder-0:8000", "http://encoder-1:8000"]), unique=True
    )
    model_id = draw(st.sampled_from(sorted(_NUM_EXPERTS)))
    is_balanced = _NUM_EXPERTS[model_id] > 0 and draw(st.booleans())
    num_tokens, timeout = draw(counts), draw(st.integers(0, 64))
    return ServedOptions(
        encoder_urls=tuple(draw(urls)),
        model_id=model_id,
        num_experts=_NUM_EXPERTS[model_id],
        dtype=draw(st.sampled_from([DType.BF16, DType.FP16, DType.FP32])),
        tp=tp,
        pp=draw(degrees),
        dp=dp,
        ep=ep,
        attention_dp=dp > 1 and ep == 1,
        max_tokens=draw(counts),
        max_num_seqs=draw(counts),
        max_num_batched_tokens=num_tokens,
        max_chunk_tokens=draw(st.sampled_from([0, num_tokens])),
        batch_wait_iters=draw(st.integers(0, 64)),
        batch_wait_tokens_ratio=draw(st.floats(0.0, 1.0)),
        balance_timeout_iters=timeout,
        balance_wait_iters=draw(st.integers(0, 16)) if timeout else 0,
        memory_utilization_ratio=draw(st.floats(0.01, 1.0)),
        quantization=draw(st.sampled_from(["", "fp8"])),
        kv_dtype=draw(st.sampled_from([None, DType.FP8])),
        has_prefix_caching=draw(st.booleans()),
        has_graphs=draw(st.booleans()),
        has_priority_scheduling=draw(st.booleans()),
        mixes_prefill=draw(st.booleans()),
        prefill_interval=draw(st.integers(1, 64)),
        receive_interval=draw(st.integers(1, 64)),
        expert_exchange=draw(st.sampled_from(exchanges)),
        has_expert_balancing=is_balanced,
        num_redundant_experts=draw(st.integers(0, 64)) if is_balanced else 0,
        decode_context_parallel=draw(degrees),
        window_tokens_ratio=draw(st.floats(0.01, 1.0)),
        two_batch_tokens=draw(st.sampled_from([0, 2])),
        role=draw(st.sampled_from(["aggregated", "prefill", "decode"])),
        max_loras=max_loras,
        num_loras=max_loras + draw(st.integers(0, 8)) if max_loras else 0,
        lora_rank=draw(st.integers(1, 64)) if max_loras else 0,
        drafts=drafts,
        num_draft_tokens=draw(st.integers(1, 8)) if drafts else 0,
        draft_model="me/draft" if drafts == "draft_model" else "",
    )


@pytest.mark.parametrize("name", ["sglang", "vllm"])
@given(served=_served())
def test_a_servers_command_is_read_as_what_it_was_written_for(
    name: str, served: ServedOptions
) -> None:
    server = all_servers()[name]
    words = {"vllm": ["vllm", "serve", served.model_id], "sglang": ["-m", "sglang.launch_server"]}
    arguments = text_arguments(server.options.write(served))
    found = server.read(shlex.join([*words[name], *arguments]))
    assert found is not None
    fields, unread = found
    said = {key: value for key, value in served.fields.items() if key not in _UNSAID[name]}
    assert (said, []) == (fields, unread)


@pytest.mark.parametrize("release", ["1.0", "1.1", "1.2", "1.3"])
@given(served=_served())
def test_a_command_is_read_with_its_file_as_what_both_were_written_for(
    release: str, served: ServedOptions
) -> None:
    """TensorRT-LLM's ranks have all of attention, or a part of it, and never both.

    Those that split contexts are some of tensor parallelism.
    """
    if served.dp > 1:
        ep = served.dp if served.ep > 1 else 1
        served = replace(served, tp=1, ep=ep, decode_context_parallel=1)
    splits = min(served.tp, served.decode_context_parallel)
    served = replace(served, decode_context_parallel=splits)
    words, files = TRTLLM.write(served, "server.llm.yaml", release)
    found = TRTLLM.read(shlex.join(words), files)
    assert found is not None
    fields, unread = found
    said = {key: value for key, value in served.fields.items() if key not in _UNSAID["trtllm"]}
    assert (said, []) == (fields, unread)


def test_every_server_has_its_law() -> None:
    assert set(all_servers()) == set(_UNSAID)
