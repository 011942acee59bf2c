"""Nothing that is committed ties the project to one machine or one registry."""

from pathlib import Path

# Written in parts, so that this file does not name them itself.
_REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("registry", "yarnpkg", "com"),
        ("deb", "debian", "org"),
        ("download", "pytorch", "org"),
    )
)


def test_no_file_names_a_registry_host(repository_files: list[Path]) -> None:
    """Which registry or mirror to ask is the machine's own configuration."""
    assert _files_with(repository_files, _REGISTRY_HOSTS) == []


def test_no_file_holds_a_path_of_this_machine(
    repository: Path, repository_files: list[Path]
) -> None:
    folders = [folder for folder in (repository, Path.home()) if len(folder.parts) > 1]
    assert _files_with(repository_files, tuple(f"{folder}/" for folder in folders)) == []


def test_no_file_is_larger_than_a_mebibyte(repository_files: list[Path]) -> None:
    """Data sets do not belong into the repository."""
    limit_bytes = 2**20
    assert [str(p) for p in repository_files if p.stat().st_size > limit_bytes] == []


def _files_with(paths: list[Path], needles: tuple[str, ...]) -> list[str]:
    return [
        f"{path}: {needle}"
        for path in paths
        for needle in needles
        if needle in path.read_text(encoding="utf-8", errors="replace")
    ]
