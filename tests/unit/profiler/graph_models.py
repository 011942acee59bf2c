"""Small models of several families, and a profile of one as quick as it can be."""

import json
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from profiler_fakes import CPU, FakeCatalog

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import GraphReport, GraphRequest
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.environment import free_memory_bytes
from foretoken.profiler.graph.model import ModelShape, outline_model, place_model, read_model_config
from foretoken.profiler.graph.profiling import RowKeeping, profile_graph
from foretoken.profiler.graph.trace import Trace, trace_model
from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.stopwatch import CpuStopwatch

# What a test needs to know is that something was timed, not how long it takes.
QUICK = TimerSpec(
    min_samples=3,
    max_samples=3,
    sample_us_min=0.0,
    warm_up_s_min=0.0,
    warm_up_s_max=0.0,
    case_s_max=0.001,
    max_input_sets=1,
)
_LLAMA_LIKE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
_GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "gemma": {**_LLAMA_LIKE, "head_dim": 16},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 16},
    "phi": {**_LLAMA_LIKE, "num_key_value_heads": 4},
    "phi3": {**_LLAMA_LIKE, "pad_token_id": 0},
    "gpt2": _GPT2,
    "gpt_neox": {**_SMALL, "intermediate_size": 256},
    "opt": {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


def config_json(family: str, **changes: object) -> str:
    """Return a `config.json` of a family."""
    return json.dumps({**CONFIGS[family], "model_type": family, **changes})


def graph_request(family: str, **facts: Any) -> GraphRequest:
    """Return a request for sequences of 8 tokens, one micro batch size, fp32."""
    plain: dict[str, Any] = {
        "device": "cpu",
        "model": family,
        "config_json": config_json(family),
        "sequence_length": 8,
        "micro_batch_size_max": 1,
        "dtype": DType.FP32,
    }
    return GraphRequest(**{**plain, **facts})


def trace_of(family: str, num_ranks: int = 1, **changes: object) -> Trace:
    """Return the trace of two samples of 8 tokens."""
    return _trace(family, num_ranks, config_json(family, **changes))


@cache
def _trace(family: str, num_ranks: int, text: str) -> Trace:
    request = graph_request(family, config_json=text)
    tensors = TensorFactory(torch.device("cpu"), torch.float32, 0)
    shape = ModelShape(
        config=read_model_config(request), num_layers=2, num_ranks=num_ranks, dtype=torch.float32
    )
    model = place_model(outline_model(shape, family), tensors)
    return trace_model(model, tensors.integers(96, 2, 8))


def profile(
    request: GraphRequest,
    folder: Path,
    catalog: FakeCatalog | None = None,
    free_bytes: Callable[[LocalDevice], float] = free_memory_bytes,
) -> GraphReport:
    """Profile on this CPU, quickly."""
    rig = Rig(
        device=LocalDevice(name="cpu", torch_name="cpu"),
        device_spec=CPU,
        stopwatch=CpuStopwatch(),
        timer=QUICK,
        num_threads=1,
    )
    return profile_graph(
        request,
        rig,
        RowKeeping(catalog=catalog or FakeCatalog(), spool_folder=folder),
        JobProgress(lambda _ratio, _message: None, threading.Event()),
        free_bytes=free_bytes,
    )
