"""Exports that must not be served: damaged copies, and well-sealed ones that are made to do harm."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tensorflow.core.protobuf import saved_model_pb2

from serving.saved_model import layout
from tff_pdp.digests import as_text

Corruption = Callable[[Path, random.Random], None]


def publish(good: Path, base_path: Path, name: str, corrupt: Corruption, rng: random.Random) -> Path:
    """Copies an export, corrupts the copy and moves it into place in one step."""
    staging = base_path / f"{name}.staging"
    shutil.copytree(good, staging)
    corrupt(staging, rng)
    target = base_path / name
    staging.rename(target)
    return target


def reseal(export: Path) -> None:
    """Writes the hashes of the files as they are now into the manifest, as an attacker would."""
    path = export / layout.MANIFEST_FILE
    manifest = json.loads(path.read_text(encoding="utf-8"))
    files = [file for file in sorted(export.rglob("*")) if file.is_file() and not file.is_symlink() and file != path]
    manifest["files"] = {str(file.relative_to(export)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    manifest["total_bytes"] = sum(file.stat().st_size for file in files)
    path.write_text(as_text(manifest), encoding="utf-8")


def _sealed(change: Corruption) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        change(export, rng)
        reseal(export)

    return corrupt


def flip_bytes(export: Path, rng: random.Random) -> None:
    """Changes a few bytes of one file."""
    path = rng.choice([file for file in sorted(export.rglob("*")) if file.is_file() and file.stat().st_size])
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 30])):
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def flip_bytes_and_reseal(export: Path, rng: random.Random) -> None:
    """Changes a few bytes of the graph or the checkpoint under a manifest that fits: anything may come of it."""
    variables = sorted(f"variables/{path.name}" for path in (export / "variables").iterdir())
    path = export / rng.choice(
        [layout.SAVED_MODEL_FILE, *variables, layout.SAVED_MODEL_FILE, *variables, layout.WARMUP_FILE]
    )
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        place = rng.randrange(len(content))
        content[place : place + rng.choice([1, 1, 1, 0, 4])] = bytes([rng.randrange(256)]) * rng.choice([1, 1, 1, 0, 4])
    path.write_bytes(content[: rng.choice([len(content)] * 5 + [rng.randrange(len(content))])])
    reseal(export)


def _truncate(export: Path, rng: random.Random) -> None:
    path = rng.choice([file for file in sorted(export.rglob("*")) if file.is_file() and file.stat().st_size])
    os.truncate(path, rng.randrange(path.stat().st_size))


def _half_copied(export: Path, rng: random.Random) -> None:
    files = [file for file in sorted(export.rglob("*")) if file.is_file()]
    for file in rng.sample(files, rng.randrange(1, len(files))):
        file.unlink()


def _emptied(export: Path, rng: random.Random) -> None:
    for path in list(export.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _added(name: str) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        (export / name).write_bytes(b"x")

    return corrupt


def _link(name: str, target: str) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        path = export / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return corrupt


def _pipe(export: Path, rng: random.Random) -> None:
    path = export / layout.WARMUP_FILE
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _written(name: str, content: bytes) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        (export / name).write_bytes(content)

    return corrupt


def _graph(change: Callable[[saved_model_pb2.SavedModel], None]) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        path = export / layout.SAVED_MODEL_FILE
        saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
        change(saved_model)
        path.write_bytes(saved_model.SerializeToString())

    return _sealed(corrupt)


def _op(name: str) -> Corruption:
    def change(saved_model: saved_model_pb2.SavedModel) -> None:
        saved_model.meta_graphs[0].graph_def.node.add(name="added", op=name)

    return _graph(change)


def _op_in_function(saved_model: saved_model_pb2.SavedModel) -> None:
    saved_model.meta_graphs[0].graph_def.library.function[0].node_def.add(name="added", op="EagerPyFunc")


def _asset(filename: str) -> Corruption:
    def change(saved_model: saved_model_pb2.SavedModel) -> None:
        for meta_graph in saved_model.meta_graphs:
            for asset in meta_graph.asset_file_def:
                asset.filename = filename

    return _graph(change)


def _no_signatures(saved_model: saved_model_pb2.SavedModel) -> None:
    saved_model.meta_graphs[0].signature_def.clear()


def _dangling_signature(saved_model: saved_model_pb2.SavedModel) -> None:
    for tensor in saved_model.meta_graphs[0].signature_def["serving_default"].inputs.values():
        tensor.name = "nowhere:0"


def _other_tags(saved_model: saved_model_pb2.SavedModel) -> None:
    saved_model.meta_graphs[0].meta_info_def.tags[:] = ["train"]


def _manifest(content: bytes) -> Corruption:
    return _written(layout.MANIFEST_FILE, content)


def _checkpoint(suffix: str, *, size: int | None = None) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        path = next(file for file in (export / "variables").iterdir() if suffix in file.name)
        os.truncate(path, path.stat().st_size // 2 if size is None else size)

    return _sealed(corrupt)


def _checkpoint_noise(suffix: str) -> Corruption:
    def corrupt(export: Path, rng: random.Random) -> None:
        path = next(file for file in (export / "variables").iterdir() if suffix in file.name)
        path.write_bytes(rng.randbytes(path.stat().st_size))

    return _sealed(corrupt)


# Each of these must be refused, and say why.
REFUSED: dict[str, Corruption] = {
    "flipped bytes": flip_bytes,
    "flipped bytes again": flip_bytes,
    "truncated": _truncate,
    "half copied": _half_copied,
    "emptied": _emptied,
    "an added file": _added("variables/extra"),
    "an added asset": _added("assets/../assets/extra.txt"),
    "a link to a file": _link("assets.extra/model_card.json", "/etc/hostname"),
    "a link to a folder": _link("variables", "/etc"),
    "an added link": _link("etc", "/etc"),
    "a pipe": _pipe,
    "a graph of noise": _sealed(_written(layout.SAVED_MODEL_FILE, bytes(range(256)) * 50)),
    "an empty graph": _sealed(_written(layout.SAVED_MODEL_FILE, b"")),
    "PyFunc": _op("PyFunc"),
    "EagerPyFunc in a function": _graph(_op_in_function),
    "ReadFile": _op("ReadFile"),
    "an unknown op": _op("NoSuchOp"),
    "an asset far above": _asset("../../../../../../../../etc/hostname"),
    "an asset beside": _asset("../saved_model.pb"),
    "an absolute asset": _asset("/etc/hostname"),
    "an asset without a name": _asset(""),
    "an asset that is a folder": _asset("."),
    "no signatures": _graph(_no_signatures),
    "a dangling signature": _graph(_dangling_signature),
    "other tags": _graph(_other_tags),
    "a manifest that is a list": _manifest(b"[]"),
    "a manifest that is deep": _manifest(b"[" * 200_000),
    "a manifest of numbers": _manifest(b'{"files": 7}'),
    "a manifest without hashes": _manifest(b'{"format_version": 1, "files": {"saved_model.pb": null}}'),
    "a manifest that is no text": _manifest(b"\xff\xfe\x00"),
    "a manifest of files outside": _manifest(b'{"format_version": 1, "files": {"../../../../etc/hostname": "00"}}'),
    "half a checkpoint": _checkpoint("data"),
    "no checkpoint": _checkpoint("data", size=0),
    "half an index": _checkpoint("index"),
    "an empty index": _checkpoint("index", size=0),
    "a checkpoint of noise": _checkpoint_noise("data"),
    "an index of noise": _checkpoint_noise("index"),
    "warm-up requests of noise": _sealed(_written(layout.WARMUP_FILE, b"\x10" + b"\0" * 50)),
}

# Folders with these names are no versions, whatever is in them.
IGNORED_NAMES = [str(2**63), "9" * 30, "-5", "1.5", "5x", "0x10", "７", " 8", "8 ", "1e3", "77.tmp", ".99", "latest"]
