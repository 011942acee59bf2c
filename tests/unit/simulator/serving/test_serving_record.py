from dataclasses import replace

import numpy as np
from serving_records import TinyRequest, TinyRules, run_tiny_engines

from foretoken.simulator.serving.record import count_group_tokens


def test_the_tokens_of_a_group_are_those_of_all_engines_step_by_step() -> None:
    requests = [TinyRequest(arrival_ns=0, prompt=prompt, answer=3) for prompt in (5, 9)]
    record = run_tiny_engines(requests, TinyRules())
    (steps,) = record.steps
    twice = replace(record, steps=[steps, replace(steps, num_tokens=10 * steps.num_tokens)])
    assert steps.num_group_tokens is None
    for each in count_group_tokens(twice, [range(2)]).steps:
        np.testing.assert_array_equal(11 * steps.num_tokens, each.num_group_tokens)
