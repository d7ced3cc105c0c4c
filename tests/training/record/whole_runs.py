"""Whole runs with every kind of file that the project writes, and what its readers make of each file.

`KINDS` has each kind of file by the pattern of its path in a run's folder, with the readers that use the file. A file
that no pattern is for fails the tests: a new kind of file needs a reader here.
"""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from msgspec.structs import replace

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from serving.client_ids import ClientIdHash
from serving.export.stored_models import read_models
from serving.export.versions import last_version
from serving.production.exports import write_models_config
from serving.saved_model import layout
from serving.saved_model.checks import check_complete, check_export
from serving.tf_serving import read_model_config_file
from tests.places import DEMO
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS, Manifest, RowInfluence, mark_finished
from tff_pdp.errors import ServingError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.experiment.model import build_model
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.model_card import (
    check_leaves_out_nobody,
    check_settings,
    newest_version,
    served_ids,
)
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.personalize import personalize
from tff_pdp.training.client_store.states import close_states
from tff_pdp.training.counted import cost_of_all_runs
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import SEARCH, all_releases, check_files, check_record
from tff_pdp.training.rounds import first_state
from tff_pdp.training.run_folder import check_beside, check_engine, read_metrics
from tff_pdp.training.search import runs as search_runs
from tff_pdp.training.search import tune as tuning
from tff_pdp.training.train import train

# In the run's folder, so that it is copied and damaged with all the rest.
REGISTRY = "registry"
NAMES = ("east", "north", "south", "west")
NUM_TRAIN = 36
SILOS = {
    "kind": "silo_example",
    "batch_size": NUM_TRAIN,
    "clip_norm": 1.0,
    "budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-3},
}
USERS = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": len(NAMES),
    "budgets": {"kind": "one_for_all", "epsilon": 50.0, "delta": 0.1},
}
PEOPLE = RowInfluence("node", "replace_special", 4, "nobody has more than 3 contacts")
STATISTICS = {
    "num_examples": {"kind": "noised", "epsilon": 0.2},
    "feature_scaling": {"kind": "dp_moments", "lower": -1.0, "upper": 1.0, "noise_multiplier": 20.0},
}
# Synthetic data of so few records need a large budget; with less, no class may have a count above the noise.
SYNTHETIC = {
    **SILOS,
    "budgets": {"kind": "one_for_all", "epsilon": 40.0, "delta": 1e-3},
    "synthetic": {"generator": {"kind": "dp_gaussian", "examples": 40, "low": -1.0, "high": 1.0}, "rounds": 2},
}
SEARCHED = {
    "algorithm": "mr_mtl",
    "values": {"prox_weight": [0.1, 10]},
    "mean_runs": 3.0,
    "score_noise_multiplier": 10.0,
}


@dataclasses.dataclass(frozen=True)
class WholeRun:
    """A run that is over, or was stopped; tests damage copies of it.

    Attributes:
      name: of the run.
      config: its experiment.
      method: the method that was trained.
    """

    name: str
    config: ExperimentConfig
    method: str

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.config.output)

    def copied_to(self, output: Path) -> "WholeRun":
        """The run in another folder."""
        shutil.copytree(self.output, output, symlinks=True)
        privacy = replace(self.config.privacy, registry=str(output / REGISTRY))
        return dataclasses.replace(self, config=replace(self.config, output=str(output), privacy=privacy))


def points(name: str, number: int) -> SiloArrays:
    """Points in a square, labelled by the sign of their first coordinate."""
    x = np.random.default_rng(number).uniform(-1, 1, (60, 2))
    return SiloArrays(name, x, np.where(x[:, 0] > 0, 1, -1))


