"""The first minute of a new user: what questions take in a new home, and with NVIDIA's tables.

Every command is a process of its own, as a user starts it: CPU seconds of it and all its workers,
seconds of wall clock, and the memory of its largest process. Prints what the starter's answers rest
on, how wide their intervals are compared with those from all tables, the nearest measured run, and
what importing, keeping, training and asking the whole wheel takes.

    python tests/benchmarks/bench_first_minute.py [--wheel FILE] [--systems h200_sxm,...] [--train]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "deepseek-v3")
_TARGETS = {"isl": 4000, "osl": 1000, "ttft": "2s", "tpot": "30ms"}
_QUESTION = tuple(f"--{name}={value}" for name, value in _TARGETS.items())
_TRAINING = ("simulate", "training", str(_ROOT / "docs/examples/training-llama-3-70b.yaml"))
_GEMM = ("predict", "gemm", "m=1024", "n=14336", "k=4096", "dtype=bf16", "--device", "h200_sxm")
_MB = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What a command took, and what it printed."""

    cpu_s: float
    wall_s: float
    peak_mb: float
    output: str

    @property
    def figures(self) -> str:
        """As cells of a table."""
        return f"{self.cpu_s:.1f} | {self.wall_s:.1f} | {self.peak_mb:.0f}"


def main() -> int:
    """Ask, import and ask again."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="the wheel with NVIDIA's tables")
    parser.add_argument("--systems", default="", help="of the wheel; all where not given")
    parser.add_argument("--train", action="store_true", help="train all series, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starter = Path(folder) / "starter"
        print("A new home, nothing imported:\n")
        answers = _ask_all(starter)
        _ask_others(starter)
        if options.wheel is None:
            print("\nNVIDIA's tables are not at hand (--wheel): nothing to compare with")
            return 0
        whole = Path(folder) / "whole"
        print(
            "\nNVIDIA's tables:\n\n| | CPU s | wall s | most MB of a process | on disk |\n"
            "|---|---|---|---|---|"
        )
        systems = ("--systems", options.systems) if options.systems else ()
        _report(
            "install",
            _run(whole, "catalog", "install", "nvidia", "--wheel", str(options.wheel), *systems),
            whole,
        )
        if options.train:
            _report("train all", _run(whole, "train"), whole)
        print("\nThe same questions with these tables:\n")
        others = _ask_all(whole)
        _ask_others(whole)
        print(
            f"\nHome after all questions: {_size_mb(whole):.0f} MB,"
            f" models {_size_mb(whole / 'predictor'):.0f} MB"
        )
        print(
            "\nIntervals of the starter in widths of those from these tables: of each one's best,"
            " and the median of the layouts that both have"
        )
        for model in _MODELS:
            print(f"  {model}: {_compare(answers[model], others[model])}")
    return 0


@dataclass(frozen=True, slots=True)
class Widths:
    """The interval of every layout of a search in parts of its answer, and which is best."""

    best: str
    by_layout: dict[str, float]


def _compare(own: Widths, other: Widths) -> str:
    ratios = [
        width / other.by_layout[name]
        for name, width in own.by_layout.items()
        if other.by_layout.get(name)
    ]
    of_best = own.by_layout[own.best] / other.by_layout[other.best]
    note = "" if own.best == other.best else " (of different layouts)"
    return f"{of_best:.2f}{note}, {statistics.median(ratios):.2f} of {len(ratios):,}"


def _find_widths(found: dict[str, Any]) -> Widths:
    columns = found["candidates"]
    names = ("output_throughput_tps_per_gpu", "tps_per_gpu_low", "tps_per_gpu_high")
    rows = zip(columns["name"], *(columns[name] for name in names), strict=True)
    return Widths(found["best"], {name: (high - low) / tps for name, tps, low, high in rows if tps})


def _ask_all(home: Path) -> dict[str, Widths]:
    """Ask the five searches; return the widths of the intervals of each."""
    print(
        "| best deployment of | CPU s | wall s | most MB of a process | again, CPU s |"
        " output tokens/s/GPU | 90 % interval | rests on | nearest measured run |\n"
        f"|{'---|' * 9}"
    )
    widths = {}
    for model in _MODELS:
        argv = (
            "--output",
            "json",
            "search",
            "serving",
            "--model",
            model,
            "--device",
            "h200_sxm",
            "--gpus",
            "8",
            *_QUESTION,
        )
        first, again = _run(home, *argv), _run(home, *argv)
        found = json.loads(first.output)
        columns, row = found["candidates"], found["candidates"]["name"].index(found["best"])
        value, low, high = (
            columns[name][row]
            for name in ("output_throughput_tps_per_gpu", "tps_per_gpu_low", "tps_per_gpu_high")
        )
        widths[model] = _find_widths(found)
        print(
            f"| {model}: {found['best']} | {first.figures} | {again.cpu_s:.1f} | {value:,.0f} |"
            f" {low:,.0f} to {high:,.0f} | {_basis(found)} | {_nearest(found)} |",
            flush=True,
        )
    return widths


def _basis(found: dict[str, Any]) -> str:
    ratios = found["echo"]["time_ratio_by_provenance"]
    return ", ".join(f"{name} {ratio:.0%}" for name, ratio in ratios.items() if ratio >= 0.005)


def _nearest(found: dict[str, Any]) -> str:
    remarks = [each for each in found["echo"]["remarks"] if each.startswith("nearest measured")]
    return remarks[0].partition(": ")[2] if remarks else "-"


def _ask_others(home: Path) -> None:
    print("\n| | CPU s | wall s | most MB of a process | again, CPU s |\n|---|---|---|---|---|")
    for name, argv in (
        ("training step, Llama-3-70B on 1,024 H100", _TRAINING),
        ("one GEMM", _GEMM),
    ):
        first, again = _run(home, *argv), _run(home, *argv)
        print(
            f"| {name} | {first.figures} | {again.cpu_s:.1f}, {again.peak_mb:.0f} MB |", flush=True
        )


def _report(name: str, run: Run, home: Path) -> None:
    print(f"| {name} | {run.figures} | {_size_mb(home):.0f} MB |", flush=True)


def _run(home: Path, *argv: str) -> Run:
    """Run a command of the program on a home."""
    command: Sequence[str] = (sys.executable, "-m", "foretoken.app", "--home", str(home), *argv)
    begun_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in {0, 3}:
            raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
        output.seek(0)
        return Run(
            cpu_s=used.ru_utime + used.ru_stime,
            wall_s=time.monotonic() - begun_s,
            peak_mb=used.ru_maxrss * 1024 / _MB,
            output=output.read(),
        )


def _size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / _MB


if __name__ == "__main__":
    raise SystemExit(main())
