"""A cluster of compiled pools does what one of reference pools does, to the last ns."""

from dataclasses import fields, replace

import numpy as np
from cluster_strategies import ClusterCase, cluster_cases
from hypothesis import given

from foretoken.simulator.serving.record import (
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)


@given(case=cluster_cases())
def test_clusters_agree(case: ClusterCase) -> None:
    """Requests, tokens, steps and what is said of each pool are equal."""
    reference, fast = (_run(case, uses_fast_path=is_fast) for is_fast in (False, True))
    assert _columns(reference) == _columns(fast)
    assert reference.pools == fast.pools


def _run(case: ClusterCase, *, uses_fast_path: bool) -> ServingRecord:
    pools = [
        replace(pool, engines=replace(pool.engines, uses_fast_path=uses_fast_path))
        for pool in case.setup.pools
    ]
    record, _ = replace(case, setup=replace(case.setup, pools=pools)).run()
    return record


def _columns(record: ServingRecord) -> list[dict[str, object]]:
    parts: list[RequestRecord | TokenRuns | StepRecord] = [record.requests, record.tokens]
    return [
        {column.name: np.asarray(getattr(part, column.name)).tolist() for column in fields(part)}
        for part in (*parts, *record.steps)
    ]
