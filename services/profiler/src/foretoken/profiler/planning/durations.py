"""How long cases take to time: estimated from the timer's rules, and learned as they are timed."""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_S
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import CPU

_log = logging.getLogger(__name__)

# Inputs are made, a graph is captured, the kernel is named, a row is written.
_CASE_S = 0.03
# Samples until a median is known within the interval asked for, when nothing disturbs it.
_USUAL_SAMPLES = 40
_WARM_UP_SAMPLES = 8
# A process group is started and met with.
_COLLECTIVE_S = 1.0
# What is known of few cases counts less than the rules.
_PRIOR_CASES = 3.0


class CaseDurations:
    """Seconds it takes to time a call.

    What earlier cases of an operator took, over what the rules say, corrects the rules; of an
    operator that was never timed all others together do.
    """

    def __init__(self, device: DeviceSpec, timer: TimerSpec) -> None:
        """Begin with the timer's rules on that device."""
        self._device, self._timer = device, timer
        self._rules_s: defaultdict[str, float] = defaultdict(float)
        self._taken_s: defaultdict[str, float] = defaultdict(float)

    def learn(self, call: OperatorCall, taken_s: float) -> None:
        """Note what a case has taken."""
        self._rules_s[call.operator] += self.rule_s(call)
        self._taken_s[call.operator] += taken_s

    def estimate_s(self, call: OperatorCall) -> float:
        """Return the seconds that timing a call will take."""
        return self.rule_s(call) * self.ratio(call.operator)

    def total_s(self, calls: Iterable[OperatorCall]) -> float:
        """Return the seconds that timing the calls will take."""
        return sum(self.estimate_s(call) for call in calls)

    def load(self, path: Path) -> None:
        """Take up what an earlier run has learned; a file that cannot be read teaches nothing."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for operator, (rules_s, taken_s) in content.items():
                self._rules_s[operator], self._taken_s[operator] = (
                    float(rules_s),
                    float(taken_s),
                )
        except FileNotFoundError:
            return
        except (
            OSError,
            ValueError,
            OverflowError,
            RecursionError,
            AttributeError,
            TypeError,
        ) as err:
            _log.warning("durations of earlier runs cannot be read path=%s: %s", path, err)

    def save(self, path: Path) -> None:
        """Keep what was learned; it helps the next estimate, and no run fails for it."""
        content = {name: (self._rules_s[name], self._taken_s[name]) for name in self._rules_s}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(path)
        except OSError as err:
            _log.warning("durations could not be saved path=%s: %s", path, err)

    def ratio(self, operator: str) -> float:
        """Return what cases of an operator take over what the rules say."""
        prior = _PRIOR_CASES * (_CASE_S + self._timer.warm_up_s_min)
        rules_s, taken_s = sum(self._rules_s.values()), sum(self._taken_s.values())
        overall = (taken_s + prior) / (rules_s + prior)
        return (self._taken_s[operator] + prior * overall) / (self._rules_s[operator] + prior)

    def rule_s(self, call: OperatorCall) -> float:
        """Return the seconds that the timer's rules say."""
        timer, spec = self._timer, find_operator(call.operator)
        if spec.is_collective:
            return min(_COLLECTIVE_S, timer.case_s_max)
        terms = compute_terms(spec, call.dims, call.dtype, call.phase, self._device)
        call_us = float(max(terms.compute_us, terms.memory_us)) + terms.floor_us
        if not math.isfinite(call_us):
            return timer.case_s_max
        is_cpu = self._device.name == CPU
        sample_us_min = timer.sample_us_min if is_cpu else timer.graph_us
        warm_up_s_min = timer.warm_up_s_min if is_cpu else timer.cuda_warm_up_s_min
        sample_s = max(call_us, sample_us_min) / US_PER_S
        warm_up_s = max(_WARM_UP_SAMPLES * sample_s, warm_up_s_min)
        samples_s = max(_USUAL_SAMPLES, timer.min_samples) * sample_s
        # The first samples are taken however long they last.
        most_s = max(timer.case_s_max, 3 * sample_s)
        return _CASE_S + min(warm_up_s, timer.warm_up_s_max) + min(samples_s, most_s)


class RemainingTime:
    """Seconds until calls are timed, as more is learned and fewer are left."""

    def __init__(self, durations: CaseDurations, calls: Iterable[OperatorCall]) -> None:
        """Begin with all calls left."""
        self._durations = durations
        self._rules_s: defaultdict[str, float] = defaultdict(float)
        for call in calls:
            self._rules_s[call.operator] += durations.rule_s(call)

    @property
    def seconds(self) -> float:
        """Seconds left."""
        ratio = self._durations.ratio
        return sum(rule_s * ratio(operator) for operator, rule_s in self._rules_s.items())

    def take(self, call: OperatorCall, taken_s: float) -> None:
        """Note that a call was timed."""
        self._durations.learn(call, taken_s)
        left_s = self._rules_s[call.operator] - self._durations.rule_s(call)
        self._rules_s[call.operator] = max(left_s, 0.0)
