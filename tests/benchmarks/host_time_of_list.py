"""Host time of a collective over a list with one tensor a rank: the source of `list_rank_us`.

Run: python tests/benchmarks/host_time_of_list.py (needs PyTorch, the extra `profiler`)

As DeepSpeed gathered a parameter in 2021: cut a flat buffer to the parts of all ranks, one of which
is the rank's own; PyTorch then copies what NCCL gathered to each of them. Tensors have a few
elements, so that all that is left is Python and dispatch, on a CPU; a GPU has its copies besides.
Prints the least time a rank for both.
"""

import sys
import time

import torch

_RANKS, _ELEMENTS, _RUNS, _OWN = (384, 1536), 4, 50, 5
_US_PER_S = 1e6


def main() -> None:
    """Print the time of each part by number of ranks."""
    torch.set_num_threads(1)
    for num_ranks in _RANKS:
        runs = [_gather(num_ranks) for _ in range(_RUNS)]
        listed_us, copied_us = (min(run[part] for run in runs) for part in (0, 1))
        sys.stdout.write(
            f"{num_ranks} ranks: {listed_us:.1f} us a rank to list, {copied_us:.1f} us to copy\n"
        )


def _gather(num_ranks: int) -> tuple[float, float]:
    shard = torch.zeros(_ELEMENTS)
    flat = torch.zeros(_ELEMENTS * num_ranks)
    gathered = torch.zeros(num_ranks, _ELEMENTS)
    start_s = time.perf_counter()
    parts = []
    for rank in range(num_ranks):
        parts.append(flat.narrow(0, _ELEMENTS * rank, _ELEMENTS))
        if rank == _own_rank():
            parts[rank].data.copy_(shard, non_blocking=True)
    listed_s = time.perf_counter()
    for part, received in zip(parts, gathered.unbind(0), strict=True):
        part.copy_(received, non_blocking=True)
    end_s = time.perf_counter()
    scale = _US_PER_S / num_ranks
    return (listed_s - start_s) * scale, (end_s - listed_s) * scale


def _own_rank() -> int:
    return _OWN


if __name__ == "__main__":
    main()