def config_of(folder: Path, privacy: Mapping[str, Any], algorithm: str, **overrides: Any) -> ExperimentConfig:
    """An experiment of one method on four clients, whose raw data lie in the folder."""
    folder.mkdir(exist_ok=True)
    write_silo_arrays(folder / "silos.npz", [points(name, number) for number, name in enumerate(NAMES)])
    hparams = {"learning_rate": 0.5, **({"prox_weight": 0.1} if algorithm == "mr_mtl" else {"local_steps": 2})}
    settings = {
        "output": str(folder / "run"),
        "data.input": str(folder / "silos.npz"),
        "data.kind": "silo_files",
        "data.input_shape": [2],
        "data.num_classes": 2,
        "data.exact_split": True,
        "model": {"kind": "mlp", "hidden_units": [4]},
        "privacy": {"registry": str(folder / "run" / REGISTRY), **privacy},
        "training.rounds": 4,
        "training.evaluate_every": 2,
        "training.checkpoint_every": 2,
        "training.client_parallelism": "loop",
        "algorithms": {algorithm: hparams},
        "export.algorithm": algorithm,
        "tuning": {},
    }
    return load_experiment(DEMO, {**settings, **overrides})


def make_silos(folder: Path) -> WholeRun:
    """Silos trained twice, tested, exported, and exported once more with a silo added."""
    config = config_of(folder, SILOS, "mr_mtl", **{"training.client_parallelism": "auto"})
    prepare_clients(config)
    train(config, "mr_mtl", progress=False)
    train(config, "mr_mtl", overwrite=True, progress=False)
    evaluate_experiment(config)
    export_experiment(config)
    added = folder / "added.npz"
    own = points("added", 9)
    np.savez(added, x=own.x[:NUM_TRAIN].astype(np.float32), y=np.asarray(own.y[:NUM_TRAIN]) > 0)
    fit = FitOptions(steps=3, learning_rate=0.5, epsilon=4.0, delta=1e-3)
    personalize(config, added, ["added"], fit, progress=False)
    write_models_config(config.export_folder, config.export.model_name)
    return WholeRun("silos", config, "mr_mtl")


def make_users(folder: Path) -> WholeRun:
    """Users, whose states are in a store."""
    config = config_of(folder, USERS, "fed_per")
    prepare_clients(config)
    train(config, "fed_per", progress=False)
    return WholeRun("users", config, "fed_per")


def make_people(folder: Path) -> WholeRun:
    """Silos whose rows are made of a contact graph."""
    config = config_of(folder, {**SILOS, "kind": "contact_graph"}, "mr_mtl", **{"training.rounds": 2})
    prepare_clients(config)
    manifest = Manifest.load(config.clients_folder)
    dataclasses.replace(manifest, row_influence=PEOPLE).save(config.clients_folder)
    mark_finished(config.clients_folder)
    train(config, "mr_mtl", progress=False)
    return WholeRun("people", config, "mr_mtl")


def make_tuned(folder: Path) -> WholeRun:
    """Silos that released statistics and searched."""
    config = config_of(folder, {**SILOS, **STATISTICS}, "mr_mtl", **{"tuning.search": SEARCHED})
    prepare_clients(config)
    tuning.tune(config, "mr_mtl", progress=False)
    return WholeRun("tuned", config, "mr_mtl")


def make_synthetic(folder: Path) -> WholeRun:
    """Silos that released synthetic data, and trained on the data first."""
    config = config_of(folder, SYNTHETIC, "fed_avg")
    prepare_clients(config)
    train(config, "fed_avg", progress=False)
    return WholeRun("synthetic", config, "fed_avg")


def make_stopped(folder: Path) -> WholeRun:
    """A search that was stopped after the second run of each silo."""
    config = config_of(folder, SILOS, "mr_mtl", **{"tuning.search": SEARCHED})
    prepare_clients(config)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(tuning, "numbers_of_runs", lambda *arguments: [3, 3, 3, 3])
        patch.setattr(tuning, "noisy_scores", _stopping_after(2))
        tuning.tune(config, "mr_mtl", progress=False)
    return WholeRun("stopped", config, "mr_mtl")


def _stopping_after(runs: int) -> Callable[..., list[float]]:
    def noisy_scores(*arguments: Any) -> list[float]:
        if arguments[4] > runs:
            raise KeyboardInterrupt
        return search_runs.noisy_scores(*arguments)

    return noisy_scores


MAKERS = {
    "silos": make_silos,
    "users": make_users,
    "people": make_people,
    "tuned": make_tuned,
    "synthetic": make_synthetic,
    "stopped": make_stopped,
}


