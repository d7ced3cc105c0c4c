"""Small experiments that are hurt: each trial has a copy of its own, with a registry and an account of draws."""

import copy
import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from msgspec.structs import replace

from tests.faults import draws
from tests.faults.workers import Job, run_command
from tests.training.record.whole_runs import NAMES, NUM_TRAIN, SEARCHED, SILOS, USERS, config_of, points
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.new_clients.costs import plan_gradients
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.registry.entries import KEY_FILE, Registry
from tff_pdp.training.client_store.states import close_states
from tff_pdp.training.counted import cost_of_all_runs
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.record.all_runs import Own, compose, releases_on_record
from tff_pdp.training.run_folder import read_metrics, read_selected
from tff_pdp.verification.experiment import verify
from tff_pdp.verification.run_folder import Finding, Status

MOMENTS = {"kind": "dp_moments", "lower": -1.0, "upper": 1.0, "noise_multiplier": 20.0}
# A cohort that changes from round to round, and noise that goes on from round to round in the store of no user.
SOME_USERS = {**USERS, "users_per_round": 2.0}
KINDS: Mapping[str, tuple[Mapping[str, Any], str, Mapping[str, Any]]] = {
    "silos": (SILOS, "mr_mtl", {}),
    "users": (SOME_USERS, "fed_per", {}),
    "searched": (SILOS, "mr_mtl", {"tuning.search": SEARCHED}),
    "tuned": ({**SILOS, "feature_scaling": MOMENTS}, "mr_mtl", {"tuning.search": SEARCHED}),
}
ADDED = "newer"
FIT = {"steps": 3, "learning_rate": 0.5, "epsilon": 4.0, "delta": 1e-3}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Holds all that the trials of one kind have in common.

    Attributes:
      kind: a name in `KINDS`.
      config: of the prepared experiment, of which trials have copies.
      name: of the method.
      method: built.
      known: what commands that nothing happened to have left, by label.
    """

    kind: str
    config: ExperimentConfig
    name: str
    method: Method
    known: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that makes a run of this kind."""
        return "tune" if self.is_search else "train"

    @property
    def is_search(self) -> bool:
        """Tells whether hyper-parameters are searched."""
        return self.config.tuning.search is not None


def make_experiment(kind: str, folder: Path, **training: Any) -> Experiment:
    """Prepares the experiment of a kind, with these settings of `training`."""
    privacy, name, others = KINDS[kind]
    registry = str(folder / "registry")
    settings = {f"training.{key}": value for key, value in training.items()}
    config = config_of(folder, {**privacy, "registry": registry}, name, **settings, **others)
    prepare_clients(config)
    # What silos release before training would not be the trial's.
    method = build_method(replace(config, output=str(_with_clients(config, folder / "method"))), name)
    own = points(ADDED, 11)
    np.savez(folder / f"{ADDED}.npz", x=own.x[:NUM_TRAIN].astype(np.float32), y=np.asarray(own.y[:NUM_TRAIN]) > 0)
    return Experiment(kind, config, name, method)


