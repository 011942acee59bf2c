"""Results go to the catalog as well, where they outlive this service and can be compared."""

import hashlib
import json
import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.artifact import Artifact
from foretoken.domain.ports import CatalogPort
from foretoken.domain.results.result import RESULT_ARTIFACT, AnyReport, KeptResult
from foretoken.simulator.result_title import name_result, sum_up
from foretoken.wire.result_file import pack_report

A = TypeVar("A", bound=AnyReport)

_log = logging.getLogger(__name__)

# Answers of calls that may wait to be stored: no more pile up while a catalog does not answer.
_MAX_WAITING = 16


class ResultKeeper:
    """Keeps the newest `max_kept` results in a catalog.

    A catalog that cannot be reached is no reason for a job to fail: what it ought to keep is logged
    and stays with the job.
    """

    def __init__(self, catalog: CatalogPort, max_kept: int) -> None:
        self._catalog = catalog
        self._max_kept = max_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._places = threading.BoundedSemaphore(_MAX_WAITING)

    def close(self) -> None:
        """Wait until what is to be kept is."""
        self._thread.shutdown(wait=True)

    def keep_answer(self, kind: str, report: A) -> A:
        """Begin to store the answer of a call that was no job, and return it with its name.

        The caller does not wait for the catalog. Where too many answers wait for it, this one is
        not kept and has no name.
        """
        if not self._places.acquire(blocking=False):
            _log.warning("result not kept in the catalog kind=%s: too many wait for it", kind)
            return report
        job = Job(
            job_id=f"{kind}-{uuid.uuid4().hex[:12]}",
            kind=kind,
            state=JobState.SUCCEEDED,
            created_at=datetime.now(tz=UTC).isoformat(timespec="milliseconds"),
        )
        named = replace(report, job_id=job.job_id)
        self._thread.submit(self._keep_waiting, job, named)
        return named

    def _keep_waiting(self, job: Job, report: AnyReport) -> None:
        try:
            self.keep(job, report)
        except Exception:  # noqa: BLE001
            # Nobody awaits this: what goes wrong is reported here or nowhere.
            _log.exception("result not kept in the catalog job_id=%s", job.job_id)
        finally:
            self._places.release()

    def keep(self, job: Job, report: AnyReport) -> None:
        """Store a result that was reached; the oldest go."""
        content = pack_report(report)
        result = KeptResult(
            job_id=job.job_id,
            kind=job.kind,
            title=name_result(report),
            created_at=job.created_at,
            headline=sum_up(report),
        )
        artifact = Artifact(
            kind=RESULT_ARTIFACT,
            name=job.job_id,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=job.created_at,
            metadata_json=json.dumps(schema.encode(replace(result, num_bytes=len(content)))),
        )
        try:
            self._catalog.store_artifact(artifact, (content,))
            for old in self._catalog.list_artifacts(RESULT_ARTIFACT)[self._max_kept :]:
                self._catalog.delete_artifact(RESULT_ARTIFACT, old.name)
        except ForetokenError as err:
            _log.warning("result not kept in the catalog job_id=%s: %s", job.job_id, err.message)
