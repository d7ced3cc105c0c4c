"""Raw data as a job takes it: which files there are, how one becomes users, and what makes an example valid."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from beam_pipelines.schema import UserRecord


@dataclasses.dataclass(frozen=True)
class RawData:
    """The input of a client-dataset job.

    Attributes:
      source: name of the kind of data, as in `tff_pdp.registry.DATASETS`.
      folder: where the files lie; every worker must see it under this name.
      files: their names in it.
      read_users: path of a file, or of one of `parts` -> every copy of every user in it, not judged. Picklable: it
        travels to the workers. Raises DataError, naming the file, for a file that cannot be used at all.
      are_images: whether the values of an example are pixels, in [0, 1]; otherwise any finite numbers.
      has_test_examples: whether the source itself says which examples are test examples.
      parts: names of what single tasks read, where that is not a file each: paths in `folder` that `read_users`
        understands, such as `images.txt:3/16`.
      parameters: what else decided the content, as JSON has it; the manifest repeats it.
    """

    source: str
    folder: Path
    files: tuple[str, ...]
    read_users: Callable[[Path], Iterable[UserRecord]]
    are_images: bool
    has_test_examples: bool = False
    parts: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """What single tasks read."""
        return self.parts or self.files
