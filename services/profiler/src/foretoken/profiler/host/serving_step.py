"""What a serving step does on the host after the model, and small models to time it.

A model is timed as a whole, and its operators without it: the same calls with the same arguments,
one after the other. The difference is what modules, views, hooks and autograd take.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.profiler.closure.hf_model import HuggingFaceModel, build_model
from foretoken.profiler.closure.measuring import OperatorRecorder, profile_step
from foretoken.profiler.closure.step_program import make_program
from foretoken.profiler.host.probe import HostProbe, synchronize, time_on_host
from foretoken.profiler.local_device import LocalDevice

_LAYERS = (1, 2, 4, 8, 16, 32, 64)
_QUICK_LAYERS = (1, 4, 8)
_HIDDEN, _HEADS, _SMALL_VOCAB, _LENGTH = 64, 2, 64, 8
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
        "vocab_size": _SMALL_VOCAB,
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


_NUM_SEQS = (1, 4, 16, 64, 256)
_QUICK_NUM_SEQS = (1, 64)
# So few that drawing from them takes the host, not the device.
_VOCAB = 64
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 32, 0.95
# A vocabulary of subwords from made-up words; which ones does not matter to who looks them up.
_NUM_WORDS, _LONGEST_WORD, _NUM_SUBWORDS = 4000, 10, 2000
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def serving_probes(device: LocalDevice, *, quick: bool) -> Iterator[HostProbe]:
    """Yield sampling, fetching and making text, by the sequences of the batch."""
    tokenizer = _make_tokenizer()
    for num_seqs in _QUICK_NUM_SEQS if quick else _NUM_SEQS:
        dims = {"num_seqs": num_seqs, "num_ranks": 1}
        yield HostProbe(
            operator="host_step",
            dims=dims,
            kernel="transformers.LogitsProcessorList",
            sample=_sampling(num_seqs, device),
        )
        if tokenizer is not None:
            yield HostProbe(
                operator="host_step",
                dims=dims,
                kernel="tokenizers.decoders.DecodeStream",
                sample=_detokenizing(tokenizer, num_seqs, device),
            )


def _sampling(num_seqs: int, device: LocalDevice) -> Callable[[], Mapping[str, float]]:
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(_TEMPERATURE),
            TopKLogitsWarper(_TOP_K),
            TopPLogitsWarper(_TOP_P),
        ]
    )
    logits = torch.randn(num_seqs, _VOCAB, device=device.torch_device)
    tokens = torch.zeros(num_seqs, 1, dtype=torch.int64, device=device.torch_device)

    def draw() -> torch.Tensor:
        shares = torch.softmax(warpers(tokens, logits), dim=-1)
        return torch.multinomial(shares, num_samples=1)

    drawn = draw()

    def sample() -> Mapping[str, float]:
        return {
            "sample": time_on_host(draw, device),
            "fetch_tokens": time_on_host(drawn.tolist, device),
        }

    return sample


def _detokenizing(
    tokenizer: Any, num_seqs: int, device: LocalDevice
) -> Callable[[], Mapping[str, float]]:
    from tokenizers.decoders import DecodeStream

    drawn = random.Random(0)  # noqa: S311 - tokens to look up, not a secret
    vocab = tokenizer.get_vocab_size()
    streams = [DecodeStream(skip_special_tokens=True) for _ in range(num_seqs)]

    def sample() -> Mapping[str, float]:
        tokens = [drawn.randrange(vocab) for _ in range(num_seqs)]

        def add_text() -> None:
            for stream, token in zip(streams, tokens, strict=True):
                stream.step(tokenizer, token)

        return {"detokenize": time_on_host(add_text, device)}

    return sample


def _make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of made-up words, None without the package."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        return None
    drawn = random.Random(0)  # noqa: S311 - made-up words, not a secret
    words = [
        "".join(drawn.choices(_LETTERS, k=drawn.randint(2, _LONGEST_WORD)))
        for _ in range(_NUM_WORDS)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_SUBWORDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    return tokenizer
