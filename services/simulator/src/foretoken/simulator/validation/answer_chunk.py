"""What one event of a streamed answer says: text or none, and how many tokens so far.

Source: OpenAI's streaming API: events `data: {...}` with `choices` (completions: `text`, chat:
`delta.content`) and, where `stream_options.include_usage` asked for it, a last one with `usage`;
`data: [DONE]` ends it. vLLM, SGLang and TensorRT-LLM add `reasoning_content`, `token_ids`, and
`usage` in every event with `continuous_usage_stats`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DONE = "[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerChunk:
    """One event of an answer; without a choice it is a summary.

    `num_tokens` are the tokens it says it holds (-1: it does not say), `total_tokens` those of the
    answer so far or in all, `prompt_tokens` and `cached_tokens` those of the prompt (-1 likewise).
    """

    has_choice: bool = False
    has_tokens: bool = False
    is_last: bool = False
    num_tokens: int = -1
    total_tokens: int = -1
    prompt_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str = ""
    error: str = ""


def parse_chunk(data: str) -> AnswerChunk:
    """Return what the data of one event says.

    Raises:
        ValueError: it is neither JSON nor the end.

    """
    if data.strip() == _DONE:
        return AnswerChunk(is_last=True)
    content = json.loads(data)
    if not isinstance(content, Mapping):
        raise ValueError(f"expected an object, found {data[:60]!r}")  # noqa: TRY004 - bad content
    error = content.get("error")
    if error:
        message = error.get("message", error) if isinstance(error, Mapping) else error
        return AnswerChunk(error=str(message))
    choices = [choice for choice in content.get("choices") or () if isinstance(choice, Mapping)]
    usage = content.get("usage")
    counts = usage if isinstance(usage, Mapping) else {}
    details = counts.get("prompt_tokens_details")
    return AnswerChunk(
        has_choice=bool(choices),
        has_tokens=any(_has_tokens(choice) for choice in choices),
        num_tokens=_count_ids(choices),
        total_tokens=_count(counts, "completion_tokens"),
        prompt_tokens=_count(counts, "prompt_tokens"),
        cached_tokens=_count(details if isinstance(details, Mapping) else {}, "cached_tokens"),
        finish_reason=next(
            (str(choice["finish_reason"]) for choice in choices if choice.get("finish_reason")), ""
        ),
    )


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    texts = [delta.get(name) for name in _TEXTS] if isinstance(delta, Mapping) else []
    return any([choice.get("text"), choice.get("token_ids"), *texts])


def _count_ids(choices: list[Mapping[str, Any]]) -> int:
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
    return sum(len(item) for item in ids) if ids else -1


def _count(counts: Mapping[str, Any], name: str) -> int:
    value = counts.get(name)
    return value if isinstance(value, int) else -1
