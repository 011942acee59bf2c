"""Generated files stay in the folder that was asked for."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.launch.generated_file import write_files


def test_a_name_that_climbs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = {"run.sh": "echo", "../climbed.sh": "echo"}
    with pytest.raises(InvalidRequestError, match=r"folder: .* leads out of its folder"):
        write_files(tmp_path / "out", files)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]
