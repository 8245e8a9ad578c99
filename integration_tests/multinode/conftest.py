"""The network of several nodes as a fixture; without the rights to make one the tests are skipped, saying why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.multinode.network import Network, network, unavailable


@pytest.fixture
def two_nodes() -> Iterator[Network]:
    _skip_if_unavailable()
    with network(2) as net:
        yield net


@pytest.fixture
def four_nodes() -> Iterator[Network]:
    _skip_if_unavailable()
    with network(4) as net:
        yield net


def _skip_if_unavailable() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
