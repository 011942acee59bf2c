"""What a run says of its machine."""

from foretoken.domain.hardware.device import find_device
from foretoken.profiler.environment import (
    cpu_clock_mhz,
    describe_environment,
    free_memory_bytes,
    last_cache_bytes,
)
from foretoken.profiler.local_device import LocalDevice, find_local_device

CPU = find_local_device("cpu")


def test_environment_is_short_strings_without_secrets() -> None:
    described = describe_environment(CPU)
    assert set(described) - {"cpu_governor"} == {
        "framework",
        "framework_version",
        "python",
        "platform",
        "cpu",
        "cpu_capability",
        "num_cpus",
        "num_threads",
        "device",
        "num_devices",
    }
    assert all(isinstance(value, str) and len(value) < 200 for value in described.values())


def test_clock_of_a_cpu_is_plausible_where_the_system_tells_one() -> None:
    clock_mhz = cpu_clock_mhz()
    assert clock_mhz is None or 100.0 < clock_mhz < 10_000.0


def test_some_memory_is_free_and_the_cache_has_a_plausible_size() -> None:
    assert free_memory_bytes(CPU) > 2**20
    assert 2**17 < last_cache_bytes(CPU, find_device("cpu")) < 2**32


def test_cache_of_a_gpu_is_that_of_its_device_file() -> None:
    gpu = LocalDevice(name="a30", torch_name="cuda:0")
    expected = find_device("a30").l2_cache_bytes
    assert expected == last_cache_bytes(gpu, find_device("a30"))
