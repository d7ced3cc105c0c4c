"""Defines the data of a report."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import MethodFacts
from tff_pdp.reports.statement import Statement
from tff_pdp.reports.words import SILOS, USERS, ClientWords

# Keys of epsilons that were spent or promised; null in JSON if no finite epsilon holds.
_SPENT = frozenset({f"epsilon_{end}" for end in ("spent", "rdp", "pld", "at_most")})


@dataclasses.dataclass(frozen=True)
class ClientScores:
    """The results of one client, a silo or a user.

    Attributes:
      id: name of the client.
      num_test: number of held-out test examples.
      personal: test metric of the client's personal model, by method; NaN without test examples.
      shared: test metric of the shared model on this client, by method; None for methods without a shared model.
    """

    id: str
    num_test: int
    personal: Mapping[str, float]
    shared: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class AlgorithmResult:
    """The results of one method for all clients (silos or users), in the report's metric.

    Attributes:
      facts: name, title and privacy claim of the method, and the method's privacy cost for users.
      mean: mean over clients of the personal model's test metric.
      mean_over_examples: mean of the personal model's test metric, weighted by clients' numbers of test examples.
      worst_decile: mean of the personal model's test metric over the worst tenth of the clients.
      spread: standard deviation of the personal model's test metric over clients.
      shared_mean: mean over clients of the shared model's test metric; None without a shared model.
      history: pairs (round, mean over clients of the validation metric).
      rounds: number of trained rounds.
      seconds_per_round: mean wall-clock seconds of a round.
    """

    facts: MethodFacts
    mean: float
    mean_over_examples: float
    worst_decile: float
    spread: float
    shared_mean: float | None
    history: tuple[tuple[int, float], ...]
    rounds: int
    seconds_per_round: float


@dataclasses.dataclass(frozen=True)
class SyntheticImages:
    """Synthetic images that a silo has released.

    Attributes:
      id: name of the silo.
      x: the images, float32 `[images, height, width, channels]`, of one or three channels.
      y: their labels, int64 `[images]`.
      value_range: smallest and largest possible value of a pixel.
    """

    id: str
    x: np.ndarray
    y: np.ndarray
    value_range: tuple[float, float] = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Report:
    """All data that a report shows.

    Attributes:
      title: heading of the page.
      created: time at which the run ended, as text.
      metric: metric that judges the models.
      algorithms: the compared methods, in the order to show them.
      clients: results of each silo or user.
      privacy: the privacy statement.
      config: the resolved configuration of the run.
      notes: remarks for the reader, one sentence each.
      advice: what the reader may try next, and what the attempt costs.
      baseline: name of the method in which each client learns alone; gains are measured against it.
      synthetic: synthetic images of each silo, some of which are drawn; empty without synthetic images.
    """

    title: str
    created: str
    metric: Metric
    algorithms: tuple[AlgorithmResult, ...]
    clients: tuple[ClientScores, ...]
    privacy: Statement
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    baseline: str = "local_only"
    synthetic: tuple[SyntheticImages, ...] = ()

    def settings_of(self, method: str) -> Mapping[str, Any]:
        """Returns the settings of a method, by its name in the experiment; empty without a configuration."""
        return self.config.get("algorithms", {}).get(method, {})

    def kind_of(self, method: str) -> str:
        """Returns the kind of a method, by its name in the experiment."""
        return str(self.settings_of(method).get("kind", method))

    @property
    def are_users(self) -> bool:
        """True if the clients are users, false if they are silos."""
        return self.privacy.facts.are_users

    @property
    def words(self) -> ClientWords:
        """The words for the clients in the report's texts: silos or users."""
        return USERS if self.are_users else SILOS


def json_safe(value: Any) -> Any:
    """Returns the value with tuples as lists, and infinities and NaN as strings, so that every JSON reader accepts it.

    An infinite spent epsilon becomes None, because no epsilon holds; an infinite budget becomes a string.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: None if key in _SPENT and entry == math.inf else json_safe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry) for entry in value]
    return value
