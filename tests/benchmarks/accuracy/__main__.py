"""Print how far the predictor is off per family of operators and way of leaving points out.

Run: `make bench-accuracy`, or with tests/benchmarks on the path
`python -m accuracy [DATA_FOLDER] [--quick] [--family NAME]... [--seeds N] [--json]`.
The table goes to stdout, progress to stderr. The same arguments give the same figures.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from accuracy import device_ratio, layer_sum, unseen_device
from accuracy.asking import Extent, ask_family
from accuracy.device_ratio import ask_ratios
from accuracy.family import FAMILIES
from accuracy.layer_sum import ask_layers
from accuracy.line import Line, lines_to_plain, write_listing
from accuracy.source import AICONFIGURATOR, Source, import_sources
from accuracy.unseen_device import ask_unseen

_DEFAULT_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
# Questions about all of AIConfigurator's devices together.
_BY_DEVICE = {unseen_device.NAME: ask_unseen, device_ratio.NAME: ask_ratios}
_NAMES = (*(family.name for family in FAMILIES), layer_sum.NAME, *_BY_DEVICE)


def main() -> None:
    """Read the arguments, ask, print."""
    options = _read_arguments()
    wanted = [name for name in _NAMES if not options.family or name in options.family]
    extent = Extent(
        num_seeds=options.seeds or (1 if options.quick else 3),
        max_tables=3 if options.quick else options.tables,
        max_points=1_500 if options.quick else options.points,
    )
    started_s = time.perf_counter()
    lines = list(_ask(wanted, options.data, extent))
    _say(f"{time.perf_counter() - started_s:.0f} s")
    text = json.dumps(lines_to_plain(lines), indent=1) if options.json else write_listing(lines)
    sys.stdout.write(f"{text}\n")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DEFAULT_DATA)
    parser.add_argument("--quick", action="store_true", help="one seed, few tables, few points")
    parser.add_argument("--family", action="append", choices=_NAMES, help="only this; repeatable")
    parser.add_argument("--seeds", type=int, help="draws; 3, or 1 with --quick")
    parser.add_argument("--tables", type=int, default=6, help="tables per family and draw")
    parser.add_argument("--points", type=int, default=6_000, help="points per table and draw")
    parser.add_argument("--json", action="store_true", help="JSON on stdout, in percent")
    return parser.parse_args()


def _ask(wanted: list[str], data: Path, extent: Extent) -> Iterator[Line]:
    families = [family for family in FAMILIES if family.name in wanted]
    _say("importing")
    with import_sources(data, _sources_of(wanted)) as measurements:
        for family in families:
            yield from ask_family(family, measurements, extent, _say)
        if layer_sum.NAME in wanted:
            yield from ask_layers(measurements, extent, _say)
        for name, ask_devices in _BY_DEVICE.items():
            if name in wanted:
                yield from ask_devices(measurements, extent, _say)


def _sources_of(wanted: list[str]) -> tuple[Source, ...]:
    needed = [family.source for family in FAMILIES if family.name in wanted]
    needed += layer_sum.SOURCES if layer_sum.NAME in wanted else ()
    needed += [AICONFIGURATOR] if _BY_DEVICE.keys() & set(wanted) else []
    return tuple({repr(source): source for source in needed}.values())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
