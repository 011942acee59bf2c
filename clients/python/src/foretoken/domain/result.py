"""Results of simulations and searches that the catalog keeps, after the service that made them."""

from dataclasses import dataclass

from foretoken.domain.report import ServingReport
from foretoken.domain.search import CapacityReport, ServingSearchReport
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_search import TrainingSearchReport

# The kind of artifact they are in the catalog.
RESULT_ARTIFACT = "simulation_result"
AnyReport = (
    ServingReport | TrainingReport | CapacityReport | ServingSearchReport | TrainingSearchReport
)
# Kinds of jobs, with what they answer.
REPORT_CLASSES: dict[str, type[AnyReport]] = {
    "serving": ServingReport,
    "training": TrainingReport,
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
