"""Small Llamas whose kernels take next to nothing: what is left is the host.

A model is timed as a whole, and its operators without it: the same calls with the same arguments,
one after the other. The difference is what modules, views, hooks and autograd take.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.profiler.closure.hf_model import HuggingFaceModel, build_model
from foretoken.profiler.closure.kernel_count import OperatorRecorder, profile_step
from foretoken.profiler.closure.step_program import make_program
from foretoken.profiler.host.probe import HostProbe, synchronize, time_on_host
from foretoken.profiler.local_device import LocalDevice

_LAYERS = (1, 2, 4, 8, 16, 32, 64)
_QUICK_LAYERS = (1, 4, 8)
_HIDDEN, _HEADS, _VOCAB, _LENGTH = 64, 2, 64, 8
_KERNEL = "transformers llama"


def model_probes(device: LocalDevice, dtype: torch.dtype, *, quick: bool) -> Iterator[HostProbe]:
    """Yield steps of models of more and more layers: a decoding step, and one of training."""
    for num_layers in _QUICK_LAYERS if quick else _LAYERS:
        model = _build(num_layers, dtype, device)
        for kind, suffix in (("decode", "eager"), ("training", "training")):
            step = ClosureStep(kind=kind, batch_size=1, num_tokens=_LENGTH)
            yield _probe(model, step, suffix, device)
        if device.is_cuda:
            step = ClosureStep(kind="decode", batch_size=1, num_tokens=_LENGTH, mode="graph")
            yield _replay_probe(model, step, device)


def _build(num_layers: int, dtype: torch.dtype, device: LocalDevice) -> HuggingFaceModel:
    content = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": _HIDDEN,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "intermediate_size": 2 * _HIDDEN,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 2 * _LENGTH,
    }
    return build_model(content, f"llama of {num_layers} layers", dtype, device.torch_device)


def _probe(
    model: HuggingFaceModel, step: ClosureStep, suffix: str, device: LocalDevice
) -> HostProbe:
    run = make_program(model, step, device.torch_device, seed=0)
    run()
    with OperatorRecorder() as recorder:
        run()
    calls = recorder.calls
    _, num_kernels = profile_step(run, device)

    def run_operators() -> None:
        with torch.no_grad():
            for operator, args, options in calls:
                operator(*args, **options)

    def sample() -> Mapping[str, float]:
        synchronize(device)
        return {
            f"model_{suffix}": time_on_host(run, device),
            f"operators_{suffix}": time_on_host(run_operators, device),
        }

    return _of(num_kernels, sample)


def _replay_probe(model: HuggingFaceModel, step: ClosureStep, device: LocalDevice) -> HostProbe:
    run = make_program(model, step, device.torch_device, seed=0)
    _, num_kernels = profile_step(run, device)

    def replay() -> None:
        run()
        synchronize(device)

    return _of(num_kernels, lambda: {"model_graph": time_on_host(replay, device)})


def _of(num_kernels: int, sample: Callable[[], Mapping[str, float]]) -> HostProbe:
    return HostProbe(
        operator="launch_gap", dims={"num_kernels": num_kernels}, kernel=_KERNEL, sample=sample
    )
