"""Record the plan of an import, and say how far it is; the command line and the pages do it so."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from foretoken.catalog.importing import ImportPlan
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.measurement import REVIEW_JOB, RunSummary
from foretoken.domain.ports import CatalogAdminPort

# Takes a ratio from 0 to 1 and what is being done.
Update = Callable[[float, str], None]

# How often is looked how far a review is.
_REVIEW_TICK_S = 1.0


def record_plan(catalog: CatalogAdminPort, plan: ImportPlan, update: Update) -> bool:
    """Record a plan, and return whether all of it was there before."""
    num_stored, was_there = 0, True

    def ratio() -> float:
        return min((num_stored + plan.remarks.num_passed) / max(plan.num_rows, 1), 1.0)

    for table in plan.raw_tables:
        table.store(catalog)
        num_stored += table.num_rows
        update(ratio(), f"{num_stored:,} rows")
    with _watch_review(catalog, update):
        for receipt in catalog.record(plan.run, plan.batches):
            num_stored += receipt.num_rows
            was_there &= receipt.was_duplicate
            update(ratio(), f"{num_stored:,} rows")
    return was_there


def find_summary(catalog: CatalogAdminPort, plan: ImportPlan) -> RunSummary:
    """Return what the catalog says of a run that was just recorded."""
    return next(found for found in catalog.list_runs() if found.run.run_id == plan.run.run_id)


@contextmanager
def _watch_review(catalog: CatalogAdminPort, update: Update) -> Iterator[None]:
    """Show how far the catalog is with judging a run as a whole, before its last receipts."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_REVIEW_TICK_S):
            with suppress(ForetokenError):
                for job in catalog.list_jobs():
                    if job.kind == REVIEW_JOB and not job.state.is_final:
                        message = f"checking rows against each other: {job.message}"
                        update(job.progress_ratio, message)

    watching = threading.Thread(target=watch, name="review", daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()