class Trial:
    """A copy of an experiment that something happens to.

    Attributes:
      experiment: the original.
      config: of the copy.
      hurt: what may be hurt: runs, and the registry.
      output: folder of the copy.
      log: of draws, outside of what may be hurt.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        template: "Trial | None" = None,
        hurt: Path | None = None,
        **training: Any,
    ):
        """Copies the clients of an experiment or, with a template, all that a trial has.

        Args:
          experiment: the original.
          folder: a new one.
          template: whose runs, registry and draws are there already.
          hurt: where the runs and the registry are, if they are not in the folder.
          training: settings that do not change results.
        """
        self.experiment, self.folder = experiment, folder
        self.hurt = hurt or folder / "hurt"
        self.output, self.log, self._said = self.hurt / "run", folder / "draws.jsonl", folder / "said"
        self._config_file, self._views = folder / "experiment.json", 0
        folder.mkdir(parents=True)
        if template is None:
            _with_clients(experiment.config, self.output)
        else:
            shutil.copytree(template.hurt, self.hurt, symlinks=True)
            shutil.copy(template.log, self.log)
        self.config = self._configure(experiment, **training)

    def as_other(self, experiment: Experiment) -> "Trial":
        """Another experiment in the same folder, with the same account of draws."""
        other = copy.copy(self)
        self._views += 1
        other.experiment, other._said = experiment, self.folder / f"said {self._views}"
        other._config_file = self.folder / f"experiment {self._views}.json"
        other.config = other._configure(experiment)
        return other

    def beside(self) -> "Trial":
        """The same for another command, of which it is known what that one says."""
        return self.as_other(self.experiment)

    def _configure(self, experiment: Experiment, **training: Any) -> ExperimentConfig:
        config = experiment.config
        config = replace(
            config,
            output=str(self.output),
            privacy=replace(config.privacy, registry=str(self.hurt / "registry")),
            training=replace(config.training, **training),
        )
        self._config_file.write_text(json.dumps(config.to_dict()))
        return config

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.config.algorithm_folder(self.experiment.name)

    @property
    def said(self) -> str:
        """Reads the last command's output."""
        return self._said.read_text()

    def job(self, label: str, *arguments: str, command: str = "", **others: Any) -> Job:
        """A command of this trial; without a name, the one that makes the run."""
        name = command or self.experiment.command
        line = [name, "--config", str(self._config_file), *arguments]
        if name == "personalize":
            line += ["--examples", str(_added(self.experiment))]
            line += ["--client-id", ADDED, "--steps", str(FIT["steps"]), "--learning-rate", str(FIT["learning_rate"])]
            if self.experiment.kind != "users":
                line += ["--epsilon", str(FIT["epsilon"]), "--delta", str(FIT["delta"])]
        return Job(line, draws=str(self.log), label=f"{self.experiment.kind} {label}", said=str(self._said), **others)

    def here(self, label: str, *arguments: str, command: str = "") -> None:
        """Runs a command in this process, to a good end."""
        status = self.try_here(label, *arguments, command=command)
        assert status == 0, self.said

    def try_here(self, label: str, *arguments: str, command: str = "") -> int:
        """Runs a command in this process, and returns its exit status."""
        return run_command(self.job(label, *arguments, command=command))

    def spent(self) -> dict[str, float]:
        """The epsilon of all that was drawn, by scope: from the account of draws alone."""
        return {scope: _epsilon(self, scope, counts) for scope, counts in self.drawn().items()}

    def drawn(self) -> dict[str, Counter[Any]]:
        """The events of all that was drawn, by scope."""
        plan = self.experiment.method.plan
        rounds, searches, statistics = draws.rounds(self.log), draws.searches(self.log), draws.statistics(self.log)
        found = {}
        for scope in plan.budgets:
            counts: Counter[Any] = Counter()
            for number, times in rounds.items():
                for event, count, _ in plan.charges(scope, number):
                    counts[event] += times * count
            for event, _ in plan.fixed_events.get(scope, ()):
                counts[event] += statistics
            if searches:
                counts[plan.search_event(scope)] += searches
            found[scope] = +counts
        if fits := draws.fits(self.log) if plan.unit == "silo_example" else 0:
            found[ADDED] = Counter({event: fits * count for event, count in _events_of_a_fit(self).items()})
        return found

    def composed(self) -> dict[str, float]:
        """The epsilon of all on record, by scope, as reports and exports state it."""
        cost = dict(cost_of_all_runs(self.config, self.experiment.method).by_scope)
        if draws.fits(self.log):
            registry = Registry(self.config.privacy.registry)
            with np.load(_added(self.experiment)) as own:
                records = registry.keep_examples([ADDED], [own["x"]])
            cost |= compose(
                registry, releases_on_record(registry, self.output), Own(records, self.config.data.record_set, [ADDED])
            ).by_scope
        return {scope: one.epsilon for scope, one in cost.items()}

    def assert_covered(self) -> None:
        """No scope has less on record than what was drawn."""
        composed, spent = self.composed(), self.spent()
        for scope, epsilon in spent.items():
            assert composed[scope] >= epsilon * (1 - 1e-9), f"{scope}: {composed[scope]} on record, {epsilon} drawn"

    def remove_run(self) -> None:
        """Removes the run, and the record of earlier ones: what the registry says is left."""
        shutil.rmtree(self.run)
        for path in self.output.glob("earlier_releases.*"):
            path.unlink()

    def leftovers(self) -> list[str]:
        """Files and folders that only a killed command leaves."""
        paths = [path for path in self.hurt.rglob("*") if "clients" not in path.relative_to(self.hurt).parts]
        names = re.compile(r".*\.(tmp|removed|new|[0-9a-f]{32})(/.*)?")
        found = [path.relative_to(self.hurt).as_posix() for path in paths]
        return [name for name in found if names.fullmatch(name)]

    def problems(self) -> list[Finding]:
        """Finds the problems that `tff-pdp verify` names."""
        try:
            return [one for one in verify(self.output) if one.status is Status.PROBLEM]
        except ConfigError:
            return []  # No run has begun.

    def end(self) -> dict[str, Any]:
        """Everything that a run leaves, but for how long it took and what a killed one may have reserved."""
        _, state = load_trained(self.config, self.experiment.name)
        try:
            found = {
                "key": state.run_key.secret.hex(),
                "attempt": state.run_key.attempt,
                "rounds": state.round_number,
                "states": draws.digest_of(state),
                "ledger": state.ledger and state.ledger.to_json(),
                "metrics": [
                    {name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(self.run)
                ],
            }
        finally:
            close_states(state.client_states)
        if self.experiment.is_search:
            found["selected"] = read_selected(self.run)
        return found

    def assert_equal_to_whole(self, labels: int, folder: Path) -> None:
        """The run's end is, to the bit, that of a run that nothing happened to.

        Args:
          labels: how many commands may have given the run its key.
          folder: for runs that are not known yet.
        """
        end = self.end()
        names = [label for label in map(str, range(labels)) if self._key(label) == end["key"]]
        assert names, "a key that no command has drawn"
        assert end == whole_end(self.experiment, names[0], folder, self if self._has_statistics else None)

    @property
    def _has_statistics(self) -> bool:
        return self.experiment.kind == "tuned"

    def _key(self, label: str) -> str:
        return draws.key_of(f"{self.experiment.kind} {label}").secret.hex()


def whole_end(experiment: Experiment, label: str, folder: Path, like: Trial | None = None) -> dict[str, Any]:
    """Returns all that a command under a label leaves if nothing happens to the command.

    Args:
      experiment: of the command.
      label: decides the key.
      folder: where it is made if it is not known yet.
      like: a trial whose statistics, released before training, the command goes on from.
    """
    releases = like.output / "silo_releases.json" if like else None
    about = label if releases is None else f"{label} {releases.read_text()}"
    if about not in experiment.known:
        place = folder / f"whole {len(experiment.known)} {experiment.kind}"
        trial = Trial(experiment, place)
        if releases is not None:
            shutil.copy(releases, trial.output)
            # The digest of the data that they were made of is under the registry's key.
            registry, own = (Path(one.config.privacy.registry) for one in (like, trial))
            own.mkdir(parents=True)
            shutil.copy(registry / KEY_FILE, own)
        trial.here(label)
        experiment.known[about] = trial.end()
        shutil.rmtree(place)
    return experiment.known[about]


def _added(experiment: Experiment) -> Path:
    return Path(experiment.config.output).with_name(f"{ADDED}.npz")


def _events_of_a_fit(trial: Trial) -> dict[Any, int]:
    """Counts the events that one fit releases of the added client."""
    budget = SiloBudget(FIT["epsilon"], FIT["delta"])
    model = trial.experiment.method.model
    num_fitted = sum(np.size(value) for name, value in model.init(0).items() if name in model.head)
    privacy: Any = trial.config.privacy
    _, ledger = plan_gradients(
        privacy,
        budget,
        int(FIT["steps"]),
        {ADDED: NUM_TRAIN},
        num_fitted,
        batch_size=privacy.batch_size,
        clip_norm=privacy.clip_norm,
    )
    return {entry.event: entry.count for entry in ledger.entries}


def _with_clients(config: ExperimentConfig, output: Path) -> Path:
    output.mkdir(parents=True)
    shutil.copytree(config.clients_folder, output / "clients")
    return output


def _epsilon(trial: Trial, scope: str, counts: Counter[Any]) -> float:
    plan = trial.experiment.method.plan
    event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(*pair) for pair in counts.items()])
    delta = FIT["delta"] if scope == ADDED else plan.budgets[scope].delta
    return epsilon_bounds(event, delta, plan.adjacency).best if counts else 0.0


assert ADDED not in NAMES
