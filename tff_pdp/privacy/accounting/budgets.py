"""Assigns a privacy budget (epsilon, delta) to every silo, as the configuration's section `budgets` specifies.

Budgets are equal for all silos, taken from a list, drawn from a distribution (as in papers on personalised budgets), or
listed silo by silo, in the configuration or in a separate CSV or YAML file.
"""

import csv
import dataclasses
import hashlib
import io
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budget_distributions import Distributions
from tff_pdp.settings import Delta, Epsilon, Name, Settings, read_settings, read_yaml

_KEY = "privacy.budgets"


@dataclasses.dataclass(frozen=True)
class SiloBudget:
    """The budget of one scope (a silo, or all users together) for a whole run.

    Attributes:
      epsilon: upper limit of the privacy loss, positive; infinite means that no privacy is asked for.
      delta: delta of (epsilon, delta)-DP, in (0, 1); choose it well below 1 / number of records of the silo.

    Raises:
      ConfigError: a number is out of range.
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        if not self.epsilon > 0:
            raise ConfigError(f"epsilon must be a number above 0, not {self.epsilon!r}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be a number above 0 and below 1, not {self.delta!r}")


class SiloBudgets(Settings):
    """The section `privacy.budgets`: a budget for every silo.

    Attributes:
      level: with `own`, each silo's noise is calibrated to the silo's own budget. With `minimum`, each silo's noise is
        calibrated to the smallest epsilon of all silos, at the silo's own delta, so that silos with larger budgets
        spend less than they may.
    """

    level: Literal["own", "minimum"] = "own"

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order."""
        raise NotImplementedError

    def calibrated_to(self, budgets: Mapping[str, SiloBudget]) -> dict[str, SiloBudget]:
        """Returns the budgets that silos' noise is calibrated to, by client id; none is above the silo's own budget.

        Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021, baseline
        `Minimum`.
        """
        if self.level == "own":
            return dict(budgets)
        least = min((one.epsilon for one in budgets.values()), default=math.inf)
        return {client_id: SiloBudget(least, one.delta) for client_id, one in budgets.items()}


class OwnBudget(Settings):
    """The budget of one silo.

    Attributes:
      epsilon: upper limit of the privacy loss.
      delta: delta of (epsilon, delta)-DP; by default the `delta` that the section sets for all silos.
    """

    epsilon: Epsilon
    delta: Delta | None = None


class OneForAll(SiloBudgets, tag_field="kind", tag="one_for_all"):
    """Assigns the same budget to every silo.

    Attributes:
      epsilon: upper limit of the privacy loss; infinite (`.inf`) where no privacy is asked for.
      delta: delta of (epsilon, delta)-DP, well below 1 / number of records of a silo.
    """

    epsilon: Epsilon
    delta: Delta

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order."""
        return dict.fromkeys(sorted(client_ids), SiloBudget(self.epsilon, self.delta))


class Cycled(SiloBudgets, tag_field="kind", tag="cycled"):
    """Assigns the epsilons of a list to the silos in the order of their names; the list is repeated as needed.

    Attributes:
      epsilons: the list of epsilons.
      delta: delta of every silo, as in `one_for_all`.
    """

    epsilons: Annotated[tuple[Epsilon, ...], Meta(min_length=1)]
    delta: Delta

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order."""
        names, length = sorted(client_ids), len(self.epsilons)
        return {name: SiloBudget(self.epsilons[place % length], self.delta) for place, name in enumerate(names)}


class Drawn(SiloBudgets, tag_field="kind", tag="drawn"):
    """Draws an epsilon for every silo, from the seed and silos' names alone, never from data.

    The draws are the same on every machine. They are independent, and a silo keeps its epsilon when others join or
    leave, unless the distribution has `exact_shares`: a silo's epsilon then depends on the names of all silos.

    Attributes:
      distribution: distribution of epsilon.
      delta: delta of every silo, as in `one_for_all`.
      seed: seed of the draws.
    """

    distribution: Distributions
    delta: Delta
    seed: int = 0

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order.

        >>> from tff_pdp.privacy.accounting.budget_distributions import LogUniform
        >>> spread = Drawn(distribution=LogUniform(low=0.5, high=8), delta=1e-5)
        >>> {silo: round(budget.epsilon, 3) for silo, budget in spread.assign(["a", "b"]).items()}
        {'a': 2.766, 'b': 5.665}
        >>> spread.assign(["b"])["b"] == spread.assign(["a", "b"])["b"]
        True
        """
        drawn = self.distribution.draw({name: _uniforms(self.seed, name) for name in sorted(client_ids)})
        return {name: SiloBudget(epsilon, self.delta) for name, epsilon in drawn.items()}


class BySilo(SiloBudgets, tag_field="kind", tag="by_silo"):
    """Assigns a separate budget to every silo.

    Attributes:
      silos: each silo's epsilon, or its epsilon and delta.
      default_epsilon: epsilon of silos that `silos` does not name; without a default every silo must be named.
      delta: delta of silos without a delta of their own.
    """

    silos: dict[str, Epsilon | OwnBudget]
    default_epsilon: Epsilon | None = None
    delta: Delta | None = None

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order.

        Raises:
          ConfigError: a named silo does not exist, or a silo has no epsilon or no delta.
        """
        places = {name: f"{_KEY}.silos.{name}" for name in self.silos}
        return _given_by_name(f"{_KEY}.silos", self.silos, places, self, client_ids)


