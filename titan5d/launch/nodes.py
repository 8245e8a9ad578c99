"""Which node of how many this is, where they meet, and the torchrun command that follows from it.

    NNODES=2                      static: node r gets the ranks r*NGPU .. , no restarts; NODE_RANK is the order
    NNODES=2 MAX_RESTARTS=3       the nodes meet at a c10d rendezvous on node 0, again after each failure
    NNODES=2:4                    elastic: the same, and the run goes on with what is left, down to 2 nodes

A rendezvous sorts its nodes by address, so that the order stays the same after a restart. Without torch: this runs in
the launcher.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 29500
NAME_PATIENCE = 30.0
"""Seconds for MASTER_ADDR to become a known name: a pod's name is published some time after the pod has started."""
JOIN_MARGIN = 15
"""Seconds that torchrun waits longer than the process above it, whose message is the better one."""


class Refused(Exception):
    """The run cannot work as it is asked for; the text says why and what would. Exit status 2."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run as one of them sees them.

    Attributes:
        count: how many, at most.
        rank: this one; 0 is at `address` and hosts the meeting.
        address, port: where they meet. Port None: torchrun takes a free one, so that runs side by side do not
            collide (one node only).
        fewest: with how many an elastic run goes on; None: `count`.
        restarts: how often the ranks are started again after a failure.
        rendezvous_conf: further settings of torchrun's rendezvous, "key=value,key=value".
        local_address: this node's address as the others see it; "": the one it reaches `address` from.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    fewest: int | None = None
    restarts: int = 0
    rendezvous_conf: str = ""
    local_address: str = ""

    @property
    def counts(self) -> range:
        """Every number of nodes this run may have."""
        return range(self.fewest or self.count, self.count + 1)

    @property
    def static(self) -> bool:
        """Whether each node knows its ranks beforehand; nodes that may meet again have a rendezvous instead."""
        return self.restarts == 0 and len(self.counts) == 1

    def own_address(self) -> str:
        """This node's address as the others see it. Raises Refused when `address` stays unknown."""
        return self.local_address or address_towards(self.address)

    @property
    def may_join_again(self) -> bool:
        """Whether this node goes on when node 0, which hosts the meeting, was gone and is back.

        The launcher sees the ranks, and so the restarts that are used up, on Linux only."""
        return self.rank > 0 and self.restarts > 0 and sys.platform == "linux"

    def meets(self) -> bool:
        """Whether the meeting on node 0 answers."""
        try:
            with socket.create_connection((self.address, self.port or DEFAULT_PORT), timeout=5):
                return True
        except OSError:
            return False

    def waiting(self) -> str:
        """What to say while the other nodes have not come."""
        assert self.port is not None
        here = f"node {self.rank} of {self.count}"
        place = f"{self.address}:{self.port}"
        same = (
            "all need the same NNODES, MASTER_ADDR and MASTER_PORT, and each its own NODE_RANK from 0 to"
            f" {self.count - 1}"
        )
        needed = self.counts[0]
        peers = connections(self.port)
        if self.rank == 0:
            joined = max(1, len(peers))
            return f"{here} waits at {place}: {joined} of {needed} nodes joined ({_names(peers)}); {same}"
        if peers:
            return f"{here} has joined at {place} and waits for the others; {same}"
        return (
            f"{here} finds nothing at {place} yet: node 0 (NODE_RANK=0) must be started there, and MASTER_ADDR,"
            " MASTER_PORT and firewalls must let this node reach it"
        )


def read_nodes(environ: Mapping[str, str]) -> Nodes:
    """Reads NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, MAX_RESTARTS, RDZV_CONF and LOCAL_ADDR.

    Raises Refused with all that is missing or wrong.
    """
    problems: list[str] = []
    fewest, count = _node_counts(environ, problems)
    port = integer(environ, "MASTER_PORT", None, problems)
    if port is not None and not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port} is not a port: 1 to 65535")
    restarts = integer(environ, "MAX_RESTARTS", 0, problems) or 0
    if restarts < 0:
        problems.append(
            f"MAX_RESTARTS={restarts} must be at least 0: how often a failed run is started again"
        )
    conf = environ.get("RDZV_CONF", "").strip()
    if conf and not re.fullmatch(r"\w+=[^=,]+(,\w+=[^=,]+)*", conf):
        problems.append(f"RDZV_CONF={conf} must read key=value,key=value: settings of torchrun's --rdzv-conf")
    for key, value in re.findall(r"(\w+(?:timeout|interval|attempt))=([^=,]+)", conf):
        if not value.isdigit():
            problems.append(f"RDZV_CONF={conf}: {key}={value} must be a whole number")
    if count == 1:
        raise_if(problems)
        return Nodes(port=port, restarts=restarts, rendezvous_conf=conf)
    rank = integer(environ, "NODE_RANK", None, problems)
    if not environ.get("NODE_RANK", "").strip():
        problems.append(
            f"NNODES={count} needs NODE_RANK: 0 on the node at MASTER_ADDR, 1 to {count - 1} on the others"
        )
    elif rank is not None and not 0 <= rank < count:
        problems.append(f"NODE_RANK={rank} is outside 0 to {count - 1} (NNODES={count})")
    address = environ.get("MASTER_ADDR", "").strip()
    if not address:
        problems.append(
            f"NNODES={count} needs MASTER_ADDR: the host name or address of node 0, the same on all nodes"
            f" (and MASTER_PORT, a free port there, unless {DEFAULT_PORT} is)"
        )
    raise_if(problems)
    local = environ.get("LOCAL_ADDR", "").strip()
    return Nodes(count, rank or 0, address, port or DEFAULT_PORT, fewest, restarts, conf, local)