def read_run(run: WholeRun) -> Any:
    """What `evaluate` and `export` read of a trained method: states, ledger, key, rounds and the plan."""
    method, state = load_trained(run.config, run.method)
    try:
        states = state.client_states
        if hasattr(states, "rewind"):
            states = [states.round_number, states.read(range(states.num_clients))]
            # What `train --resume` goes back to, were a round to be run again.
            state.client_states.rewind(state.round_number - 2)
            states += [state.client_states.read(range(state.client_states.num_clients))]
        return [
            method.config_hash,
            sorted(method.plan.budgets.items()),
            _scalings(method),
            state.round_number,
            state.config_hash,
            state.run_key.secret,
            state.run_key.is_test_only,
            state.run_key.attempt,
            state.ledger.to_json() if state.ledger else None,
            state.client_ids,
            _bits([state.server_state, states, state.hook]),
        ]
    finally:
        close_states(state.client_states)


def read_plan(run: WholeRun) -> Any:
    """What training begins with: the plan, from the clients and from what silos released before."""
    check_beside(run.config.algorithm_folder("another"), is_replaced=False)
    method = build_method(run.config, run.method)
    ledger = method.plan.build_ledger()
    numbers = method.plan.mechanisms if hasattr(method.plan, "mechanisms") else None
    return [method.config_hash, repr(numbers), _scalings(method), ledger and ledger.to_json()]


def read_search(run: WholeRun) -> Any:
    """What `tune --resume` reads of a search that was stopped."""
    folder = run.config.algorithm_folder(run.method)
    method = build_method(run.config, run.method)
    with experiment_engine(run.config):
        first = first_state(method, run.config.training.test_only_seed)
    state = search_runs.load(folder / SEARCH, first)
    if state is None:
        return None
    check_record(folder, state.first, read_charges(folder))
    check_files(folder, state.first)
    ledger = state.first.ledger
    best = [[one.run, one.score, _bits([one.client_state])] for one in state.best]
    return [state.runs_done, best, state.first.run_key.secret, ledger and ledger.to_json(), state.first.config_hash]


def read_beside(run: WholeRun) -> Any:
    """What commands read beside the checkpoints: metrics and settings."""
    folder = run.config.algorithm_folder(run.method)
    check_engine(run.config, folder, "cpu")
    return read_metrics(folder)


def read_selected(run: WholeRun) -> Any:
    """What `tune --resume` tells of a finished search."""
    return tuning.tune(run.config, run.method, resume=True, progress=False).selected


def read_releases(run: WholeRun) -> Any:
    """What everything on record adds up to."""
    releases = all_releases(run.output)
    return [release._replace(ledger=release.ledger and release.ledger.to_json()) for release in releases]


def read_all_runs(run: WholeRun) -> Any:
    """What all runs on the same records cost together."""
    cost = cost_of_all_runs(run.config, build_method(run.config, run.method))
    return [dict(cost.by_scope), cost.notes]


def read_clients(run: WholeRun) -> Any:
    """What training reads of the clients' examples."""
    clients = ClientDataset.open(run.config.clients_folder)
    examples = [clients.load(client_id, split) for client_id in clients.client_ids for split in SPLITS]
    return [clients.manifest, clients.client_ids, [(one.x.tobytes(), one.y.tobytes()) for one in examples]]


def read_export(run: WholeRun) -> Any:
    """What `export`, `personalize` and servers read of the newest version."""
    for published in layout.published_versions(run.config.export_folder).values():
        check_export(published)
        check_complete(published)
    return read_newest(run)


def read_newest(run: WholeRun) -> Any:
    """The models of the newest version."""
    version = newest_version(run.config.export_folder)
    assert version is not None
    models = read_models(version, build_model(run.config))
    return [version.name, models.client_ids, models.rows.tolist(), _bits([models.shared, models.stacked])]


def read_documents(run: WholeRun) -> Any:
    """What `personalize` reads of the newest version before its models."""
    version = newest_version(run.config.export_folder)
    assert version is not None
    card = layout.read_document(version, layout.MODEL_CARD_FILE)
    check_settings(run.config, version, card)
    manifest = layout.read_manifest(version)
    served = served_ids(run.config, version, card)
    return [card, layout.read_document(version, layout.PRIVACY_REPORT_FILE), manifest, served("east")]