class FromFile(SiloBudgets, tag_field="kind", tag="from_file"):
    """Reads every silo's budget from a file.

    Attributes:
      file: a `.csv` file with the header `silo,epsilon` or `silo,epsilon,delta`, where a cell of delta may be empty; or
        a `.yaml` or `.yml` file that maps silos to epsilons, or to `{epsilon: .., delta: ..}`. UTF-8. Relative to the
        working directory.
      default_epsilon: epsilon of silos that the file does not name; without a default every silo must be named.
      delta: delta of silos without a delta of their own.
    """

    file: Name
    default_epsilon: Epsilon | None = None
    delta: Delta | None = None

    def assign(self, client_ids: Collection[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; the ids are in sorted order.

        Raises:
          ConfigError: the file cannot be read, has neither form, or lists a silo twice; a number is missing or out of
            range; a named silo does not exist, or a silo has no epsilon or no delta.
        """
        given, places = read_budget_file(self.file)
        return _given_by_name(self.file, given, places, self, client_ids)


Budgets = OneForAll | Cycled | Drawn | BySilo | FromFile


def read_budget_file(path: str | Path) -> tuple[dict[str, float | OwnBudget], dict[str, str]]:
    """Reads a file of budgets in one of the two forms that `FromFile` describes.

    Returns:
      Each silo's budget, and each silo's location in the file (path and line or key) for error messages.

    Raises:
      ConfigError: the file cannot be read, has neither form, or lists a silo twice; a number is missing or out of
        range. The message names the file and, for CSV, the line.
    """
    path = Path(path)
    if path.suffix.lower() not in (".csv", ".yaml", ".yml"):
        raise ConfigError(f"{path}: a file of budgets must end in .csv, .yaml or .yml")
    if path.suffix.lower() != ".csv":
        given = read_settings(dict[str, Epsilon | OwnBudget], read_yaml(path), str(path))
        return given, {name: f"{path}: {name}" for name in given}
    budgets: dict[str, float | OwnBudget] = {}
    places: dict[str, str] = {}
    for name, place, row in _csv_rows(path):
        if name in places:
            raise ConfigError(f"{place}: silo {name!r} has a budget already, at {places[name]}")
        budgets[name], places[name] = read_settings(OwnBudget, row, place), place
    return budgets, places


def _csv_rows(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields for each line its silo, its place for messages, and its cells, as numbers where possible."""
    try:
        # Spreadsheets put a byte order mark before the header.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (error at byte {error.start})") from None
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in lines:
            cells, place = [cell.strip() for cell in cells], f"{path}, line {lines.line_num}"
            if not any(cells):
                continue
            if header is None:
                header = cells
                if header not in (["silo", "epsilon"], ["silo", "epsilon", "delta"]):
                    found = ",".join(header)
                    raise ConfigError(f"{place}: the header must be silo,epsilon or silo,epsilon,delta, not {found!r}")
                continue
            if len(cells) != len(header) or not cells[0]:
                raise ConfigError(f"{place}: {','.join(cells)!r} must have a value for each of {', '.join(header)}")
            row = dict(zip(header, cells, strict=True))
            name = row.pop("silo")
            yield name, f"{place}: {name}", {key: _number(cell) for key, cell in row.items() if cell or key != "delta"}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {lines.line_num}: not valid CSV: {error}") from None
    if header is None:
        raise ConfigError(f"{path}: the file is empty; its first line must be silo,epsilon or silo,epsilon,delta")


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def _given_by_name(
    source: str,
    given: Mapping[str, float | OwnBudget],
    places: Mapping[str, str],
    common: BySilo | FromFile,
    client_ids: Collection[str],
) -> dict[str, SiloBudget]:
    names = sorted(client_ids)
    strangers = sorted(set(given) - set(names))
    if strangers:
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ConfigError(f"{places[strangers[0]]} names no silo of this data set (known: {known})")
    missing = [name for name in names if name not in given]
    if missing and common.default_epsilon is None:
        raise ConfigError(
            f"{source} has no epsilon for {len(missing)} silos, for example {missing[0]!r}: "
            f"add them, or set {_KEY}.default_epsilon"
        )
    return {name: _budget(name, given.get(name, common.default_epsilon or 0.0), common.delta) for name in names}


def _budget(name: str, given: float | OwnBudget, common_delta: float | None) -> SiloBudget:
    own = given if isinstance(given, OwnBudget) else OwnBudget(epsilon=given)
    delta = common_delta if own.delta is None else own.delta
    if delta is None:
        raise ConfigError(f"missing key {_KEY}.delta: silo {name!r} has no delta of its own")
    return SiloBudget(own.epsilon, delta)


def _uniforms(seed: int, name: str) -> tuple[float, float]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 52 bits and a half: exact in float64, and never 0 or 1.
    first, second = (((int.from_bytes(digest[at : at + 8]) >> 12) + 0.5) / 2**52 for at in (0, 8))
    return first, second