def _node_counts(environ: Mapping[str, str], problems: list[str]) -> tuple[int | None, int]:
    """(fewest, most) of NNODES=most or NNODES=fewest:most; fewest is None for the first form."""
    text = environ.get("NNODES", "").strip() or "1"
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if found is None:
        problems.append(f"NNODES={text} is not a whole number, nor two as in 2:4 (goes on with 2 to 4 nodes)")
        return None, 1
    fewest, most = int(found[1]) if found[1] else None, int(found[2])
    if most < 1 or fewest == 0:
        problems.append(f"NNODES={text} must be at least 1")
    elif fewest is not None and fewest > most:
        problems.append(
            f"NNODES={text} says at least {fewest} and at most {most} nodes; the smaller comes first"
        )
    return fewest, max(most, 1)


def torchrun(
    nodes: Nodes, ranks: int, join_timeout: float = 300.0, restarts_left: int | None = None
) -> list[str]:
    """The torchrun command for this node's `ranks`, without the program they run.

    Args:
        join_timeout: seconds for the nodes to meet, at the start and after each failure.
        restarts_left: of `nodes.restarts`; None: all.
    """
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    left = nodes.restarts if restarts_left is None else restarts_left
    restarts = [f"--max-restarts={left}"] if left else []
    if nodes.count == 1 and nodes.port is None:
        # --local-addr: the ranks meet at this address, not at a host name that may not resolve
        return [*start, *restarts, "--standalone", "--local-addr=127.0.0.1"]
    if nodes.static:
        return [
            *start,
            f"--nnodes={nodes.count}",
            f"--node-rank={nodes.rank}",
            f"--master-addr={nodes.address}",
            f"--master-port={nodes.port}",
        ]
    # Told, not guessed from host names: which node hosts the store, and each node's address
    conf = f"is_host={str(nodes.rank == 0).lower()},join_timeout={int(join_timeout) + JOIN_MARGIN}"
    return [
        *start,
        *restarts,
        f"--nnodes={nodes.counts[0]}:{nodes.count}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={nodes.address}:{nodes.port}",
        f"--rdzv-id=titan5d-{nodes.port}",
        f"--rdzv-conf={','.join(filter(None, (conf, nodes.rendezvous_conf)))}",
        f"--local-addr={nodes.own_address()}",
    ]


def rendezvous_environment(environ: Mapping[str, str], nodes: Nodes) -> dict[str, str]:
    """What torchrun and the ranks need on several nodes or for restarts, unless the user has set it."""
    added = {}
    if not nodes.static:
        # Ranks that are started again meet in a store of their own; in torchrun's they find gloo addresses of the dead
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if nodes.count > 1:
        # gloo would take the address of the host name, which many machines resolve to themselves (127.0.1.1)
        interface = interface_of(nodes.own_address())
        if interface:
            added["GLOO_SOCKET_IFNAME"] = interface
    return {name: environ.get(name, value) for name, value in added.items()}


def interface_of(address: str) -> str | None:
    """The network interface with an IPv4 address; None where there is none, or no way to ask."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def address_towards(host: str) -> str:
    """This machine's address on the network that leads to `host`. Raises Refused when the name stays unknown."""
    deadline = time.monotonic() + NAME_PATIENCE
    while True:
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: it only picks the interface
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise Refused(
                    f"refused: MASTER_ADDR={host}: {error.strerror or error}; it must be the host name or address of"
                    " node 0, known and reachable from this node"
                ) from None
            time.sleep(1)


def connections(
    port: int, tables: tuple[Path, ...] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
) -> set[str]:
    """Addresses that are connected to `port`: of others to ours, or ours to that of node 0. Empty without /proc."""
    peers = set()
    for table in tables:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state = line.split()[:4]
                if state == "01" and f"{port:04X}" in (local.rpartition(":")[2], remote.rpartition(":")[2]):
                    peers.add(_address(remote.rpartition(":")[0]))
    return peers


def _address(digits: str) -> str:
    """8 or 32 hexadecimal digits in words of the machine's byte order, as the kernel prints them -> 10.0.0.1."""
    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")


def _names(peers: set[str], shown: int = 16) -> str:
    names = sorted(peers)
    return (
        ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
        or "this one"
    )


def integer(environ: Mapping[str, str], name: str, default: int | None, problems: list[str]) -> int | None:
    """The whole number in a variable, or `default` when it is unset or empty; anything else is added to `problems`."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}={text} is not a whole number")
        return default


def check_port(nodes: Nodes) -> None:
    """Raises Refused on the node that hosts the meeting when its port is taken."""
    if nodes.rank > 0 or nodes.port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", nodes.port))
        except OSError as error:
            raise Refused(
                f"refused: MASTER_PORT={nodes.port} cannot be used on this node ({error.strerror}); another run may"
                " hold it: take a free port, the same on all nodes"
            ) from None


def raise_if(problems: list[str]) -> None:
    """Raises Refused with all problems, one a line."""
    if problems:
        raise Refused("\n".join(f"refused: {problem}" for problem in problems))
