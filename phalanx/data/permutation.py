"""A random order of any length that needs no memory: place -> item, computed when asked.

A Feistel network over pairs of bit strings is a bijection of the numbers below the next power of two; a
number that falls outside the length is put through again until it falls inside, which keeps it a bijection of
those below the length ("cycle walking", Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). The
round function is the finalizer of SplitMix64. It is not cryptographic and need not be.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

_ROUNDS = 4  # pairs of half rounds; three pairs already look random, one more for short lengths
_LEAST_BITS = 4


class HashedPermutation:
    """A bijection of 0 to length - 1 chosen by `key`; call it with places (int64) to get the items."""

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        bits = max((length - 1).bit_length(), _LEAST_BITS)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(mixed(key, i)) for i in range(2 * _ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        numbers = self._network(places.astype(np.uint64))
        while (outside := numbers >= np.uint64(self.length)).any():
            numbers[outside] = self._network(numbers[outside])
        items: np.ndarray = numbers.astype(np.int64)
        return items

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        low, high = numbers & self._low_mask, numbers >> self._low_bits
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            low = low ^ (_hash(high + even) & self._low_mask)
            high = high ^ (_hash(low + odd) & self._high_mask)
        together: np.ndarray = (high << self._low_bits) | low
        return together


def mixed(*numbers: int) -> int:
    """Return 64 random bits that the numbers determine: for keys and seeds."""
    packed = b"".join(struct.pack("<q", (number + (1 << 63)) % (1 << 64) - (1 << 63)) for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _hash(numbers: np.ndarray) -> np.ndarray:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_up: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return mixed_up
