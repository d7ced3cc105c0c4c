"""Runs the commands on experiments: each reads an experiment, calls the code that does the work, prints the outputs."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tff_pdp.command_line import (
    Command,
    Option,
    Outcome,
    Positional,
    Reporting,
    assigned,
    assigned_values,
    loading,
)
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Settings, parse_yaml

if TYPE_CHECKING:
    # It takes seconds to import.
    from tff_pdp.experiment.config import ExperimentConfig


class EngineOptions(Settings):
    """Options of the engine; a given option replaces the setting in the experiment's section `training`.

    Attributes:
      engine: inprocess (default), or native: TFF's C++ worker.
      device: cpu, gpu (all GPUs), gpu:N, or auto (default): with a GPU, the faster of CPU and GPU.
      client_parallelism: loop: one call for each client; vectorized: one call for many clients; auto (default): times
        both and keeps the faster.
      clients_per_call: largest number of clients in a call; bounds memory.
      workers: ray:N: N workers on Ray compute the clients, with the same results; none (default): this process.
    """

    engine: str | None = None
    device: str | None = None
    client_parallelism: Annotated[str | None, Option("MODE")] = None
    clients_per_call: int | None = None
    workers: Annotated[str | None, Option("ray:N")] = None

    @property
    def words(self) -> list[str]:
        """The given options, as words of a command."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        found = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value is not None}
        return [word for name, value in found.items() for word in (name, str(value))]

    @property
    def overrides(self) -> dict[str, Any]:
        """The given options as settings that replace the experiment's, by dotted key."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "workers"}
        found = {f"training.{name}": value for name, value in values.items() if value is not None}
        if self.workers is None:
            return found
        from tff_pdp.experiment.config import workers_overrides

        return {**found, **workers_overrides(self.workers)}


class OnExperiment(Reporting):
    """Reads an experiment.

    Attributes:
      config: the experiment: a YAML file, or the name of a shipped experiment, such as demo or reproduce/school.
      set: replace one value of the experiment, by dotted key, as in --set training.rounds=10; may be repeated.
    """

    config: Annotated[str, Option("FILE")]
    set: Annotated[tuple[str, ...], Option("KEY=VALUE")] = ()

    def experiment(self, further: Mapping[str, Any] | None = None) -> "ExperimentConfig":
        """Reads the experiment, with values replaced by `--set`, options of the engine and `further`."""
        engine = getattr(self, "engine", EngineOptions())
        return _experiment(self.config, self.set, {**engine.overrides, **(further or {})})


class Prepare(OnExperiment):
    """Turn raw client data into a client dataset (an Apache Beam job).

    The experiment's data.kind determines the form of data.input:
      leaf                   a folder of LEAF JSON of images, or with LEAF's folders train and test
      silo_files             feature vectors of silos: .mat, LEAF-like .json, .npz
      table                  CSV or Parquet: a file per client, or a column of clients (docs/own_data.md)
      mnist_writers          MNIST's idx.gz files and QMNIST's table of their 539 writers
      fed_emnist             TFF's emnist_all.sqlite[.lzma], or its older .h5 files
      nist_sd19              NIST SD19's by_class and by_write, by writer: raw FEMNIST
      celeba                 CelebA's text files or LEAF's JSON, and img_align_celeba, by person
      rotated_mnist          MNIST's four idx.gz files, to be divided among silos, rotated and masked
      partitioned_images     CIFAR-10/100, MNIST or EMNIST, to be divided among clients
      fashion_mnist          Fashion-MNIST's four idx.gz files, to be divided among clients
      tfds                   a dataset of TensorFlow Datasets: a prepared folder or the name of a builder
      contact_graph          a population's tables (US/UK PETs pandemic challenge): people and whom they met
      simulated_outbreak     such tables of a simulated outbreak; people from SocioPatterns' tij_*.dat, or generated
    Options of a kind are further keys of data; `tff-pdp config --reference` explains them. Name a kind of your own
    by module:name.

    Attributes:
      overwrite: replace a client dataset that was prepared with other settings.
    """

    overwrite: bool = False

    def run(self) -> Outcome:
        """Runs the preprocessing job of the experiment."""
        from tff_pdp.experiment.prepare import prepare_clients

        summary = prepare_clients(self.experiment(), overwrite=self.overwrite)
        return Outcome(summary.table(), summary.as_dict())


class Config(Command):
    """Check an experiment's file and show its defaults; or describe all keys.

    Attributes:
      config: the experiment to check: a YAML file, or the name of a shipped experiment.
      schema: show all keys as JSON Schema, for editors.
      reference: show all keys as the page docs/configuration.md.
      set: replace one value of the experiment, by dotted key; may be repeated.
    """

    config: Annotated[str | None, Option("FILE")] = None
    schema: bool = False
    reference: bool = False
    set: Annotated[tuple[str, ...], Option("KEY=VALUE")] = ()

    exactly_one = (("config", "schema", "reference"),)

    def run(self) -> Outcome:
        """Shows an experiment with its defaults, in YAML, or describes all keys."""
        if self.config is None:
            from tff_pdp.experiment.reference import reference, schema

            return Outcome(
                reference().rstrip("\n") if self.reference else json.dumps(schema(), indent=2, ensure_ascii=False)
            )
        import yaml

        with loading():
            from tff_pdp.experiment.build import build_methods

        found = _experiment(self.config, self.set, {})
        for algorithm, _ in build_methods(found, num_clients=2)[1].values():
            found.privacy.check(algorithm, found.training.weighting)
        return Outcome(yaml.safe_dump(found.to_dict(), sort_keys=False, allow_unicode=True).rstrip("\n"))


class ProgressOptions(Settings):
    """Options of what is shown while rounds are computed.

    Attributes:
      quiet: show no progress on standard error; warnings are shown nevertheless.
      log_file: add a readable line every ten seconds to this file.
    """

    quiet: bool = False
    log_file: Path | None = None

    @property
    def words(self) -> list[str]:
        """The given options, as words of a command."""
        return ["--quiet"] * self.quiet + ([] if self.log_file is None else ["--log-file", str(self.log_file)])


class _Resuming(OnExperiment):
    """Computes rounds.

    Attributes:
      resume: continue from the newest checkpoint, for instance after an interruption; or, with a larger
        training.rounds, go on after the last round with the rest of each budget.
      overwrite: start anew; an earlier run is discarded.
    """

    engine: EngineOptions
    progress: ProgressOptions
    resume: bool = False
    overwrite: bool = False

    @property
    def shown(self) -> dict[str, Any]:
        """The options of the progress, as arguments of `train` and `tune`."""
        return {"progress": not self.progress.quiet, "log_file": self.progress.log_file}

    def going_on(self, command: str, further: Sequence[str] = ()) -> str:
        """Returns the command that continues this one after it was stopped."""
        words = ["tff-pdp", command, "--config", self.config, *further]
        words += [word for one in self.set for word in ("--set", one)]
        words += [*self.engine.words, *self.progress.words, "--resume"]
        return shlex.join(words)


class Train(_Resuming):
    """Train the experiment's methods, each silo under its own privacy budget.

    Attributes:
      algorithm: one method of the experiment; default: all of them.
    """

    algorithm: Annotated[tuple[str, ...], Option("NAME")] = ()

    def run(self) -> Outcome:
        """Trains the chosen methods, one after the other."""
        with loading():
            from tff_pdp.training.train import train

        config = self.experiment()
        done: dict[str, Any] = {}
        # A method with a search is trained by `tune`; `train` refuses it if it is asked for by name.
        others = [name for name in config.algorithms if not config.tuning.search_for(name)]
        names = self.algorithm or others or list(config.algorithms)
        for name in names:
            if name not in config.algorithms:
                raise ConfigError(
                    f"--algorithm {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}"
                )
        for name in names:
            try:
                state = train(config, name, resume=self.resume, overwrite=self.overwrite, **self.shown)
            except KeyboardInterrupt as stop:
                if not str(stop):
                    raise
                words = [word for one in self.algorithm for word in ("--algorithm", one)]
                raise KeyboardInterrupt(f"{stop}; to go on: {self.going_on('train', words)}") from None
            done[name] = {"rounds": state.round_number, "folder": str(config.algorithm_folder(name))}
        return Outcome(
            "\n".join(f"{name}: {row['rounds']} rounds, in {row['folder']}" for name, row in done.items()), done
        )


class Tune(_Resuming):
    """Search hyper-parameters of one method privately, within each silo's budget.

    After one run of all silos, every silo repeats its own training alone, with a secret, random number of candidates,
    and releases the best; the cost is part of epsilon (docs/privacy.md). For later commands, write the search into the
    experiment:
      tuning:
        search: {algorithm: mr_mtl, values: {prox_weight: [0.1, 1, 10]}, runs: geometric, mean_runs: 5}
    Then tff-pdp evaluate and tff-pdp export treat the result as a trained method.

    Attributes:
      algorithm: the method to search; default: tuning.search.algorithm.
      values: values to try: --values prox_weight=0.1,1,10; may be repeated; default: tuning.search.values.
      runs: distribution of the number of runs: geometric (default), logarithmic, poisson, or a number, the shape of a
        truncated negative binomial; or fixed: each candidate once.
      mean_runs: expected number of runs of each silo, above 1.
    """

    algorithm: Annotated[str | None, Option("NAME")] = None
    values: Annotated[tuple[str, ...], Option("NAME=NUMBERS")] = ()
    runs: Annotated[str | None, Option("HOW")] = None
    mean_runs: float | None = None

    def run(self) -> Outcome:
        """Searches the hyper-parameters of one method; the method's ledger is charged for the search."""
        with loading():
            from tff_pdp.training.search.tune import tune, tune_summary, tune_text

        config = self.experiment(self._search())
        if config.tuning.search is None:
            raise ConfigError("nothing to search: give tuning.search in the configuration, or --algorithm and --values")
        name = config.tuning.search.algorithm
        try:
            tuned = tune(config, name, resume=self.resume, overwrite=self.overwrite, **self.shown)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"to go on: {self.going_on('tune', self._words())}") from None
        summary = tune_summary(config, tuned)
        return Outcome(tune_text(summary), summary)

    def _words(self) -> list[str]:
        """Returns the options of the search, as words of a command."""
        words = [word for one in self.values for word in ("--values", one)]
        given = {"--algorithm": self.algorithm, "--runs": self.runs, "--mean-runs": self.mean_runs}
        return words + [word for flag, value in given.items() if value is not None for word in (flag, str(value))]

    def _search(self) -> dict[str, Any]:
        """Returns the settings of the search that options give, by dotted key."""
        values = assigned("--values", self.values, "NAME=NUMBER,NUMBER,...")
        given = {
            "algorithm": self.algorithm,
            "mean_runs": self.mean_runs,
            "runs": self.runs and parse_yaml(self.runs, "--runs"),
            "values": {name: parse_yaml(f"[{numbers}]", "--values") for name, numbers in values.items()} or None,
        }
        return {f"tuning.search.{key}": value for key, value in given.items() if value is not None}


