"""Looks for exports that end the process which loads them: each is damaged in its own way under a manifest that fits.

python -m tests.serving.fuzz.export_hunt --exports 500 --seed 7 --keep /tmp/found

A version that does not load must be refused with a message. What loads may answer anything, as its weights or its graph
are others then. Loading happens in a child process; exports that ended it, or that nothing was said about in time, are
kept.
"""

import argparse
import collections
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serving.fuzz.corrupted_exports import flip_bytes_and_reseal, publish
from tests.serving.fuzz.target import export_model

_LIMIT_SECONDS = 60.0
_LOADER = """
import sys
from pathlib import Path
from serving.saved_model.servable import load_servable
from tff_pdp.errors import ServingError
answers = open(int(sys.argv[1]), "w")
for line in sys.stdin:
    try:
        load_servable(Path(line.rstrip())).close()
        print("loads", file=answers, flush=True)
    except ServingError as error:
        print("refused:", repr(str(error))[:2000], file=answers, flush=True)
    except BaseException as error:
        print("raises:", repr(error)[:2000], file=answers, flush=True)
"""


class _Loader:
    """A child process that loads one export after another."""

    def __init__(self, log: Path):
        reading, writing = os.pipe()
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LOADER, str(writing)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=[writing],
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def load(self, export: Path) -> str:
        """Returns what became of an export: `loads`, `refused: ...`, `raises: ...`, or how the process ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{export}\n")
        self._process.stdin.flush()
        if not select.select([self._answers], [], [], _LIMIT_SECONDS)[0]:
            self._process.kill()
            return f"says nothing within {_LIMIT_SECONDS:.0f} s"
        return self._answers.readline().strip() or f"ended the process: {self._process.wait()}"

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()


def main() -> int:
    """Loads many damaged exports; returns 1 if one was not simply refused or loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR", help="where to leave what was found")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    counts: collections.Counter[str] = collections.Counter()
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base_path = root / "models" / export_model(root).name
        loader = _Loader(options.keep / "log")
        for number in range(options.exports):
            name = f"hunt_{options.seed}_{number}"
            rng = random.Random(f"{options.seed}/{number}")
            export = publish(base_path / "1", base_path, name, flip_bytes_and_reseal, rng)
            said = loader.load(export)
            counts[said.split(":")[0]] += 1
            if not said.startswith(("loads", "refused")):
                found += 1
                print(f"{name}: {said}", flush=True)
                shutil.copytree(export, options.keep / name, dirs_exist_ok=True)
                loader.close()
                loader = _Loader(options.keep / "log")
            shutil.rmtree(export)
        loader.close()
    print(dict(counts))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
