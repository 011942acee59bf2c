"""Profiles that extend others: what they take, what they change, and what is refused."""

from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.profile_folder import extend_contents
from foretoken.domain.plugins import scan_yaml

_OLD = {
    "block_size": 16,
    "by_device": [{"least_gib": 70}],
    "can": {
        "source": "its documents",
        "has": {"dcp": [1], "kv_tiers": ["none"]},
        "conflicts": [
            {"of": {"pp": ["more"], "lora": [True]}, "why": "old"},
            {"of": {"tp": ["more"], "dp": ["more"]}, "why": "kept"},
        ],
    },
}


def _extend(**own: Any) -> dict[str, Any]:
    extended = extend_contents({"new": {"extends": "old", **own}, "old": _OLD}, "engines")
    assert _OLD == extended["old"]
    return dict(extended["new"])


def test_what_a_profile_does_not_say_is_as_the_other_says() -> None:
    assert {"extends": "old", **_OLD} == _extend()


def test_a_key_takes_the_place_of_the_other_profiles() -> None:
    found = _extend(block_size=32, by_device=[])
    assert (32, [], _OLD["can"]) == (found["block_size"], found["by_device"], found["can"])


def test_aspects_are_changed_one_by_one_and_null_bounds_them_no_more() -> None:
    found = _extend(can={"has": {"dcp": None, "lora": [False]}})["can"]
    assert {"kv_tiers": ["none"], "lora": [False]} == found["has"]
    assert "its documents" == found["source"]


def test_a_conflict_takes_the_place_of_that_of_the_same_aspects() -> None:
    own = [
        {"of": {"lora": [True], "pp": [4]}, "why": "new"},
        {"of": {"ep": ["more"]}, "why": "added"},
    ]
    found = _extend(can={"conflicts": own})["can"]["conflicts"]
    assert ["new", "kept", "added"] == [conflict["why"] for conflict in found]


def test_a_conflict_of_no_values_is_lifted() -> None:
    own = [{"of": {"pp": [], "lora": []}, "why": "both go since this release"}]
    found = _extend(can={"conflicts": own})["can"]["conflicts"]
    assert ["kept"] == [conflict["why"] for conflict in found]


def test_profiles_may_extend_one_that_extends_another() -> None:
    contents: dict[str, dict[str, Any]]
    contents = {"c": {"extends": "b"}, "b": {"extends": "a", "y": 2}, "a": {"x": 1, "y": 1}}
    assert {"extends": "b", "x": 1, "y": 2} == extend_contents(contents, "engines")["c"]


@pytest.mark.parametrize(
    ("contents", "circle"),
    [
        ({"a": {"extends": "a"}}, "a extends a"),
        ({"c": {"extends": "a"}, "a": {"extends": "b"}, "b": {"extends": "a"}}, "a extends b"),
    ],
)
def test_a_circle_is_refused_and_named(contents: dict[str, Any], circle: str) -> None:
    with pytest.raises(InvalidRequestError, match=circle):
        extend_contents(contents, "engines")


def test_a_profile_that_there_is_not_is_refused_with_the_nearest() -> None:
    contents = {"vllm-0.19": {}, "vllm-0.20": {"extends": "vllm-0.1"}}
    with pytest.raises(UnknownPluginError, match=r"vllm-0\.20\.yaml: extends.*vllm-0\.19"):
        extend_contents(contents, "engines")


@pytest.mark.parametrize("folder", ["engines", "trainers"])
def test_a_file_says_nothing_that_the_profile_it_extends_says(folder: str) -> None:
    contents = dict(scan_yaml("foretoken.domain.frameworks", folder))
    extended = extend_contents(contents, folder)
    pairs = [
        (stem, content, extended[content["extends"]])
        for stem, content in contents.items()
        if "extends" in content
    ]
    assert pairs
    for stem, own, base in pairs:
        has, base_has = ({**side.get("can", {}).get("has", {})} for side in (own, base))
        again = [f"{stem}: {key}" for key in own if key != "can" and own[key] == base.get(key)]
        again += [f"{stem}: {key}" for key in has if has[key] == base_has.get(key)]
        assert [] == again
