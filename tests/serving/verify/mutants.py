"""Damaged copies of an export, made at random from a seed, whose manifests agree with the damage."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from serving.saved_model import layout
from serving.saved_model import layout as manifest
from serving.saved_model.checks import ALLOWED_OPS

HUGE_VARINT = b"\xff" * 9 + b"\x01"


def flip_bits(random_source: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(random_source.choice([1, 1, 4, 64])):
        damaged[random_source.randrange(len(damaged))] ^= 1 << random_source.randrange(8)
    return bytes(damaged)


def truncate(random_source: random.Random, content: bytes) -> bytes:
    return content[: random_source.randrange(len(content))]


def insert_huge_varint(random_source: random.Random, content: bytes) -> bytes:
    position = random_source.randrange(len(content))
    return content[:position] + HUGE_VARINT + content[position + random_source.choice([0, 1, 10]) :]


def overwrite_run(random_source: random.Random, content: bytes) -> bytes:
    start = random_source.randrange(len(content))
    run = random_source.choice([b"\x00", b"\xff", b"\x0a"]) * random_source.randrange(1, 64)
    return content[:start] + run + content[start + len(run) :]


def repeat_part(random_source: random.Random, content: bytes) -> bytes:
    start, end = sorted(random_source.randrange(len(content) + 1) for _ in range(2))
    return content[:end] + content[start:]


def nest(random_source: random.Random, content: bytes) -> bytes:
    """Appends a message within a message, thousands deep, as a field of every number that a parser may descend into."""
    nested = b""
    tag = bytes([random_source.randrange(1, 16) << 3 | 2])
    for _ in range(300):
        nested = tag + varint(len(nested)) + nested
    return content + nested


DAMAGES: list[Callable[[random.Random, bytes], bytes]] = [
    flip_bits,
    flip_bits,
    truncate,
    insert_huge_varint,
    overwrite_run,
    repeat_part,
    nest,
]


def varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def make_mutant(export_dir: Path, target: Path, seed: int) -> str:
    """Copies an export and damages one of its files.

    Returns:
      What was done, for messages.
    """
    shutil.copytree(export_dir, target)
    random_source = random.Random(seed)
    files = manifest.files(target)
    file = files[seed % len(files)]
    name = file.relative_to(target).as_posix()
    if random_source.random() < 0.1:
        other = random_source.choice(files)
        content, other_content = file.read_bytes(), other.read_bytes()
        file.write_bytes(other_content)
        other.write_bytes(content)
        done = f"{name} swapped with {other.name}"
    else:
        damage = random_source.choice(DAMAGES)
        file.write_bytes(damage(random_source, file.read_bytes()))
        done = f"{name} damaged by {damage.__name__}"
    if name != layout.MANIFEST_FILE:
        rewrite_manifest(target)
    return f"seed {seed}: {done}"


def rewrite_manifest(export_dir: Path) -> None:
    """Makes the manifest agree with the files, as whoever changed them would."""
    try:
        details = json.loads((export_dir / layout.MANIFEST_FILE).read_text(encoding="utf-8"))
    except ValueError:
        details = {}
    manifest.write_manifest(
        export_dir, {key: value for key, value in details.items() if key not in ("files", "total_bytes")}
    )


def make_graph_mutant(export_dir: Path, target: Path, seed: int) -> str:
    """Copies an export and changes its graph, so that it is still a readable one of allowed ops.

    Returns:
      What was done, for messages.
    """
    shutil.copytree(export_dir, target)
    random_source = random.Random(seed)
    done = []
    with edited(target) as meta_graph:
        scopes = [meta_graph.graph_def.node, *(one.node_def for one in meta_graph.graph_def.library.function)]
        for _ in range(random_source.choice([1, 2, 8])):
            nodes = random_source.choice([scope for scope in scopes if scope])
            change = random_source.choice(CHANGES)
            done.append(f"{change.__name__} of {change(random_source, random_source.choice(nodes), nodes)}")
    return f"seed {seed}: {'; '.join(done)}"


@contextlib.contextmanager
def edited(export_dir: Path) -> Iterator[meta_graph_pb2.MetaGraphDef]:
    """The graph of an export, to be changed; the manifest is made to agree."""
    path = export_dir / layout.SAVED_MODEL_FILE
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    yield saved_model.meta_graphs[0]
    path.write_bytes(saved_model.SerializeToString())
    rewrite_manifest(export_dir)


def change_op(random_source: random.Random, node, nodes) -> str:
    before, node.op = node.op, random_source.choice(sorted(ALLOWED_OPS))
    return f"{node.name} from {before} to {node.op}"


def change_input(random_source: random.Random, node, nodes) -> str:
    other = random_source.choice(nodes).name
    if node.input:
        node.input[random_source.randrange(len(node.input))] = other
    else:
        node.input.append(other)
    return f"{node.name} to {other}"


def drop_node(random_source: random.Random, node, nodes) -> str:
    name = node.name
    nodes.remove(node)
    return name


def change_attribute(random_source: random.Random, node, nodes) -> str:
    if not node.attr:
        return f"{node.name}, which has none"
    name = random_source.choice(sorted(node.attr))
    value = node.attr[name]
    match value.WhichOneof("value"):
        case "type":
            value.type = random_source.randrange(0, 130)
        case "i":
            value.i = random_source.choice([-1, 0, 2**31, 2**63 - 1, -(2**63)])
        case "shape":
            value.shape.dim.add().size = random_source.choice([-2, -1, 0, 2**40, 2**62])
        case "tensor":
            change_tensor(random_source, value.tensor)
        case "s":
            value.s = random_source.choice([b"", b"\xff\x00", b"/etc/hostname", value.s * 2])
        case "func":
            value.func.name = random_source.choice(["", node.name, value.func.name + "x"])
        case _:
            del node.attr[name]
    return f"{node.name}.{name}"


def change_tensor(random_source: random.Random, tensor) -> None:
    match random_source.randrange(4):
        case 0:
            tensor.dtype = random_source.randrange(0, 130)
        case 1:
            tensor.tensor_shape.dim.add().size = random_source.choice([-1, 0, 2, 2**20, 2**62])
        case 2:
            tensor.tensor_content = tensor.tensor_content + b"\x01"
        case _:
            for field in ("int_val", "int64_val", "float_val"):
                values = getattr(tensor, field)
                values[:] = [random_source.choice([-1, 2**30, -(2**30)]) for _ in values]


CHANGES = [change_op, change_input, drop_node, change_attribute, change_attribute]
