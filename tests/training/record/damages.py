"""Damages of single files: a changed byte, a cut, nothing left, no file."""

import dataclasses
import random
from pathlib import Path

KINDS = ("bit", "bit", "bit", "byte", "byte", "more", "cut", "empty", "gone")


@dataclasses.dataclass(frozen=True)
class Damage:
    """One damage of a file, the same for the same seed.

    Attributes:
      content: what the file holds afterwards; None where there is no file any more.
      about: what was done, for messages.
    """

    content: bytes | None
    about: str

    @classmethod
    def draw(cls, path: Path, seed: str) -> "Damage":
        """A random damage of a file, drawn from a seed."""
        generator, content = random.Random(seed), path.read_bytes()
        kind = generator.choice(KINDS)
        if kind == "gone":
            return cls(None, "removed")
        if kind == "empty" or not content:
            return cls(b"" if content else b"\n", "emptied" if content else "a line break in an empty file")
        if kind == "cut":
            size = generator.randrange(len(content))
            return cls(content[:size], f"cut to {size} of {len(content)} bytes")
        place = _place(content, generator)
        around = content[max(0, place - 12) : place + 8]
        if kind == "more":
            added = bytes([generator.randrange(256)])
            return cls(content[:place] + added + content[place:], f"{added!r} put in at {place}, in {around!r}")
        changed = bytearray(content)
        changed[place] ^= 1 << generator.randrange(8) if kind == "bit" else generator.randrange(1, 256)
        return cls(bytes(changed), f"byte {place} is {changed[place : place + 1]!r}, in {around!r}")

    def inflict(self, path: Path) -> None:
        """Damages a file."""
        if self.content is None:
            path.unlink()
        else:
            path.write_bytes(self.content)


def _place(content: bytes, generator: random.Random) -> int:
    """A byte; of a file of pages that are mostly free, nine times of ten one that is not zero."""
    if content.startswith(b"SQLite format 3") and generator.random() < 0.9:
        return generator.choice([place for place, byte in enumerate(content) if byte])
    return generator.randrange(len(content))
