"""Experiments as YAML: frozen dataclasses, unknown keys are errors, and the resolved form is saved with the run."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from beam_pipelines.options import DataConfig
from tff_pdp.engines.options import CLIENT_PARALLELISMS
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.facts import GENERATORS
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.settings import UniqueKeyLoader, build_settings

WEIGHTINGS = ("uniform", "num_examples", "paper_capped_num_examples")
EXPORT_LAYOUTS = ("auto", "stacked", "clusters", "hypernetwork", "per_client")
EXPORTED_CLIENT_IDS = ("hashed", "plain")
# What silos released before training (`tff_pdp.experiment.before_training`), in the experiment's folder.
RELEASES_FILE = "silo_releases.json"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model: a name from the registry, and the arguments of its builder besides the shapes."""

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and how.

    Attributes:
      rounds: planned rounds; the noise is calibrated for them.
      weighting: how clients count in a mean: `uniform`; silos by their `num_examples`, as far as these are known; users
        by `paper_capped_num_examples`, their number of examples over `weight_cap` and at most one, which takes these
        numbers for public.
      weight_cap: the number of examples from which on a user counts as one.
      evaluate_every: validation metrics each so many rounds.
      checkpoint_every: a checkpoint each so many rounds.
      engine: a name from `tff_pdp.engines.running.ENGINES`.
      device: where the engine computes: `cpu`, `gpu`, `gpu:N` or `auto`.
      client_parallelism: `loop` calls once for each client, a few at a time, `vectorized` for many clients at once, and
        `auto` times both in the first round and keeps the faster. For the engine `inprocess`.
      clients_per_call: the most clients computed at a time; memory grows with it. For the engine `inprocess`.
      deterministic_operations: of noised training on a GPU, use only kernels of TensorFlow that repeat their sums to
        the bit. Slower, and refused by TensorFlow where an operation has none.
      test_only_seed: fixes all randomness; reports then say "not private".
    """

    rounds: int
    weighting: str = "uniform"
    weight_cap: int = 100
    evaluate_every: int = 5
    checkpoint_every: int = 10
    engine: str = "inprocess"
    device: str = "auto"
    client_parallelism: str = "auto"
    clients_per_call: int = 256
    deterministic_operations: bool = True
    test_only_seed: int | None = None


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """What is exported, and how.

    Attributes:
      algorithm: which trained method. Named here, not chosen by a metric: a choice costs budget.
      model_name: the name it is served under.
      layout: how personal models lie in the export: `stacked`, a row for every client of what differs between them;
        `clusters`, a row for every different model; `hypernetwork`, the small states that models are made from, for
        methods that have them; `per_client`, an export for every client; or `auto`, the smallest of the first three or,
        where that is above 1 GiB, `per_client` for up to 100 clients.
      client_ids: `hashed`, the export and requests have keyed hashes of the clients' ids, the key being in
        `client_id.key` beside the run; or `plain`, they have the ids themselves.
    """

    algorithm: str
    model_name: str
    layout: str = "auto"
    client_ids: str = "hashed"


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """A private search for hyper-parameters: what every silo tries with `tff-pdp tune`, and what a try costs it.

    Attributes:
      algorithm: the method that is searched; its own hyper-parameters are those of the pivot run.
      values: by hyper-parameter, the values tried; every combination of them is a candidate.
      runs: distribution of the number of runs: `geometric`, `logarithmic`, `poisson`, or the shape, at least 0, of a
        truncated negative binomial. `fixed` tries every candidate once, and costs as much as to release them all.
      mean_runs: expected number of runs, above 1; not for `fixed`.
      score_noise_multiplier: standard deviation of the noise on a run's score over the most that one validation example
        can change it: one more example answered correctly or, for a regression, `score_bound`.
      score_bound: the largest squared error of one example that counts in a score, for a regression.
    """

    algorithm: str
    values: Mapping[str, Any]
    runs: str | float = "geometric"
    mean_runs: float = 5.0
    score_noise_multiplier: float = 10.0
    score_bound: float = 1.0


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """What was chosen by looking at results on these data, and how often one looked; reports repeat it.

    Attributes:
      tuned: settings chosen without privacy, in a reader's words.
      configurations_tried: how many configurations were looked at for that.
      search: a private search, which the ledger is charged for.
    """

    tuned: tuple[str, ...] = ()
    configurations_tried: int = 1
    search: SearchConfig | None = None

    def search_for(self, algorithm: str) -> SearchConfig | None:
        """The search for this method's hyper-parameters, where there is one."""
        return self.search if self.search and self.search.algorithm == algorithm else None


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: one data set, one model, one privacy plan, and the methods trained under it.

    Attributes:
      output: folder everything is written under.
      algorithms: hyper-parameters by method name.
    """

    title: str
    output: str
    data: DataConfig
    model: ModelConfig
    privacy: PrivacyConfig
    training: TrainingConfig
    algorithms: Mapping[str, Mapping[str, float | int]]
    export: ExportConfig
    tuning: TuningConfig = TuningConfig()

    @property
    def clients_folder(self) -> Path:
        """The client dataset."""
        return Path(self.output) / "clients"

    def algorithm_folder(self, algorithm: str) -> Path:
        """State, metrics and ledger of one method."""
        return Path(self.output) / algorithm

    @property
    def client_id_key(self) -> Path:
        """The key that clients' ids are hashed with where they leave the run: a secret, and no part of an export."""
        return Path(self.output) / "client_id.key"

    @property
    def export_folder(self) -> Path:
        """The model's base path, as TensorFlow Serving calls it."""
        return Path(self.output).resolve() / "export" / self.export.model_name

    def to_dict(self) -> dict[str, Any]:
        """The resolved experiment as plain data, defaults filled in."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def hash(self, algorithm: str, data_hash: str) -> str:
        """A digest of everything that decides one method's training up to rounding, its data set included."""
        content = self.to_dict()
        decisive = {key: content[key] for key in ("model", "privacy")}
        # Where runs are counted does not change them.
        del decisive["privacy"]["registry"]
        # Runs of earlier versions, which could not choose, drew by it.
        if decisive["privacy"]["generator"] == "philox":
            del decisive["privacy"]["generator"]
        decisive["data"] = data_hash
        decisive["algorithm"] = {algorithm: content["algorithms"][algorithm]}
        decisive["training"] = {
            key: content["training"][key] for key in ("rounds", "weighting", "weight_cap", "test_only_seed")
        }
        if self.tuning.search_for(algorithm):
            decisive["search"] = content["tuning"]["search"]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads an experiment.

    Args:
      path: a YAML file.
      overrides: values by dotted key, such as `{"data.input": "my/folder"}`, that replace the file's.

    Raises:
      ConfigError: the file is missing or not YAML, or a key is unknown, missing or of the wrong type.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(), UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    for key, value in (overrides or {}).items():
        *parents, last = key.split(".")
        target = content
        for parent in parents:
            if isinstance(target, dict) and target.get(parent) is None:
                target[parent] = {}
            target = target[parent] if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise ConfigError(f"{path}: there is no key {key!r} to set")
        target[last] = value
    config = build_settings(ExperimentConfig, content, str(path), "")
    _check_ranges(config, str(path))
    return config


