"""The engine profiles: each says its rules and their source, and every version has one."""

from dataclasses import astuple, replace
from statistics import NormalDist

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import (
    EngineSpec,
    all_engines,
    find_engine,
    find_engine_of_day,
)
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.hardware.device import all_devices, find_device

_VLLM_VERSIONS = [f"0.{minor}" for minor in range(14, 32)]


@pytest.mark.parametrize(
    ("profile", "max_num_seqs", "last"),
    [
        # Between two sizes the largest batch that can come has a graph of its own.
        ("trtllm-1.0", 13, (8, 13)),
        ("trtllm-1.0", 16, (8, 16)),
        ("trtllm-1.0", 2048, (1024, 2048)),
        # Twice 13 tokens at most, of which 24 is the last size.
        ("vllm-0.19", 13, (16, 24)),
    ],
)
def test_the_largest_batch_is_captured_where_engines_say_so(
    profile: str, max_num_seqs: int, last: tuple[int, int]
) -> None:
    found = EngineSpec(profile=profile, max_num_seqs=max_num_seqs).resolve(find_device("b200"))
    assert last == found.graph_capture_sizes[-2:]


@pytest.mark.parametrize("name", sorted(all_engines()))
def test_every_profile_says_its_source(name: str) -> None:
    """A rule without a source cannot be checked."""
    assert len(find_engine(name).source) > 40


@pytest.mark.parametrize("name", sorted(all_engines()))
def test_every_profile_resolves_alone(name: str) -> None:
    """A scenario that names a profile and nothing else has its rules."""
    assert find_engine(name).scheduler == EngineSpec(profile=name).resolve().scheduler


@pytest.mark.parametrize("version", [*_VLLM_VERSIONS, "0.14.1", "0.19.0", "0.22.1"])
def test_vllm_versions_are_known(version: str) -> None:
    """Every release from 0.14 to 0.31 has the v1 rules with asynchronous scheduling."""
    profile = find_engine(f"vllm-{version}")
    assert ("chunked_prefill", True) == (profile.scheduler, profile.has_async_scheduling)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm-0.6.6", ("vllm_v0", "prompt", 0.9)),
        ("vllm-0.9.2", ("chunked_prefill", "chunk", 0.9)),
        ("vllm-0.12.0", ("chunked_prefill", "chunk", 0.9)),
        ("vllm-0.18", ("chunked_prefill", "chunk", 0.9)),
        ("vllm-0.19", ("chunked_prefill", "prompt", 0.9)),
        ("vllm-0.20", ("chunked_prefill", "prompt", 0.92)),
        ("sglang-0.5.9", ("sglang", "share", 0.88)),
        ("trtllm-1.1.0", ("trtllm", "answer", 0.9)),
    ],
)
def test_rules_change_with_the_version(name: str, expected: tuple[str, str, float]) -> None:
    """Admission and memory follow the release that is named."""
    profile = find_engine(name)
    found = (profile.scheduler, profile.admission, profile.memory_utilization_ratio)
    assert expected == found


def test_a_release_with_a_profile_of_its_own_is_not_of_its_series() -> None:
    """Where there is one for 0.5.20, others of 0.5 are of the profile of the series."""
    found = {name: find_engine(name).software for name in ("sglang-0.5.20", "sglang-0.5.9")}
    assert {"sglang-0.5.20": "sglang 0.5.20", "sglang-0.5.9": "sglang 0.5.9"} == found


@pytest.mark.parametrize(
    ("profile", "device", "tp", "expected"),
    [
        ("vllm-0.26", "b200", 1, (1024, 8192, 0.92, 512)),
        ("vllm-0.31", "b200", 1, (1024, 16384, 0.92, 1024)),
        ("vllm-0.31", "mi300x", 1, (1024, 16384, 0.92, 512)),
        ("vllm-0.31", "h200_sxm", 1, (1024, 8192, 0.92, 512)),
        # It is named in the source: larger steps are slower on it.
        ("vllm-0.31", "a100_sxm_80", 1, (256, 2048, 0.92, 512)),
        ("vllm-0.31", "l4", 1, (256, 2048, 0.92, 512)),
        ("sglang-0.5.20", "h200_sxm", 1, (2048, 8192, 0.903, 8192)),
        ("sglang-0.5.20", "h200_sxm", 4, (2048, 8192, 0.897, 8192)),
        ("sglang-0.5.20", "l4", 1, (2048, 4096, 0.684, 4096)),
        # What says nothing of devices is the same on all.
        ("vllm-0.18", "b200", 1, (256, 2048, 0.9, 512)),
    ],
)
def test_an_engine_chooses_its_limits_by_its_device(
    profile: str, device: str, tp: int, expected: tuple[int, int, float, int]
) -> None:
    """A server's limits on tokens and requests, its share of the memory, its largest graph."""
    found = EngineSpec(profile=profile).resolve(find_device(device), tp)
    assert expected == (
        found.max_num_seqs,
        found.max_num_batched_tokens,
        found.memory_utilization_ratio,
        found.graph_capture_sizes[-1],
    )


