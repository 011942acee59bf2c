"""What sites that train one model together wait for: sums over the slow links between them.

Within a site gradients are summed as the scenario says. Then each site has one sum, in shards on
its devices, and the sites' links carry it around a ring: a reduce-scatter and an all-gather.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009; Douillard et al., "DiLoCo", 2023, for sums that are not made in every step.
"""

from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import SiteRules
from foretoken.domain.units import MS_PER_S


def count_summed_bytes(scenario: TrainingScenario) -> float:
    """Return the bytes of the model's gradients, in the format that they are reduced in."""
    trainer = scenario.trainer.resolve()
    dtype = trainer.gradient_dtype or scenario.dtype.kept_in_training
    return count_parameters(scenario.model).total * dtype.num_bytes


def site_wait_s(scenario: TrainingScenario, sites: SiteRules) -> float:
    """Return what a step waits for other sites, the mean over steps."""
    others = sites.num_sites - 1
    if not others:
        return 0.0
    sent_bytes = 2 * others / sites.num_sites * count_summed_bytes(scenario)
    latency_s = 2 * others * sites.latency_ms / MS_PER_S
    return (sent_bytes / sites.bytes_per_s + latency_s) / sites.sync_steps
