"""Limits on latencies as people write them: `ttft p99 2s`, `itl p99.9 200ms`, `e2e mean 20s`."""

import re
from collections.abc import Sequence

from foretoken.app.cli.duration import parse_ms
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.search import LatencyLimit

_OPTION = "--limit"
_METRICS = {
    **{name: name for name in LIMITED},
    **{name.removesuffix("_ms"): name for name in LIMITED},
    "e2e": "e2e_latency_ms",
}
_SHORT_NAMES = ("ttft", "tpot", "itl", "e2e")
_PERCENTILE = re.compile(r"p(\d+\.?\d*)")
_HIGHEST_PERCENTILE = 100


def parse_limit(text: str) -> LatencyLimit:
    """Return the limit that `METRIC STATISTIC TIME` names; `<=` or `<` may stand before the time.

    Raises:
        InvalidRequestError: it is written otherwise, or names what there is not.

    """
    words = text.lower().replace("<=", " ").replace("<", " ").split()
    if len(words) == 4:  # noqa: PLR2004 - "2 s", the unit apart
        words[2:] = ["".join(words[2:])]
    if len(words) != 3:  # noqa: PLR2004 - metric, statistic, time
        raise _error(text, "write METRIC STATISTIC TIME, such as `ttft p99 2s`")
    metric, statistic, time = words
    if metric not in _METRICS:
        raise _error(text, f"{metric!r} is none of {', '.join(_SHORT_NAMES)}")
    return LatencyLimit(
        metric=_METRICS[metric],
        percentile=_parse_statistic(text, statistic),
        limit_ms=parse_ms(time, _OPTION),
    )


def parse_limits(_: str, texts: Sequence[str]) -> tuple[LatencyLimit, ...]:
    """Return the limits of the texts of an option, in order.

    Raises:
        InvalidRequestError: one cannot be read.

    """
    return tuple(parse_limit(text) for text in texts)


def _parse_statistic(text: str, statistic: str) -> float:
    if statistic in {"mean", "avg", "average"}:
        return 0.0
    matched = _PERCENTILE.fullmatch("p50" if statistic == "median" else statistic)
    percentile = float(matched[1]) if matched else 0.0
    if not 0 < percentile <= _HIGHEST_PERCENTILE:
        raise _error(text, f"{statistic!r} is no statistic: write mean, p50, p99 or p99.9")
    return percentile


def _error(text: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError.of_field(_OPTION, f"{text!r}: {problem}")
