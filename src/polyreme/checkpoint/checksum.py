"""The CRC-32 of a file from the checksums of its parts, in any order, by whoever has them. Pure.

A CRC is linear: but for a constant that depends on the size alone, the checksum of a file is the XOR, over
its parts, of the checksum of that part followed by as many zero bytes as come behind it in the file: the
part's contribution. So ranks that write or read different parts of one file XOR what they have, and nobody
needs to see the whole.

Invariant: `total(size, contributions of parts that partition a file of that size)` is `zlib.crc32` of the
file. Polynomials over GF(2) are integers whose highest bit is x^0, as in zlib; a state is one of degree below
32."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

try:
    from isal.isal_zlib import crc32  # the same as zlib's, by carry-less products: 3 to 5 times as fast
except ImportError:  # it has no wheels for this platform
    from zlib import crc32

POLYNOMIAL = 0xEDB88320  # x^32 + x^26 + ... + 1, without the x^32
ALL = 0xFFFFFFFF  # zlib begins with this state, and inverts the last one

Data = bytes | bytearray | memoryview


def linear(data: Data, before: int = 0) -> int:
    """The state after `data`, from the state `before` (0: nothing, or only zeros, before it), without zlib's
    inversions."""
    return crc32(data, before ^ ALL) ^ ALL


def shift(state: int, nbytes: int) -> int:
    """The state after another `nbytes` zero bytes: `state` times x^(8 nbytes). Takes microseconds, whatever
    their number."""
    bit = 0
    while nbytes:
        if nbytes & 1:
            a, b, c, d = _doubling(bit)
            state = a[state & 255] ^ b[state >> 8 & 255] ^ c[state >> 16 & 255] ^ d[state >> 24]
        nbytes >>= 1
        bit += 1
    return state


def zeros(nbytes: int) -> int:
    """`zlib.crc32` of that many zero bytes, without making them."""
    return shift(ALL, nbytes) ^ ALL


def contribution(data: Data, behind: int) -> int:
    """What `data` adds to the checksum of a file in which `behind` bytes come after it."""
    return shift(linear(data), behind)


def total(size: int, contributions: Iterable[int]) -> int:
    """`zlib.crc32` of a file of `size` bytes, of parts that partition it (what no part covers counts as
    zeros)."""
    value = zeros(size)
    for each in contributions:
        value ^= each
    return value


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & ALL
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _power(bit: int) -> int:
    """x^(8 * 2^bit)."""
    return _multiply(_power(bit - 1), _power(bit - 1)) if bit else 1 << 31 - 8


@cache
def _doubling(bit: int) -> list[list[int]]:
    """`shift` by 2^bit bytes: the product of a state with x^(8 * 2^bit), which is the XOR of four look-ups,
    one for each byte of the state."""
    power, tables = _power(bit), []
    for byte in range(4):
        table = [0]
        for low in range(8):
            moved = _multiply(1 << 8 * byte + low, power)
            table += [moved ^ other for other in table]
        tables.append(table)
    return tables