def test_what_somebody_sets_is_not_chosen_by_the_device() -> None:
    spec = EngineSpec(profile="vllm-0.31", max_num_seqs=64, rules={"graph_capture_sizes": "[8]"})
    found = spec.resolve(find_device("b200"))
    assert (64, (8,)) == (found.max_num_seqs, found.graph_capture_sizes)


@pytest.mark.parametrize("name", sorted(all_engines()))
def test_every_profile_resolves_on_every_device(name: str) -> None:
    for device in all_devices().values():
        assert find_engine(name).scheduler == EngineSpec(profile=name).resolve(device).scheduler


def test_asynchronous_scheduling_came_with_0_14() -> None:
    """The release before it waits for a step before it schedules the next."""
    assert not find_engine("vllm-0.13").has_async_scheduling


def test_engines_of_papers_need_no_version() -> None:
    """Orca, Sarathi, FasterTransformer and LightLLM are named alone."""
    names = ("orca", "sarathi", "faster-transformer", "lightllm")
    expected = ["orca", "sarathi", "static_batch", "lightllm"]
    assert expected == [find_engine(name).scheduler for name in names]


def test_a_version_no_profile_covers_is_an_error() -> None:
    """A release that nobody looked at is not silently taken for another."""
    with pytest.raises(UnknownPluginError):
        find_engine("vllm-7.0")


_TIER = KvTier(name="cpu", capacity_bytes=2**30, read_bytes_per_s=25e9, write_bytes_per_s=25e9)


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (EngineSpec(profile="vllm-v0", rules={"preemption": "swap"}), "needs a tier"),
        (EngineSpec(kv_tiers=(_TIER, replace(_TIER, is_shared=True))), "one that is_shared"),
    ],
    ids=["swapping to nowhere", "tiers in part shared"],
)
def test_tiers_and_rules_must_go_together(engine: EngineSpec, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        engine.resolve()


def test_tiers_are_read_from_a_text() -> None:
    engine = EngineSpec(kv_tiers=(_TIER,))
    assert engine == engine.with_tiers("")
    assert () == engine.with_tiers("none").kv_tiers
    host, disk = engine.with_tiers("cpu:64e9:25e9+disk:1e12:5e9").kv_tiers
    assert ("cpu", 64 * 10**9, 25e9, 25e9, False) == astuple(host)
    assert ("disk", 10**12, 5e9, 5e9, False) == astuple(disk)
    (store,) = engine.with_tiers("store:2e12:25e9:shared").kv_tiers
    assert store.is_shared


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:64e9", "cpu:much:25e9", "cpu:nan:1", "a:1:1:2", "a:0:1"]
)
def test_a_text_that_says_no_tier_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"kv_tiers|capacity_bytes"):
        EngineSpec().with_tiers(text)


def test_a_tier_serves_a_cache_or_swapping() -> None:
    assert EngineSpec(profile="vllm-0.19", kv_tiers=(_TIER,)).resolve().has_prefix_caching
    swapping = EngineSpec(profile="vllm-v0", rules={"preemption": "swap"}, kv_tiers=(_TIER,))
    assert swapping.resolve().preemption == "swap"


@pytest.mark.parametrize(
    ("profile", "software"),
    [
        ("vllm-0.19", "vllm 0.19"),
        ("vllm-0.14", "vllm 0.14"),
        ("vllm-0.16", "vllm 0.16"),
        ("vllm-0.15", "vllm 0.15-0.16"),
        ("vllm-v0", "vllm 0.2-0.7"),
        ("trtllm-1.0", "trtllm 0.20-1.3"),
        ("plain", ""),
        ("sarathi", ""),
    ],
)
def test_a_profile_with_versions_is_of_a_software(profile: str, software: str) -> None:
    assert software == find_engine(profile).software


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("none", {}),
        ("two_batch_tokens=2", {"two_batch_tokens": "2"}),
        (
            "graph_mode=full+piecewise+block_size=32",
            {"graph_mode": "full+piecewise", "block_size": "32"},
        ),
    ],
)
def test_rules_in_a_text_may_have_a_plus_in_their_values(
    text: str, expected: dict[str, str]
) -> None:
    engine = EngineSpec(profile="vllm-0.19").with_rules(text)
    assert engine.rules == expected
    resolved = engine.resolve()
    if "graph_mode" in expected:
        assert ("full+piecewise", 32) == (resolved.graph_mode, resolved.block_size)


@pytest.mark.parametrize("text", ["block_size", "block_size=", "dcp+block_size=32"])
def test_a_rule_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="write rule=value"):
        EngineSpec().with_rules(text)


