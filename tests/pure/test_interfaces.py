"""Which interface leads to another host, as this host's own tables say."""

from __future__ import annotations

import socket
import sys

import pytest

from polyreme.distributed.interfaces import addresses, is_loopback, source

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tables")


@linux
def test_every_interface_is_known_by_its_addresses() -> None:
    found = addresses()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}


def test_the_way_to_this_host_is_loopback() -> None:
    assert source("127.0.0.1") == source("localhost") == "127.0.0.1"
    assert source("127.0.1.1") is not None and is_loopback("127.0.1.1") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("fe80::1%eth0")


def test_there_is_no_way_to_a_name_that_nobody_has() -> None:
    assert source("no-such-host.invalid") is None
