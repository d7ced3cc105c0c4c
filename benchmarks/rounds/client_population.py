"""Measures the cost of a round with a small cohort of a large population, whose states lie on disk.

A process of its own trains CENTAUR with user-level DP on each population of simulated clients. Writes seconds per round
and the largest resident memory, start included; the last column compares with the smallest population.

  python -m benchmarks.rounds.client_population
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, describe_machine
from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.engines.running import running_engine
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.hparams import build_algorithm, hparam_columns
from tff_pdp.experiment.method import Method
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.privacy.accounting.budgets import OneForAll
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.user import User
from tff_pdp.processes.client_work import num_released
from tff_pdp.processes.compose import compose
from tff_pdp.training.client_store.states import close_states
from tff_pdp.training.rounds import first_state, run_round

OUTPUT = RESULTS / "client_population.json"
POPULATIONS = (1_000, 10_000, 100_000)
COHORT, EXAMPLES, CLASSES, BATCH_SIZE = 500, 20, 10, 20
SHAPE = (14, 14, 1)
# Number of rounds that are not recorded: the first rounds compile functions and fill buffers.
WARM_UP = 5


class SimulatedClients:
    """Clients with the interface of `tff_pdp.experiment.examples.ClientSource`; `load_many` draws clients' examples."""

    def __init__(self, size: int):
        self.client_ids = tuple(f"client_{number:07d}" for number in range(size))

    def sizes(self, split: str) -> np.ndarray:
        """Returns the numbers of examples, the same for all clients."""
        del split
        return np.full(len(self.client_ids), EXAMPLES)

    def load_many(self, places: np.ndarray, split: str) -> ClientExamples:
        """Draws the examples of the clients at `places`: noise around one of a few images per class."""
        del split
        means = np.random.default_rng(0).random((CLASSES, *SHAPE), np.float32)
        x, y = np.empty((len(places), EXAMPLES, *SHAPE), np.float32), np.empty((len(places), EXAMPLES), np.int64)
        for row, place in enumerate(places):
            generator = np.random.default_rng(int(place))
            y[row] = generator.integers(0, CLASSES, EXAMPLES)
            x[row] = means[y[row]] + 0.1 * generator.standard_normal((EXAMPLES, *SHAPE), np.float32)
        return ClientExamples(x.reshape(-1, *SHAPE), y.reshape(-1))


def build_method(size: int, rounds: int) -> Method:
    """Builds CENTAUR on `size` clients, with an expected cohort of 500."""
    clients: Any = SimulatedClients(size)
    model = build_cnn(SHAPE, CLASSES, (8, 16), hidden_units=0, pool_after="each")
    algorithm, hparams = build_algorithm("centaur", {}, num_clients=size, rounds=rounds, head=model.head)
    sizes = dict.fromkeys(clients.client_ids, EXAMPLES)
    training = PlannedTraining(
        num_examples=sizes, gradients_per_round={}, rounds=rounds, num_released=num_released(algorithm, model)
    )
    settings = User(
        kind="user",
        batch_size=BATCH_SIZE,
        budgets=OneForAll(epsilon=8.0, delta=1e-7),
        users_per_round=COHORT,
    )
    plan = settings.build(training)
    estimator = plan.estimator(model)
    return Method(
        clients=clients,
        algorithm=algorithm,
        hparams=hparam_columns(algorithm, hparams, sizes, BATCH_SIZE),
        model=model,
        plan=plan,
        scalings={},
        estimator=estimator,
        process=compose(algorithm, model, estimator=estimator, user_sum=plan.server_sum()),
        config_hash="",
    )


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Measures one population; returns size, expected cohort, rounds, median seconds per round, and megabytes."""
    method = build_method(size, rounds + WARM_UP)
    data = Examples(method.clients, "train", method.model)
    seconds = []
    with running_engine("inprocess", "cpu"), tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "states"
        state = first_state(method, None, store)
        for number in range(1, rounds + WARM_UP + 1):
            started = time.perf_counter()
            state = run_round(method, state, number, data)
            state.client_states.prune(number)
            seconds.append(time.perf_counter() - started)
        close_states(state.client_states)
        disk = sum(path.stat().st_size for path in store.iterdir())
    return {
        "clients": size,
        "cohort": COHORT,
        "rounds": rounds,
        "s_per_round": float(np.median(seconds[WARM_UP:])),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "store_mb": disk / 2**20,
    }


def main() -> None:
    """Measures every population and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="recorded rounds for each; default 20")
    parser.add_argument("--population", type=int, metavar="N", help="measure only this size; print its row")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    if options.population:
        print(json.dumps(measure(options.population, options.rounds)))
        return
    rows = []
    for size in POPULATIONS:
        command = [sys.executable, "-m", "benchmarks.rounds.client_population"]
        command += ["--population", str(size), "--rounds", str(options.rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append({**row, "ratio": row["s_per_round"] / (rows or [row])[0]["s_per_round"]})
        print(
            f"{size:>9,} clients {1e3 * row['s_per_round']:8.0f} ms per round {row['peak_rss_mb']:8.0f} MB resident "
            f"{row['store_mb']:8.1f} MB on disk  {rows[-1]['ratio']:.2f} times",
            flush=True,
        )
    options.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
