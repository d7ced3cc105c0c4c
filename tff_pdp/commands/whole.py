"""Runs `tff-pdp run`: an experiment from its data to its report and its export, in one command."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tff_pdp.command_line import Outcome, loading
from tff_pdp.commands.experiment import EngineOptions, Export, OnExperiment, Prepare, ProgressOptions

if TYPE_CHECKING:
    from tff_pdp.experiment.config import ExperimentConfig


class Run(OnExperiment):
    """Prepare, train, evaluate, report and export in one command.

    Finished steps are not repeated, and a stopped training goes on from its newest checkpoint: the same command
    continues after an interruption. A method that `tuning.search` names is searched, as `tff-pdp tune` does. If
    settings have changed since, the command refuses to go on and says which command replaces the old results.
    """

    engine: EngineOptions
    progress: ProgressOptions

    def run(self) -> Outcome:
        """Runs all steps that are not finished."""
        config = self.experiment()
        _say("prepare", str(config.clients_folder))
        prepared = Prepare(config=self.config, set=self.set).run()
        _say("train", ", ".join(config.algorithms))
        try:
            trained = [name for name in config.algorithms if self._train(config, name)]
        except KeyboardInterrupt as stop:
            words = ["tff-pdp", "run", "--config", self.config, *(word for one in self.set for word in ("--set", one))]
            command = shlex.join([*words, *self.engine.words, *self.progress.words])
            raise KeyboardInterrupt(": ".join(filter(None, [str(stop), f"to go on: {command}"]))) from None
        _say("evaluate", str(Path(config.output) / "report.html"))
        summary, text = self._evaluate(config)
        _say("export", str(config.export_folder))
        exported = self._export(config)
        content = {"prepared": prepared.content, "trained": trained, "summary": summary, "export": exported.content}
        return Outcome(f"{text}\nreport: {Path(config.output) / 'report.html'}\n{exported.text}", content)

    def _train(self, config: "ExperimentConfig", name: str) -> bool:
        """Trains or searches one method; returns false if that is finished already."""
        from tff_pdp.training.record import checkpoint_files
        from tff_pdp.training.record.charges import read_charges
        from tff_pdp.training.record.releases import CHECKPOINTS

        folder = config.algorithm_folder(name)
        charges = read_charges(folder)
        reached = checkpoint_files.newest_round(folder / CHECKPOINTS)
        # Evaluation checks that the run has the settings of this experiment.
        if charges is not None and charges.is_closed and reached == config.training.rounds:
            print(f"{name}: finished already, in {folder}", file=sys.stderr)
            return False
        shown: dict[str, Any] = {"progress": not self.progress.quiet, "log_file": self.progress.log_file}
        with loading():
            from tff_pdp.training.search.tune import tune
            from tff_pdp.training.train import train

        (tune if config.tuning.search_for(name) else train)(config, name, resume=True, **shown)
        return True

    def _evaluate(self, config: "ExperimentConfig") -> tuple[dict[str, Any], str]:
        """Tests the methods, unless `summary.json` has the results of these runs; returns summary and table."""
        from tff_pdp.training.record.charges import run_id_of
        from tff_pdp.verification.epsilons import SUMMARY_FILE, read_json

        with loading():
            from tff_pdp.training.evaluate import evaluate_experiment, summary_table

        path = Path(config.output) / SUMMARY_FILE
        summary = dict(read_json(path)) if path.exists() else {}
        expected = {name: run_id_of(config.algorithm_folder(name)) for name in config.algorithms}
        rows = summary.get("algorithms", {})
        found = {name: row.get("run") for name, row in rows.items()}
        if found != expected or any(row["rounds"] != config.training.rounds for row in rows.values()):
            summary = evaluate_experiment(config)
        return summary, summary_table(summary)

    def _export(self, config: "ExperimentConfig") -> Outcome:
        """Exports the chosen method, unless the newest version has its models."""
        with loading():
            from serving.saved_model import layout
            from tff_pdp.personal_models.model_card import check_settings, newest_version
            from tff_pdp.training.record.charges import run_id_of

        folder, own = config.export_folder, config.export
        version = newest_version(folder)
        if version is not None:
            card = layout.read_document(version, layout.MODEL_CARD_FILE)
            expected = {
                "algorithm": own.algorithm,
                "run": run_id_of(config.algorithm_folder(own.algorithm)),
                "rounds": config.training.rounds,
                "client_id_kind": own.client_ids,
                "title": config.title,
            }
            if own.layout in ("auto", card.get("layout")) and all(card.get(key) == expected[key] for key in expected):
                check_settings(config, version, card)
                return Outcome(f"exported already: {version}", {"versions": {own.model_name: str(version)}})
        return Export(config=self.config, set=self.set, engine=self.engine).run()


def _say(step: str, place: str) -> None:
    print(f"{step}: {place}", file=sys.stderr, flush=True)
