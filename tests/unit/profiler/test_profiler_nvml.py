"""What is asked of NVML, on a library that answers what the test says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.profiler.timing.nvml import (
    NvmlDevice,
    descendants,
    find_by_uuid,
    other_process_count,
    throttle_names,
)
from foretoken.profiler.timing.watch import CudaWatch, Observation


class FakeNvml:
    """Answers questions from a table; a question that is not there is refused as NVML does."""

    class NVMLError(Exception):
        pass

    def __init__(self, answers: Mapping[str, Any], missing: frozenset[str] = frozenset()) -> None:
        self.answers = dict(answers)
        self.asked: list[tuple[Any, ...]] = []
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self._missing:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            if name not in self.answers:
                raise FakeNvml.NVMLError(name)
            found = self.answers[name]
            return found(*arguments) if callable(found) else found

        return answer


@dataclass(frozen=True)
class Process:
    pid: int


BUSY = {
    "nvmlDeviceGetPowerUsage": 612_500,
    "nvmlDeviceGetClockInfo": lambda _, clock: {1: 1755, 2: 2619}[clock],
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetComputeRunningProcesses": [],
}


def watch(answers: Mapping[str, Any]) -> CudaWatch:
    return CudaWatch(NvmlDevice(FakeNvml(answers), "gpu"), now_s=lambda: 0.0)


def observe(answers: Mapping[str, Any]) -> Observation:
    watching = watch(answers)
    watching.start()
    return watching.finish()


def test_readings_have_the_units_of_rows() -> None:
    reading = observe(BUSY).reading
    assert (reading.power_w, reading.clock_mhz, reading.temperature_c) == (612.5, 1755.0, 61.0)


def test_links_are_counted_that_are_up() -> None:
    """A board has fewer than NVML numbers; about the others it is asked in vain."""

    def state(_: str, link: int) -> int:
        if link > 11:
            raise FakeNvml.NVMLError(str(link))
        return int(link % 4 > 0)

    answers = {"nvmlDeviceGetNvLinkState": state}
    assert 9 == NvmlDevice(FakeNvml(answers), "gpu").nvlink_count()
    assert NvmlDevice(FakeNvml({}), "gpu").nvlink_count() is None


def test_a_power_cap_is_recorded_and_not_doubted() -> None:
    seen = observe(BUSY)
    assert (seen.reading.throttle, seen.flags) == ("power_cap", ())


@pytest.mark.parametrize(
    ("bits", "name"),
    [(0x8, "hw_slowdown"), (0x20, "thermal"), (0x40, "hw_thermal"), (0x80, "hw_power_brake")],
)
def test_a_slowdown_is_doubted(bits: int, name: str) -> None:
    seen = observe({**BUSY, "nvmlDeviceGetCurrentClocksEventReasons": bits})
    assert seen.reading.throttle == name
    assert seen.flags == (f"throttled: {name}",)


def test_what_held_the_clock_down_at_the_start_counts() -> None:
    """Cool again after the last sample is not cool throughout."""
    bits = iter([0x20, 0x4])
    seen = observe({**BUSY, "nvmlDeviceGetCurrentClocksEventReasons": lambda _: next(bits)})
    assert seen.reading.throttle == "power_cap,thermal"
    assert seen.flags == ("throttled: thermal",)


def test_idle_and_set_clocks_are_no_slowdowns() -> None:
    assert throttle_names(0x1 | 0x2 | 0x100) == ()


def test_a_board_that_answers_nothing_ends_no_run() -> None:
    seen = observe({})
    assert seen == Observation()
    assert NvmlDevice(FakeNvml({}), "gpu").describe() == {}
    assert watch({}).clock_mhz() is None


def test_an_old_binding_is_asked_by_the_former_names() -> None:
    renamed = frozenset({"nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"})
    answers = {
        "nvmlDeviceGetTemperature": 55,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x10,
    }
    device = NvmlDevice(FakeNvml(answers, missing=renamed), "gpu")
    assert (device.temperature_c(), device.throttle_reasons()) == (55.0, ("sync_boost",))


def test_description_is_short_strings() -> None:
    answers = {
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetMaxClockInfo": lambda _, clock: {1: 1980, 2: 2619}[clock],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlSystemGetDriverVersion": b"580.65.06",
    }
    assert NvmlDevice(FakeNvml(answers), "gpu").describe() == {
        "gpu_power_limit_w": "700",
        "gpu_clock_mhz_max": "1980",
        "gpu_memory_clock_mhz_max": "2619",
        "gpu_ecc": "on",
        "gpu_mig": "off",
        "gpu_persistence": "on",
        "driver": "580.65.06",
    }


def test_a_device_is_found_by_its_uuid_with_the_prefix_it_has() -> None:
    """torch leaves the prefix out; a number would be wrong under CUDA_VISIBLE_DEVICES."""

    def by_uuid(uuid: str) -> str:
        if uuid != "MIG-4711":
            raise FakeNvml.NVMLError(uuid)
        return "part"

    library = FakeNvml(
        {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": by_uuid,
            "nvmlDeviceIsMigDeviceHandle": 1,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "board",
            "nvmlDeviceGetPowerUsage": 300_000,
            "nvmlDeviceGetComputeRunningProcesses": [Process(7)],
        }
    )
    device = find_by_uuid("4711", library)
    assert device is not None
    assert (device.power_w(), device.process_ids()) == (300.0, (7,))
    assert ("nvmlDeviceGetPowerUsage", "board") in library.asked
    assert ("nvmlDeviceGetComputeRunningProcesses", "part") in library.asked


@pytest.mark.parametrize(
    ("uuid", "library"), [("4711", None), ("", FakeNvml({})), ("4711", FakeNvml({}))]
)
def test_without_binding_uuid_or_driver_there_is_nothing_to_ask(uuid: str, library: Any) -> None:
    assert find_by_uuid(uuid, library) is None


def test_other_processes_are_doubted() -> None:
    """None of three is this process by its number; one of them may be, seen from outside."""
    processes = [Process(2**22 + 1), Process(2**22 + 2), Process(2**22 + 3)]
    seen = observe({**BUSY, "nvmlDeviceGetComputeRunningProcesses": processes})
    (flag,) = seen.flags
    assert flag.startswith("shared_device: ")


def test_own_ranks_are_no_others() -> None:
    assert other_process_count([10, 11, 12], own=10, children=frozenset({11, 12})) == 0


def test_strangers_beside_the_own_process_count() -> None:
    assert other_process_count([10, 99, 98], own=10, children=frozenset({11})) == 2


def test_in_a_container_the_own_process_has_another_number() -> None:
    assert other_process_count([4001], own=10, children=frozenset()) == 0
    assert other_process_count([4001, 4002], own=10, children=frozenset()) == 1


@given(st.sets(st.integers(1, 50)), st.integers(1, 50), st.frozensets(st.integers(1, 50)))
def test_no_more_others_than_are_listed(
    listed: set[int], own: int, children: frozenset[int]
) -> None:
    assert 0 <= other_process_count(listed, own, children) <= len(listed)


def test_descendants_are_children_and_their_children(tmp_path: Path) -> None:
    for pid, parent, name in ((2, 1, "a"), (3, 2, "b) (c"), (4, 3, "d"), (5, 9, "e")):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} 0 0\n")
    (tmp_path / "6").mkdir()
    assert descendants(2, tmp_path) == {3, 4}
