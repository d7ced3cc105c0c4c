"""Runs `tff-pdp audit`: measures what an observer can infer from a run beyond the guarantee."""

from typing import Annotated

from tff_pdp.command_line import Option, Outcome
from tff_pdp.commands.experiment import EngineOptions, OnExperiment
from tff_pdp.settings import CountOrZero


class AuditBudgets(OnExperiment):
    """Show the budgets of silos that the server can read from uploads.

    Silos' records are protected, budgets are not: an upload carries its noise in the clear. From each silo's own upload
    in round 1 and public parameters, the command reads the silo's noise multiplier z and epsilon, and shows both beside
    the true values. Example:
      tff-pdp audit budgets --config experiment.yaml --algorithm fed_avg

    The method must have been trained, at least through round 1. That round is repeated with the run's own key, so that
    uploads have the same bits: nothing new is released, charged or written. On another machine or with another version
    the bits may differ; the command then refuses.

    For images on a background of zeros, such as MNIST's, first-layer weights of the outer frame show nothing but noise
    (`quiet`, for models whose first layer is dense). Otherwise z is read from the median of all absolute values
    (`median`), which is too large where the signal is not small beside the noise.

    Attributes:
      algorithm: one method of the experiment; default: the experiment's only method.
      frame: width, in pixels, of the outer frame that is zero in all images; 0 for none.
    """

    engine: EngineOptions
    algorithm: Annotated[str | None, Option("NAME")] = None
    frame: Annotated[CountOrZero, Option("PIXELS")] = 2

    def run(self) -> Outcome:
        """Reads budgets from the uploads of a run's first round."""
        from tff_pdp.audit.budgets import audit_budgets, audit_text
        from tff_pdp.errors import ConfigError

        config = self.experiment()
        name = self.algorithm or (next(iter(config.algorithms)) if len(config.algorithms) == 1 else None)
        if name is None:
            raise ConfigError(f"--algorithm is missing; this experiment has: {', '.join(config.algorithms)}")
        content = audit_budgets(config, name, self.frame)
        return Outcome(audit_text(content), content)