class Evaluate(OnExperiment):
    """Test the personal models; write report.html and summary.json.

    Attributes:
      algorithm: one method of the experiment; default: all of them.
    """

    engine: EngineOptions
    algorithm: Annotated[tuple[str, ...], Option("NAME")] = ()

    def run(self) -> Outcome:
        """Tests the personal models and writes the report."""
        with loading():
            from tff_pdp.training.evaluate import evaluate_experiment, summary_table

        config = self.experiment()
        summary = evaluate_experiment(config, self.algorithm or None)
        return Outcome(f"{summary_table(summary)}\nreport: {Path(config.output) / 'report.html'}", summary)


class Export(OnExperiment):
    """Write the personal models as one SavedModel for TensorFlow Serving.

    Attributes:
      drop_added: leave out clients that tff-pdp personalize added to the newest version.
    """

    engine: EngineOptions
    drop_added: bool = False

    def run(self) -> Outcome:
        """Exports the experiment's chosen method."""
        with loading():
            from serving.production.exports import docker_command, write_models_config
            from tff_pdp.personal_models.example_request import write_example_request
            from tff_pdp.personal_models.export import export_experiment

        config = self.experiment()
        exported = export_experiment(config, drop_added=self.drop_added)
        folder, name = config.export_folder.parent, config.export.model_name
        content = {
            "versions": {name: str(version) for name, version in exported.versions.items()},
            "layout": exported.layout,
            "size": dataclasses.asdict(exported.size),
            "bytes_about": dict(exported.sizes),
        }
        keyed = f"by keyed hashes of their ids; the key is in {config.client_id_key}"
        if name in exported.versions:
            version, base_path = exported.version, str(exported.version.parent)
            content |= {"version": str(version), "models_config": str(write_models_config(version.parent, name))}
            first, serve, production = str(version), "serve it here", docker_command(version.parent, name)
        else:
            base_path = f"{folder / name}.CLIENT"
            first, serve = f"{len(exported.versions)} models, in {base_path}", "serve one here"
            production = f"tff-pdp deploy {folder} --output FOLDER"
        lines = [
            f"exported: {first}",
            f"layout: {exported.layout_text()}",
            f"size: {exported.size.text()}",
            f"requests name clients: {'by their ids' if config.export.client_ids == 'plain' else keyed}",
            f"{serve}: tff-pdp serve --model-base-path {base_path}",
        ]
        if example := write_example_request(config):
            lines.append(f"ask for client {example.client_id!r}, with an example of zeros: {example.command}")
            content["example_request"] = example.command
        return Outcome("\n".join([*lines, f"in production: {production}"]), content)


