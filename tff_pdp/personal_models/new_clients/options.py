"""Defines the options of a fit of new clients, for the command and the library; importing this module is fast."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The options of a fit of new clients; an option that is None has its default.

    Attributes:
      steps: number of gradient steps; default: 100.
      learning_rate: learning rate of each step; default: as in training.
      batch_size: size of batches, for protected silos the expected size; default: privacy.batch_size.
      clip_norm: L2 bound on each example's gradient, for protected silos; default: privacy.clip_norm.
      epsilon: epsilon of each silo for this fit; required for protected silos.
      delta: delta of each silo for this fit; below 1 / number of the silo's examples.
      replace: fit clients again that are in the export already.

    >>> FitOptions(steps=50, learning_rate=0.1).steps
    50
    """

    steps: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    clip_norm: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    replace: bool = False
