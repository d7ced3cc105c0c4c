"""Defines what a report is made of: frozen values that survive a trip through JSON unchanged."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from tff_pdp import errors
from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import UserCosts
from tff_pdp.reports.words import SILOS, USERS, ClientWords

# JSON has no infinities and no NaN; a budget without bound must not turn into an unreadable file.
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# What was spent or is promised; null in JSON where no finite epsilon holds.
_SPENT = frozenset({f"epsilon_{end}" for end in ("spent", "rdp", "pld", "minimum", "maximum", "at_most")})


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return json_safe(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**_checked(cls, _decode(data)))


@dataclasses.dataclass(frozen=True)
class SiloResult(ClientScores):
    """What one silo paid and what it got.

    Attributes:
      num_train: number of training examples, public or noised.
      epsilon_target: the silo's budget for one method; infinite where the silo asked for no protection.
      epsilon_spent: what one method's training spent (the largest over the compared methods); the smaller bound below,
        or the budget where the number of training examples was noised; infinite where the claim is `none`.
      epsilon_rdp: upper bound from Rényi accounting.
      epsilon_pld: upper bound from privacy loss distributions; NaN where it was not computed.
      delta: the delta of all three epsilons.
      noise_multiplier: standard deviation of the noise over the clip norm.
      sampling_rate: probability that one record takes part in one step.
      last_round: the last it took part in, when its budget was spent or training ended.
      claim: of that method's guarantee for this silo; `none` where the silo, or the run, has none.
      claim_reason: one line that says why.
    """

    num_train: int
    epsilon_target: float
    epsilon_spent: float
    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    last_round: int
    claim: str
    claim_reason: str


@dataclasses.dataclass(frozen=True)
class AlgorithmResult:
    """What one method reached over all clients, silos or users, in the report's metric.

    Attributes:
      name: the method's name in the registry.
      title: the method's name for a reader.
      mean: mean over clients of the personal model's test metric.
      mean_over_examples: the same, each client weighted by its number of test examples.
      worst_decile: mean over the worst tenth of the clients.
      spread: standard deviation over clients.
      shared_mean: mean over clients of the shared model's test metric; `None` where there is none.
      history: pairs (round, mean over clients of the validation metric).
      rounds: number of rounds trained.
      seconds_per_round: mean wall-clock seconds of a round.
      claim: of this run: `formal`, `formal-conditional`, `empirical` or `none`.
      claim_reason: one line that says why.
      exported: whether this method's models were written for serving.
      user_costs: what its training cost every user; `None` where clients are silos.
    """

    name: str
    title: str
    mean: float
    mean_over_examples: float
    worst_decile: float
    spread: float
    shared_mean: float | None
    history: tuple[tuple[int, float], ...]
    rounds: int
    seconds_per_round: float
    claim: str
    claim_reason: str
    exported: bool
    user_costs: UserCosts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return json_safe(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        values = _checked(cls, _decode(data))
        values["history"] = tuple((int(number), value) for number, value in values["history"])
        costs = values.get("user_costs")
        values["user_costs"] = None if costs is None else UserCosts(**_checked(UserCosts, costs))
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
      title: heading of the page.
      created: when the run ended, as text.
      metric: what models are judged by here.
      algorithms: the compared methods, in the order to show them.
      silos: one entry per silo; none where clients are users.
      privacy: what `statement.build_privacy_statement` returned, or `statement.build_user_statement`.
      config: the resolved configuration of the run.
      notes: remarks for the reader, one sentence each.
      baseline: name of the method in which each client learns alone; gains are measured against it.
      users: one entry per user; none where clients are silos.
    """

    title: str
    created: str
    metric: Metric
    algorithms: tuple[AlgorithmResult, ...]
    silos: tuple[SiloResult, ...]
    privacy: Mapping[str, Any]
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    baseline: str = "local_only"
    users: tuple[ClientScores, ...] = ()

    @property
    def clients(self) -> tuple[ClientScores, ...]:
        """The silos, or the users."""
        return self.users or self.silos

    @property
    def words(self) -> ClientWords:
        """What to call them."""
        return USERS if self.users else SILOS

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return json_safe(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        values = _checked(cls, data)
        values["metric"] = Metric(**values["metric"])
        values["algorithms"] = tuple(AlgorithmResult.from_dict(entry) for entry in values["algorithms"])
        values["silos"] = tuple(SiloResult.from_dict(entry) for entry in values["silos"])
        values["users"] = tuple(ClientScores.from_dict(entry) for entry in values.get("users", ()))
        values["notes"] = tuple(values["notes"])
        return cls(**values)


def _checked(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(
        name for name, field in fields.items() if name not in data and field.default is dataclasses.MISSING
    )
    if unknown or missing:
        raise errors.DataError(
            f"{cls.__name__} in a report file: unknown keys {unknown}, missing keys {missing}. "
            "The file was written by another version; write the report again from its run."
        )
    return dict(data)


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


def _decode(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the non-finite words back into numbers, except in text fields, where a client may be called "nan"."""

    def decode(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: math.inf if key in _SPENT and entry is None else decode(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [decode(entry) for entry in value]
        return _NON_FINITE.get(value, value) if isinstance(value, str) else value

    text = {"id", "name", "title", "claim", "claim_reason"}
    return {**decode(values), **{key: value for key, value in values.items() if key in text}}
