"""Hashes clients' ids with a secret key, so that an export does not name any client."""

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from tff_pdp.errors import ServingError
from tff_pdp.files import naming, sync

KEY_BYTES = 32
# Never a client's id: ids in exports have no line break.
_FINGERPRINTED = b"fingerprint\n"


class ClientIdHash:
    """Hashes a client's id: an export has the first 32 hex digits of the id's HMAC-SHA256 under a secret key.

    An id has the same hash in every exported version, so callers may store hashes. Only someone with the key can find
    out from an export who its clients are, or whether a guessed id is among the clients. Hashes are only pseudonyms:
    the rows of an export are still personal data.

    Example:
      >>> ClientIdHash(bytes(32))("alice")
      'ce3837f76a54a635191b1704ac767226'
    """

    def __init__(self, key: bytes):
        """Stores the key; raises ServingError if the key does not have 32 bytes."""
        if len(key) != KEY_BYTES:
            raise ServingError(f"The key for client ids must have {KEY_BYTES} bytes; it has {len(key)}.")
        self._key = key

    def __call__(self, client_id: str) -> str:
        """Returns the hash that replaces an id in exports and requests; an empty id (the global model) stays empty.

        Raises:
          ServingError: the id is not valid Unicode.
        """
        if not client_id:
            return client_id
        return hmac.digest(self._key, encode_id(client_id), hashlib.sha256).hex()[:32]

    @property
    def fingerprint(self) -> str:
        """Returns the key's fingerprint: 32 hex digits that identify the key and reveal nothing else about it."""
        return hmac.digest(self._key, _FINGERPRINTED, hashlib.sha256).hex()[:32]

    @classmethod
    def load(cls, path: Path) -> "ClientIdHash":
        """Reads a key that `load_or_create` wrote; raises ServingError if the file is missing or damaged."""
        try:
            text = path.read_text(encoding="ascii")
        except FileNotFoundError as error:
            raise ServingError(f"{path} is missing; restore it: ids in exports are hashes under this key.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ServingError(f"{path} cannot be read as a key for client ids: {error}.") from error
        words = text.split()
        try:
            hashed = cls(bytes.fromhex(words[0]))
        except (ValueError, IndexError, ServingError) as error:
            raise ServingError(f"{path} does not hold a key for client ids; restore it.") from error
        # Files of the first version hold the key alone.
        if words[1:] not in ([], [hashed.fingerprint]):
            raise ServingError(f"{path} does not hold a key for client ids and its fingerprint; restore it.")
        return hashed

    @classmethod
    def load_or_create(cls, path: Path) -> "ClientIdHash":
        """Reads the key; if the file is missing, creates it with a new random key, readable by the file's owner only.

        A new key comes from the operating system's random generator. Processes that call this at the same moment get
        the same key.

        Raises:
          ServingError: the file is damaged, or cannot be written.
        """
        if not path.exists():
            try:
                _create_key(path)
            except OSError as error:
                raise ServingError(f"{path}: a key for client ids cannot be written: {error}.") from error
        return cls.load(path)


def encode_id(client_id: str) -> bytes:
    """Encodes an id in UTF-8, as exports and requests do; raises ServingError if the id is not valid Unicode."""
    try:
        return client_id.encode()
    except UnicodeEncodeError as error:
        raise ServingError(f"Client id {client_id!r:.100} is not valid Unicode.") from error


def _create_key(path: Path) -> None:
    """Writes a new key, unless another process wrote one first; a reader sees the whole key or no file."""
    # Readable by its owner alone from the first moment.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    staging = Path(name)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="ascii") as file:
            key = secrets.token_bytes(KEY_BYTES)
            # The fingerprint shows whether a key was damaged.
            file.write(f"{key.hex()}\n{ClientIdHash(key).fingerprint}\n")
        # The key of ids that were given out must survive a power cut.
        sync(staging)
        # Unlike a rename, a link never replaces another process's file.
        with contextlib.suppress(FileExistsError):
            os.link(staging, path)
            sync(path.parent)
    finally:
        staging.unlink()
