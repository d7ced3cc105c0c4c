"""Runs the demo as far as the end of the first round, and prints the seconds of each part as JSON.

  python -m benchmarks.start_up.first_round FOLDER

The demo writes into a folder in FOLDER, which must be empty or absent; so does the registry of runs.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tff_pdp.command_line import loading

# Parts of the demo, in order: each part begins where the part before ends.
PARTS = ("imports", "prepare", "build", "round")


class _FirstRoundDone(BaseException):
    """Ends the demo; no part of the demo handles it as an error."""


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Runs the demo in `folder` as far as the end of the first round, in a process that has imported little so far.

    Returns:
      Wall seconds (`s`) and seconds of processor time of this process (`cpu_s`), by part. `imports` imports TensorFlow
      and TFF. `prepare` prepares the data. `build` composes the computations and opens the run. `round` traces,
      compiles and runs.
    """
    now = [(time.perf_counter(), time.process_time())]

    def mark() -> None:
        now.append((time.perf_counter(), time.process_time()))

    with loading():
        from tff_pdp.commands.demo import run_demo
        from tff_pdp.training import train as training

    mark()
    run_round, build_method = training.run_round, training.build_method

    def marked_build(*arguments: Any) -> Any:
        mark()
        return build_method(*arguments)

    def only_round(*arguments: Any) -> Any:
        mark()
        run_round(*arguments)
        mark()
        raise _FirstRoundDone

    patched = mock.patch.multiple(training, build_method=marked_build, run_round=only_round)
    with patched, contextlib.suppress(_FirstRoundDone):
        run_demo(folder / "demo", None, {"privacy.registry": str(folder / "registry")})
    return {
        part: {"s": end[0] - start[0], "cpu_s": end[1] - start[1]}
        for part, start, end in zip(PARTS, now[:-1], now[1:], strict=True)
    }


def main() -> None:
    """Measures one start of the demo and prints the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    print(json.dumps(measure(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
