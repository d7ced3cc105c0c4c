"""Runs the commands that look at runs: `status`, `compare` and `list`; none of them writes to a run's folder."""

from pathlib import Path
from typing import Annotated, Literal

from tff_pdp.command_line import Option, Outcome, Positional, Reporting
from tff_pdp.errors import ConfigError
from tff_pdp.files import replace_text


class Status(Reporting):
    """Show how far runs have come, what they have spent and what is left.

    Works for running, stopped and killed runs, and writes nothing. Spending is what the run's record says: it includes
    rounds that are reserved but not yet run. `tff-pdp verify` computes the spending of all runs together.

      tff-pdp status runs/demo              all methods of an experiment
      tff-pdp status runs/demo/mr_mtl       one method
      tff-pdp status --config demo          all methods of an experiment, also those that have not begun

    Attributes:
      runs: output folder of an experiment, or folder of one method in it.
      config: the experiment: a YAML file, or the name of a shipped experiment.
    """

    runs: Annotated[tuple[Path, ...] | None, Positional("RUN")] = None
    config: Annotated[str | None, Option("FILE")] = None

    def run(self) -> Outcome:
        """Reads the status of each run.

        Raises:
          ConfigError: no run is named, or a folder has no run.
          DataError: the record of a run is damaged.
        """
        from tff_pdp.verification.status import status_of, status_text

        found = [status_of(folder) for folder in self._folders()]
        return Outcome("\n".join(map(status_text, found)), {"runs": [one.as_dict() for one in found]})

    def _folders(self) -> list[Path]:
        from tff_pdp.verification.experiment import runs_of
        from tff_pdp.verification.run_folder import is_run

        folders: list[Path] = []
        if self.config is not None:
            from tff_pdp.experiment.config import load_experiment

            config = load_experiment(self.config)
            folders += [config.algorithm_folder(name) for name in config.algorithms]
        for place in self.runs or ():
            if not place.is_dir():
                raise ConfigError(f"{place} is not a folder")
            # A folder named `.` has no name of its own.
            place = place if place.name else place.absolute()
            folders += [place] if is_run(place) else runs_of(place)
        if not folders:
            raise ConfigError("name a run, or an experiment with --config; see tff-pdp status --help")
        return folders


class Compare(Reporting):
    """Compare the results of runs in a table and, with --plot, in a page with learning curves.

    A run is the output folder of an experiment that `tff-pdp evaluate` has tested, or the folder of one method in it.
    Results are those of `summary.json`; they are not private. The epsilon of a row is that of one method. Whoever sees
    several runs on the same records sees more: `tff-pdp verify` computes the epsilon of all runs in one folder.

    Attributes:
      runs: output folders of experiments, or folders of methods in them.
      plot: file for a page (.html) or a figure (.svg) of the validation metric by round.
    """

    runs: Annotated[tuple[Path, ...], Positional("RUN")]
    plot: Annotated[Path | None, Option("FILE")] = None

    def run(self) -> Outcome:
        """Reads results, prints a table and draws learning curves.

        Raises:
          ConfigError: a folder has no results, or the file for the plot is neither .html nor .svg.
          DataError: a file of a run is damaged.
        """
        from tff_pdp.verification.compare import compared, curves_figure, curves_page, table

        if self.plot is not None and self.plot.suffix not in (".html", ".svg"):
            raise ConfigError(f"--plot {self.plot} must end in .html or .svg")
        rows = compared(self.runs)
        text = table(rows)
        if self.plot is not None:
            replace_text(self.plot, curves_page(rows) if self.plot.suffix == ".html" else curves_figure(rows))
            text += f"\nplot: {self.plot}"
        return Outcome(text, {"runs": [row.as_dict() for row in rows]})


class List(Reporting):
    """List what an experiment's file can name, with one line each.

    `tff-pdp config --reference` explains the settings of each. docs/which_method.md says which method suits what.

    Attributes:
      kind: algorithms, models, sources (kinds of raw data), plans (privacy) or trackers.
    """

    kind: Annotated[Literal["algorithms", "models", "sources", "plans", "trackers"], Positional()]

    def run(self) -> Outcome:
        """Lists the kinds of one section."""
        from tff_pdp.experiment.kinds import ALGORITHMS, MODELS, PLANS, SOURCES, TRACKERS

        known = {"algorithms": ALGORITHMS, "models": MODELS, "sources": SOURCES, "plans": PLANS, "trackers": TRACKERS}
        lines = known[self.kind].described()
        width = max(map(len, lines))
        return Outcome("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()), lines)
