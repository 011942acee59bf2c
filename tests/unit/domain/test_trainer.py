"""Trainer profiles: found by name, changed by rules, what is wrong named."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.capability import describe_values
from foretoken.domain.frameworks.trainer import TrainerSpec, all_trainers, find_trainer

_ROOT = Path(__file__).resolve().parents[3]


def test_a_rule_changes_its_profile_alone() -> None:
    changed = TrainerSpec(profile="plain", rules={"attention": "unfused"}).resolve()
    assert ("unfused", "flash") == (changed.attention, find_trainer("plain").attention)


def test_an_unknown_profile_names_its_key_and_the_nearest() -> None:
    with pytest.raises(UnknownPluginError) as caught:
        TrainerSpec(profile="megatron").resolve()
    message = caught.value.message
    assert message.startswith("trainer.profile: unknown trainer 'megatron'; did you mean megatron-")
    assert "megatron-core" in message


@pytest.mark.parametrize("rule", ["name", "framework", "versions", "source"])
def test_what_describes_a_profile_is_no_rule(rule: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TrainerSpec(rules={rule: "other"}).resolve()
    assert [f"trainer.rules.{rule}"] == [item.field for item in caught.value.violations]


def test_an_unknown_rule_names_the_nearest_first() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TrainerSpec(rules={"fuse_norm": "true"}).resolve()
    (found,) = caught.value.violations
    assert "trainer.rules.fuse_norm" == found.field
    assert found.description.startswith("unknown key; did you mean fuses_norm")


def test_the_documented_capabilities_are_those_of_the_profiles() -> None:
    text = (_ROOT / "docs" / "reference" / "trainers.md").read_text(encoding="utf-8")
    section = text.partition("## What each can do")[2].partition("\n## ")[0]
    aspects = ("pipeline_schedule", "zero_stage", "context_parallel", "", "weight_parallel")
    cells = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            name, *columns = (cell.strip() for cell in line.strip("|").split("|"))
            cells[name.strip("`")] = columns[:5]
    expected = {
        name: [
            describe_values(profile.can.has, aspect)
            if aspect
            else "no"
            if profile.can.has.get("ep") == (1,)
            else "yes"
            for aspect in aspects
        ]
        for name, profile in all_trainers().items()
    }
    assert expected == cells
