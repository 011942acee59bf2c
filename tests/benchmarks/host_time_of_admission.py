"""Host time of a prompt that joins a step: the source of `admission_us_per_token` in `vllm-0.11`.

Run: python tests/benchmarks/host_time_of_admission.py [TOKENS ...]
    (needs the Python files of vLLM 0.12.0's wheel on PYTHONPATH, and what they import; no device)

Calls what vLLM's engine does with a request, in its order and with its own classes: its thread for
what comes in (`v1/engine/core.py`, process_input_sockets), a step of the scheduler whose cache has
the whole prompt (`v1/core/kv_cache_manager.py`), the pickle that ranks in other processes get, and
the arrays of the worker (`v1/worker/gpu_input_batch.py`, add_request). Prints the tenth of 120
requests' times by which each part is least disturbed, by token.
"""

import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import NewRequestData  # type: ignore[import-not-found]
from vllm.v1.engine import EngineCoreRequest  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # type: ignore[import-not-found]

_NUM_PROMPTS, _NUM_ROUNDS, _BLOCK, _US_PER_S = 40, 4, 16, 1e6
_VOCABULARY, _ROOM, _NUM_SEQS = 128_000, 3_000, 512
_NUM_TOKENS = ("1000", "8000")


class _Times:
    """What each part took, in us."""

    def __init__(self) -> None:
        self.of_part: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        start_s = time.perf_counter()
        yield
        self.of_part[name].append(_US_PER_S * (time.perf_counter() - start_s))


def main(num_tokens: int) -> None:
    """Print what each part takes for a token of a prompt that is in the cache."""
    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    hasher, manager = get_request_block_hasher(_BLOCK, hash_of), _manager(num_tokens)
    draw = np.random.default_rng(0)
    prompts = draw.integers(_VOCABULARY, size=(_NUM_PROMPTS, num_tokens)).tolist()
    rows = np.zeros((_NUM_SEQS, num_tokens + _ROOM), np.int32)
    times = _Times()
    for number in range(_NUM_ROUNDS):
        held = [
            _admit(times, manager, hasher, rows[place], _message(prompt, f"{number}-{place:030d}"))
            for place, prompt in enumerate(prompts)
        ]
        for request in held:
            with times.part("engine, step: free"):
                manager.free(request)
        if number == 0:
            # It filled the cache.
            times.of_part.clear()
    for name, took_us in times.of_part.items():
        least_us = sorted(took_us)[len(took_us) // 10]
        sys.stdout.write(f"{name:24} {least_us / num_tokens:.4f} us a token\n")


def _manager(num_tokens: int) -> Any:
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=56_000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=num_tokens + _ROOM,
        enable_caching=True,
        hash_block_size=_BLOCK,
    )


def _message(prompt: list[int], name: str) -> Any:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=500, ignore_eos=True),
        pooling_params=None,
        eos_token_id=2,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _admit(times: _Times, manager: Any, hasher: Any, row: Any, message: Any) -> Any:
    """Do with a request what the engine and a worker do until it is in a batch."""
    num_tokens = len(message.prompt_token_ids)
    with times.part("server: pack"):
        packed = MsgpackEncoder().encode(message)
    with times.part("engine, thread: unpack"):
        received = MsgpackDecoder(EngineCoreRequest).decode(packed)
    with times.part("engine, thread: request"):
        request = Request.from_engine_core_request(received, None)
    with times.part("engine, thread: hashes"):
        request.block_hashes = hasher(request)
    with times.part("engine, step: look up"):
        blocks, num_cached = manager.get_computed_blocks(request)
    request.num_computed_tokens = num_cached
    with times.part("engine, step: blocks"):
        manager.allocate_slots(request, num_tokens - num_cached, num_cached, blocks)
        data = NewRequestData.from_request(request, manager.get_block_ids(request.request_id))
    with times.part("ranks: pack, unpack"):
        data = pickle.loads(pickle.dumps(data))  # noqa: S301 - our own
    with times.part("worker: arrays"):
        row[:num_tokens] = data.prompt_token_ids
        row[: len(data.block_ids[0])] = data.block_ids[0]
    return request


if __name__ == "__main__":
    for text in sys.argv[1:] or _NUM_TOKENS:
        main(int(text))
