"""What a map of options writes, it reads back: the fields are the same."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.frameworks.engine import EXPERT_EXCHANGES
from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.launch.options import text_arguments
from foretoken.simulator.launch.server import ServedOptions, all_servers

# What a server has no option for; how much a store holds is said in the environment.
_UNSAID = {
    "vllm": {
        *("mixes_prefill", "receive_interval", "window_tokens_ratio", "encoder_urls"),
        "store_bytes",
    },
    "sglang": {"num_loras", "prefill_interval", "decode_context_parallel", "store_bytes"},
}


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
    return ServedOptions(
        encoder_urls=tuple(draw(urls)),
        model_id=draw(st.sampled_from(["me/a model", "/models/x=1", "llama-3.1-8b"])),
        dtype=draw(st.sampled_from([DType.BF16, DType.FP16, DType.FP32])),
        tp=tp,
        pp=draw(degrees),
        dp=dp,
        ep=ep,
        attention_dp=dp > 1 and ep == 1,
        max_tokens=draw(counts),
        max_num_seqs=draw(counts),
        max_num_batched_tokens=draw(counts),
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
        has_expert_balancing=draw(st.booleans()),
        num_redundant_experts=draw(st.integers(0, 64)),
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


@pytest.mark.parametrize("name", sorted(all_servers()))
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
