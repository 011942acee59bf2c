"""Each test finds the defect it is for, and lets the sound data next to it be."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from catalog_rows import row, table

from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.quality.flag import Coded, code_columns
from foretoken.catalog.quality.review import find_flags
from foretoken.catalog.quality.stored_row import ALIKE, StoredRows, bound_rows
from foretoken.catalog.quality.test_definition import all_tests

_RNG_SEED = 7


def _stored(rows: Iterable[dict[str, Any]], *, run_id: str = "run-1", **fields: Any) -> StoredRows:
    """Return rows of one operator and device as a review reads them."""
    found = table(*rows)
    found, (group,) = split_by_operator(found)
    coded = code_columns(found, (*ALIKE, "source_file"))
    coded["run_id"] = Coded(np.zeros(len(found), dtype=np.int32), (run_id,))
    device = found.column("device")[0].as_py()
    work_us, floor_us = bound_rows(group.spec, device, group.columns, coded)
    flags = found.column("flags").to_pylist()
    return StoredRows(
        spec=group.spec,
        device=device,
        columns=group.columns,
        coded=coded,
        latency_us=found.column("latency_us_median").to_numpy(),
        work_us=work_us,
        floor_us=floor_us,
        is_impossible=np.array([bool(given) for given in flags]),
        peer_ratios=fields.get("peer_ratios", {}),
    )


def _names(rows: StoredRows) -> dict[str, int]:
    """Return how many rows each test flags."""
    found = find_flags(rows)
    return Counter(flag.split(":")[0] for flags in found.values() for flag in flags)


def _norm(num_tokens: int, **changes: Any) -> dict[str, Any]:
    """Return a layer norm at half the A30's bandwidth; 6.6 us are the launch."""
    dims = {"num_tokens": num_tokens, "hidden": 4096}
    ratio = 2.0 if changes.get("phase") == "backward" else 1.0
    time_us = 6.6 + ratio * num_tokens * 4096 * 2 * 2 / 933e3 * 2
    return row(operator="layer_norm", dims=dims, **{"latency_us_median": time_us, **changes})


def _norms(**changes: Any) -> list[dict[str, Any]]:
    return [_norm(1000 * step, **changes) for step in range(1, 65)]


def _gather(message_bytes: int, **changes: Any) -> dict[str, Any]:
    dims = {"message_bytes": message_bytes, "devices_per_node": 8, "num_nodes": 1}
    time_us = 20 + message_bytes * 7 / 8 / 200e3
    named = {"operator": "all_gather", "device": "a100_sxm_80", "topology": "a100_dgx"}
    return row(**{**named, "dims": dims, "latency_us_median": time_us, **changes})


def test_every_test_has_a_name_of_its_own() -> None:
    names = [test.name for test in all_tests()]
    assert sorted(set(names)) == sorted(names)


def test_sound_rows_are_not_doubted() -> None:
    rows = [*_norms(), *_norms(phase="backward"), *_norms(kernel="other")]
    assert {} == _names(_stored(rows, peer_ratios={"a100_sxm_80": 2.0}))


def test_a_row_off_its_line_is_doubted_and_its_neighbours_are_not() -> None:
    rows = _norms()
    rows[20]["latency_us_median"] *= 2
    assert {20: ["local_outlier: 2 times what its neighbours suggest"]} == find_flags(_stored(rows))


def test_rows_of_another_kernel_are_another_line() -> None:
    rows = _norms()
    rows[20] |= {"kernel": "b", "latency_us_median": rows[20]["latency_us_median"] * 2}
    assert {} == _names(_stored(rows))


def test_of_repeats_those_far_from_the_median_are_doubted() -> None:
    rows = [_norm(5000, latency_us_median=time) for time in (300.0, 301.0, 390.0)]
    assert [2] == list(find_flags(_stored(rows)))


