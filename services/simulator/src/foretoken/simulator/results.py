"""Results go to the catalog as well, where they outlive this service and can be compared."""

import hashlib
import json
import logging
from dataclasses import replace

from foretoken.domain import schema
from foretoken.domain.artifact import Artifact
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job
from foretoken.domain.ports import CatalogPort
from foretoken.domain.result import RESULT_ARTIFACT, AnyReport, KeptResult
from foretoken.simulator.result_title import name_result, sum_up
from foretoken.wire.result_file import pack_report

_log = logging.getLogger(__name__)


class ResultKeeper:
    """Keeps the newest `max_kept` results in a catalog.

    A catalog that cannot be reached is no reason for a job to fail: what it ought to keep is logged
    and stays with the job.
    """

    def __init__(self, catalog: CatalogPort, max_kept: int) -> None:
        self._catalog = catalog
        self._max_kept = max_kept

    def keep(self, job: Job, report: AnyReport) -> None:
        """Store the result of a job that succeeded; the oldest go."""
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
