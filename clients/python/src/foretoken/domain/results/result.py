"""Results of simulations, plans and searches that the catalog keeps after they were made."""

from dataclasses import dataclass

from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport

# The kind of artifact they are in the catalog.
RESULT_ARTIFACT = "simulation_result"
AnyReport = (
    ServingReport
    | TrainingReport
    | TrainingRunReport
    | CapacityReport
    | ServingSearchReport
    | TrainingSearchReport
)
# The answer of one call, which is no job; its name is made as that of a job.
TRAINING_RUN_KIND = "training-run"
# Kinds of results, with what they are.
REPORT_CLASSES: dict[str, type[AnyReport]] = {
    "serving": ServingReport,
    "training": TrainingReport,
    TRAINING_RUN_KIND: TrainingRunReport,
    "capacity": CapacityReport,
    "serving-search": ServingSearchReport,
    "training-search": TrainingSearchReport,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptResult:
    """What is known of a result: the job, its kind of `REPORT_CLASSES`, and a title for people.

    `created_at` is ISO 8601 UTC, `headline` the one figure that sums it up.
    """

    job_id: str
    kind: str
    title: str
    created_at: str
    headline: str = ""
    num_bytes: int = 0
