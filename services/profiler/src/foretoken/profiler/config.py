"""Settings of the profiler."""

from dataclasses import dataclass, field

from foretoken.profiler.ranks.rendezvous import RendezvousSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerSpec:
    """When a measurement is good enough, and when it has taken too long.

    Sampling stops once the 95 % interval of the median is within `interval_ratio_target` of it on
    either side, or after `case_s_max`. A sample lasts at least `sample_us_min`: short calls are
    repeated inside it. Warm-up ends when two halves of its latest samples agree within
    `warm_up_ratio`. Inputs rotate over copies that together exceed `rotation_cache_ratio` times
    the device's last-level cache, at most `max_input_sets` of them.

    On a GPU a sample is one graph of calls that together take `graph_us`, at most
    `max_calls_per_graph` of them; warm-up takes at least `cuda_warm_up_s_min` and waits for a
    steady clock, at most `cuda_warm_up_s_max`.
    """

    interval_ratio_target: float = 0.01
    min_samples: int = 10
    max_samples: int = 1000
    sample_us_min: float = 200.0
    max_calls_per_sample: int = 1000
    warm_up_s_min: float = 0.025
    warm_up_s_max: float = 0.5
    warm_up_ratio: float = 0.03
    case_s_max: float = 2.0
    max_input_sets: int = 64
    rotation_cache_ratio: float = 2.0
    graph_us: float = 500.0
    max_calls_per_graph: int = 20
    cuda_warm_up_s_min: float = 0.01
    cuda_warm_up_s_max: float = 0.1


def _quick_timer() -> TimerSpec:
    return TimerSpec(
        interval_ratio_target=0.02,
        min_samples=8,
        warm_up_s_min=0.003,
        warm_up_s_max=0.02,
        warm_up_ratio=0.1,
        case_s_max=0.08,
        max_input_sets=40,
        rotation_cache_ratio=1.0,
        graph_us=300.0,
        cuda_warm_up_s_max=0.04,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerConfig:
    """Where the profiler keeps its jobs, how it times, and how often it hands over rows.

    The same work is timed every `drift_check_s` (0: 5 on a CPU, 10 on a GPU) to see whether the
    machine has changed; the rows until then are let go. A batch of them goes to the catalog after
    `batch_rows` rows or `batch_s` seconds. Measuring waits `receipt_s` for its receipt, then goes
    on and keeps rows in `state_folder`; before a profile and at its end it waits `catalog_s` for a
    catalog that is away.

    `num_threads` fixes torch's CPU threads (0: torch's own choice). Calls whose roofline exceeds
    `call_s_max` are not planned, in a quick sweep those above `quick_call_s_max`; on a CPU a slow
    core's roofline counts. A share `repeat_ratio` is timed twice. Cases may take `memory_ratio_max`
    of the free memory; one that does not end in `case_s_hung` ends the process (0: none does), as
    nothing else stops a kernel that hangs, and starting again goes on behind it. At the end, cases
    that the machine disturbed are timed again, for `retime_ratio` of the time that all took.

    `topology` names the links between local devices (empty: the device's usual one). A pod of an
    Indexed Job measures share `shard_index` of `num_shards`. Nodes that time collectives together
    meet by `rendezvous`.
    """

    state_folder: str
    drift_check_s: float = 0.0
    batch_rows: int = 50
    batch_s: float = 5.0
    receipt_s: float = 5.0
    catalog_s: float = 300.0
    num_threads: int = 0
    call_s_max: float = 1.0
    quick_call_s_max: float = 0.1
    case_s_hung: float = 600.0
    retime_ratio: float = 0.25
    memory_ratio_max: float = 0.5
    repeat_ratio: float = 0.05
    topology: str = ""
    shard_index: int = 0
    num_shards: int = 1
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)
    timer: TimerSpec = field(default_factory=TimerSpec)
    quick_timer: TimerSpec = field(default_factory=_quick_timer)
