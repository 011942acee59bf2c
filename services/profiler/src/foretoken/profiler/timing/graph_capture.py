"""Calls recorded into a CUDA graph, to be replayed without the host's launch overhead."""

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.profiler.timing.stopwatch import IndexedCall

# What a library needs to set up before it may be captured: handles, workspaces, compiled code.
NUM_CALLS_BEFORE_CAPTURE = 3
# Share of the device's memory that torch may hold, used or not, from one case to the next.
_RESERVED_RATIO_MAX = 0.25
# What torch's private functions raise that a release has not, or has no use for.
_NOT_NEEDED = (RuntimeError, AttributeError, TypeError)


class CaptureError(Exception):
    """The calls cannot be captured: they wait for the device, or work on the host."""


@dataclass(slots=True)
class CapturedCalls:
    """A graph of `num_calls` calls; `close` frees its private memory."""

    num_calls: int
    _graph: "torch.cuda.CUDAGraph"
    _device: torch.device

    def replay(self) -> None:
        """Queue all calls on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Let go of the graph's memory; it goes back to the device once much has gathered.

        Giving all unused memory back after each case would take longer than a short case.
        """
        self._graph.reset()
        total = torch.cuda.get_device_properties(self._device).total_memory
        if torch.cuda.memory_reserved(self._device) > _RESERVED_RATIO_MAX * total:
            torch.cuda.empty_cache()


def capture_calls(call: IndexedCall, num_calls: int, device: torch.device) -> CapturedCalls:
    """Capture `num_calls` calls on the current stream, which must not be the default one.

    They must have run on this stream before, and so must the forward pass of a backward call:
    autograd runs each step on the stream of its forward step.

    Raises:
        CaptureError: a call does what a graph cannot hold.
        RuntimeError: there is too little memory, or the device does not answer any more.

    """
    _refuse_waiting(call)
    torch.cuda.synchronize(device)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads (a watch, a collective's) may go on calling CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for index in range(num_calls):
            call(index)
        is_empty = _end(graph)
    except torch.cuda.OutOfMemoryError:
        _abandon(graph, pool, device)
        raise
    except Exception as err:
        _abandon(graph, pool, device)
        raise CaptureError(_first_line(err)) from err
    except BaseException:
        _abandon(graph, pool, device)
        raise
    captured = CapturedCalls(num_calls, graph, device)
    if is_empty:
        captured.close()
        raise CaptureError("it launches nothing on the device")
    return captured


def _end(graph: "torch.cuda.CUDAGraph") -> bool:
    """End a capture, and return whether it holds nothing, about which torch only warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    return any("empty" in str(warning.message) for warning in caught)


def _refuse_waiting(call: IndexedCall) -> None:
    """Run a call once that must not wait for the device.

    A capture that breaks leaves torch's allocator in an unknown state, so what is known to break
    one is found before.

    Raises:
        CaptureError: it waits.

    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # The mode is said not to find every wait: the capture itself finds the others.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as err:
        raise CaptureError(_first_line(err)) from err
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _abandon(graph: "torch.cuda.CUDAGraph", pool: Any, device: torch.device) -> None:
    """End a capture that failed, and undo what it leaves behind.

    Raises:
        RuntimeError: the device does not answer any more.

    """
    index = torch.cuda.current_device() if device.index is None else device.index
    # Ending it is what makes the stream usable again; it reports the failure once more. Before
    # torch 2.12 the allocator then still believed in the capture, and no version frees its pool.
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        graph.reset()
    with contextlib.suppress(*_NOT_NEEDED):
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001
    with contextlib.suppress(*_NOT_NEEDED):
        torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    # The default generator may still believe that it is being captured, and refuse to draw.
    with contextlib.suppress(*_NOT_NEEDED):
        default = torch.cuda.default_generators[index]
        fresh = torch.Generator(device=device).manual_seed(default.initial_seed())
        default.graphsafe_set_state(fresh.graphsafe_get_state())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0]
