"""What a step is made of on one stage: shares of components that do not contain each other."""

from collections.abc import Mapping

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.training_run import ALL_STAGES, MeasuredTraining

FORWARD = "layers, forward"
BACKWARD = "layers, backward"
BESIDE_LAYERS = "rest of the passes"
REST = "waiting and other"

# Of the first stage: nothing there waits for another stage's update.
_STAGE = 0

Times = Mapping[str, float]


def forward_share(scenario: TrainingScenario) -> float:
    """Return the share of a layer's tensor-parallel reductions that are in its forward pass.

    The backward pass has as many as the forward one, and as many again where it runs that again.
    """
    again = 0.0
    if scenario.recompute == "full":
        num_chunks = scenario.layout.pp * scenario.virtual_stages
        num_layers = scenario.model.num_layers / num_chunks
        again = min(scenario.recompute_layers / num_layers, 1.0) or 1.0
    return 1.0 / (2.0 + again)


def split_step(
    step_ms: float, times: Times, calls: Mapping[str, int], reduced_forward: float
) -> Mapping[str, float]:
    """Return the ms of a step by part, from components' times and how often each is in the step.

    A layer's passes contain `mp_allreduce`, `reduced_forward` of it the forward pass, a stage's
    passes the layers, and `optimizer` contains `dp_allgather`: each part is without what it
    contains. What is left of the step is waiting, and all that was not measured; nothing where the
    parts are longer than the step.
    """
    whole = {name: time_ms * calls.get(name, 0) for name, time_ms in times.items()}
    reduced = whole.get("mp_allreduce", 0.0)
    shares = {"encoder_fwd": reduced_forward, "encoder_bwd": 1.0 - reduced_forward}
    alone = {
        name: max(whole[name] - share * reduced, 0.0)
        for name, share in shares.items()
        if name in whole
    }
    parts = {
        FORWARD: alone.get("encoder_fwd", 0.0),
        BACKWARD: alone.get("encoder_bwd", 0.0),
        "mp_allreduce": reduced,
    }
    if "stage_fwd" in whole and "stage_bwd" in whole:
        beside = whole["stage_fwd"] + whole["stage_bwd"] - sum(parts.values())
        parts[BESIDE_LAYERS] = max(beside, 0.0)
    gathered = whole.get("dp_allgather", 0.0)
    parts["pp_p2p"] = whole.get("pp_p2p", 0.0)
    parts["dp_allreduce"] = whole.get("dp_allreduce", 0.0)
    if "optimizer" in whole:
        gathered = min(gathered, whole["optimizer"])
    parts["dp_allgather"] = gathered
    parts["optimizer"] = whole.get("optimizer", gathered) - gathered
    parts[REST] = max(step_ms - sum(parts.values()), 0.0)
    return {name: time_ms for name, time_ms in parts.items() if time_ms > 0}


def compare_proportions(
    run: MeasuredTraining, report: TrainingReport, scenario: TrainingScenario
) -> Mapping[str, Mapping[str, float]]:
    """Return the parts in ms of the first stage's step, `measured` and `simulated`.

    How often a component is in a step is the simulation's count for both. Flagged times count too:
    a picture with a doubtful part says more than one without. Empty without measured components.
    """
    here = [item for item in report.components if item.stage == _STAGE]
    calls = {item.name: item.num_calls for item in here}
    measured: dict[str, float] = {}
    for item in sorted(run.components, key=lambda item: item.stage):
        # What was measured of the stage itself replaces what stands for all.
        if item.stage in (ALL_STAGES, _STAGE) and item.name in calls:
            measured[item.name] = item.time_ms
    if not measured:
        return {}
    simulated = {item.name: item.time_ms for item in here if item.name in measured}
    share = forward_share(scenario)
    return {
        "measured": split_step(run.step.time_ms, measured, calls, share),
        "simulated": split_step(report.step_time_ms, simulated, calls, share),
    }
