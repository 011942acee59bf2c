"""Calls that read all rows may take as long as a stream; the others answer soon or fail."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import pytest
from contract_fakes import FakeCatalog
from loopback import serve

from foretoken.catalog import servicer
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ForetokenError, ServiceUnavailableError
from foretoken.domain.measurements.measurement import MeasurementFilter, PruneRequest, RunSummary


class _SlowError(ForetokenError):
    """What the slow catalog answers, in the end."""


class _SlowCatalog(FakeCatalog):
    """A catalog of very many rows."""

    def _scan(self, *_arguments: object) -> None:
        time.sleep(0.6)
        raise _SlowError("answered")

    describe_snapshot = create_snapshot = diff_snapshots = prune = compact = _scan  # type: ignore[assignment]

    def list_runs(self) -> tuple[RunSummary, ...]:
        time.sleep(0.6)
        return ()


@pytest.fixture
def client() -> Iterator[CatalogClient]:
    with serve(servicer.register, _SlowCatalog()) as options:
        hasty = dataclasses.replace(options, deadline_s=0.2, stream_deadline_s=20.0)
        with CatalogClient.connect(hasty) as client:
            yield client


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.describe_snapshot(MeasurementFilter()),
        lambda client: client.create_snapshot(MeasurementFilter()),
        lambda client: client.diff_snapshots("a", "b"),
        lambda client: client.prune(PruneRequest(older_than_days=1.0)),
        lambda client: client.compact(),
    ],
    ids=["describe", "create", "diff", "prune", "compact"],
)
def test_a_call_that_reads_all_rows_is_waited_for(
    call: Callable[[CatalogClient], object], client: CatalogClient
) -> None:
    with pytest.raises(ForetokenError, match="answered"):
        call(client)


def test_another_call_is_not(client: CatalogClient) -> None:
    with pytest.raises(ServiceUnavailableError, match="did not answer in time"):
        client.list_runs()
