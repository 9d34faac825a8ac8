"""Combines the CRC-32 of a file from the checksums of its chunks, in any order. Pure.

A CRC is linear: but for a constant that depends on the size alone, the checksum of a file is the XOR, over
its chunks, of the checksum of that chunk followed by as many zero bytes as come behind it in the file: the
chunk's contribution. So ranks that write or read different chunks of one file XOR their contributions, and
none needs to see the whole.

Invariant: `total(size, contributions of chunks that partition a file of that size)` is `zlib.crc32` of the
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
ALL = 0xFFFFFFFF  # zlib begins with this state, and inverts the final one

Data = bytes | bytearray | memoryview


def linear(data: Data, before: int = 0) -> int:
    """Return the state after `data`, from the state `before` (0: no bytes, or only zeros, came before),
    without zlib's inversions."""
    return crc32(data, before ^ ALL) ^ ALL


def shift(state: int, nbytes: int) -> int:
    """Return the state after `nbytes` more zero bytes: `state` times x^(8 nbytes). Takes microseconds for any
    number."""
    bit = 0
    while nbytes:
        if nbytes & 1:
            a, b, c, d = _doubling(bit)
            state = a[state & 255] ^ b[state >> 8 & 255] ^ c[state >> 16 & 255] ^ d[state >> 24]
        nbytes >>= 1
        bit += 1
    return state


def zeros(nbytes: int) -> int:
    """Return `zlib.crc32` of `nbytes` zero bytes, without making them."""
    return shift(ALL, nbytes) ^ ALL


def contribution(data: Data, behind: int) -> int:
    """Return the contribution of `data` to the checksum of a file in which `behind` bytes come after it."""
    return shift(linear(data), behind)


def total(size: int, contributions: Iterable[int]) -> int:
    """Return `zlib.crc32` of a file of `size` bytes from the contributions of chunks that do not overlap;
    bytes that no chunk covers count as zeros."""
    value = zeros(size)
    for each in contributions:
        value ^= each
    return value


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo POLYNOMIAL."""
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
    """Tables for `shift` by 2^bit bytes: the product of a state with x^(8 * 2^bit) is the XOR of four
    look-ups, one for each byte of the state."""
    power, tables = _power(bit), []
    for byte in range(4):
        table = [0]
        for low in range(8):
            moved = _multiply(1 << 8 * byte + low, power)
            table += [moved ^ other for other in table]
        tables.append(table)
    return tables
