"""Small experiments for every kind of state that clients keep, and what a training of them ends with."""

import copy
import hashlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.places import DEMO
from tests.training.record.whole_runs import SYNTHETIC
from tests.training.stopping import stop_before as stop
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.training.client_store.states import close_states, is_store, open_states, to_columns
from tff_pdp.training.record.releases import STORE
from tff_pdp.training.train import train

NUM_CLIENTS = 12
STEPS = {"learning_rate": 0.1, "local_steps": 2}
ALGORITHMS = {
    "fed_avg": STEPS,
    "mr_mtl": STEPS,
    "ditto": STEPS,
    "mocha": STEPS,
    "ifca_mr_mtl": STEPS,
    "pfa": {**STEPS, "partition": "known", "liberal_share": 0.5},
    "udp_hypernet": {**STEPS, "hidden_units": [8]},
    "dp_pfed_dsu": STEPS,
    "centaur": {**STEPS, "head_steps": "2 epochs", "adapt_steps": 3},
    "pppfl": {"learning_rate": 0.5, "local_steps": 2, "adaptation_learning_rate": 0.5, "adaptation_steps": 3},
}
# Methods that are run with users here; others with silos.
OF_USERS = ("fed_avg", "udp_hypernet", "dp_pfed_dsu", "centaur")
_USERS = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": 6,
    "budgets": {"kind": "one_for_all", "epsilon": 20.0, "delta": 1e-3},
}
_SILOS = {
    "kind": "silo_example",
    "clip_norm": 1.0,
    "batch_size": 16,
    "budgets": {"kind": "cycled", "epsilons": [18, 20], "delta": 1e-3},
}


def write_clients(folder: Path) -> Path:
    """Prepares the clients of all experiments; returns their folder."""
    from beam_pipelines.sources.partition import write_digits_leaf

    write_digits_leaf(folder / "leaf", num_clients=NUM_CLIENTS, concentration=5.0, seed=0)
    config = load_experiment(DEMO, {"output": str(folder), "data.input": str(folder / "leaf")})
    prepare_clients(config)
    return config.clients_folder


def experiment_of(clients: Path, output: Path, name: str, workers: int = 0, **overrides):
    """A small experiment of one method, in a folder of its own."""
    output.mkdir(exist_ok=True, parents=True)
    if not (output / "clients").exists():
        (output / "clients").symlink_to(clients)
    privacy = _USERS if name in OF_USERS else _SILOS
    if name == "pppfl":
        privacy = {**_SILOS, "budgets": {**_SILOS["budgets"], "epsilons": [36, 40]}}
        privacy["synthetic"] = {**SYNTHETIC["synthetic"], "rounds": 3}
    settings = {
        "output": str(output),
        "data.input": str(clients.parent / "leaf"),
        "model": {"kind": "mlp", "hidden_units": [8]},
        "privacy": copy.deepcopy(privacy),
        "training.rounds": 6,
        "training.checkpoint_every": 2,
        "training.evaluate_every": 3,
        "training.test_only_seed": 1,
        "training.device": "cpu",
        "training.client_parallelism": "loop",
        "algorithms": {name: dict(ALGORITHMS[name])},
        "export.algorithm": name,
        "tuning": {},
    }
    if workers:
        settings["training.workers"] = {"num_workers": workers}
    return load_experiment(DEMO, {**settings, **{key.replace("__", "."): value for key, value in overrides.items()}})


def trained(config, name, *, stop_before=None, **options) -> str:
    """Trains a method; returns the digest of all that is left: weights, states of clients and the hook, the ledger.

    With `stop_before`, the training fails before this round, and there is no digest.
    """
    if stop_before is not None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
            stop(patch, stop_before)
            train(config, name, progress=False, **options)
        return ""
    state = train(config, name, progress=False, **options)
    states, found = state.client_states, hashlib.sha256()
    if is_store(states):
        states = open_states(config.algorithm_folder(name) / STORE)
    columns = to_columns(states)
    close_states(states)
    for leaf in tf.nest.flatten((state.server_state, columns, state.hook)):
        array = np.ascontiguousarray(np.asarray(leaf))
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    found.update(state.ledger.to_json().encode() if state.ledger else b"")
    return found.hexdigest()
