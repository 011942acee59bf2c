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
from foretoken.simulator.workload.request_plan import RequestPlan, name_sessions

# Steps between two looks at whether those are done that a run goes on for.
_LOOK_STEPS = 1000


class EngineRun:
    """The engines of a deployment with the requests of a plan, from the first on."""

    def __init__(self, plan: RequestPlan, setup: DeploymentSetup, tables: CostTables) -> None:
        """Set them up.

        Raises:
            UnknownPluginError: there is no scheduler of that name, or engines do not know the
                router.

        """
        self._plan = plan
        self._setup = setup
        self._state = build_state(plan, setup, tables)
        self._slices: list[Slice] = []
        self._is_over = False

    def go_on(self, num_first: int, progress: Callable[[float], None]) -> None:
        """Simulate until the first `num_first` requests are done, or some steps longer.

        Raises:
            RuntimeError: requests run that the scheduler does not schedule.

        """
        rules, num_requests = self._state.record[0], self._plan.num_requests
        first = self._state.arrays["requests"]["outcome"][:num_first]
        room = len(self._state.arrays["steps"])
        if num_first < num_requests:
            room = min(room, _LOOK_STEPS + self._setup.num_engines)
        rules["room_steps"] = room
        while not self._is_over and (num_first == num_requests or not first.all()):
            status = run_slice(self._state.record)
            self._slices.append(take_output(self._state))
            if status == layout.STUCK:
                raise RuntimeError(f"{self._setup.profile.scheduler} does not schedule what runs")
            self._is_over = status == layout.DONE
            progress(rules["num_done"] / num_requests)

    def send_no_more(self) -> None:
        """Let a closed loop end with the requests that have been sent."""
        rules = self._state.record[0]
        rules["num_unfollowing"] = rules["num_released"]

    def record(self) -> ServingRecord:
        """Return what the engines did until now; of requests that are not done what is so far."""
        output = join_slices(self._slices)
        self._slices = [output]
        return ServingRecord(
            requests=_requests_of(self._state.arrays["requests"], self._plan),
            tokens=replace(token_runs(output.runs), engine=None),
            steps=step_records(output, self._setup),
            num_kv_blocks=self._setup.num_kv_blocks,
            block_size=self._setup.profile.block_size,
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
        session=name_sessions(plan),
    )
