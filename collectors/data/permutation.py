"""A shuffle without a list: which record comes at which place, computed for any place at once."""

from hashlib import blake2b
from math import isqrt

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A pseudorandom permutation of 0 … size - 1 that takes no memory: `permutation(place)` is a record.

    It is the generalized Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", 2002): a place
    is a pair (x, y) below a · b, with a · b at least `size` and hardly more; each round adds a hash of the one half to
    the other; results of `size` or more are enciphered again (cycle walking). One `key` gives one permutation.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._a = isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 8]) for at in range(0, 8 * _ROUNDS, 8)]

    def __call__(self, place: int) -> int:
        found = self._encipher(place)
        # The cycle through `place` comes back below `size`, at the latest to `place` itself.
        while found >= self._size:
            found = self._encipher(found)
        return found

    def _encipher(self, value: int) -> int:
        x, y = divmod(value, self._b)
        for number, key in enumerate(self._keys):
            if number % 2:
                y = (y + _mixed(x ^ key)) % self._b
            else:
                x = (x + _mixed(y ^ key)) % self._a
        return x * self._b + y


def _mixed(value: int) -> int:
    """Return 64 bits that depend on all of `value`: the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
