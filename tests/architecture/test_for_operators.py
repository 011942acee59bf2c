"""What is promised to operators names tests and benchmarks that there are."""

import re
from pathlib import Path


def test_every_promise_names_what_holds_it(repository: Path) -> None:
    text = (repository / "docs/reference/for-operators.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if "how it is" not in row[1]]
    assert len(promises) > 20
    for promise, tested, _ in promises:
        named = re.findall(r"`(tests/[\w/.]+\.py)`", tested)
        assert named, promise
        assert [] == [path for path in named if not (repository / path).is_file()], promise


def test_the_figures_of_the_repository_itself_are_right(repository: Path) -> None:
    text = (repository / "docs/reference/for-operators.md").read_text(encoding="utf-8")
    alerts = (repository / "deploy/k8s/components/alerts/alerts.yaml").read_text(encoding="utf-8")
    names = re.findall(r"- alert: (\w+)", alerts)
    assert f"{len(set(names))} alerts, {len(names)} rules" in text
    role = "deploy/k8s/components/profiler-controller/role.yaml"
    rights = re.findall(
        r"resources: \[(.*)\]\n    verbs: \[(.*)\]", (repository / role).read_text()
    )
    count = sum(len(r.split(",")) * len(v.split(",")) for r, v in rights)
    assert f"{count} rights, each taken away in turn" in text
