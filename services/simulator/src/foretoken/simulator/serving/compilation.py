"""Compile the serving engine: LLVM takes a minute for it, once on a machine."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

import numpy as np

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.jobs.executor import CHECK_PERIOD_S
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cost.tables import CostTables, flat_tables
from foretoken.simulator.engine.choice import find_scheduler, list_schedulers
from foretoken.simulator.engine.kernel import run_slice
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.engine.simulation import EngineRun, is_ready
from foretoken.simulator.jit import can_keep
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import plan_requests

# Two jobs that need the same code compile it once.
_COMPILING = threading.Lock()
# Whether pools of clusters, or engines on their own; and the schedulers.
_Wanted = tuple[bool, tuple[str, ...]]


def must_compile(setup: DeploymentSetup | ClusterSetup) -> bool:
    """Whether a plan waits for the compiler first: the code is not kept from before."""
    if isinstance(setup, DeploymentSetup):
        return not is_ready(setup)
    return not all(EnginePool.is_ready(pool.engines) for pool in setup.pools)


def must_compile_any(schedulers: Iterable[str] | None = None) -> bool:
    """Whether anything of the engine, of pools of it or of schedulers, else all, is not kept."""
    setup = DeploymentSetup(profile=find_engine(DEFAULT_PROFILE), num_kv_blocks=1)
    is_kept = is_ready(setup) and EnginePool.is_ready(setup)
    names = list_schedulers() if schedulers is None else schedulers
    return not (is_kept and all(find_scheduler(name).is_ready for name in names))


def warm_up(setup: DeploymentSetup, tables: CostTables) -> None:
    """Compile what runs a deployment, or load it where that was done before."""
    one = np.ones(1, dtype=np.int64)
    EngineRun(plan_requests(one, one, one), setup, tables).go_on(1, lambda _: None)


def compile_engines(schedulers: Iterable[str] | None = None) -> None:
    """Compile the engine and some schedulers, else all; load what was compiled before.

    Each takes some seconds; that of the default profile comes with the engine.
    """
    for wanted in _engines_with(list_schedulers() if schedulers is None else schedulers):
        _compile(wanted, None)


def load_engines(wait: Callable[[], None]) -> None:
    """Load the engine and every scheduler, compiled as by `compile_apart` where that is needed."""
    _compile_apart(must_compile_any, _engines_with(list_schedulers()), wait)
    compile_engines()


def compile_apart(setup: DeploymentSetup | ClusterSetup, wait: Callable[[], None]) -> None:
    """Let a process of its own compile what a deployment needs, where it is not kept.

    Nothing interrupts LLVM: compiled here it would keep whoever cancels a job or ends the service
    waiting. `wait` is called several times a second; what it raises ends that process. Where
    machine code cannot be kept, or no process be started, it is compiled when it first runs.
    """
    if isinstance(setup, DeploymentSetup):
        wanted: _Wanted = (False, (setup.profile.scheduler,))
    else:
        wanted = (True, tuple(pool.engines.profile.scheduler for pool in setup.pools))
    _compile_apart(lambda: must_compile(setup), (wanted,), wait)


def _compile_apart(
    is_needed: Callable[[], bool], wanted: Sequence[_Wanted], wait: Callable[[], None]
) -> None:
    while not _COMPILING.acquire(timeout=CHECK_PERIOD_S):
        wait()
    try:
        if is_needed() and can_keep(run_slice):
            with closing(LocalExecutor(1)) as executor, suppress(ServiceUnavailableError):
                list(executor.run(_compile, wanted, None, wait))
    finally:
        _COMPILING.release()


def _engines_with(schedulers: Iterable[str]) -> tuple[_Wanted, ...]:
    names = tuple(schedulers)
    return (False, names), (True, names)


def _compile(wanted: _Wanted, _shared: None) -> None:
    has_pools, schedulers = wanted
    if has_pools:
        EnginePool.compile(flat_tables())
    else:
        profile = find_engine(DEFAULT_PROFILE)
        warm_up(DeploymentSetup(profile=profile, num_kv_blocks=1), flat_tables())
    for name in schedulers:
        find_scheduler(name).compile()
