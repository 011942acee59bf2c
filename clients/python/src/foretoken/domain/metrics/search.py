"""Metrics of capacities and of searches."""

from foretoken.domain.metrics.metric import Metric

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