def read_fits(run: WholeRun) -> Any:
    """How many clients another export of the trained method would lose."""
    with pytest.raises(ServingError) as refused:
        check_leaves_out_nobody(run.config.export_folder)
    if "1 clients that were not in training, 1 fits in all" not in str(refused.value):
        raise refused.value
    return "1 fit"


def read_last_version(run: WholeRun) -> Any:
    """The number that the next version follows."""
    return last_version(run.config.export_folder)


def read_key(run: WholeRun) -> Any:
    """The key of clients' ids, as `predict` uses it."""
    return ClientIdHash.load(run.config.client_id_key)("east")


def read_models_config(run: WholeRun) -> Any:
    """What a server is told to serve."""
    return read_model_config_file(run.config.export_folder / "models.config")


Reader = Callable[[WholeRun], Any]
# Written for people, who may change what is in them: whatever has the form is taken as it stands.
MEANT_TO_BE_CHANGED = r"export/[^/]*/models\.config"
_EXPORT = (read_export, read_documents, read_fits)
# By pattern of the path below the run's folder; the first that fits counts. None where no command reads the file.
KINDS: Mapping[str, tuple[Reader, ...]] = {
    r"(.*/)?\.[^/]*\.lock": (),
    r"report\.html|summary\.json": (),
    r"clients/dead_letters/.*": (),
    r"clients/(manifest\.json|_SUCCESS)": (read_clients, read_plan, read_run),
    r"clients/(index\.parquet|shards/.*)": (read_clients,),
    r"earlier_releases\.(jsonl|head)": (read_releases, read_run),
    rf"{REGISTRY}/(registry\.(jsonl|head)|records\.key|records/.*)": (read_all_runs,),
    r"silo_releases\.json": (read_plan, read_run),
    r"synthetic_data\.npz": (read_plan, read_run),
    r"client_id\.key": (read_key, read_documents),
    r"[^/]*/charges\.(jsonl|head)": (read_run, read_releases),
    r"[^/]*/(config\.json|metrics\.jsonl|client_parallelism\.json)": (read_run, read_beside),
    r"[^/]*/selected\.json": (read_run, read_selected),
    r"[^/]*/checkpoints/round_[0-9]*/(checkpoint\.json|run_key\.json|state\.npz)": (read_run, read_releases),
    r"[^/]*/search/round_[0-9]*/(checkpoint\.json|run_key\.json|state\.npz)": (read_search, read_releases),
    r"[^/]*/client_states/(store|shard_[0-9]*)\.sqlite(-journal)?": (read_run,),
    MEANT_TO_BE_CHANGED: (read_models_config,),
    r"export/[^/]*/\.last_version": (read_last_version,),
    r"export/[^/]*/[0-9]+/.*": _EXPORT,
}
# Where a search was stopped there is no trained method.
_STOPPED = {read_run: read_search}


def files_of(run: WholeRun) -> list[str]:
    """All files below a run's folder."""
    return sorted(path.relative_to(run.output).as_posix() for path in run.output.rglob("*") if path.is_file())


def kind_of(name: str) -> str:
    """The pattern of a file's kind.

    Raises:
      LookupError: the file is of no kind that is known.
    """
    for pattern in KINDS:
        if re.fullmatch(pattern, name):
            return pattern
    raise LookupError(f"{name} is a new kind of file: give it a reader in KINDS that refuses it when it is damaged")


def readers_of(run: WholeRun, name: str) -> tuple[Reader, ...]:
    """The readers that a file of a run has."""
    readers = KINDS[kind_of(name)]
    return tuple(dict.fromkeys(_STOPPED.get(one, one) if run.name == "stopped" else one for one in readers))


def _scalings(method: Any) -> list[bytes]:
    return [scaling.shift.tobytes() + scaling.scale.tobytes() for scaling in method.scalings.values()]


def _bits(values: Any) -> list[Any]:
    return [(np.asarray(leaf).dtype.str, np.asarray(leaf).tobytes()) for leaf in tf.nest.flatten(values)]