def test_many_repeats_have_a_spread_of_their_own() -> None:
    """A cloud 20 % wide is noise; what lies outside it is not."""
    times = [300.0, 315.0, 330.0, 345.0, 360.0, 600.0]
    rows = [_norm(5000, latency_us_median=time) for time in times]
    assert [5] == list(find_flags(_stored(rows)))


def test_differences_below_the_timer_resolution_are_none() -> None:
    """1 us against 2 us in a table of whole microseconds."""
    rows = [_norm(1, latency_us_median=time) for time in (7.0, 8.0, 7.0)]
    assert {} == _names(_stored(rows))


def test_impossible_rows_are_no_neighbours_and_not_doubted_twice() -> None:
    rows = _norms()
    rows[20] |= {"flags": ["faster_than_physics: 1 us"], "latency_us_median": 1.0}
    assert {} == find_flags(_stored(rows))


def test_what_is_left_of_an_impossible_table_is_doubted() -> None:
    rows = _norms()
    for found in rows[:32]:
        found["flags"] = ["faster_than_physics: 1 us"]
    assert {"impossible_table": 32} == _names(_stored([*rows, *_norms(kernel="other")]))


def test_times_that_ignore_the_work_are_doubted() -> None:
    """A call that returns before the kernel ends takes as long for any size."""
    rng = np.random.default_rng(_RNG_SEED)
    rows = [{**found, "latency_us_median": rng.uniform(900, 1100)} for found in _norms()]
    names = _names(_stored([*rows, *_norms(source_file="sound.csv", kernel="other")]))
    assert {"ignores_work": 64} == names


def test_a_launch_bound_table_need_not_rise() -> None:
    rng = np.random.default_rng(_RNG_SEED)
    rows = [_norm(step, latency_us_median=rng.uniform(7.0, 7.5)) for step in range(1, 65)]
    assert {} == _names(_stored(rows))


