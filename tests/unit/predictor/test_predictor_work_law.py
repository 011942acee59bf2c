"""The law of work, where the measured points do not tell its parts apart."""

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.regression.regime import fit_work_law
from foretoken.predictor.roofline import Target

SPEC = find_operator("moe_experts")
TARGET = Target(device=find_device("h200_sxm"), dtype=DType.BF16)
FLOOR_US = 40.0


def one_layer(hidden: int) -> Design:
    """Return the experts of one layer, of any width, that all receive tokens."""
    tokens, width = (
        grid.reshape(-1)
        for grid in np.meshgrid([2_000, 3_000, 5_000, 9_000, 17_000], [256, 512, 1024, 2048])
    )
    fixed = {"top_k": 8, "num_experts": 128, "hidden": hidden}
    columns = {name: np.full(len(tokens), value) for name, value in fixed.items()}
    columns |= {"num_tokens": tokens, "intermediate": width}
    columns["num_active_experts"] = columns["num_experts"]
    return build_design(SPEC, columns, TARGET)


def latency_us(design: Design) -> np.ndarray:
    """Return a launch and what each token's features take."""
    columns = dict(zip(SPEC.dim_names, design.points.T, strict=True))
    return np.asarray(FLOOR_US + 2e-5 * columns["num_tokens"] * columns["hidden"])


@pytest.mark.parametrize("hidden", [2048, 2880, 7168])
def test_a_layer_s_law_follows_the_size_of_another(hidden: int) -> None:
    """Work that no point tells apart from tokens grows with features, a launch with nothing."""
    known, asked = one_layer(5120), one_layer(hidden)
    law = fit_work_law(known, np.log(latency_us(known) / known.base_us))
    answered_us = asked.base_us * np.exp(law.log_ratio(asked))
    assert latency_us(asked) == pytest.approx(answered_us, rel=0.05)


def test_parts_in_proportion_do_not_change_what_is_fitted() -> None:
    known = one_layer(5120)
    law = fit_work_law(known, np.log(latency_us(known) / known.base_us))
    assert latency_us(known) == pytest.approx(
        known.base_us * np.exp(law.log_ratio(known)), rel=0.02
    )