def _check_ranges(config: ExperimentConfig, source: str) -> None:
    """Refuses values that have the right type and no meaning, before anything is run or spent."""
    for key in ("rounds", "evaluate_every", "checkpoint_every", "clients_per_call", "weight_cap"):
        _require(getattr(config.training, key) >= 1, source, f"training.{key} must be at least 1")
    _require(
        config.training.client_parallelism in CLIENT_PARALLELISMS,
        source,
        f"training.client_parallelism {config.training.client_parallelism!r} must be auto, loop or vectorized",
    )
    _require(
        config.training.weighting in WEIGHTINGS,
        source,
        f"training.weighting {config.training.weighting!r} must be one of: {', '.join(WEIGHTINGS)}",
    )
    _require(config.privacy.batch_size >= 1, source, "privacy.batch_size must be at least 1")
    _require(
        config.privacy.generator in GENERATORS,
        source,
        f"privacy.generator {config.privacy.generator!r} must be one of: {', '.join(GENERATORS)}",
    )
    registry = config.privacy.registry
    _require(
        registry is None or Path(registry).is_absolute(),
        source,
        f"privacy.registry {registry!r} must be an absolute path: it would be another folder in each working directory",
    )
    _require(bool(config.algorithms), source, "algorithms must name at least one method")
    for name, hparams in config.algorithms.items():
        _require(isinstance(hparams, Mapping), source, f"algorithms.{name} must be a mapping of hyper-parameters")
    sets = config.data.record_set
    names = [sets] if isinstance(sets, str) else list((sets or {}).values())
    _require(
        all(isinstance(name, str) and name for name in names),
        source,
        f"data.record_set {sets!r} must be a name, or names by client",
    )
    search = config.tuning.search
    _require(
        search is None or search.algorithm in config.algorithms,
        source,
        f"tuning.search.algorithm {search and search.algorithm!r} is not one of: {', '.join(config.algorithms)}",
    )
    export = config.export
    known = ", ".join(config.algorithms)
    _require(
        export.algorithm in config.algorithms, source, f"export.algorithm {export.algorithm!r} is not one of: {known}"
    )
    _require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", export.model_name) is not None,
        source,
        f"export.model_name {export.model_name!r} must be letters, digits, '_', '.' and '-'",
    )
    for key, values in {"layout": EXPORT_LAYOUTS, "client_ids": EXPORTED_CLIENT_IDS}.items():
        given = getattr(export, key)
        _require(given in values, source, f"export.{key} {given!r} must be one of: {', '.join(values)}")


def _require(condition: bool, source: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{source}: {message}")
