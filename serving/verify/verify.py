"""Verifies a received export as a whole, and describes the export's contents."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.saved_model import layout
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.errors import ServingError


@dataclasses.dataclass(frozen=True)
class VerifiedExport:
    """The contents of an export that passed its verification.

    Attributes:
      export_dir: directory of the version.
      files: size of each file in bytes, by the file's path relative to the directory.
      signatures: signatures of the loaded graph by name, as `serving.saved_model.signatures.describe` returns them.
      ops: names of all ops that the graph uses, sorted.
      warmup_requests: number of the export's warm-up requests, which were all run.
      claims: other entries of the manifest, such as `num_clients`, `layout` and `tensorflow_version`; nothing checks
        that they are true.
    """

    export_dir: Path
    files: Mapping[str, int]
    signatures: Mapping[str, Any]
    ops: Sequence[str]
    warmup_requests: int
    claims: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Returns the total size of all files in bytes."""
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Returns all attributes and `total_bytes` as JSON values."""
        return {**dataclasses.asdict(self), "export_dir": str(self.export_dir), "total_bytes": self.total_bytes}

    def summary(self) -> str:
        """Returns a summary for people, of a few lines."""
        plain = {key: value for key, value in self.claims.items() if isinstance(value, str | int | float)}
        claims = [f"{key.replace('_', ' ')} {value}" for key, value in plain.items()]
        lines = [
            f"{self.export_dir}: verified",
            f"  {len(self.files)} files, {self.total_bytes:,} bytes; {len(self.ops)} ops, all allowed; "
            f"{self.warmup_requests} warm-up requests answered",
            f"  says of itself: {', '.join(claims)}",
        ]
        for name, signature in self.signatures.items():
            lines.append(f"  {name} ({_described(signature['inputs'])}) -> ({_described(signature['outputs'])})")
        return "\n".join(lines)


def verify_export(export_dir: Path, process: FreshProcess, expectations: Sequence[Expectation] = ()) -> VerifiedExport:
    """Verifies one version in a fresh process: checks its files and graph, loads it, and compares its answers.

    The calling process reads files of the export only after the verification has succeeded.

    Raises:
      ServingError: the export is refused; the message gives the reason, and names the file or the answer.
    """
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
    """Returns `path` alone if it is a version; else the folders of its versions, or only the newest if `latest`.

    Raises:
      ServingError: the path has neither a SavedModel nor versions.
    """
    if (path / layout.SAVED_MODEL_FILE).exists():
        return [path]
    versions = list(layout.published_versions(path).values())
    if not versions:
        raise ServingError(f"{path} holds neither a {layout.SAVED_MODEL_FILE} nor numbered versions.")
    return versions[-1:] if latest else versions


def _described(tensors: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {tensor['dtype']} {_shape(tensor['shape'])}" for key, tensor in tensors.items())


def _shape(sizes: Sequence[int | None] | None) -> str:
    return "of any rank" if sizes is None else f"[{', '.join('n' if size is None else str(size) for size in sizes)}]"
