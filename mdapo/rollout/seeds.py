"""Random numbers from counters: what is drawn depends on names and places, never on what was drawn before."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def seed_of(*parts: object) -> int:
    """A 63-bit seed from anything with a stable ``str``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, index: int) -> float:
    """A uniform number in [0, 1) for token ``index`` of the turn seeded ``seed`` (splitmix64 of both, 53 bits)."""
    return (mix(mix(seed) ^ index) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """The splitmix64 output function (Steele, Lea, Flood 2014): scatters a 64-bit counter."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
