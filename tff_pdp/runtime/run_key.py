"""The secret from which a run's randomness is derived: everything random is a function of (run key, round, client)."""

import dataclasses
import hashlib
import os

import numpy as np

KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class RunKey:
    """A run's secret key.

    Guarantee: seeds of different rounds and clients are independent to anyone without the key (keyed BLAKE2b).
    Assumes: the key stays secret. Who knows it can subtract the noise, so it is stored readable by its owner alone.

    Attributes:
      secret: 32 bytes.
      is_test_only: the key came from a fixed seed, which anyone can guess; reports then say "not private".
    """

    secret: bytes = dataclasses.field(repr=False)
    is_test_only: bool = False

    @classmethod
    def from_entropy(cls) -> "RunKey":
        """Draws a key from the operating system's entropy."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_test_seed(cls, seed: int) -> "RunKey":
        """Derives a key from a number: reproducible, and not private."""
        return cls(hashlib.blake2b(f"test-only {seed}".encode(), digest_size=KEY_BYTES).digest(), is_test_only=True)

    def client_seed(self, round_number: int, client_id: str) -> np.ndarray:
        """Returns the int64 `[2]` seed of one client in one round."""
        message = f"{round_number}:{client_id}".encode()
        digest = hashlib.blake2b(message, key=self.secret, digest_size=16, person=b"client round").digest()
        return np.frombuffer(digest, np.int64).copy()
