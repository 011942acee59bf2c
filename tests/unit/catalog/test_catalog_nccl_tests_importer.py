"""Logs of nccl-tests, of any version, become rows of the collectives."""

from pathlib import Path

import pytest
from import_plans import list_rows

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError

_GPU = "NVIDIA H100 80GB HBM3"
_SETTINGS = (
    "# nThread 1 nGpus 8 minBytes 1024 maxBytes 4096 step: 4(factor) warmup iters: 5 iters: 20"
    " agg iters: {agg} validation: 1 graph: {graph}"
)
_HEADER = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"""  # noqa: E501
_FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 3.14"
_ROWS = (
    "1024   256   float   sum   -1   21.50   0.05   0.08   0   20.25   0.05   0.09   0",
    "4096  1024   float   sum   -1   12345   0.33   0.58   0   24.75   0.17   0.29   0",
)
_PER_ITERATION = "time algbw busbw #wrong i_min i_max i_p99 i_cv%"
_LIMITS = "0 20.0 30.0 29.0 5.0"
_NAMES = ("message_bytes", "devices_per_node", "num_nodes")


def _ranks(hosts: str = "a" * 8, gpu: str = _GPU, group: str = "Group  0 ") -> str:
    return "\n".join(
        f"#  Rank {rank:2} {group}Pid {100 + rank:6} on {host:>10} device {rank:2} [0x{rank:02x}]"
        f" {gpu}"
        for rank, host in enumerate(hosts)
    )


def _log(*rows: str, ranks: str = "", header: str = _HEADER, agg: int = 1, graph: int = 0) -> str:
    settings = _SETTINGS.format(agg=agg, graph=graph)
    parts = (settings, "#\n# Using devices", ranks or _ranks(), header, *rows, _FOOTER)
    return "\n".join(parts) + "\n"


def _write(folder: Path, text: str, name: str = "all_reduce_perf.log") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _read(path: Path, *, options: dict[str, str] | None = None, **changes: str) -> ImportPlan:
    request = ImportRequest(path=path, options=options or {}, **changes)
    return find_importer("nccl_tests").read(request)


def test_a_line_is_an_out_of_place_row_and_an_in_place_row(tmp_path: Path) -> None:
    _write(tmp_path, _log(*_ROWS))
    rows = list_rows(_read(tmp_path))
    expected = [
        (1024, 21.5, None, 16),
        (4096, 12345.0, None, 17),
        (1024, 20.25, "buffers=in_place", 16),
        (4096, 24.75, "buffers=in_place", 17),
    ]
    assert expected == [
        (
            row["dims"]["message_bytes"],
            row["latency_us_median"],
            row["variant"],
            row["source_row"],
        )
        for row in rows
    ]
    names = ("operator", "dtype", "device", "topology", "framework", "num_samples", "source_file")
    common = ("all_reduce", "fp32", "h100_sxm", "h100_dgx", "nccl", 20, "all_reduce_perf.log")
    assert {common} == {tuple(row[name] for name in names) for row in rows}


@pytest.mark.parametrize(
    ("program", "operator", "variant"),
    [
        ("all_reduce", "all_reduce", None),
        ("all_gather", "all_gather", None),
        ("reduce_scatter", "reduce_scatter", None),
        ("alltoall", "all_to_all", None),
        ("sendrecv", "send_recv", "pattern=ring"),
        ("broadcast", "broadcast", None),
    ],
)
def test_the_program_says_which_operator_ran(
    program: str, operator: str, variant: str | None, tmp_path: Path
) -> None:
    starting = "# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22907\n"
    starting += f"# Collective test starting: {program}_perf\n"
    _write(tmp_path, starting + _log(_ROWS[0]), "run.txt")
    first = list_rows(_read(tmp_path))[0]
    assert (operator, variant, "2.29.7") == (
        first["operator"],
        first["variant"],
        first["framework_version"],
    )


@pytest.mark.parametrize(
    ("hosts", "group"), [("aaaabbbb", (4, 2)), ("abcdefgh", (1, 8)), ("aabb", (2, 2))]
)
def test_nodes_are_the_distinct_hosts(hosts: str, group: tuple[int, int], tmp_path: Path) -> None:
    _write(tmp_path, _log(_ROWS[0], ranks=_ranks(hosts)))
    dims = list_rows(_read(tmp_path))[0]["dims"]
    assert (1024, *group) == tuple(dims[name] for name in _NAMES)


def test_groups_side_by_side_are_a_variant(tmp_path: Path) -> None:
    halves = (
        _ranks("aaaa")
        + "\n"
        + "\n".join(
            f"#  Rank  {rank} Group  1 Pid 9 on b device 0 [0x00] {_GPU}" for rank in (4, 5, 6, 7)
        )
    )
    _write(tmp_path, _log(_ROWS[0], ranks=halves))
    first = list_rows(_read(tmp_path))[0]
    assert ((4, 1), "groups=2") == (
        (first["dims"]["devices_per_node"], first["dims"]["num_nodes"]),
        first["variant"],
    )


def test_what_the_plain_case_leaves_open_is_in_the_variant(tmp_path: Path) -> None:
    row = "1024   512    half   max   -1   21.50   0.05   0.08   0   20.25   0.05   0.09   0"
    _write(tmp_path, _log(row, agg=4, graph=2))
    rows = list_rows(_read(tmp_path))
    variants = [
        "agg_iters=4;graph=true;redop=max",
        "agg_iters=4;buffers=in_place;graph=true;redop=max",
    ]
    assert variants == [row["variant"] for row in rows]
    assert {"fp16"} == {row["dtype"] for row in rows}


def test_wrong_results_are_failed_rows(tmp_path: Path) -> None:
    row = "1024   256   float   sum   -1   21.50   0.05   0.08   7   20.25   0.05   0.09   0"
    _write(tmp_path, _log(row))
    names = ("status", "status_reason", "latency_us_median")
    found = [tuple(row[name] for name in names) for row in list_rows(_read(tmp_path))]
    assert [("failed", "7 wrong values", None), ("ok", None, 20.25)] == found


def test_results_that_were_not_compared_are_kept(tmp_path: Path) -> None:
    row = "1024   256   float   sum   -1   21.50   0.05   0.08   N/A   20.25   0.05   0.09   N/A"
    _write(tmp_path, _log(row))
    assert ["ok", "ok"] == [row["status"] for row in list_rows(_read(tmp_path))]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        # Before 2.12: no root, the largest error in place of wrong values.
        (
            "size count type redop time algbw busbw error time algbw busbw error",
            "1024 256 float sum 21.50 0.05 0.08 4e-07 20.25 0.05 0.09 0e+00",
        ),
        # An all-gather of those days has no redop either, an all-to-all a blank one.
        (
            "size count type time algbw busbw error time algbw busbw error",
            "1024 256 float 21.50 0.05 0.08 0e+00 20.25 0.05 0.09 0e+00",
        ),
        (
            "size count type redop time algbw busbw error time algbw busbw error",
            "1024 256 float 21.50 0.05 0.08 0e+00 20.25 0.05 0.09 N/A",
        ),
        # 2.17 with times of each iteration and time stamps.
        (
            f"size count type redop root {_PER_ITERATION} {_PER_ITERATION} timestamp",
            f"1024 256 float none -1 21.5 1 2 {_LIMITS} 20.25 1 2 {_LIMITS} 2026-01-02 03:04:05",
        ),
    ],
)
def test_columns_of_other_versions_are_understood(columns: str, row: str, tmp_path: Path) -> None:
    _write(tmp_path, _log(row, ranks=_ranks(group=""), header=f"# {columns}"))
    assert [21.5, 20.25] == [row["latency_us_median"] for row in list_rows(_read(tmp_path))]


def test_a_table_without_in_place_times_has_one_row_a_line(tmp_path: Path) -> None:
    header = "#  size  count  type  redop  root  time  algbw  busbw  #wrong"
    _write(tmp_path, _log("1024 256 float sum -1 21.50 0.05 0.08 0", header=header))
    assert [None] == [row["variant"] for row in list_rows(_read(tmp_path))]


def test_a_file_may_hold_several_runs_between_other_output(tmp_path: Path) -> None:
    text = (
        "$ mpirun -np 8 ./build/all_reduce_perf -b 1K -e 4K -f 4\n"
        "NCCL version 2.21.5+cuda12.4\n"
        + _log(_ROWS[0], "a:1:2 [0] NCCL INFO all_gather_perf: closing", _ROWS[1])
        + "$ mpirun -np 8 ./build/all_gather_perf -b 1K -e 4K -f 4\n"
        + _log("4096 128 float none -1 31.5 0.1 0.1 0 30.5 0.1 0.1 0")
    )
    _write(tmp_path, text, "night.out")
    rows = list_rows(_read(tmp_path))
    found = [(row["operator"], row["latency_us_median"]) for row in rows if not row["variant"]]
    assert [("all_reduce", 21.5), ("all_reduce", 12345.0), ("all_gather", 31.5)] == found
    assert {"2.21.5"} == {row["framework_version"] for row in rows}


def test_tags_of_launchers_are_taken_off(tmp_path: Path) -> None:
    lines = _log(*_ROWS).splitlines()
    for name, tag in (("all_reduce_a.log", "[1,0]<stdout>:"), ("all_reduce_b.log", "0: ")):
        _write(tmp_path, "\n".join(tag + line for line in lines), name)
    assert 8 == _read(tmp_path).num_rows


def test_empty_messages_and_types_without_a_format_are_noted(tmp_path: Path) -> None:
    rows = (
        "0     0   float   sum   -1   5.50   0.00   0.00   0   5.25   0.00   0.00   0",
        "8     1  double   sum   -1   5.50   0.00   0.00   0   5.25   0.00   0.00   0",
    )
    _write(tmp_path, _log(*rows, _ROWS[0]))
    plan = _read(tmp_path)
    assert 2 == plan.num_rows
    for text in ("rows of 0 bytes", "rows of type double"):
        assert any(text in note for note in plan.notes)


def test_a_collective_without_an_operator_is_noted(tmp_path: Path) -> None:
    _write(tmp_path, _log(*_ROWS))
    _write(tmp_path, "# Collective test starting: hypercube_perf\n" + _log(*_ROWS), "b.log")
    plan = _read(tmp_path)
    assert 4 == plan.num_rows
    assert any("no operator here is hypercube_perf's" in note for note in plan.notes)


def test_a_log_without_devices_needs_them_named(tmp_path: Path) -> None:
    text = "\n".join((_HEADER, *_ROWS))
    path = _write(tmp_path, text, "table.txt")
    with pytest.raises(InvalidRequestError, match="names no collective"):
        _read(path)
    options = {"collective": "all_gather"}
    with pytest.raises(InvalidRequestError, match="has no list of devices"):
        _read(path, options=options)
    options |= {"devices_per_node": "4", "num_nodes": "2"}
    first = list_rows(_read(path, device="h200_sxm", options=options))[0]
    assert ("h200_sxm", "all_gather", 4) == (
        first["device"],
        first["operator"],
        first["dims"]["devices_per_node"],
    )


def test_a_device_in_several_topologies_needs_one_named(tmp_path: Path) -> None:
    _write(tmp_path, _log(*_ROWS, ranks=_ranks(gpu="NVIDIA A100-SXM4-80GB")))
    with pytest.raises(InvalidRequestError, match=r"a100_dgx, .*; give --topology"):
        _read(tmp_path)
    assert "a100_dgx" == list_rows(_read(tmp_path, topology="a100_dgx"))[0]["topology"]
    with pytest.raises(InvalidRequestError, match="h100_dgx is made of h100_sxm"):
        _read(tmp_path, topology="h100_dgx")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (_ranks("a") + "\n" + _ranks("b"), "has a rank twice"),
        (_ranks("aab"), "different numbers of ranks"),
        (_ranks("aa") + "\n#  Rank  3 Group  0 Pid 1 on a device 3 [0x03] " + _GPU, "3 of 4 ranks"),
        (_ranks("aa") + "\n#  Rank  2 Group  0 Pid 1 on a device 2 [0x02] NVIDIA L40", "several"),
    ],
)
def test_a_list_of_devices_that_makes_no_group_is_refused(
    ranks: str, message: str, tmp_path: Path
) -> None:
    _write(tmp_path, _log(*_ROWS, ranks=ranks))
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1024   256   float   sum   -1   21.50   0.05", "line 16: 7 cells in a table of 13"),
        (_ROWS[0].replace("21.50", "slow"), "line 16: time: 'slow' is not a number"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(row: str, message: str, tmp_path: Path) -> None:
    _write(tmp_path, _log(row))
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)


def test_times_of_the_host_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, _log(_ROWS[0], header=_HEADER.replace(" time ", " cputime ")))
    with pytest.raises(InvalidRequestError, match="no device times"):
        _read(tmp_path)


def test_an_unknown_device_is_named_with_its_file(tmp_path: Path) -> None:
    _write(tmp_path, _log(*_ROWS, ranks=_ranks(gpu="NVIDIA GT 1030")))
    with pytest.raises(UnknownDeviceError, match=r"all_reduce_perf\.log.*GT 1030"):
        _read(tmp_path)


def test_a_folder_without_a_table_says_so(tmp_path: Path) -> None:
    _write(tmp_path, "nothing here", "notes.txt")
    _write(tmp_path, "x", "plot.png")
    with pytest.raises(InvalidRequestError, match="has no table of nccl-tests"):
        _read(tmp_path)
