"""Run the engines of a deployment in slices and collect what they wrote."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from foretoken.simulator import jit
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine import layout
from foretoken.simulator.engine.choice import find_scheduler
from foretoken.simulator.engine.kernel import run_slice
from foretoken.simulator.engine.layout import Ints, Records
from foretoken.simulator.engine.output import (
    Slice,
    join_slices,
    step_records,
    take_output,
    token_runs,
)
from foretoken.simulator.engine.state import build_state
from foretoken.simulator.serving.record import RequestRecord, ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan


def run_engines(
    plan: RequestPlan,
    setup: DeploymentSetup,
    tables: CostTables,
    progress: Callable[[float], None],
) -> ServingRecord:
    """Return what the engines did with the requests.

    Raises:
        UnknownPluginError: there is no scheduler of that name, or engines do not know the router.
        RuntimeError: requests run that the scheduler does not schedule.

    """
    state = build_state(plan, setup, tables)
    slices: list[Slice] = []
    while True:
        status = run_slice(state.record)
        slices.append(take_output(state))
        if status == layout.DONE:
            break
        if status == layout.STUCK:
            raise RuntimeError(f"{setup.profile.scheduler} does not schedule what runs")
        progress(state.record[0]["num_done"] / plan.num_requests)
    output = join_slices(slices)
    return ServingRecord(
        requests=_requests_of(state.arrays["requests"], plan),
        tokens=replace(token_runs(output.runs), engine=None),
        steps=step_records(output, speculates=setup.speculation is not None),
        num_kv_blocks=setup.num_kv_blocks,
        block_size=setup.profile.block_size,
    )


def is_ready(setup: DeploymentSetup) -> bool:
    """Whether what runs a deployment need not be compiled: that was done here or is kept."""
    return jit.is_ready(run_slice) and find_scheduler(setup.profile.scheduler).is_ready


def _requests_of(requests: Records, plan: RequestPlan) -> RequestRecord:
    def column(name: str) -> Ints:
        return np.ascontiguousarray(requests[name], dtype=np.int64)

    return RequestRecord(
        arrival_ns=column("arrival_ns"),
        queued_ns=column("queued_ns"),
        scheduled_ns=column("scheduled_ns"),
        first_token_ns=column("first_token_ns"),
        finished_ns=column("finished_ns"),
        num_prefill_tokens=column("num_prefill"),
        num_decode_tokens=column("num_decode"),
        num_preemptions=column("num_preemptions"),
        num_cached_tokens=column("num_cached"),
        num_loaded_tokens=column("num_loaded"),
        engine=column("engine"),
        slo_class=plan.slo_class,
        outcome=column("outcome"),
    )
