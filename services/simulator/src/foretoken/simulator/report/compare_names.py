"""Names by which strategies of several searches can be told to be the same."""

from collections.abc import Mapping, Sequence

from foretoken.simulator.report.search_candidates import Row


def name_alike(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the rows of every search with names that tell the same of the cluster and the batch.

    A search names a device, a number of devices or a batch only where it varies them. What one
    search names, all do here.
    """
    told = {word for found in rows.values() for row in found for word in _told(row)}
    return {
        label: [{**row, "name": _tell(row, told)} for row in found] for label, found in rows.items()
    }


def _words(row: Row) -> dict[str, str]:
    """Return how a name tells each of what it may leave out; nothing of what has none."""
    words = {
        "device": "" if row["placement"] else str(row["device"]),
        "num_devices": f"{row['num_devices']:.0f} devices",
        "global_batch_size": f"gbs{row['global_batch_size']:.0f}",
    }
    return {axis: word for axis, word in words.items() if word}


def _told(row: Row) -> set[str]:
    padded = f" {row['name']} "
    return {axis for axis, word in _words(row).items() if f" {word} " in padded}


def _tell(row: Row, axes: set[str]) -> str:
    words, name = _words(row), f" {row['name']} "
    for axis in _told(row):
        name = name.replace(f" {words[axis]} ", " ", 1)
    parts = name.split()
    if "global_batch_size" in axes:
        after = next((n + 1 for n, part in enumerate(parts) if part.startswith("mbs")), len(parts))
        parts.insert(after, words["global_batch_size"])
    first = [words[axis] for axis in ("device", "num_devices") if axis in axes and axis in words]
    return " ".join([*first, *parts])
