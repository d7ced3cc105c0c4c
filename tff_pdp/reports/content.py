"""Defines what a report is made of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import MethodFacts
from tff_pdp.reports.statement import Statement
from tff_pdp.reports.words import SILOS, USERS, ClientWords

# What was spent or is promised; null in JSON where no finite epsilon holds.
_SPENT = frozenset({f"epsilon_{end}" for end in ("spent", "rdp", "pld", "at_most")})


@dataclasses.dataclass(frozen=True)
class ClientScores:
    """What one client, a silo or a user, got.

    Attributes:
      id: the client's name.
      num_test: number of held-out test examples.
      personal: method name to the test metric of this client's personal model; NaN without test examples.
      shared: method name to the test metric of the shared model on this client; `None` where there is none.
    """

    id: str
    num_test: int
    personal: Mapping[str, float]
    shared: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class AlgorithmResult:
    """What one method reached over all clients, silos or users, in the report's metric.

    Attributes:
      facts: its name, title and claim, and what it cost users.
      mean: mean over clients of the personal model's test metric.
      mean_over_examples: the same, each client weighted by its number of test examples.
      worst_decile: mean over the worst tenth of the clients.
      spread: standard deviation over clients.
      shared_mean: mean over clients of the shared model's test metric; `None` where there is none.
      history: pairs (round, mean over clients of the validation metric).
      rounds: number of rounds trained.
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
class Report:
    """Everything a report shows.

    Attributes:
      title: heading of the page.
      created: when the run ended, as text.
      metric: what models are judged by here.
      algorithms: the compared methods, in the order to show them.
      clients: one entry per silo, or user.
      privacy: the statement.
      config: the resolved configuration of the run.
      notes: remarks for the reader, one sentence each.
      baseline: name of the method in which each client learns alone; gains are measured against it.
    """

    title: str
    created: str
    metric: Metric
    algorithms: tuple[AlgorithmResult, ...]
    clients: tuple[ClientScores, ...]
    privacy: Statement
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    baseline: str = "local_only"

    @property
    def are_users(self) -> bool:
        """Whether clients are users."""
        return self.privacy.facts.are_users

    @property
    def words(self) -> ClientWords:
        """What to call clients."""
        return USERS if self.are_users else SILOS


def json_safe(value: Any) -> Any:
    """The value with tuples as lists and with infinities and NaN as words, which every JSON reader accepts.

    A spent epsilon that is infinite is null: there is none. Budgets that are infinite were asked for, and stay words.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: None if key in _SPENT and entry == math.inf else json_safe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry) for entry in value]
    return value
