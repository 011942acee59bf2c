"""Nodes learn from settings, or from torchrun, where they meet and who leads."""

import socket

import pytest

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.ranks.rendezvous import (
    LOOPBACK,
    RendezvousSpec,
    choose_interface,
    find_interface,
    find_rendezvous,
)

TORCHRUN = {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}

needs_loopback = pytest.mark.skipif(
    LOOPBACK not in [name for _, name in socket.if_nameindex()], reason="no interface lo"
)


def test_without_settings_there_is_one_node_that_leads() -> None:
    found = find_rendezvous(RendezvousSpec(), {})
    assert (1, 0, True) == (found.num_nodes, found.node_rank, found.is_leader)


def test_torchrun_says_where_to_meet_and_who_does_nothing() -> None:
    found = find_rendezvous(RendezvousSpec(), TORCHRUN)
    expected = RendezvousSpec(
        endpoint="node-a:29400",
        num_nodes=2,
        node_rank=1,
        is_served=True,
        prefix="foretoken-2",
        local_rank=1,
        num_local_ranks=4,
    )
    assert expected == found
    assert not found.is_leader


def test_only_the_first_process_of_the_first_node_leads() -> None:
    leaders = [
        (node, local)
        for node in range(2)
        for local in range(4)
        if find_rendezvous(
            RendezvousSpec(),
            {**TORCHRUN, "GROUP_RANK": str(node), "LOCAL_RANK": str(local)},
        ).is_leader
    ]
    assert [(0, 0)] == leaders


def test_settings_win_over_torchrun() -> None:
    spec = RendezvousSpec(endpoint="other:1234", num_nodes=3, node_rank=2)
    assert spec == find_rendezvous(spec, TORCHRUN)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "LOCAL_RANK", "GROUP_RANK"])
def test_half_of_torchruns_variables_are_somebody_elses(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    assert RendezvousSpec() == find_rendezvous(RendezvousSpec(), environment)


def test_nodes_of_different_size_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="same number of processes"):
        find_rendezvous(RendezvousSpec(), {**TORCHRUN, "WORLD_SIZE": "7"})


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"num_nodes": 2}, "endpoint"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"num_nodes": 2, "node_rank": 2, "endpoint": "a:1"}, "node_rank"),
        ({"endpoint": "nowhere"}, "endpoint"),
        ({"endpoint": "host:99999"}, "endpoint"),
        ({"wait_s": 0.0}, "wait_s"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RendezvousSpec(**wrong)  # type: ignore[arg-type]
    assert [path] == [violation.field for violation in caught.value.violations]


def test_settings_survive_a_configuration_file() -> None:
    spec = RendezvousSpec(endpoint="[::1]:29500", num_nodes=4, node_rank=3, interface="eth1")
    assert spec == schema.decode(RendezvousSpec, schema.encode(spec))
    assert ("::1", 29500) == spec.address


@needs_loopback
def test_ranks_of_one_machine_talk_over_loopback() -> None:
    assert LOOPBACK == choose_interface(RendezvousSpec())
    assert LOOPBACK == find_interface("127.0.0.1")
    assert LOOPBACK == find_interface("127.0.0.7")


def test_an_interface_asked_for_is_taken() -> None:
    spec = RendezvousSpec(endpoint="a:1", num_nodes=2, interface="ib0")
    assert "ib0" == choose_interface(spec)


def test_no_interface_leads_to_a_name_that_does_not_resolve() -> None:
    assert "" == find_interface("no-such-host.invalid")
