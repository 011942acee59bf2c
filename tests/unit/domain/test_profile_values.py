"""A profile printed whole: what it says is what the profile is, and each value has its file."""

import pytest

from foretoken.domain.frameworks.engine import all_engines
from foretoken.domain.frameworks.profile_values import ProfileFiles, ProfileValue
from foretoken.domain.frameworks.trainer import all_trainers

_PROFILES: dict[tuple[str, str], object] = {
    **{("engines", name): one for name, one in all_engines().items()},
    **{("trainers", name): one for name, one in all_trainers().items()},
}


def _values(folder: str, name: str) -> dict[str, ProfileValue]:
    profile = _PROFILES[folder, name]
    return {one.rule: one for one in ProfileFiles(folder, name).list_values(profile)}


@pytest.mark.parametrize(("folder", "name"), _PROFILES)
def test_every_profile_can_be_printed_with_the_files_that_set_its_values(
    folder: str, name: str
) -> None:
    sources = ProfileFiles(folder, name).list_sources()
    values = _values(folder, name)
    assert all(one.source for one in sources)
    assert {one.set_by for one in values.values()} <= {"", *(one.profile for one in sources)}
    # Experts lie together unless a file says that they need not.
    unsaid = {rule for rule, one in values.items() if rule.startswith("can") and not one.set_by}
    assert unsaid <= {"can: experts"}


def test_a_value_is_of_the_nearest_file_that_sets_it() -> None:
    values = _values("engines", "vllm-0.25")
    memory = values["memory_utilization_ratio"]
    assert (memory.value, memory.set_by) == (0.92, "vllm-0.20")
    assert values["versions"].set_by == "vllm-0.25"
    assert values["max_chunk_tokens"].set_by == ""
    assert "graphs take on average" in values["reserved_bytes"].comment
