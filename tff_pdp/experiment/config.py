"""Reads experiments from YAML into typed settings, without TensorFlow.

In the sections `data` and `privacy`, `kind` names the class of the settings; both sections are read here in full.
Settings of models and methods are parameters of functions whose modules import TensorFlow. These settings are therefore
read later, by `tff_pdp.experiment.build`, but before anything is written or spent.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from beam_pipelines.options import SourceSettings
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import ALGORITHMS, LOSSES, METRICS, MODELS, PLANS, SOURCES
from tff_pdp.kinds import Kinds
from tff_pdp.privacy.plans.plan import PlanSettings
from tff_pdp.settings import (
    CONFIGS,
    ClientParallelism,
    Count,
    Name,
    Positive,
    Settings,
    Xla,
    join_key,
    read_settings,
    read_yaml,
    settings_class,
    to_plain,
)

# Releases of silos before training (`tff_pdp.experiment.before_training`), in the experiment's folder.
RELEASES_FILE = "silo_releases.json"
# A setting as YAML has it, before its type is known.
Value = bool | int | float | str | tuple[Any, ...] | dict[str, Any] | None
# Settings of a model, or of a method, by name.
Values = dict[str, Value]


class Workers(Settings):
    """Sets which workers compute the clients; results have the same bits for any number of workers.

    Attributes:
      kind: `ray`, processes of a Ray cluster.
      num_workers: number of workers.
      address: address of the Ray cluster, such as `auto` in the cluster's own pods; empty for a cluster on this
        machine, which ends with the command.
      cpus_per_worker: number of cores of each worker.
      gpus_per_worker: number of GPUs of each worker; without a GPU, workers compute on the CPU.
      clients: fsspec URL of a copy of the client dataset, for workers that do not see the experiment's folder; by
        default, workers read the folder itself.
      states: fsspec URL of the folder for clients' states, which all workers can write; by default, the run's folder.
    """

    kind: Literal["ray"] = "ray"
    num_workers: Count = 1
    address: str = ""
    cpus_per_worker: Count = 1
    gpus_per_worker: Annotated[float, Meta(ge=0)] = 0.0
    clients: str = ""
    states: str = ""


class Training(Settings):
    """Sets how long to train, and how rounds are computed.

    Attributes:
      rounds: planned number of rounds, for which the noise is calibrated.
      weighting: weight of each client in a mean. With `uniform`, all weights are equal. With `num_examples`, the weight
        is the silo's public or noised number of examples. With `budget`, the weight is the epsilon of the silo's own
        budget, even if `privacy.budgets.level` is `minimum` (WeiAvg of the PFA paper). With `budget_softmax`, the
        weight is exp(epsilon / `softmax_temperature`) for the same epsilon (PPPFL). With `paper_capped_num_examples`,
        the weight is min(1, a user's number of examples / `weight_cap`), which treats users' numbers of examples as
        public.
      weight_cap: number of examples at and above which a user has weight 1, for `paper_capped_num_examples`.
      softmax_temperature: epsilon by which a silo's budget must be larger for e times the weight, for
        `budget_softmax`.
      evaluate_every: number of rounds from one validation to the next; the last round is always validated.
      checkpoint_every: number of rounds from one checkpoint to the next; the last round always has a checkpoint.
      engine: where computations run: `inprocess`, in this process; or `native`, in TensorFlow Federated's own worker.
      device: where the engine computes: `cpu`; `gpu`, all GPUs; `gpu:N`, one GPU; or `auto`, which with a GPU times the
        CPU and the GPUs in the first round and keeps the faster.
      client_parallelism: how the engine `inprocess` computes clients: `loop`, with one call for each client and a few
        calls side by side; `vectorized`, with one call for many clients; or `auto`, which times both ways in the first
        round and keeps the faster one.
      clients_per_call: largest number of clients in a call; more clients need more memory. For the engine `inprocess`.
      xla: where XLA compiles the work of clients that one call computes, for the engine `inprocess`. `auto` is on a GPU
        in training without privacy, `always` everywhere, `never` nowhere. Compiling takes seconds for each new shape.
        Clients' work with DP-SGD is never compiled, because the guarantee counts roundings as they are written. If XLA
        cannot compile a computation, a warning says so, and the computation runs without XLA. XLA rounds sums
        differently, so the choice is on the run's record.
      deterministic_operations: in noised training on a GPU, use only TensorFlow kernels whose sums are reproducible to
        the bit, from the start of training to the end of the process. This is slower, and fails where an operation has
        no such kernel. Without it, rounds after a kill are drawn anew and charged again.
      workers: workers that compute the clients; without this section, this process does. For the engine `inprocess`.
      nonprivate_metrics: whether rounds are validated: figures of clients' validation examples then go to
        `metrics.jsonl` and to trackers, without noise, under names that begin with `nonprivate`. Without them, no
        validation takes time, and reports have no learning curves.
      trackers: tools that show the course of training, each with its `kind` (`tensorboard`, `mlflow`, `wandb` or
        `module:name`) and its own settings. A tracker that fails is left out, and training goes on.
      test_only_seed: seed that fixes all randomness; reports then say "not private".
    """

    rounds: Count
    weighting: Literal["uniform", "num_examples", "budget", "budget_softmax", "paper_capped_num_examples"] = "uniform"
    weight_cap: Count = 100
    softmax_temperature: Positive = 10.0
    evaluate_every: Count = 5
    checkpoint_every: Count = 10
    engine: Literal["inprocess", "native"] = "inprocess"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|gpu(:[0-9]+)?)$")] = "auto"
    client_parallelism: ClientParallelism = "auto"
    clients_per_call: Count = 256
    xla: Xla = "auto"
    deterministic_operations: bool = True
    workers: Workers | None = None
    nonprivate_metrics: bool = True
    trackers: tuple[Values, ...] = ()
    test_only_seed: int | None = None

    def __post_init__(self):
        if self.engine == "native" and self.client_parallelism == "vectorized":
            raise ValueError("client_parallelism: the engine native computes clients one by one, not vectorized")
        if self.engine == "native" and self.workers is not None:
            raise ValueError("workers: the engine native has a worker of its own; workers are for the engine inprocess")
        if self.engine == "native" and self.xla == "always":
            raise ValueError("xla: the engine native has no XLA; write auto or never")
        if self.workers is not None and self.xla == "always":
            raise ValueError("xla: workers do without XLA; write auto or never")


class Export(Settings):
    """Sets which models are exported, and in which form.

    Attributes:
      algorithm: the trained method to export. The method is not chosen by a metric, because a choice by
        results would cost budget.
      model_name: name under which the model is served: letters, digits, `_`, `.` and `-`.
      layout: how personal models are stored. `stacked` has one row per client, with the weights that differ between
        clients. `clusters` has one row per different model. `hypernetwork` has the small states from which some methods
        make models. `per_client` makes one export per client. `auto` is the smallest of the first three layouts; if the
        smallest is above 1 GiB and there are at most 100 clients, `auto` is `per_client`.
      client_ids: how the export and requests name clients: `hashed`, by keyed hashes of their ids, with the key in
        `client_id.key` in the experiment's folder; or `plain`, by the ids themselves.
    """

    algorithm: Name
    model_name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    layout: Literal["auto", "stacked", "clusters", "hypernetwork", "per_client"] = "auto"
    client_ids: Literal["hashed", "plain"] = "hashed"


class SearchSettings(Settings):
    """Sets a private search for hyper-parameters, which every silo makes in `tff-pdp tune`.

    Attributes:
      algorithm: the method whose hyper-parameters are searched. Before the search there is one federated run, the pivot
        run, with the method's settings under `algorithms`. Its result is released; each silo then searches alone.
      values: values to try for each hyper-parameter; every combination of values is a candidate.
      runs: distribution of the number of runs: `geometric`, `logarithmic`, `poisson`, or a number of at least 0, the
        shape of a truncated negative binomial. `fixed` tries every candidate once, at the privacy cost of releasing
        all candidates' runs.
      mean_runs: expected number of runs of each silo, above 1; not for `fixed`.
      score_noise_multiplier: standard deviation of the noise on a run's score, divided by the largest change that one
        validation example can make: 1 (one more correct answer) or, for a regression, `score_bound`.
      score_bound: bound that each example's squared error is clipped to in a score; for a regression only.
    """

    algorithm: Name
    values: Annotated[dict[str, Annotated[tuple[float, ...], Meta(min_length=1)]], Meta(min_length=1)]
    runs: Literal["geometric", "logarithmic", "poisson", "fixed"] | Annotated[float, Meta(ge=0)] = "geometric"
    mean_runs: Annotated[float, Meta(gt=1)] = 5.0
    score_noise_multiplier: Positive = 10.0
    score_bound: Positive = 1.0


class Tuning(Settings):
    """Lists settings that were chosen by results on the experiment's data, and the number of tried configurations.

    Attributes:
      tuned: names of the settings that were chosen without privacy, worded for readers of the report.
      configurations_tried: number of configurations whose results were looked at for this choice.
      search: a private search for hyper-parameters; the ledger is charged for the search.
    """

    tuned: tuple[str, ...] = ()
    configurations_tried: Count = 1
    search: SearchSettings | None = None

    def search_for(self, algorithm: str) -> SearchSettings | None:
        """Returns the search for this method's hyper-parameters; None if there is none."""
        return self.search if self.search and self.search.algorithm == algorithm else None


class ExperimentConfig(Settings):
    """Describes one experiment: one data set, one model, one privacy plan, and the methods trained under it.

    Attributes:
      title: title of the report.
      output: folder for all files of the experiment.
      data: the raw data, and how examples are made from them.
      model: `kind`, a name from `tff_pdp.experiment.kinds.MODELS` or `module:name`; `seed` of the initial weights, 0 by
        default; `loss` and `metric`, names from `LOSSES` and `METRICS` there or `module:name`, in place of the model's
        own; and the parameters of the model's function.
      privacy: the privacy plan: what is protected, and with which budget.
      training: number of rounds, and how rounds are computed.
      algorithms: settings of each method to train, under a name of your choice. The setting `kind` names the method; it
        may be left out if your name is the method's name.
      export: settings of the export.
      tuning: settings that were chosen by looking at results, and a private search for hyper-parameters.

    >>> load_experiment("demo", {"output": "runs/mine"}).algorithm_folder("mr_mtl")
    PosixPath('runs/mine/mr_mtl')
    """

    title: Name
    output: Name
    data: SourceSettings
    model: Values
    privacy: PlanSettings
    training: Training
    algorithms: Annotated[dict[str, Values], Meta(min_length=1)]
    export: Export
    tuning: Tuning = Tuning()

    def __post_init__(self):
        known = ", ".join(self.algorithms)
        search = self.tuning.search
        for key, name in (("export", self.export.algorithm), ("tuning.search", search and search.algorithm)):
            if name is not None and name not in self.algorithms:
                raise ValueError(f"{key}.algorithm {name!r} must be one of {known}")

    @property
    def federated_rounds(self) -> int:
        """Number of rounds that a method's own schedule is for: all rounds, or those on synthetic data."""
        synthetic = self.privacy.synthetic
        return self.training.rounds if synthetic is None else synthetic.rounds

    @property
    def xla(self) -> Xla:
        """The use of XLA that the engine is asked for: `never` for `auto` in training with privacy or with workers."""
        # No test has shown that on a GPU a compiled client has the same bits whichever other clients are in the stack.
        if self.training.xla == "auto" and (self.privacy.is_private or self.training.workers is not None):
            return "never"
        return self.training.xla

    @property
    def clients_folder(self) -> Path:
        """The folder of the client dataset."""
        return Path(self.output) / "clients"

    def algorithm_folder(self, algorithm: str) -> Path:
        """Returns the folder of one method's state, metrics and ledger."""
        return Path(self.output) / algorithm

    @property
    def client_id_key(self) -> Path:
        """The path of the secret key that hashes clients' ids in exports; exports do not contain the key."""
        return Path(self.output) / "client_id.key"

    @property
    def export_folder(self) -> Path:
        """The folder of the exported model's versions, which is TensorFlow Serving's base path."""
        return Path(self.output).resolve() / "export" / self.export.model_name

    def kind_of(self, algorithm: str) -> str:
        """Returns the kind of a method, by its name in this experiment."""
        return str(self.algorithms[algorithm].get("kind", algorithm))

    def outside(self, algorithm: str) -> dict[str, str]:
        """Returns the origin (`Kinds.origin`) of each kind that is defined outside of tff_pdp, by section.

        Raises:
          ConfigError: a module cannot be imported.
        """
        kinds = {
            "data": (SOURCES, self.data.kind),
            "model": (MODELS, str(self.model.get("kind", ""))),
            **self._losses_and_metrics_outside(),
            "privacy": (PLANS, self.privacy.kind),
            f"algorithms.{algorithm}": (ALGORITHMS, self.kind_of(algorithm)),
        }
        origins = {section: known.origin(kind) for section, (known, kind) in kinds.items()}
        return {section: origin for section, origin in origins.items() if origin is not None}

    def _losses_and_metrics_outside(self) -> dict[str, tuple[Kinds, str]]:
        """Returns the loss and the metric that are defined outside of tff_pdp, by section."""
        found = {}
        for name, known in (("loss", LOSSES), ("metric", METRICS)):
            chosen = self.model.get(name)
            kind = chosen.get("kind") if isinstance(chosen, Mapping) else chosen
            if isinstance(kind, str) and ":" in kind:
                found[f"model.{name}"] = (known, kind)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the resolved experiment as plain data, with defaults filled in."""
        return json.loads(json.dumps(to_plain(self)))

    def hash(self, algorithm: str, data_hash: str) -> str:
        """Returns a digest of everything that decides one method's training result, apart from rounding.

        `data_hash` is a digest of the data, and of all else outside of the configuration that decides the result.
        """
        decisive = {**decisive_settings(self.to_dict(), algorithm), "data": data_hash}
        if outside := self.outside(algorithm):
            decisive["outside"] = outside
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def decisive_settings(content: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Returns the settings that decide one method's training result, apart from data and from rounding, by section.

    `content` is an experiment as plain data, as `ExperimentConfig.to_dict` returns it.
    """
    decisive = {"model": content["model"], "privacy": dict(content["privacy"])}
    # The registry that counts a run does not change the run.
    decisive["privacy"].pop("registry", None)
    decisive["algorithm"] = {algorithm: content["algorithms"][algorithm]}
    training = content["training"]
    names = ["rounds", "weighting", "weight_cap", "test_only_seed"]
    names += ["softmax_temperature"] if training["weighting"] == "budget_softmax" else []
    decisive["training"] = {name: training[name] for name in names}
    search = content["tuning"]["search"]
    if search is not None and search["algorithm"] == algorithm:
        decisive["search"] = search
    return decisive


def workers_overrides(workers: str) -> dict[str, Any]:
    """Returns the option `--workers` as settings that replace the experiment's, by dotted key.

    Raises:
      ConfigError: the option is neither `ray:N` nor `none`.

    >>> workers_overrides("ray:4")
    {'training.workers.kind': 'ray', 'training.workers.num_workers': 4}
    """
    if workers == "none":
        return {"training.workers": None}
    kind, _, number = workers.partition(":")
    if kind != "ray" or not number.isdecimal() or not int(number):
        raise ConfigError(f"--workers {workers!r} must be ray:N, with a number N of at least 1, or none")
    return {"training.workers.kind": kind, "training.workers.num_workers": int(number)}


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads an experiment.

    Args:
      path: a YAML file or, if no file has this path, the name of an experiment that comes with the package, such as
        `demo` or `reproduce/school`.
      overrides: values that replace the file's, by dotted key, such as `{"data.input": "my/folder"}`; None removes
        the key.

    Raises:
      ConfigError: the file is missing or not YAML, a key is unknown or missing, or a value has a wrong type or range.

    >>> load_experiment("demo", {"training.rounds": 50}).training.rounds
    50
    """
    shipped = CONFIGS / f"{path}.yaml"
    content = read_yaml(shipped if shipped.is_file() and not Path(path).is_file() else path)
    source = str(path)
    for key, value in (overrides or {}).items():
        _override(content, key, value, source)
    return experiment_of(content, source)


def with_values(config: ExperimentConfig, values: Mapping[str, Any], source: str) -> ExperimentConfig:
    """Returns an experiment with some values replaced, by dotted key; None removes the key.

    Raises:
      ConfigError: as in `experiment_of`; messages begin with `source`.
    """
    content = config.to_dict()
    for key, value in values.items():
        _override(content, key, value, source)
    return experiment_of(content, source)


def experiment_of(content: Any, source: str) -> ExperimentConfig:
    """Converts plain data to an experiment; `source` is the name of the data's source in errors.

    Raises:
      ConfigError: a key is unknown or missing, or a value has a wrong type or range.
    """
    _check_names(content, source)
    sections: dict[str, tuple[Kinds[Any], type[Settings]]] = {
        "data": (SOURCES, SourceSettings),
        "privacy": (PLANS, PlanSettings),
    }
    classes = {}
    for key, (kinds, base) in sections.items():
        section = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(section, Mapping):
            classes[key] = _class_of(section, source, key, kinds, base)
    return read_settings(_typed(**classes), content, source)


def _class_of(section: Mapping[str, Any], source: str, key: str, kinds: Kinds[Any], base: type[Settings]) -> type:
    if "kind" not in section:
        raise ConfigError(f"{source}: missing key {key}.kind: one of {', '.join(kinds.own)}, or module:name")
    kind = read_settings(Name, section["kind"], source, f"{key}.kind")
    try:
        found = kinds.find(kind)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{source}: {key}.kind: {kind} is not a subclass of {base.__name__}")
    return found


@functools.cache
def _typed(data: type = SourceSettings, privacy: type = PlanSettings) -> type[ExperimentConfig]:
    return settings_class("ExperimentConfig", {"data": data, "privacy": privacy}, {}, ExperimentConfig)


# Names of an earlier version, and what replaces them.
_RENAMED = {
    "data.source": "data.kind",
    "data.arguments": "the options of data.kind, which stand in data itself",
    "model.name": "model.kind",
    "model.arguments": "the options of model.kind, which stand in model itself",
    "privacy.plan": "privacy.kind",
    "privacy.budgets.cycle": "privacy.budgets with kind cycled, and epsilons",
}
# Budgets had no kind; the kind follows from a key.
_KINDS_OF_BUDGETS = {"epsilon": "one_for_all", "silos": "by_silo", "file": "from_file", "distribution": "drawn"}


def _check_names(content: Any, source: str) -> None:
    """Refuses keys of an earlier version, and names the new ones."""

    def at(key: str) -> Any:
        found = content
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    for old, new in _RENAMED.items():
        if at(old) is not None:
            raise ConfigError(f"{source}: the key {old} is now {new}")
    budgets = at("privacy.budgets")
    for key, kind in _KINDS_OF_BUDGETS.items():
        if isinstance(budgets, Mapping) and key in budgets and "kind" not in budgets:
            raise ConfigError(f"{source}: missing key privacy.budgets.kind: budgets with {key} are of kind {kind}")


def _override(content: Any, key: str, value: Any, source: str) -> None:
    *parents, last = key.split(".")
    target = content
    for parent in parents:
        if isinstance(target, dict) and target.get(parent) is None:
            target[parent] = {}
        target = target[parent] if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise ConfigError(f"{source}: cannot set {join_key('', key)}: a key above has a value that is not a mapping")
    if value is None:
        target.pop(last, None)
    else:
        target[last] = value
