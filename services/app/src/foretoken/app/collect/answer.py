"""One request under way: what came of its answer, and when."""

from dataclasses import dataclass, field

from foretoken.domain.requests.serving_run import UNKNOWN, UNKNOWN_S, MeasuredRequest
from foretoken.simulator.validation.answer_chunk import AnswerChunk


@dataclass(kw_only=True, slots=True)
class Answer:
    """Collects the events of an answer; times in s from the run's start."""

    planned_s: float
    sent_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    total_tokens: int = UNKNOWN
    prompt_tokens: int = UNKNOWN
    cached_tokens: int = UNKNOWN
    is_finished: bool = False
    error: str = ""

    def add(self, chunk: AnswerChunk, time_s: float) -> None:
        """Take in one event that came at a time."""
        self.error = self.error or chunk.error
        self.is_finished |= chunk.is_last or bool(chunk.finish_reason)
        self.prompt_tokens = max(self.prompt_tokens, chunk.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        num_new = self._count_new(chunk) if chunk.has_choice else 0
        self.total_tokens = max(self.total_tokens, chunk.total_tokens)
        if num_new > 0:
            self.chunk_s.append(time_s)
            self.chunk_tokens.append(num_new)

    def to_request(self) -> MeasuredRequest:
        """Return what was recorded; an answer that broke off has an error."""
        num_seen = sum(self.chunk_tokens)
        num_decode = self.total_tokens if self.total_tokens >= 0 else num_seen
        error = self.error
        if not error and not self.is_finished:
            error = f"the answer broke off after {num_seen} tokens"
        if not error and not self.chunk_s:
            error = "the answer had no tokens"
        # Events without counts may have held several tokens each: then nobody knows how many.
        is_counted = num_seen == num_decode
        return MeasuredRequest(
            planned_s=self.planned_s,
            arrival_s=self.sent_s,
            first_token_s=self.chunk_s[0] if self.chunk_s else UNKNOWN_S,
            last_token_s=self.chunk_s[-1] if self.chunk_s else UNKNOWN_S,
            num_prefill_tokens=self.prompt_tokens
            if self.prompt_tokens >= 0
            else self.num_prefill_tokens,
            num_decode_tokens=num_decode,
            chunk_s=tuple(self.chunk_s),
            chunk_tokens=tuple(self.chunk_tokens) if is_counted else (),
            error=error,
        )

    def _count_new(self, chunk: AnswerChunk) -> int:
        if chunk.total_tokens >= 0:
            return chunk.total_tokens - max(self.total_tokens, 0)
        if chunk.num_tokens >= 0:
            return chunk.num_tokens
        return int(chunk.has_tokens)
