"""What a worker sends back for a task: its result, or the error it ended with."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from foretoken.domain.errors import ForetokenError


class Outcome(NamedTuple):
    """A pickled result, or where `is_error` a pickled exception and its traceback."""

    is_error: bool
    content: bytes

    def unpack(self) -> Any:
        """Return the result.

        Raises:
            Exception: the task's own, with the worker's traceback as a note.

        """
        if not self.is_error:
            return pickle.loads(self.content)  # noqa: S301 - our own worker's
        error, trace = pickle.loads(self.content)  # noqa: S301
        if not isinstance(error, ForetokenError):
            error.add_note(f"in a worker:\n{trace}")
        raise error


def attempt(task: Callable[[], Any]) -> Outcome:
    """Do a task and pack what comes of it, whatever that is."""
    try:
        return Outcome(is_error=False, content=pickle.dumps(task(), pickle.HIGHEST_PROTOCOL))
    except Exception as err:  # noqa: BLE001
        # The boundary of the worker: whatever a task raises must reach whoever asked for it.
        return Outcome(is_error=True, content=_pack_error(err))


def _pack_error(err: Exception) -> bytes:
    trace = "".join(traceback.format_exception(err))
    try:
        content = pickle.dumps((err, trace))
        pickle.loads(content)  # noqa: S301 - an error whose class takes other arguments fails here
    except Exception:  # noqa: BLE001 - a class of anybody's
        plain = RuntimeError(f"{type(err).__name__}: {err}")
        return pickle.dumps((plain, trace))
    return content
