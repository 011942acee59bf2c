"""All metrics, by name and in the order of tables."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foretoken.domain.metrics.metric import SHARE, Figure, Metric, Place, figures_of
from foretoken.domain.metrics.request import LATENCIES
from foretoken.domain.metrics.serving import SERVING
from foretoken.domain.metrics.training import RUN, STEP_RATES, STEP_USE
from foretoken.domain.results.report import ServingReport
from foretoken.domain.units import S_PER_HOUR

# A table: every metric in as few lines as it needs.
# fmt: off
POOLS = (
    Metric("num_engines", "replicas", "", "",
        "replicas there can be, each engine of a data-parallel group by itself", shown=("pool",)),
    Metric("running_engines_mean", "replicas, mean", "", "",
        "replicas that serve, over the duration", neutral=0.0, shown=("pool",)),
    Metric("pools[].running_engines_mean", "replicas, mean", "", "",
        "replicas of all pools that serve, over the duration", neutral=0.0, of=(ServingReport,),
        read=lambda report: sum(pool.running_engines_mean for pool in report.pools),
        shown=("page",)),
    Metric("pools[].num_failures", "replica failures", "", "lower",
        "failures of replicas of all pools", neutral=0.0, of=(ServingReport,),
        read=lambda report: sum(pool.num_failures for pool in report.pools), shown=("page",)),
    Metric("num_failures", "failures", "", "lower",
        "failures of a pool's replicas; of a training run, how many are expected", neutral=0.0,
        shown=("comparison", "pool")),
    Metric("num_scale_ups", "replicas started", "", "", "replicas that an autoscaler started",
        neutral=0.0, shown=("pool",)),
    Metric("num_scale_downs", "replicas stopped", "", "", "replicas that an autoscaler gave up",
        neutral=0.0, shown=("pool",)),
    Metric("sent_bytes_per_s", "KV transfer", "GB/s", "",
        "KV caches that left the pool (prefill) or reached it (decode)", scale=1e9, neutral=0.0,
        shown=("pool",)),
    Metric("port_utilization_ratio", "port utilization", SHARE, "",
        "share of the time held that a replica's ports were busy with KV caches", neutral=0.0,
        shown=("pool",)),
    Metric("num_adapter_loads", "adapters loaded", "", "", "LoRA adapters that replicas loaded",
        neutral=0.0, shown=("pool",)),
    Metric("device_s", "GPU hours", "", "",
        "time that GPUs were held, starting and restarting included", scale=S_PER_HOUR,
        shown=("pool",)),
)
# fmt: on


# A table: every metric in as few lines as it needs.
# fmt: off
SEARCH = (
    Metric("capacity_rps", "capacity", "requests/s", "higher",
        "the highest rate that was seen to meet the targets", shown=("comparison",)),
    Metric("low_rps", "capacity, lower bound", "requests/s", "higher",
        "lower end of its interval: the workload's chance and the estimates' error",
        shown=("comparison",)),
    Metric("high_rps", "capacity, upper bound", "requests/s", "higher",
        "upper end of its interval", shown=("comparison",)),
    Metric("first_miss_rps", "lowest rate that misses", "requests/s", "",
        "the lowest rate above the capacity that was seen to miss the targets"),
    Metric("sampling_low_rps", "lower bound by chance", "requests/s", "",
        "lower end of the interval of the workload's chance alone"),
    Metric("sampling_high_rps", "upper bound by chance", "requests/s", "",
        "upper end of the interval of the workload's chance alone"),
    Metric("cpu_s", "CPU time", "s", "", "processor time that the answer took"),
    Metric("capacity_rps_per_gpu", "capacity per GPU", "requests/s", "higher", "capacity / GPUs",
        shown=("comparison",)),
    Metric("min_devices", "fewest GPUs for the rate", "", "lower",
        "fewest GPUs of a deployment that carries the target rate", shown=("comparison",)),
    Metric("min_usd_per_hour", "least cost for the rate", "USD/h", "lower",
        "least price of a deployment that carries the target rate", shown=("comparison",)),
    Metric("num_points", "points", "", "", "deployments or strategies of the space",
        shown=("comparison",)),
    Metric("num_distinct", "distinct points", "", "", "points that differ from all others",
        shown=("comparison",)),
    Metric("num_evaluated", "answered in closed form", "", "",
        "points that were answered in closed form", shown=("comparison",)),
    Metric("num_legal", "can run", "", "",
        "strategies that the model, the cluster and the framework allow", shown=("comparison",)),
    Metric("num_fitting", "have the memory", "", "", "of these, those whose memory suffices",
        shown=("comparison",)),
    Metric("num_simulated", "simulated", "", "",
        "points that were simulated request by request, or event by event", shown=("comparison",)),
)
# fmt: on


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (*SEARCH, *RUN, *LATENCIES, *STEP_RATES, *SERVING, *POOLS, *STEP_USE)
}

# What a target is about other than latencies: the share of requests in their SLOs.
ATTAINMENT = "slo"


def shown_at(place: Place, record: Any) -> list[Metric]:
    """Return the metrics of a report, or of a row of a table, that are shown somewhere."""
    return [metric for metric in METRICS.values() if place in metric.shown and metric.is_of(record)]


def list_figures(
    place: Place, records: Sequence[Any], *, prefix: str = "", without: Collection[str] = ()
) -> list[Figure]:
    """Return the figures of records of one kind that are shown somewhere, a row each.

    A record that is None, such as that of what cannot run, has none. Labels begin with `prefix`;
    metrics named in `without` are left out.
    """
    first = next((record for record in records if record is not None), None)
    return [
        figure
        for metric in shown_at(place, first)
        if metric.name not in without
        for figure in figures_of(metric, records, prefix)
    ]


def describe_limit(metric: str, percentile: float) -> str:
    """Return what a limit is about: `TTFT p99`, `TPOT mean`, `SLO attainment`."""
    if metric == ATTAINMENT:
        return METRICS["slo_attainment_ratio"].label
    return f"{METRICS[metric].label} {describe_statistic(percentile)}"


def describe_statistic(percentile: float) -> str:
    """Return the name of a percentile, of the mean where it is 0: `p99`."""
    return f"p{percentile:g}" if percentile else "mean"