class Demo(Reporting):
    """Run a whole experiment, from data to a server, on real digits or on your own FEMNIST folder.

    Attributes:
      data: folder of LEAF FEMNIST JSON; default: scikit-learn's digits.
      output: folder for all results; the results of an earlier demo are replaced.
    """

    data: Annotated[str | None, Option("DIR")] = None
    output: Annotated[Path, Option("DIR")] = Path("runs/demo")
    engine: EngineOptions

    def run(self) -> Outcome:
        """Runs the demo, and prints where the results are."""
        with loading():
            from tff_pdp.commands.demo import run_demo

        summary, text = run_demo(self.output, self.data, self.engine.overrides)
        return Outcome(text, summary, 0 if summary["served_equals_in_process"] else 1)


class Reproduce(Reporting):
    """Repeat a published experiment: methods x privacy budgets x seeds.

    Attributes:
      setting: name of the experiment.
      paper: make the paper's choices, unsound choices included.
      scale: full: the paper's numbers of runs and rounds; small: for two cores.
      methods: names of methods; default: those of the scale.
      epsilons: epsilon of every silo or user; inf: no privacy.
      budgets: names of budgets that differ between silos, such as mix_gauss_1; default: those of the scale.
      seeds: number of repetitions; default: that of the scale.
      variants: names of variants, such as default, silo_scaling, classes_2.
      grid: also sweep lambda over these values; without values: over the setting's grid.
      data: folder of the raw data; default: $TFF_PDP_DATA.
      output: folder of the runs; a stopped sweep in this folder goes on; default: runs/reproduce/SETTING.
      jobs: number of processes; default: one per core, or one with --workers.
      workers: ray:N: N workers on Ray compute the clients of each process, with the same results.
    """

    setting: Annotated[str, Positional(choices="tff_pdp.reproduce.setting:NAMES")]
    paper: bool = False
    scale: Literal["small", "full"] | None = None
    methods: Annotated[tuple[str, ...], Option("NAME")] = ()
    epsilons: Annotated[tuple[str, ...], Option("E")] = ()
    budgets: Annotated[tuple[str, ...], Option("NAME")] = ()
    seeds: int | None = None
    variants: Annotated[tuple[str, ...], Option("NAME")] = ()
    grid: Annotated[tuple[float, ...] | None, Option("LAMBDA")] = None
    data: Annotated[str | None, Option("DIR")] = None
    output: Annotated[str | None, Option("DIR")] = None
    jobs: int | None = None
    workers: Annotated[str | None, Option("ray:N")] = None

    def run(self) -> Outcome:
        """Repeats a published experiment."""
        from tff_pdp.reproduce.reproduction import reproduce

        content, text = reproduce(self)
        return Outcome(text, content, 1 if content["failures"] else 0)


class Doctor(Reporting):
    """Show versions and devices, and test the engines on each device.

    Attributes:
      device: cpu, gpu, gpu:N or auto: test this device alone, convolutions included, and time a round.
    """

    device: str | None = None

    def run(self) -> Outcome:
        """Lists versions and devices, and tests the engines."""
        with loading():
            from tff_pdp.commands.doctor import examine

        content, text = examine(self.device)
        return Outcome(text, content, 0 if content["healthy"] else 1)


def _experiment(path: str, assignments: tuple[str, ...], further: Mapping[str, Any]) -> "ExperimentConfig":
    from tff_pdp.experiment.config import load_experiment

    return load_experiment(path, {**assigned_values("--set", assignments), **further})
