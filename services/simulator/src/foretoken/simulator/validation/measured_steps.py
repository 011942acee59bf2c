"""What engines themselves record of their steps, in formats of theirs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.validation.measured_run import RunFile

_FORMATS = "foretoken.simulator.serving.measured_steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep:
    """A step that an engine recorded: what it computed, and how long that took.

    `prefill_tokens` new tokens of `num_prefills` prompts came after `prefill_kv_tokens` that were
    there. `num_decodes` sequences got one token each: their contexts are `decode_kv_tokens` long
    together with it, the longest `decode_kv_tokens_max`.
    """

    duration_s: float
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    num_decodes: int = 0
    decode_kv_tokens: int = 0
    decode_kv_tokens_max: int = 0

    @property
    def kind(self) -> str:
        """Which of `STEP_KINDS` it is."""
        if not self.num_prefills:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def num_tokens(self) -> int:
        """How many tokens it computed."""
        return self.prefill_tokens + self.num_decodes

    @property
    def is_whole(self) -> bool:
        """Whether all there must be of a step is there."""
        return (
            0 < self.duration_s < math.inf
            and self.num_tokens > 0
            and self.prefill_tokens >= self.num_prefills
            and self.prefill_kv_tokens >= 0
            and self.decode_kv_tokens >= self.num_decodes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStepsFormat:
    """A format of step records.

    `recognises` tells by a file's content, and raises nothing but what reading it raises; `read`
    returns the steps whose time it tells, and leaves the others out.
    """

    title: str
    recognises: Callable[[RunFile], bool]
    read: Callable[[RunFile], tuple[EngineStep, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRun:
    """The steps of a file, and the title of the format they were in."""

    source: str
    steps: tuple[EngineStep, ...]


def all_step_formats() -> Mapping[str, MeasuredStepsFormat]:
    """Return every format by name."""
    return scan_modules(_FORMATS, "MEASURED_STEPS")


def load_steps(path: Path, format_name: str = "") -> StepRun:
    """Return the steps in a file; an empty format name means the one whose content it is.

    Raises:
        UnknownPluginError: no such format.
        InvalidRequestError: in no format known here, or no step in it can be used.

    """
    formats = all_step_formats()
    file = RunFile(path, "--steps")
    if not file.text.strip():
        file.refuse("is empty")
    if format_name:
        chosen = UnknownPluginError.look_up(format_name, formats)
    else:
        found = [item for item in formats.values() if item.recognises(file)]
        if not found:
            known = "; ".join(f"{name} ({item.title})" for name, item in formats.items())
            file.refuse(f"in no format of step records known here: {known}")
        chosen = found[0]
    steps = tuple(step for step in chosen.read(file) if step.is_whole)
    if not steps:
        file.refuse(f"read as {chosen.title}, it tells the time of no step")
    return StepRun(source=chosen.title, steps=steps)
