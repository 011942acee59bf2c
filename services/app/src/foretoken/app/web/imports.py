"""Imports that pages have started: threads of this process, looked at while they run.

Importers work where the files are, which is here, as they do in the process of a command.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

from foretoken.app.importing import find_summary, record_plan
from foretoken.catalog.importing import ImportPlan
from foretoken.domain.errors import ForetokenError, UnknownJobError
from foretoken.domain.ports import CatalogAdminPort

_log = logging.getLogger(__name__)
_KEPT: Final = 50
_FAILED: Final = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningImport:
    """How far an import is; `state` is running, succeeded or failed, `lines` what came of it."""

    job_id: str
    title: str
    created_at: str
    state: str = "running"
    progress_ratio: float = 0.0
    message: str = "reading"
    lines: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.state != "running"


class Imports:
    """The imports of this process, newest first; some of the ended ones are forgotten."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: dict[str, RunningImport] = {}
        self._lock = threading.Lock()

    def start(
        self,
        title: str,
        catalog: CatalogAdminPort,
        open_plan: Callable[[], AbstractContextManager[ImportPlan]],
    ) -> RunningImport:
        """Start an import and return how it is now; the plan is opened and closed in its thread."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        begun = RunningImport(job_id=f"import-{uuid4().hex[:12]}", title=title, created_at=now)
        with self._lock:
            ended = [one.job_id for one in self._found.values() if one.is_final]
            for job_id in ended[: max(0, len(self._found) - _KEPT)]:
                del self._found[job_id]
            self._found[begun.job_id] = begun
        work = threading.Thread(
            target=self._run, args=(begun.job_id, catalog, open_plan), name="import", daemon=True
        )
        work.start()
        return begun

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

    def _run(
        self,
        job_id: str,
        catalog: CatalogAdminPort,
        open_plan: Callable[[], AbstractContextManager[ImportPlan]],
    ) -> None:
        try:
            with open_plan() as plan:
                self._set(job_id, message=f"storing {plan.num_rows:,} rows")
                was_there = record_plan(
                    catalog,
                    plan,
                    lambda ratio, said: self._set(job_id, progress_ratio=ratio, message=said),
                )
                lines = _describe(catalog, plan, was_there=was_there)
            self._set(job_id, state="succeeded", progress_ratio=1.0, message="done", lines=lines)
        except ForetokenError as err:
            self._set(job_id, state=_FAILED, message=err.message)
        except Exception:  # noqa: BLE001
            # The boundary of a thread: whoever looks has to learn that it ended.
            _log.exception("import failed job_id=%s", job_id)
            self._set(job_id, state=_FAILED, message="an error of the program; its log has more")


def _describe(catalog: CatalogAdminPort, plan: ImportPlan, *, was_there: bool) -> tuple[str, ...]:
    summary = find_summary(catalog, plan)
    counts = (
        f"{summary.num_rows:,} rows, {summary.num_flagged:,} of them flagged,"
        f" {summary.num_failed:,} failed; run {plan.run.run_id}"
    )
    again = ("All of it was there before.",) if was_there else ()
    source = f"{plan.run.source or plan.run.tool}, licence {plan.run.licence or 'not said'}"
    return (counts, source, *again, *plan.notes)
