"""Runs small experiments of every kind with fixed seeds and prints digests of all files that they write.

A change that moves code, or makes it faster, must not change a number: run this tool before and after the change, on
the same machine, and compare.

    .venv/bin/python tools/digests.py --data DIR > before.json
    .venv/bin/python tools/digests.py --data DIR --checkout ../other > after.json

Digests depend on the processor, as sums of floats do: compare two versions on one machine, not two machines.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sklearn.datasets import load_digits

# Keys whose values say when and where a run took place, or which files the code has.
VOLATILE = ("seconds", "time", "created", "started", "finished", "path", "folder", "input", "output", "source_digest")
# One thread per operation, because the number of threads decides the order of some sums.
ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "Agg"}
# Plain ids, because hashed ids depend on a key that each run draws.
SETTINGS = {"training.test_only_seed": 1, "training.client_parallelism": "loop", "export.client_ids": "plain"}
SEEDED = tuple(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}"))


def main() -> int:
    """Prints a JSON document: for each experiment, the files that it wrote and their digests."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with school, mnist and mnist_writers")
    parser.add_argument("--checkout", type=Path, default=Path(), help="checkout whose code runs; default: this one")
    parser.add_argument("--only", action="append", choices=sorted(EXPERIMENTS), help="one experiment; default: all")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for name in options.only or EXPERIMENTS:
        with tempfile.TemporaryDirectory() as folder:
            EXPERIMENTS[name](Run(options.checkout.resolve(), Path(folder), options.data.resolve()))
            found[name] = dict(digests(Path(folder)))
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    print()
    return 0


class Run:
    """Runs the command of one checkout in a folder of its own."""

    def __init__(self, checkout: Path, folder: Path, data: Path):
        self.checkout, self.folder, self.data = checkout, folder, data

    def config(self, name: str) -> str:
        """Returns the path of a configuration of the checkout."""
        # Earlier versions have configurations outside of the package.
        folders = (self.checkout / folder for folder in ("tff_pdp/configs", "configs"))
        return str(next(folder / name for folder in folders if folder.is_dir()))

    def __call__(self, command: str, *arguments: str) -> None:
        """Runs one command of `tff-pdp`.

        Raises:
          SystemExit: the command failed.
        """
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self.checkout)}
        done = subprocess.run(
            [sys.executable, "-m", "tff_pdp.cli", command, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"tff-pdp {command} {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}")


def demo(run: Run) -> None:
    """Runs the demo's digits and configuration, from raw data to an export."""
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    users = {f"silo_{k:02}": np.arange(k, len(labels), 10) for k in range(10)}
    leaf = {
        "users": list(users),
        "num_samples": [len(rows) for rows in users.values()],
        "user_data": {
            user: {"x": images[rows].reshape(len(rows), -1).tolist(), "y": labels[rows].tolist()}
            for user, rows in users.items()
        },
    }
    (run.folder / "leaf").mkdir()
    (run.folder / "leaf" / "digits.json").write_text(json.dumps(leaf))
    config = ("--config", run.config("demo.yaml"), "--set", "output=run", "--set", "data.input=leaf", *SEEDED)
    for command in ("prepare", "train", "evaluate", "export"):
        run(command, *config)


def school(run: Run, *options: str) -> None:
    """Runs School: one seed, one budget, three methods."""
    methods = ("--methods", "local_only", "fed_avg", "mr_mtl")
    run(
        "reproduce",
        "school",
        "--data",
        str(run.data),
        "--seeds",
        "1",
        "--epsilons",
        "6",
        *methods,
        "--output",
        "run",
        *options,
    )


def users(run: Run) -> None:
    """Runs MNIST's writers with user-level privacy: states, cohorts, a shared part, a hypernetwork, an export."""
    config = ("--config", run.config("reproduce/mnist_writers.yaml"), "--set", "output=run", *SEEDED)
    config += ("--set", f"data.input={run.data / 'mnist'}", "--set", "training.rounds=2")
    run("prepare", *config)
    for name in ("centaur", "udp_hypernet"):
        run("train", *config, "--algorithm", name)
        run("evaluate", *config, "--algorithm", name)
    run("export", *config)


def contact_graph(run: Run) -> None:
    """Runs a simulated outbreak: tables, rows of people, node-level privacy, an export."""
    text = yaml.safe_load(Path(run.config("reproduce/pandemic.yaml")).read_text())
    text["output"] = "run"
    text["data"]["population"]["num_people"] = 8000
    text["training"]["rounds"] = 4
    (run.folder / "pandemic.yaml").write_text(yaml.safe_dump(text))
    for command in ("prepare", "train", "evaluate", "export"):
        run(command, "--config", "pandemic.yaml", *SEEDED)


EXPERIMENTS = {
    "demo": demo,
    "school": school,
    "school_paper": lambda run: school(run, "--paper"),
    "users": users,
    "contact_graph": contact_graph,
}


def digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields each file below a folder and the digest of its content, without parts that differ in each run."""
    for path in sorted(folder.rglob("*")):
        is_volatile = path.suffix in (".key", ".log") or path.name == "partial.jsonl" or path.parent.name == "variables"
        if path.is_file() and not path.is_symlink() and not is_volatile:
            yield str(path.relative_to(folder)), hashlib.sha256(_content(path)).hexdigest()[:16]


def _content(path: Path) -> bytes:
    match path.suffix:
        case ".json":
            content = _lasting(json.loads(path.read_text()))
            # This manifest is an export's list of files and hashes; the files themselves are compared.
            return b"" if path.name == "manifest.json" and "files" in content else _as_bytes(content)
        case ".jsonl":
            return _as_bytes([_lasting(json.loads(line)) for line in path.read_text().splitlines()])
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return b"".join(_of_array(key, array) for key, array in arrays.items())
        case ".html":
            # Without the time of writing and the seconds per round.
            return re.sub(r"[0-9T:+-]{25} ·|[0-9.e-]+ s each", "", path.read_text()).encode()
        case ".pb" if path.name == "saved_model.pb":
            return _of_saved_model(path)
        case ".pb":
            # This file is a fingerprint of the bytes of the graph.
            return b""
        case _:
            return path.read_bytes()


def _of_saved_model(path: Path) -> bytes:
    """Returns all variables and counts of operations, without the names of functions, which depend on the process."""
    from tensorflow import train
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    graph = SavedModel.FromString(path.read_bytes()).meta_graphs[0]
    functions = sorted(
        sorted(Counter(node.op for node in function.node_def).items()) for function in graph.graph_def.library.function
    )
    reader = train.load_checkpoint(str(path.parent / "variables" / "variables"))
    variables = [_of_array(name, reader.get_tensor(name)) for name in sorted(reader.get_variable_to_shape_map())]
    return _as_bytes([functions, sorted(graph.signature_def)]) + b"".join(variables)


def _of_array(name: str, array: Any) -> bytes:
    array = np.asarray(array)
    values = str(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
    return f"{name} {array.dtype} {array.shape}".encode() + values


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if not any(part in key for part in VOLATILE)}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
