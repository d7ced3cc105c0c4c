"""Draws uniform numbers that depend on a seed and on ids alone, not on positions, order or other records."""

import hashlib

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def keyed_uint64(seed: int, purpose: str, *ids: np.ndarray) -> np.ndarray:
    """Draws a uniform 64-bit number, uint64 `[n]`, for each row of the columns `ids`; each column is int64 `[n]`.

    Applies the finaliser of SplitMix64 after each id (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014). The numbers are for reproducible choices, not for secrets. Different purposes give
    independent numbers.
    """
    digest = hashlib.blake2b(purpose.encode(), digest_size=8, key=str(seed).encode()).digest()
    state = np.full(len(ids[0]), int.from_bytes(digest, "little"), np.uint64)
    for values in ids:
        state += values.astype(np.uint64)
        mix(state)
    return state


def hexadecimal_names(seed: int, purpose: str, *ids: np.ndarray) -> np.ndarray:
    """Draws a name for each row of the columns `ids`; each column is int64 `[n]`.

    Returns bytes `[n]`. Each name has 32 hexadecimal digits, which encode 128 uniform bits.
    """
    halves = [keyed_uint64(seed, f"{purpose} {half}", *ids) for half in (0, 1)]
    return np.frombuffer(np.stack(halves, axis=1).astype(">u8").tobytes().hex().encode(), "S32")


def mix(state: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's step and finaliser to uint64 numbers, in place, and returns the numbers."""
    # Unsigned integers wrap, as the function demands.
    state += _STEP
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
