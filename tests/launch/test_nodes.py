"""Nodes: what the environment says, who has joined, the torchrun command of static, restartable and elastic runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from titan5d.launch import nodes as nodes_module
from titan5d.launch.nodes import (
    Nodes,
    Refused,
    address_towards,
    check_port,
    connections,
    interface_of,
    read_nodes,
    rendezvous_environment,
    torchrun,
)

TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


def test_elastic_nodes_and_restarts() -> None:
    elastic = read_nodes({**TWO, "NNODES": "2:4", "NODE_RANK": "3", "MAX_RESTARTS": "5"})
    assert (list(elastic.counts), elastic.rank, elastic.restarts, elastic.static) == ([2, 3, 4], 3, 5, False)
    assert read_nodes(TWO).static and list(read_nodes(TWO).counts) == [2]
    assert not read_nodes({**TWO, "MAX_RESTARTS": "1"}).static
    assert read_nodes({"MAX_RESTARTS": "2"}) == Nodes(restarts=2)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TWO, "NNODES": "4:2"}, "NNODES=4:2 says at least 4 and at most 2 nodes"),
        ({**TWO, "NNODES": "0:2"}, "NNODES=0:2 must be at least 1"),
        ({**TWO, "NNODES": "2-4"}, "nor two as in 2:4"),
        ({**TWO, "NNODES": "2:4", "NODE_RANK": "4"}, "NODE_RANK=4 is outside 0 to 3"),
        ({**TWO, "MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 must be at least 0"),
        ({**TWO, "MAX_RESTARTS": "many"}, "MAX_RESTARTS=many is not a whole number"),
        ({**TWO, "RDZV_CONF": "fast"}, "RDZV_CONF=fast must read key=value"),
        ({**TWO, "RDZV_CONF": "a=b,last_call_timeout=x"}, "last_call_timeout=x must be a whole number"),
        ({**TWO, "NODE_RANK": " "}, "NNODES=2 needs NODE_RANK"),
    ],
)
def test_what_cannot_be_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(Refused) as refused:
        read_nodes(environ)
    assert words in str(refused.value)


def test_nodes_that_may_meet_again_have_a_rendezvous() -> None:
    command = torchrun(read_nodes({**TWO, "NNODES": "1:2", "RDZV_CONF": "last_call_timeout=3"}), 4, 100)
    assert "--nnodes=1:2" in command and "--rdzv-endpoint=127.0.0.1:29500" in command
    assert "--rdzv-conf=is_host=false,join_timeout=115,last_call_timeout=3" in command
    assert "--local-addr=127.0.0.1" in command
    host = torchrun(read_nodes({**TWO, "NODE_RANK": "0", "MAX_RESTARTS": "2"}), 4, 100)
    assert "--max-restarts=2" in host and "--nnodes=2:2" in host
    assert "--rdzv-conf=is_host=true,join_timeout=115" in host
    alone = torchrun(Nodes(restarts=2), 1)
    assert "--max-restarts=2" in alone and "--standalone" in alone


def test_restarted_ranks_do_not_meet_in_the_store_of_the_dead() -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert rendezvous_environment({}, Nodes(restarts=1)) == {name: "1"}
    assert rendezvous_environment({}, Nodes()) == {}
    several = rendezvous_environment({}, read_nodes(TWO))
    assert several == {"GLOO_SOCKET_IFNAME": "lo"}
    assert (
        rendezvous_environment({"GLOO_SOCKET_IFNAME": "ib0"}, read_nodes(TWO))["GLOO_SOCKET_IFNAME"] == "ib0"
    )


def test_addresses_and_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    monkeypatch.setattr(nodes_module, "NAME_PATIENCE", 0.0)
    with pytest.raises(Refused, match=r"MASTER_ADDR=no-such-host\.invalid"):
        address_towards("no-such-host.invalid")


def test_who_is_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connections(port) == set()
        with socket.create_connection(("127.0.0.1", port)):
            assert connections(port) == {"127.0.0.1"}


def test_the_kernels_tables(tmp_path: Path) -> None:
    """Port 29500 is 733C; a listening socket (0A) and another port are no connections."""
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 0100000A:733C 0200000A:A1B2 01 rest\n"
        "   1: 00000000:733C 00000000:0000 0A rest\n"
        "   2: 0100000A:0016 0300000A:A1B2 01 rest\n"
    )
    wide = tmp_path / "tcp6"
    wide.write_text("  sl\n   0: 0:733C 0000000000000000FFFF00000400000A:A1B2 01 rest\n")
    assert connections(29500, (table, wide, tmp_path / "none")) == {"10.0.0.2", "10.0.0.4"}


def test_what_a_waiting_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = Nodes(4, 0, "head", 29500), Nodes(4, 2, "head", 29500)
    monkeypatch.setattr(nodes_module, "connections", lambda port: {"10.0.0.1", "10.0.0.3"})
    assert "node 0 of 4 waits at head:29500: 2 of 4 nodes joined (10.0.0.1, 10.0.0.3)" in host.waiting()
    assert "node 2 of 4 has joined at head:29500" in other.waiting()
    monkeypatch.setattr(nodes_module, "connections", lambda port: set())
    assert "1 of 4 nodes joined (this one)" in host.waiting()
    assert "node 2 of 4 finds nothing at head:29500" in other.waiting()


def test_a_port_that_is_taken_is_refused_where_the_meeting_is() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Refused, match=f"MASTER_PORT={port} cannot be used on this node"):
            check_port(Nodes(2, 0, "127.0.0.1", port))
        check_port(Nodes(2, 1, "127.0.0.1", port))
    check_port(Nodes(2, 0, "127.0.0.1", port))
    check_port(Nodes())
