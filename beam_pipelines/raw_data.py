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
      read_users: path of a file -> every copy of every user in it, not judged. Picklable: it travels to the workers.
        Raises DataError, naming the file, for a file that cannot be used at all.
      are_images: whether the values of an example are pixels, in [0, 1]; otherwise any finite numbers.
      has_test_examples: whether the source itself says which examples are test examples.
      parameters: what else decided the content, as JSON has it; the manifest repeats it.
    """

    source: str
    folder: Path
    files: tuple[str, ...]
    read_users: Callable[[Path], Iterable[UserRecord]]
    are_images: bool
    has_test_examples: bool = False
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
