"""Imports that pages have started: threads of this process, looked at while they run.

Importers work where the files are, which is here, as they do in the process of a command. One that
is cancelled stops where it downloads, or after the batch it is storing; what was stored is
recognised when it is resumed.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from uuid import uuid4

from foretoken.app.importing import find_summary, record_plan
from foretoken.catalog.importing import ImportPlan
from foretoken.catalog.installing import Heard
from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InvalidRequestError,
    UnknownJobError,
)
from foretoken.domain.ports import CatalogAdminPort

_log = logging.getLogger(__name__)
_KEPT: Final = 50
_RUNNING, _FAILED, _CANCELLED = "running", "failed", "cancelled"


# Opens a plan, which reports how far a download is; that raises where it is not wanted any more.
OpenPlan = Callable[[Heard], AbstractContextManager[ImportPlan]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningImport:
    """How far an import is; `lines` are what came of it.

    `state` is running, succeeded, failed or cancelled.
    """

    job_id: str
    title: str
    created_at: str
    state: str = _RUNNING
    progress_ratio: float = 0.0
    message: str = "reading"
    lines: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.state != _RUNNING

    @property
    def can_resume(self) -> bool:
        """Whether it ended before it was done."""
        return self.state in (_FAILED, _CANCELLED)


class Imports:
    """The imports of this process, newest first; some of the ended ones are forgotten."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: dict[str, RunningImport] = {}
        self._plans: dict[str, OpenPlan] = {}
        self._unwanted: set[str] = set()
        self._lock = threading.Lock()

    def start(self, title: str, catalog: CatalogAdminPort, open_plan: OpenPlan) -> RunningImport:
        """Start an import and return how it is now; the plan is opened and closed in its thread."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        begun = RunningImport(job_id=f"import-{uuid4().hex[:12]}", title=title, created_at=now)
        with self._lock:
            ended = [one.job_id for one in self._found.values() if one.is_final]
            for job_id in ended[: max(0, len(self._found) - _KEPT)]:
                del self._found[job_id]
                self._plans.pop(job_id, None)
            self._found[begun.job_id] = begun
            self._plans[begun.job_id] = open_plan
        work = threading.Thread(
            target=self._run, args=(begun.job_id, catalog, open_plan), name="import", daemon=True
        )
        work.start()
        return begun

    def cancel(self, job_id: str) -> None:
        """Have an import stop downloading, or when its present batch is stored; an ended one stays.

        Raises:
            UnknownJobError: as `get`.

        """
        if not self.get(job_id).is_final:
            self._set(job_id, message="stops when what it does now is done")
            # After what is said: it may end before the next line.
            self._unwanted.add(job_id)

    def resume(self, job_id: str, catalog: CatalogAdminPort) -> RunningImport:
        """Start an import that failed or was cancelled once more, as a new one.

        Raises:
            UnknownJobError: as `get`.
            InvalidRequestError: it runs, or is done.

        """
        found = self.get(job_id)
        if not found.can_resume:
            raise InvalidRequestError.of_field("job", f"{job_id} is {found.state}")
        return self.start(found.title, catalog, self._plans[job_id])

    def get(self, job_id: str) -> RunningImport:
        """Return an import.

        Raises:
            UnknownJobError: this process has none of that name.

        """
        with self._lock:
            if job_id not in self._found:
                raise UnknownJobError(f"there is no import {job_id}", name=job_id)
            return self._found[job_id]

    def list(self) -> tuple[RunningImport, ...]:
        """Return all, newest first."""
        with self._lock:
            return tuple(reversed(self._found.values()))

    def _set(self, job_id: str, **changes: Any) -> None:
        with self._lock:
            self._found[job_id] = replace(self._found[job_id], **changes)

    def _run(self, job_id: str, catalog: CatalogAdminPort, open_plan: OpenPlan) -> None:
        try:
            update = partial(self._update, job_id)
            with open_plan(update) as plan:
                update(0.0, f"storing {plan.num_rows:,} rows")
                was_there = record_plan(catalog, plan, update)
                lines = _describe(catalog, plan, was_there=was_there)
            self._set(job_id, state="succeeded", progress_ratio=1.0, message="done", lines=lines)
            # Whatever a user sent need not be kept longer.
            self._plans.pop(job_id, None)
        except CancelledJobError as err:
            self._set(job_id, state=_CANCELLED, message=err.message)
        except ForetokenError as err:
            self._set(job_id, state=_FAILED, message=err.message)
        except Exception:  # noqa: BLE001
            # The boundary of a thread: whoever looks has to learn that it ended.
            _log.exception("import failed job_id=%s", job_id)
            self._set(job_id, state=_FAILED, message="an error of the program; its log has more")
        finally:
            self._unwanted.discard(job_id)

    def _update(self, job_id: str, ratio: float, said: str) -> None:
        """Say how far an import is.

        Raises:
            CancelledJobError: it is not wanted any more.

        """
        if job_id in self._unwanted:
            raise CancelledJobError(f"cancelled; it was at: {said}")
        self._set(job_id, progress_ratio=ratio, message=said)


def _describe(catalog: CatalogAdminPort, plan: ImportPlan, *, was_there: bool) -> tuple[str, ...]:
    summary = find_summary(catalog, plan)
    counts = (
        f"{summary.num_rows:,} rows, {summary.num_flagged:,} of them flagged,"
        f" {summary.num_failed:,} failed; run {plan.run.run_id}"
    )
    again = ("All of it was there before.",) if was_there else ()
    source = f"{plan.run.source or plan.run.tool}, licence {plan.run.licence or 'not said'}"
    return (counts, source, *again, *plan.notes)
