"""Options of a fit of new clients, as the command and the library take them; imports nothing heavy."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """Says how new clients are fitted; an option that is None is as in training.

    Attributes:
      steps: gradient steps; default 100.
      learning_rate: default: that of training.
      batch_size: default: privacy.batch_size; the expected size of a protected silo's Poisson batches.
      clip_norm: L2 bound on each example's gradient, for protected silos; default: privacy.clip_norm.
      epsilon: budget of each silo for this fit; required for protected silos.
      delta: of the same; below 1 / number of the silo's examples.
      replace: fit clients again that are in the export already.
    """

    steps: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    clip_norm: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    replace: bool = False
