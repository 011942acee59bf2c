"""What a serving step does on the host after the model: sample, fetch tokens, make text of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from foretoken.profiler.host.probe import HostProbe, time_on_host
from foretoken.profiler.local_device import LocalDevice

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
