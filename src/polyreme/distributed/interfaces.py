"""Find which of this host's network interfaces leads to another host.

Sends nothing to that host: a connected datagram socket that is never written to shows what the routing table
says."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

from polyreme.distributed.apart import look_up

_GET_ADDRESSES, _ADDRESS = 22, 20  # of netlink: RTM_GETADDR, RTM_NEWADDR
_REQUEST_ALL = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2


def source(host: str) -> str | None:
    """Return the address of this host from which packets to `host` (a name or an address) go; None where
    there is no route to it, or no such name."""
    try:
        ways = look_up(host, 9, socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in ways:
        try:
            with socket.socket(family, kind, protocol) as asked:
                asked.connect(address)
                return str(asked.getsockname()[0])
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    """Return whether a numeric `address`, such as 127.0.1.1, never leaves this host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def addresses() -> dict[str, str]:
    """Return this host's addresses with the interface of each; none where the system is not Linux."""
    if not hasattr(socket, "AF_NETLINK"):
        return {}
    found = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHIIBBBBi", 24, _GET_ADDRESSES, _REQUEST_ALL, 1, 0, 0, 0, 0, 0, 0))
        done = False
        while not done:
            for kind, content in _messages(kernel.recv(65536)):
                done = done or kind != _ADDRESS
                if kind == _ADDRESS:
                    address, index = _address(content)
                    found[address] = socket.if_indextoname(index)
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, content) of each netlink message in `data`."""
    while data:
        length, kind = struct.unpack_from("=IH", data)
        yield kind, data[16:length]
        data = data[(length + 3) & ~3 :]


def _address(content: bytes) -> tuple[str, int]:
    """Return the address in a netlink message, and the index of its interface."""
    family, _, _, _, index = struct.unpack_from("=BBBBI", content)
    attributes, rest = {}, content[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        attributes[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    # on a point-to-point link _IFA_ADDRESS is the other end's
    return socket.inet_ntop(family, attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))), index
