"""Measures methods for budgets that differ: how often PFA groups silos rightly, and the memory of a round.

Groups: a draw is a division of MNIST among ten silos, a budget for each, and one warm-start round with its noise. Right
are the groups if the liberal silos are those of the mixture's component with the largest epsilons. Memory: the largest
resident memory of a process that trains the tutorial CNN of 26,010 weights on 50 silos, start included.

  python -m benchmarks.rounds.differing_budgets --data data/mnist
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, describe_machine
from tff_pdp.experiment.build import build_method, experiment_engine, keep_computations
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.training.rounds import first_state, run_round

OUTPUT = RESULTS / "differing_budgets.json"
SILOS, LIBERAL = 10, 1
MIXTURES = ("mix_gauss_1", "mix_gauss_3", "mix_gauss_4")
PARTITIONS: dict[str, dict[str, Any]] = {
    "IID": {"kind": "uniform", "num_clients": SILOS},
    "two labels": {"kind": "shards", "num_clients": SILOS, "shards_per_client": 2},
}
# One warm start, and the rounds of the reproduction, for which the noise is planned.
ROUNDS = 21
# Divisions of the images that the draws take turns with.
DIVISIONS = 5
METHODS: dict[str, dict[str, Any]] = {
    "fed_avg": {},
    "pfa": {"partition": "by_norm"},
    "pfa_raw": {"kind": "pfa", "partition": "by_norm", "paper_raw_norms": True},
    "pfa_plus": {"kind": "pfa", "partition": "by_norm", "plus": True},
}
OF_MEMORY = ("fed_avg", "pfa", "pfa_plus")


def experiment(data: str, output: Path, steps: int, **overrides: Any) -> ExperimentConfig:
    """Returns the reproduction's experiment with other settings, by dotted key with `__` for the dot."""
    methods = {name: {**given, "learning_rate": 0.1, "local_steps": steps} for name, given in METHODS.items()}
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_experiment(
        "reproduce/pfa_mnist",
        {"data.input": data, "output": str(output), "training.rounds": ROUNDS, "algorithms": methods, **changed},
    )


def count_right_groups(data: str, draws: int, first_seed: int) -> Iterator[dict[str, Any]]:
    """Yields, for each division and mixture, the number of draws with the right groups, by logarithms and raw norms."""
    with tempfile.TemporaryDirectory() as folder, keep_computations({}):
        for name, partition in PARTITIONS.items():
            for mixture in MIXTURES:
                right = dict.fromkeys(("pfa", "pfa_raw"), 0)
                for seed in range(first_seed, first_seed + draws):
                    output = Path(folder) / f"{name} {seed % DIVISIONS}"
                    config = experiment(
                        data,
                        output,
                        93,
                        data__seed=first_seed + seed % DIVISIONS,
                        data__partition=partition,
                        privacy__budgets__distribution={"kind": mixture},
                        privacy__budgets__seed=seed,
                        training__test_only_seed=seed,
                    )
                    if not config.clients_folder.exists():
                        prepare_clients(config)
                    for method in right:
                        right[method] += is_grouped_rightly(config, method)
                yield {
                    "division": name,
                    "mixture": mixture,
                    "draws": draws,
                    "right_by_logarithms": right["pfa"],
                    "right_by_raw_norms": right["pfa_raw"],
                }


def is_grouped_rightly(config: ExperimentConfig, name: str) -> bool:
    """Runs the warm start, and compares the liberal silos with those of the largest epsilon."""
    method = build_method(config, name)
    epsilons = np.array([method.plan.budgets[client_id].epsilon for client_id in method.clients.client_ids])
    with experiment_engine(config):
        state = first_state(method, config.training.test_only_seed)
        state = run_round(method, state, 1, method.client_data("train"))
    found = np.flatnonzero(np.asarray(state.server_state["algorithm"]["is_liberal"]))
    return set(found) == set(np.argsort(epsilons)[-LIBERAL:])


def measure_memory(data: str, name: str, rounds: int) -> dict[str, Any]:
    """Trains some rounds in this process; returns the method's name and the largest resident memory so far, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        config = experiment(
            data,
            Path(folder),
            20,
            data__partition={"kind": "uniform", "num_clients": 50},
            data__images_per_client=1200,
            model={"kind": "tutorial_cnn"},
            privacy__budgets={"kind": "one_for_all", "epsilon": 1.0, "delta": 1e-5},
            training__test_only_seed=0,
        )
        prepare_clients(config)
        method = build_method(config, name)
        with experiment_engine(config):
            state, data_of_all = first_state(method, 0), method.client_data("train")
            for number in range(1, rounds + 1):
                state = run_round(method, state, number, data_of_all)
    return {"method": name, "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Measures groups and memory, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="MNIST's four .gz files")
    parser.add_argument("--draws", type=int, default=20, metavar="N", help="draws for each row; default 20")
    parser.add_argument("--first-seed", type=int, default=200, metavar="N", help="seed of the first draw; default 200")
    parser.add_argument("--memory-of", choices=OF_MEMORY, help="measure only the memory of this method; print its row")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(measure_memory(options.data, options.memory_of, rounds=4)))
        return
    memory = []
    for name in OF_MEMORY:
        command = [sys.executable, "-m", "benchmarks.rounds.differing_budgets", "--data", options.data]
        done = subprocess.run(
            [*command, "--memory-of", name], check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        memory.append({**row, "times_fed_avg": row["peak_rss_mb"] / (memory or [row])[0]["peak_rss_mb"]})
        print(f"{name:<10} {row['peak_rss_mb']:7.0f} MB  {memory[-1]['times_fed_avg']:.3f} times fed_avg", flush=True)
    groups = []
    for row in count_right_groups(options.data, options.draws, options.first_seed):
        groups.append(row)
        print(
            f"{row['division']:<11} {row['mixture']}  right of {row['draws']}: {row['right_by_logarithms']} by "
            f"logarithms, {row['right_by_raw_norms']} by raw norms",
            flush=True,
        )
    found = {"machine": describe_machine(), "groups": groups, "memory": memory}
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