def test_a_step_with_prompts_waits_for_its_launches() -> None:
    """690 kernels of gpt-oss and 2,108 of DeepSeek-V3 keep the host as long as others measured."""
    for profile in (find_engine("trtllm-1.0"), find_engine("trtllm-1.3")):
        layer_us = 10 * profile.launch_us + profile.expert_call_us["other"]
        outside_us = profile.eager_us + 6 * profile.launch_us
        call_ms = (36 * layer_us + outside_us) / 1000
        assert pytest.approx((30.0409 + 30.3245) / 2, rel=0.01) == call_ms
        # What module timers say of the parts takes that much longer with them.
        timed_ratio = (31.116 + 30.632) / 2 / call_ms
        experts_ms = 36 * (profile.launch_us + profile.expert_call_us["other"]) / 1000
        assert pytest.approx((9.32 + 9.138) / 2, rel=0.01) == timed_ratio * experts_ms
        assert pytest.approx((6.728 + 6.892) / 2, rel=0.01) == timed_ratio * outside_us / 1000
        two_ranks_ms = (33.44 + 31.40 + 31.75) / 3
        late_ratio = profile.launch_spread_ratio * NormalDist().inv_cdf(1.625 / 2.25)
        assert pytest.approx(two_ranks_ms, rel=0.01) == call_ms * (1 + late_ratio)
        tokenizer_ms = profile.frontend_us_per_token * 0.9 * 1024 / 1000
        measured_ms = 2.6915 + 2.0356 + 5.2418
        assert pytest.approx(measured_ms, abs=0.01) == profile.frontend_ms + tokenizer_ms
    assert pytest.approx(82.64, rel=0.01) == 2108 * find_engine("sglang-0.5").launch_us / 1000


def test_a_step_in_pieces_waits_for_the_launches_of_its_layers() -> None:
    """28 layers of Qwen3-0.6B, which a device is done with sooner, and three launches each."""
    for profile in (find_engine("vllm-0.11"), find_engine("vllm-0.28")):
        assert pytest.approx(3.64, rel=0.01) == 28 * profile.piece_us / 1000
    sglang = find_engine("sglang-0.5.20")
    assert pytest.approx(3 * sglang.launch_us) == sglang.piece_us


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sglang-0.5.8.post1", "sglang 0.5.8.post1"),
        ("trtllm-1.2.0rc6.post2", "trtllm 1.2.0rc6.post2"),
        ("vllm-0.19.0.dev5", "vllm 0.19.0.dev5"),
    ],
)
def test_candidates_and_posts_are_of_their_release(name: str, expected: str) -> None:
    """What PyPA calls a version is one; a nightly build's name is none."""
    assert expected == find_engine(name).software
    with pytest.raises(UnknownPluginError):
        find_engine("sglang-nightly-dev")


@pytest.mark.parametrize(
    ("engine", "day", "expected"),
    [
        ("vllm", "2025-10-29", "vllm-0.11"),
        ("vllm", "2025-10-03", "vllm-0.8"),
        ("trtllm", "2025-10-29", "trtllm-1.0"),
        ("sglang", "2026-10-01", "sglang-0.5.20"),
        ("vllm", "", "vllm-0.28"),
        ("vllm", "2020-01-01", ""),
        ("plain", "2026-10-01", ""),
    ],
)
def test_a_day_has_the_last_release_by_then(engine: str, day: str, expected: str) -> None:
    """Without a day it is the last of all; what is no software has none."""
    found = find_engine_of_day(engine, day)
    assert expected == (found.name if found else "")


def test_every_profile_of_a_software_says_when_it_came_out() -> None:
    """In the order of versions."""
    for engine in ("vllm", "sglang", "trtllm"):
        profiles = [each for each in all_engines().values() if each.engine == engine]
        days = [each.released for each in sorted(profiles, key=lambda each: _first(each.versions))]
        assert all(days)
        assert days == sorted(days)


def _first(versions: str) -> tuple[int, ...]:
    return tuple(map(int, versions.partition("-")[0].split(".")))


def test_a_host_that_takes_longer_takes_longer_for_all_but_what_is_set() -> None:
    """Of Grace it is the device's file that says how much."""
    plain = EngineSpec(profile="sglang-0.5").resolve()
    rules = {"host_time_ratio": "2", "launch_us": "50"}
    slow = EngineSpec(profile="sglang-0.5", rules=rules).resolve(find_device("h200_sxm"))
    assert (50, 2 * plain.frontend_ms) == (slow.launch_us, slow.frontend_ms)
    assert {kind: 2 * us for kind, us in plain.compile_us.items()} == slow.compile_us
    on_x86 = EngineSpec(profile="sglang-0.5").resolve(find_device("b200"))
    assert plain.launch_us == on_x86.launch_us
    grace = EngineSpec(profile="trtllm-1.3").resolve(find_device("gb200"))
    assert pytest.approx(197.4 / 181.7, rel=0.01) == grace.launch_us / 44.8
    assert pytest.approx(197.4 / 181.7, rel=0.01) == grace.expert_call_us["other"] / 206
