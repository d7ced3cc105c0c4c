"""Measures seconds per federated round of several contenders on the same work, interleaved in one run.

    python -m benchmarks.rounds.run --workloads W2,W3 --contenders floor-tf,stock-tff --repetitions 3
    python -m benchmarks.rounds.run --scaling
    python -m benchmarks.rounds.run --device gpu

A contender whose environment does not exist is skipped; a contender that fails is reported and left out of the rows.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.machine import RESULTS, ROOT, gpu_names
from benchmarks.rounds.measure import WARM_UP_ROUNDS, Row, measure
from benchmarks.rounds.workloads import WORKLOADS, build_workload
from tff_pdp.files import replace_text

_PEERS = ROOT / ".venv-bench"
_ALL = tuple(WORKLOADS)
_FED_AVG = ("W1", "W1-dp", "W2", "W2-dp")

# For each name: the Python, the module and its further arguments, and the workloads that the contender takes part in.
CONTENDERS: dict[str, tuple[Path, list[str], Sequence[str]]] = {
    "ours-native": (Path(sys.executable), ["ours", "native"], _ALL),
    "ours-loop": (Path(sys.executable), ["ours", "loop"], _ALL),
    "ours-vectorized": (Path(sys.executable), ["ours", "vectorized"], _ALL),
    "stock-tff": (Path(sys.executable), ["stock_tff"], _FED_AVG),
    "floor-tf": (Path(sys.executable), ["floor_tf"], _ALL),
    "fedjax": (_PEERS / "fedjax" / "bin" / "python", ["fedjax"], _FED_AVG),
    "pfl": (_PEERS / "pfl" / "bin" / "python", ["pfl"], _FED_AVG),
    "pfl-1-thread": (_PEERS / "pfl" / "bin" / "python", ["pfl", "1"], _FED_AVG),
}
# TFF's worker has no code for GPUs, and a number of threads decides nothing there.
_ON_GPU = tuple(name for name in CONTENDERS if name not in ("ours-native", "stock-tff", "pfl-1-thread"))
_SCALING_CLIENTS = (20, 100, 500)
_SCALING_POPULATIONS = (10, 100, 1000, 10000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the rows; returns the exit status, 1 if there is no row at all."""
    options = _parse(arguments)
    # If this process is stopped from outside, the contenders stop too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[Row] = []
    for name, clients, population in _sizes(options):
        rows += _measure_one(name, clients, population, options)
        # Rows are written after every workload, so that a later failure does not lose them.
        write_rows(rows, options.output)
    return 0 if rows else 1


def write_rows(rows: Sequence[Row], output: Path) -> None:
    """Replaces the file's content by these rows, atomically."""
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, json.dumps(list(rows), indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds.run", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--workloads", type=names, help=f"of {','.join(_ALL)}; default: all, with --scaling W2,W3")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where all contenders compute")
    parser.add_argument("--contenders", type=names, help="default: all that are installed and can use the device")
    parser.add_argument("--repetitions", type=int, help="recorded rounds; default: W1 5, W2 9, W3 25")
    parser.add_argument("--clients", type=numbers, help="clients per round (W3: silos), e.g. 20,100,500")
    parser.add_argument("--scaling", action="store_true", help="20 to 500 clients, and populations of 10 to 10000")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each answer of a contender")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/latest.json, gpu.json or scaling.json")
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or (["W2", "W3"] if options.scaling else list(_ALL))
    is_gpu = options.device == "gpu"
    options.contenders = options.contenders or list(_ON_GPU if is_gpu else CONTENDERS)
    name = ("gpu_scaling" if is_gpu else "scaling") if options.scaling else "gpu" if is_gpu else "latest"
    options.output = (options.output or RESULTS / f"{name}.json").resolve()
    for kind, known in (("workloads", WORKLOADS), ("contenders", CONTENDERS)):
        unknown = [name for name in getattr(options, kind) if name not in known]
        if unknown:
            parser.error(f"unknown {kind}: {', '.join(unknown)}; known: {', '.join(known)}")
    absent = [name for name in options.contenders if is_gpu and name not in _ON_GPU]
    if absent:
        parser.error(f"contenders that cannot use a GPU: {', '.join(absent)}")
    if is_gpu:
        try:
            gpu_names()
        except RuntimeError as error:
            parser.error(str(error))
    return options


def _sizes(options: argparse.Namespace) -> Iterable[tuple[str, int | None, int | None]]:
    for name in options.workloads:
        for clients in options.clients or (_SCALING_CLIENTS if options.scaling else (None,)):
            yield name, clients, None
        # In W3 all silos take part: there is no population to draw from.
        if options.scaling and name in _FED_AVG:
            for population in _SCALING_POPULATIONS:
                yield name, min(_SCALING_POPULATIONS), population


def _measure_one(name: str, clients: int | None, population: int | None, options: argparse.Namespace) -> list[Row]:
    workload = build_workload(name, clients, population)
    specification = {"name": name, "clients_per_round": workload.clients_per_round, "population": workload.population}
    commands = {}
    for contender in options.contenders:
        python, (module, *module_arguments), workloads = CONTENDERS[contender]
        if name in workloads and python.is_file() and (ROOT / f"benchmarks/rounds/contenders/{module}.py").is_file():
            program = [str(python), "-m", f"benchmarks.rounds.contenders.{module}"]
            commands[contender] = [*program, json.dumps(specification), *module_arguments]
    repetitions = options.repetitions or workload.repetitions
    title = f"{name}, {workload.clients_per_round} of {workload.population} clients"
    with tqdm(total=len(commands) * (WARM_UP_ROUNDS + repetitions + 1), desc=title, mininterval=1) as progress:

        def on_step(contender: str) -> None:
            progress.set_postfix_str(contender)
            progress.update()

        rows, errors = measure(workload, commands, repetitions, options.timeout, on_step, options.device)
    for contender, error in errors.items():
        print(f"{name}: {contender} is left out: {error}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    sys.exit(main())
