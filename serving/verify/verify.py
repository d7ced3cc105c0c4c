"""Verifying an export as a whole, for the exporter before it publishes and for whoever receives one."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.saved_model import layout
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.errors import ServingError


@dataclasses.dataclass(frozen=True)
class VerifiedExport:
    """What an export holds that passed its verification.

    Attributes:
      export_dir: the directory of the version.
      files: bytes of every file, by its path below the directory.
      signatures: what can be called, read off the loaded graph: for each name its `method`, `inputs` and `outputs`,
        which have a `dtype` and a `shape` (None where a dimension is open) for each key.
      ops: all ops that the graph uses, sorted.
      warmup_requests: how many stored requests were replayed.
      claims: what the manifest says beside the hashes, such as `num_clients`, `layout` and `tensorflow_version`; only
        that it is the exporter's manifest speaks for it.
    """

    export_dir: Path
    files: Mapping[str, int]
    signatures: Mapping[str, Any]
    ops: Sequence[str]
    warmup_requests: int
    claims: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**dataclasses.asdict(self), "export_dir": str(self.export_dir), "total_bytes": self.total_bytes}

    def summary(self) -> str:
        """A few lines for a person."""
        claims = [f"{key.replace('_', ' ')} {value}" for key, value in self.claims.items() if _is_plain(value)]
        lines = [
            f"{self.export_dir}: verified",
            f"  {len(self.files)} files, {self.total_bytes:,} bytes; {len(self.ops)} ops, all allowed; "
            f"{self.warmup_requests} warm-up requests answered",
            f"  says of itself: {', '.join(claims)}",
        ]
        for name, signature in self.signatures.items():
            lines.append(f"  {name} ({_described(signature['inputs'])}) -> ({_described(signature['outputs'])})")
        return "\n".join(lines)


def verify_export(
    export_dir: Path, *, expectations: Sequence[Expectation] = (), process: FreshProcess | None = None
) -> VerifiedExport:
    """Checks the files and the graph of an export, then loads it in a fresh process and compares its answers.

    Nothing of the export is read or run by the calling process before that other process is through with it.

    Args:
      export_dir: the directory of one version.
      expectations: requests and the answers they must get.
      process: a process that was started before; without it one is started for this call, which takes seconds.

    Raises:
      ServingError: the export is refused; the message names the file or the answer, and why.
    """
    if process is None:
        with FreshProcess() as own:
            return verify_export(export_dir, expectations=expectations, process=own)
    found = process.verify(export_dir, expectations)
    manifest = layout.read_manifest(export_dir)
    return VerifiedExport(
        export_dir=export_dir,
        files={
            path.relative_to(export_dir).as_posix(): path.stat().st_size
            for path in sorted(export_dir.rglob("*"))
            if path.is_file()
        },
        signatures=found["signatures"],
        ops=found["ops"],
        warmup_requests=found["warmup_requests"],
        claims={key: value for key, value in manifest.items() if key not in ("files", "signatures", "digest")},
    )


def versions_below(path: Path, *, latest: bool = False) -> list[Path]:
    """The exports that a path stands for: the directory of one version itself, or the versions of a base path.

    Args:
      path: a directory with a SavedModel, or with numbered directories.
      latest: of a base path, only the highest version.

    Raises:
      ServingError: there is neither.
    """
    if (path / layout.SAVED_MODEL_FILE).exists():
        return [path]
    versions = list(layout.published_versions(path).values())
    if not versions:
        raise ServingError(f"{path} holds neither a {layout.SAVED_MODEL_FILE} nor numbered versions.")
    return versions[-1:] if latest else versions


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _described(tensors: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {tensor['dtype']} {_shape(tensor['shape'])}" for key, tensor in tensors.items())


def _shape(sizes: Sequence[int | None] | None) -> str:
    return "of any rank" if sizes is None else f"[{', '.join('n' if size is None else str(size) for size in sizes)}]"
