"""Sets the synthetic data that each silo releases before training, and the part of the silo's budget for them."""

import math
from typing import Literal

from msgspec.structs import replace

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import next_float32, solve_noise_multiplier
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.synthetic.base import Generator
from tff_pdp.privacy.synthetic.cgan import DpCgan
from tff_pdp.privacy.synthetic.datalens import DataLens
from tff_pdp.privacy.synthetic.gaussian import DpGaussian
from tff_pdp.privacy.synthetic.merf import DpMerf
from tff_pdp.settings import Count, Settings, Share

# The reason in the ledger.
SYNTHETIC = "synthetic data"

Generators = DpGaussian | DpMerf | DpCgan | DataLens


class SyntheticData(Settings):
    """The synthetic data that each silo releases once before training, and the rounds that train on them.

    Attributes:
      generator: how synthetic examples are made: `kind`, and the generator's public settings. `num_classes` follows
        from the data.
      rounds: number of rounds, from the first, that train on synthetic data. These rounds cost no budget. In all later
        rounds each silo adapts a model of its own to its records, and releases nothing.
      share: part of a silo's epsilon that the synthetic data cost alone, at half of the silo's delta. The adaptation
        has all that is left of the budget.
      adaptation: `dp_sgd`, the plan's DP-SGD; or `non_private`, training without clip and noise. With `non_private`, as
        in the PPPFL paper, the synthetic data have the whole budget, the shared model is protected, and the personal
        models are not: they cannot be exported.
    """

    generator: Generators
    rounds: Count
    share: Share = 0.5
    adaptation: Literal["dp_sgd", "non_private"] = "dp_sgd"

    @property
    def is_adapted_privately(self) -> bool:
        """True if silos adapt their models by DP-SGD."""
        return self.adaptation == "dp_sgd"

    def for_classes(self, num_classes: int) -> Generator:
        """Returns the generator for examples of a data set.

        Raises:
          ConfigError: the data set is for a regression, or the generator is for another number of classes.
        """
        if not num_classes:
            raise ConfigError("privacy.synthetic makes examples of classes, and this data set is for a regression")
        if self.generator.num_classes not in (1, num_classes):
            raise ConfigError(
                f"privacy.synthetic.generator.num_classes is {self.generator.num_classes}, and the data set has "
                f"{num_classes} classes: leave the setting out"
            )
        return replace(self.generator, num_classes=num_classes)

    def noise_multiplier(self, budget: SiloBudget) -> float:
        """Returns the least noise multiplier of a generator that costs its part of a silo's budget.

        Raises:
          ConfigError: the budget is infinite, or the noise would leave nothing to learn.
          BudgetError: no noise meets that part of the budget.
        """
        if math.isinf(budget.epsilon):
            raise ConfigError("privacy.synthetic needs finite budgets: without noise, synthetic data are no release")
        if self.is_adapted_privately:
            budget = SiloBudget(self.share * budget.epsilon, budget.delta / 2)
        try:
            noise = next_float32(solve_noise_multiplier(self.generator.event, budget.epsilon, budget.delta))
            self.generator.check_noise(noise)
        except BudgetError as error:
            raise BudgetError(f"privacy.synthetic: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"privacy.synthetic.generator: {error}") from None
        return noise
