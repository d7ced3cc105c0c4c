"""Sends runs to Weights & Biases, a service outside of this computer."""

import importlib
from typing import Any, Literal

from tff_pdp.settings import Name
from tff_pdp.trackers.base import RoundReport, RunFacts, require_package


class Wandb:
    """Sends settings and scalars of a run. A run that is resumed continues the run at the service."""

    def __init__(self, project: str, entity: str, mode: str):
        """Stores the project, the account (empty for the user's own) and the mode."""
        self._project, self._entity, self._mode = project, entity, mode
        self._run: Any = None

    def began(self, run: RunFacts) -> None:
        """Begins a run at the service, or continues the run that has the same id."""
        # The package need not be installed.
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=self._project,
            entity=self._entity or None,
            mode=self._mode,
            name=run.method,
            id=run.run_id,
            resume="allow",
            config=dict(run.settings),
            dir=str(run.folder.parent),
        )

    def round_done(self, report: RoundReport) -> None:
        """Sends the round's scalars."""
        self._run.log(report.scalars(), step=report.round_number)

    def ended(self, run: RunFacts) -> None:
        """Ends the run at the service."""
        self._run.finish(exit_code=0 if run.is_finished else 1)


def build_wandb(*, project: Name, entity: str = "", mode: Literal["online", "offline"] = "online") -> Wandb:
    """Builds a tracker that sends runs to Weights & Biases; figures under `nonprivate/` leave this computer, too.

    Args:
      project: name of the project.
      entity: account of a user or a team; by default the user's own.
      mode: `online`, or `offline` for files that `wandb sync` sends later.

    Raises:
      ConfigError: the package wandb is not installed.
    """
    require_package("wandb", "wandb", "pip install wandb==0.17.9")
    return Wandb(project, entity, mode)
