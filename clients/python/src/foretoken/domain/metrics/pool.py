"""Metrics of the pools of a cluster: replicas, what moves between pools, what they hold."""

from foretoken.domain.metrics.metric import SHARE, Metric
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
