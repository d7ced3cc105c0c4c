"""Derives all randomness of a run from a secret key: every draw is a function of (run key, round, client)."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws

KEY_BYTES = 32
# In place of a run's number: adaptation, which a client does for itself before its model is used.
ADAPTATION = -1


@dataclasses.dataclass(frozen=True)
class RunKey:
    """The secret key of a run, from which all seeds are derived.

    Guarantee: seeds of different rounds and clients are independent to anyone without the key (keyed BLAKE2b).
    Assumes: the key stays secret. Anyone with the key can subtract the noise, so only the owner of the key's
      file can read it.

    Attributes:
      secret: 32 bytes.
      is_test_only: whether the key came from a fixed seed, which anyone can guess; reports then say "not private".
      attempt: number of times that rounds had to be drawn anew, or were added after the end; each attempt draws as if
        from a key of its own.
      salt: number, as text, that tells rounds that were added after the end from those that a copy of the run added;
        empty for all other rounds.
    """

    secret: bytes = dataclasses.field(repr=False)
    is_test_only: bool = False
    attempt: int = 0
    salt: str = ""

    @classmethod
    def from_entropy(cls) -> "RunKey":
        """Draws a key from the operating system's entropy."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_test_seed(cls, seed: int) -> "RunKey":
        """Derives a key from a number: reproducible, and not private."""
        return cls(hashlib.blake2b(f"test-only {seed}".encode(), digest_size=KEY_BYTES).digest(), is_test_only=True)

    def fingerprint(self) -> str:
        """Returns 32 hexadecimal digits that identify this secret, and reveal nothing else about it."""
        return hashlib.blake2b(b"", key=self.secret, digest_size=16, person=b"fingerprint").hexdigest()

    def keyed(self, digest: str) -> str:
        """Returns a digest of settings and data that is keyed with the secret: 32 hexadecimal digits.

        `digest` is the unkeyed digest of settings and data. Anyone who sees the unkeyed digest and knows all other
        records could test whether some record is in the data.
        """
        message = digest.encode()
        return hashlib.blake2b(message, key=self.secret, digest_size=16, person=b"settings, data").hexdigest()

    def client_seed(self, round_number: int, client_id: str, run: int = 0) -> np.ndarray:
        """Returns the int64 `[2]` seed of one client in one round; rounds are numbered from 1.

        `run` is 0 for training, the number of the client's run (from 1) in a search, or `ADAPTATION`.
        """
        return self.client_seeds(round_number, [client_id], run)[0]

    def client_seeds(self, round_number: int, client_ids: Sequence[str], run: int = 0) -> np.ndarray:
        """Returns the seeds of several clients in one round, int64 `[clients, 2]`; arguments as in `client_seed`."""
        prefix, purpose = (f"{run}:", b"search round") if run else ("", b"client round")
        digests = [self._digest(f"{prefix}{round_number}:{client_id}", purpose, 16) for client_id in client_ids]
        return np.frombuffer(b"".join(digests), np.int64).reshape(-1, 2).copy()

    def server_seeds(self) -> np.ndarray:
        """Returns the seeds of the noise that the server adds: int64 `[2, 2]`, two seeds of two numbers each."""
        return np.frombuffer(self._digest("", b"server noise", 32), np.int64).reshape(2, 2).copy()

    def cohort_generator(self, number: int) -> ExactDraws:
        """Returns a generator for the cohort of the round `number`, or for all cohorts of the epoch `number`."""
        return ExactDraws(self._digest(str(number), b"cohort", KEY_BYTES))

    def generator(self, purpose: str, client_id: str, run: int = 0) -> ExactDraws:
        """Returns a generator for one purpose of one client in one run; `run` is as in `client_seed`.

        `purpose` has at most 16 bytes, and must differ from this class's own purposes, such as `cohort`.
        """
        return ExactDraws(self._digest(f"{run}:{client_id}", purpose.encode(), KEY_BYTES))

    def _digest(self, message: str, purpose: bytes, size: int) -> bytes:
        # No other message begins with digits and a full stop, or with digits and a plus sign.
        attempt = f"{self.attempt}." if self.attempt else ""
        if self.salt:
            attempt = f"{self.attempt}+{self.salt}."
        return hashlib.blake2b((attempt + message).encode(), key=self.secret, digest_size=size, person=purpose).digest()
