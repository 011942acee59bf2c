"""What every command waits for: the program starts without the packages that few commands need."""

import subprocess
import sys

# Each takes a tenth of a second or more to import.
_HEAVY = (
    "aiohttp",
    "duckdb",
    "jinja2",
    "kubernetes",
    "lightgbm",
    "matplotlib",
    "numba",
    "prometheus_client",
    "ray",
    "scipy",
    "torch",
    "transformers",
)


def test_no_command_waits_for_what_only_some_need() -> None:
    code = (
        "import sys, foretoken.app.cli.main\n"
        f"print(*[name for name in {_HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [] == done.stdout.split()