def _prefill(length: int, **changes: Any) -> dict[str, Any]:
    """Return attention of a prompt, whose times follow no work: the host launches it so."""
    pairs = length * (length + 1) // 2
    dims = {
        "num_seqs": 1,
        "q_tokens": length,
        "kv_tokens": length,
        "score_pairs": pairs,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    return row(operator="attention_prefill", dims=dims, **changes)


@pytest.mark.parametrize(("host_us", "flagged"), [(12000.0, {}), (1000.0, {"ignores_work": 64})])
def test_prompts_may_wait_for_a_host_that_takes_three_times_as_long(
    host_us: float, flagged: dict[str, int]
) -> None:
    """Engines launch them one by one, too; 8,192 tokens take an A30 3.3 ms at best."""
    times_us = np.random.default_rng(_RNG_SEED).uniform(0.95 * host_us, 1.05 * host_us, 64)
    rows = [
        _prefill(128 * (step + 1), latency_us_median=time_us)
        for step, time_us in enumerate(times_us)
    ]
    assert flagged == _names(_stored(rows))


def test_a_backward_pass_without_a_kernel_is_doubted() -> None:
    """By the forward pass it takes less than half of what another device needs."""
    backward = _norms(phase="backward")
    for found in backward:
        found["latency_us_median"] *= 0.6
    rows = [*_norms(), *backward]
    assert {} == _names(_stored(rows, peer_ratios={"a30": 1.2, "a100_sxm_80": 1.9}))
    found = find_flags(_stored(rows, peer_ratios={"a30": 1.2, "a100_sxm_80": 3.2}))
    assert list(range(64, 128)) == list(found)
    assert ["backward_too_fast: takes 1.2 times the forward pass; 3.2 times on a100_sxm_80"] == (
        found[64]
    )


def test_a_backward_pass_far_below_its_work_is_doubted_without_another_device() -> None:
    backward = _norms(phase="backward")
    for found in backward:
        found["latency_us_median"] *= 0.2
    assert {"backward_too_fast": 64} == _names(_stored([*_norms(), *backward]))


def test_a_line_that_jumps_between_close_sizes_is_doubted() -> None:
    rng = np.random.default_rng(_RNG_SEED)
    sizes = [2**28 + step * 2**20 for step in range(200)]
    smooth = [_gather(size) for size in sizes]
    wild = [_gather(size, kernel="other") for size in sizes]
    for found in wild:
        found["latency_us_median"] *= rng.choice([1.0, 2.0, 4.0, 8.0])
    doubts = find_flags(_stored([*smooth, *wild]))
    assert list(range(200, 400)) == list(doubts)
    assert all(flags[0].startswith("erratic: along message_bytes") for flags in doubts.values())


def test_a_saw_is_not_erratic() -> None:
    """A kernel that likes even sizes."""
    rows = [_gather(2**28 + step * 2**20) for step in range(200)]
    for found in rows[::2]:
        found["latency_us_median"] *= 1.5
    assert {} == _names(_stored(rows))


def _linear(file: str, ratios: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return GEMMs of widths 1024 to 8192 whose n is a multiple of k."""
    found = []
    for width in range(1024, 9216, 1024):
        for ratio in ratios:
            for m in (512, 1024, 2048, 4096):
                dims = {"m": m, "n": ratio * width, "k": width}
                time_us = 10 + 2 * m * ratio * width**2 / 100e6
                found.append(row(dims=dims, source_file=file, latency_us_median=time_us))
    return found


def test_a_table_sampled_along_one_direction_is_doubted() -> None:
    rows = [*_linear("1.csv", (1, 2, 3)), *_linear("2.csv", (1,)), *_linear("3.csv", (1, 2, 4))]
    doubts = find_flags(_stored(rows))
    assert list(range(96, 128)) == list(doubts)
    assert [
        "locked_dimensions: n is always 1 times k, unlike in the other tables of this run"
    ] == doubts[96]


def test_one_direction_only_is_no_doubt_where_all_tables_are_alike() -> None:
    rows = [*_linear("1.csv", (1,)), *_linear("2.csv", (2,)), *_linear("3.csv", (3,))]
    assert {} == _names(_stored(rows))


@pytest.mark.parametrize(("factor", "num_doubted"), [(3.0, 64), (1000.0, 64), (1.2, 0), (2.5, 0)])
def test_a_table_some_whole_number_too_slow_is_doubted(factor: float, num_doubted: int) -> None:
    """Sums over three iterations; milliseconds for microseconds."""
    scaled = _norms(source_file="sums.csv")
    for found in scaled:
        found["latency_us_median"] *= factor
    others = [_norm(1000 * step + 10, source_file="means.csv") for step in range(1, 65)]
    doubts = find_flags(_stored([*scaled, *others]))
    flagged = [place for place, flags in doubts.items() if flags[0].startswith("scaled_table")]
    assert list(range(num_doubted)) == flagged


@pytest.mark.parametrize(("factor", "num_doubted"), [(1000.0, 64), (3.0, 0), (0.9, 0)])
def test_a_table_far_off_other_software_is_doubted(factor: float, num_doubted: int) -> None:
    """Nanoseconds for microseconds, where no table of the same software can tell."""
    far = _norms(framework="pytorch", dtype="bf16")
    for found in far:
        found["latency_us_median"] *= factor
    assert num_doubted == _names(_stored([*far, *_norms()])).get("off_other_sources", 0)


def test_another_variant_is_no_reference() -> None:
    far = _norms(framework="pytorch", variant="lane=eager")
    for found in far:
        found["latency_us_median"] *= 10
    assert {} == _names(_stored([*far, *_norms()]))


def _products(host_us: float, **changes: Any) -> list[dict[str, Any]]:
    """Return products at half the A30's bandwidth, small and large, that wait for the host."""
    return [
        row(
            dims={"m": 16, "n": n, "k": 512 * step},
            **{"latency_us_median": max(host_us, 6.6 + n * 512 * step * 2 * 2 / 933e3), **changes},
        )
        for step in range(1, 9)
        for n in 1 << np.arange(9, 17)
    ]


def test_a_table_that_waited_for_the_host_is_doubted_whole() -> None:
    slow = _products(200.0, framework_version="0.24.0")
    sound = _products(0.0, framework="sglang")
    assert {"host_bound": len(slow)} == _names(_stored([*slow, *sound]))


def test_products_that_nothing_compares_with_are_not_doubted() -> None:
    other = _products(0.0, framework="sglang", variant="quant=int8_wo")
    assert {} == _names(_stored([*_products(200.0), *other]))


def test_what_waits_a_little_is_not_doubted() -> None:
    assert {} == _names(_stored([*_products(12.0), *_products(0.0, framework="sglang")]))


def test_prefills_wait_for_the_host_in_engines_too() -> None:
    def blocks(time_us: float, framework: str) -> list[dict[str, Any]]:
        return [
            row(
                operator="causal_conv_prefill",
                dims=dict.fromkeys(("num_seqs",), 1)
                | {"num_tokens": tokens, "channels": 4096}
                | {"kernel_size": 4},
                framework=framework,
                latency_us_median=time_us,
            )
            for tokens in range(16, 1040, 16)
        ]

    assert {} == _names(_stored([*blocks(300.0, "vllm"), *blocks(20.0, "sglang")]))


def _modules(least_us: float, **changes: Any) -> list[dict[str, Any]]:
    """Return latent decodes of a module that takes so long for next to nothing."""
    widths = {"num_heads": 4, "hidden": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512}
    widths |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return [
        row(
            operator="mla_decode_module",
            device="h200_sxm",
            dtype="bf16",
            dims=widths
            | {"num_seqs": num_seqs}
            | {"kv_tokens": num_seqs * context, "kv_tokens_max": context},
            **{
                "framework": "vllm",
                "latency_us_median": least_us + num_seqs * context * 1152 / 2.4e6,
                **changes,
            },
        )
        for num_seqs in 1 << np.arange(6)
        for context in 1 << np.arange(4, 18)
    ]


@pytest.mark.parametrize(
    ("least_us", "changes", "is_flagged"),
    [
        pytest.param((78.0, 34.0), {}, True, id="many kernels more"),
        pytest.param((20.0, 10.0), {}, False, id="a kernel or two more"),
        pytest.param((78.0, 34.0), {"kernel": "FLASHMLA"}, False, id="another kernel"),
        pytest.param((78.0, 34.0), {"framework": "trtllm"}, False, id="another engine"),
        pytest.param((78.0, 34.0), {"variant": "kv=fp8"}, False, id="another variant"),
    ],
)
def test_a_release_whose_small_calls_take_many_launches_more_is_flagged_whole(
    least_us: tuple[float, float], changes: dict[str, Any], is_flagged: bool
) -> None:
    slow = _modules(least_us[0], framework_version="0.24.0", **changes)
    sound = _modules(least_us[1], framework_version="0.25.0")
    flagged = {"off_other_releases": len(slow)} if is_flagged else {}
    assert flagged == _names(_stored([*slow, *sound]))


def test_of_releases_that_differ_by_their_work_alone_none_is_flagged() -> None:
    slow = _modules(34.0, framework_version="0.24.0")
    for found in slow:
        found["latency_us_median"] += 9 * (found["latency_us_median"] - 34.0)
    assert {} == _names(_stored([*slow, *_modules(34.0, framework_version="0.25.0")]))


def test_collectives_that_the_host_launches_are_no_matter_of_releases() -> None:
    def exchanges(release: str, host_us: float) -> list[dict[str, Any]]:
        found = [_gather(2**power, framework_version=release) for power in range(10, 20)]
        for each in found:
            each["latency_us_median"] += host_us
        return found

    assert {} == _names(_stored([*exchanges("0.5.20", 100.0), *exchanges("0.5.10", 40.0)]))
