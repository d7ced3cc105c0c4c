"""The public parameters that MR-MTL's automatic lambda is set from."""

import dataclasses
import math

import numpy as np

from tff_pdp.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class SiloParameters:
    """What is public of all silos' training; arrays are `[silos]`, all in one order of silos.

    Guarantee: nothing here is computed from data other than the numbers of examples.
    Assumes: these are public, or released with noise, as in `tff_pdp.privacy.plan.PrivacyPlan.num_examples`.

    Attributes:
      learning_rate: of the local steps, the same in all silos.
      rounds: planned number of rounds.
      local_steps: steps of a round, m.
      num_examples: training examples, n.
      clip_norm: C.
      noise_multiplier: z.
      sampling_rate: q, in (0, 1].
      expected_batch_size: B, what a step's noised sum is divided by.

    Raises:
      ConfigError: there is a single silo, or a value is out of range, as a noise multiplier of 0 is.
    """

    learning_rate: float
    rounds: int
    local_steps: np.ndarray
    num_examples: np.ndarray
    clip_norm: np.ndarray
    noise_multiplier: np.ndarray
    sampling_rate: np.ndarray
    expected_batch_size: np.ndarray

    def __post_init__(self):
        size = len(self.local_steps)
        if size < 2:
            raise ConfigError("prox_weight: auto compares silos, and there is only one: give prox_weight a number")
        for field in ("local_steps", "num_examples"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), np.int64))
        for field in ("clip_norm", "noise_multiplier", "sampling_rate", "expected_batch_size"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), np.float64))
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value.shape != (size,) or not np.all((value > 0) & np.isfinite(value)):
                raise ConfigError(
                    f"prox_weight: auto needs a positive and finite {field.name} for each of the {size} silos, not "
                    f"{value.tolist()}: give prox_weight a number, or train with privacy"
                )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"prox_weight: auto needs a positive learning_rate, not {self.learning_rate}")

    @property
    def num_silos(self) -> int:
        """How many silos there are."""
        return len(self.local_steps)

    @property
    def dp_variance(self) -> np.ndarray:
        """Variance that DP noise adds to one weight's gradient in one step."""
        return (self.noise_multiplier * self.clip_norm / self.expected_batch_size) ** 2

    def sampling_variance(self, num_weights: int) -> np.ndarray:
        """Likewise what Poisson sampling adds, for clipped gradients of total variance C^2."""
        return (1 - self.sampling_rate) * self.clip_norm**2 / (self.expected_batch_size * num_weights)

    def example_variance(self, num_weights: int) -> np.ndarray:
        """Variance of one weight of a silo's mean gradient over draws of all its examples, for the same gradients."""
        return self.clip_norm**2 / (self.num_examples * num_weights)
