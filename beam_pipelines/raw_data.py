"""Raw data as a job takes it: which files there are, how one becomes users, and what makes an example valid."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from beam_pipelines.records import UserRecord
from tff_pdp.errors import DataError

if TYPE_CHECKING:
    # They start Beam, which describing raw data does not need.
    from beam_pipelines.engine.stages import Stage
    from beam_pipelines.options import ClientDatasetOptions, ClientRules, Summary


class PreparedSource(Protocol):
    """Input with a job of its own, for a kind of raw data that does not consist of users with examples."""

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Prepares a client dataset, or finds that it is already there; raises DataError as other jobs do."""
        ...


@dataclasses.dataclass(frozen=True)
class RawData:
    """The input of a client-dataset job.

    Attributes:
      source: name of the kind of data, as in `tff_pdp.experiment.kinds.SOURCES`.
      folder: where the files lie; every worker must see it under this name.
      files: their names in it, for the manifest, which has their hashes. Of data in very many files none; `parameters`
        then has one hash of all.
      read_users: path of a file, or of one of `parts` -> every copy of every user in it, not judged. Picklable: it
        travels to the workers. Raises DataError, naming the file, for a file that cannot be used at all.
      are_images: whether the values of an example are pixels, in [0, 1]; otherwise any finite numbers.
      has_test_examples: whether the source itself says which examples are test examples.
      has_validation_examples: whether it also says which of the others are validation examples.
      parts: names of what single tasks read, where that is not a file each: paths in `folder` that `read_users`
        understands, such as those of `part_names`.
      user_stages: builds the stages whose last one gives the table of users
        (`beam_pipelines.dataset.clients.user_pieces` makes it), where a user's examples are not found in one place and
        `read_users` cannot be.
      parameters: what else decided the content, as JSON has it; the manifest repeats it.
    """

    source: str
    folder: Path
    files: tuple[str, ...]
    read_users: Callable[[Path], Iterable[UserRecord]] | None
    are_images: bool
    has_test_examples: bool = False
    has_validation_examples: bool = False
    parts: tuple[str, ...] = ()
    user_stages: "Callable[[ClientRules], Sequence[Stage]] | None" = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """What single tasks read."""
        return self.parts or self.files


def files_in(folder: Path) -> list[Path]:
    """The files in a folder, sorted by name, but for hidden ones: `._a.json` is what macOS leaves beside `a.json`.

    Raises:
      DataError: a link leads nowhere, as where large files of a repository have not been fetched.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path}: a link to {path.readlink()}, which is not there; fetch the file or remove the link"
            )
    return [path for path in paths if path.is_file()]


def part_names(file: str, count: int) -> tuple[str, ...]:
    """Names of the parts of a file that is read by several tasks: `images.txt:0/3`, `images.txt:1/3`, ..."""
    return tuple(f"{file}:{number}/{count}" for number in range(count))


def split_part(path: Path) -> tuple[Path, int, int]:
    """The file, the number of the part and the number of parts that a path names; a whole file is part 0 of 1."""
    named = re.fullmatch(r"(.*):(\d+)/(\d+)", str(path))
    return (Path(named[1]), int(named[2]), int(named[3])) if named else (path, 0, 1)
