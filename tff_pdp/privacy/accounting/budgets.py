"""Who may spend how much: the `budgets` part of a configuration, read into one (epsilon, delta) for each silo."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.budget_distributions import draw_epsilons
from tff_pdp.privacy.budget_entries import BudgetEntry, mapping_entries, read_budget_file
from tff_pdp.settings import open_unit_delta, positive_epsilon

_FORMS = (
    "Use one of: `{epsilon: 4.0, delta: 1e-4}` for all silos; "
    "`{delta: 1e-4, silos: {silo_a: 1.0, silo_b: {epsilon: 2.0, delta: 1e-5}}, default_epsilon: 4.0}`; "
    "`{delta: 1e-4, file: budgets.csv}`, of silo,epsilon[,delta], or a YAML file of the same; "
    "`{delta: 1e-4, cycle: [1, 2, 4, 8]}`, assigned in sorted order of the silo names; "
    "`{delta: 1e-4, distribution: {kind: log_uniform, low: 0.5, high: 8, seed: 0}}`."
)
_KEYS_OF_FORM = {
    "epsilon": {"epsilon"},
    "silos": {"silos", "default_epsilon"},
    "file": {"file", "default_epsilon"},
    "cycle": {"cycle"},
    "distribution": {"distribution"},
}


@dataclasses.dataclass(frozen=True)
class SiloBudget:
    """What one scope may spend over a whole run.

    Attributes:
      epsilon: upper limit of the privacy loss, positive; infinite means that no privacy is asked for.
      delta: share of bad luck accepted, in (0, 1); choose it well below 1 / number of records of the silo.
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        positive_epsilon("epsilon", self.epsilon)
        open_unit_delta("delta", self.delta)


def parse_budgets(config: Mapping[str, Any], client_ids: Collection[str]) -> dict[str, SiloBudget]:
    """Reads the budgets of all silos from a configuration mapping.

    Args:
      config: one of the forms in the example below, or `{delta: .., file: ..}`, for whose files see
        `tff_pdp.privacy.budget_entries`; distributions are described in `tff_pdp.privacy.budget_distributions`.
        `delta` may be left out where every silo is given one of its own.
      client_ids: every silo that takes part.

    Returns:
      The budget by silo, in sorted order.

    Raises:
      ConfigError: naming the key, or the file and its line: it is unknown, missing or out of range, or names a silo
        that does not exist.

    >>> parse_budgets({"epsilon": 4.0, "delta": 1e-4}, ["b", "a"])
    {'a': SiloBudget(epsilon=4.0, delta=0.0001), 'b': SiloBudget(epsilon=4.0, delta=0.0001)}
    >>> [b.epsilon for b in parse_budgets({"delta": 1e-4, "cycle": [1, 2]}, ["a", "b", "c"]).values()]
    [1.0, 2.0, 1.0]
    >>> parse_budgets({"delta": 1e-4, "silos": {"a": 1}, "default_epsilon": 4}, ["a", "b"])["b"].epsilon
    4.0
    >>> parse_budgets({"silos": {"a": {"epsilon": 1, "delta": 1e-5}}}, ["a"])
    {'a': SiloBudget(epsilon=1.0, delta=1e-05)}
    >>> drawn = {"kind": "log_uniform", "low": 0.5, "high": 8, "seed": 0}
    >>> 0.5 < parse_budgets({"delta": 1e-4, "distribution": drawn}, ["a"])["a"].epsilon < 8
    True
    """
    form = _form(config)
    names = sorted(client_ids)
    delta = open_unit_delta("privacy.budgets.delta", config["delta"]) if "delta" in config else None
    if form == "epsilon":
        epsilon = positive_epsilon("privacy.budgets.epsilon", config["epsilon"])
        entries = _without_own_delta(dict.fromkeys(names, epsilon))
    elif form == "cycle":
        entries = _without_own_delta(_cycled(config["cycle"], names))
    elif form == "distribution":
        entries = _without_own_delta(draw_epsilons(config["distribution"], names))
    else:
        entries = _given_by_name(config, form, names)
    return {name: _budget(name, entries[name], delta) for name in names}


def _form(config: Mapping[str, Any]) -> str:
    forms = [form for form in _KEYS_OF_FORM if form in config]
    if "default_epsilon" in config and not forms:
        forms = ["silos"]
    if len(forms) != 1:
        listed = [f"`{form}`" for form in forms or _KEYS_OF_FORM]
        found = f"none of {', '.join(listed[:-1])} and {listed[-1]}" if not forms else " and ".join(listed)
        raise ConfigError(f"privacy.budgets has {found}; exactly one is needed. {_FORMS}")
    unknown = sorted(str(key) for key in set(config) - _KEYS_OF_FORM[forms[0]] - {"delta"})
    if unknown:
        raise ConfigError(f"privacy.budgets has the unknown key `{unknown[0]}`. {_FORMS}")
    return forms[0]


def _without_own_delta(epsilons: Mapping[str, float]) -> dict[str, BudgetEntry]:
    return {name: BudgetEntry("privacy.budgets", epsilon) for name, epsilon in epsilons.items()}


def _cycled(cycle: Any, names: list[str]) -> dict[str, float]:
    if not isinstance(cycle, list | tuple) or not cycle:
        raise ConfigError(f"privacy.budgets.cycle is {cycle!r}; it must be a list of epsilons, such as [1, 2, 4, 8].")
    values = [positive_epsilon(f"privacy.budgets.cycle[{position}]", value) for position, value in enumerate(cycle)]
    return {name: values[position % len(values)] for position, name in enumerate(names)}


def _given_by_name(config: Mapping[str, Any], form: str, names: list[str]) -> dict[str, BudgetEntry]:
    if form == "file":
        if not isinstance(config["file"], str) or not config["file"]:
            raise ConfigError(f"privacy.budgets.file is {config['file']!r}; it must be the path of a file.")
        source, given = config["file"], read_budget_file(config["file"])
    else:
        source, given = "privacy.budgets.silos", mapping_entries("privacy.budgets.silos", config.get("silos", {}))
    strangers = sorted(set(given) - set(names))
    if strangers:
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ConfigError(f"{given[strangers[0]].place} names no silo of this data set (it has {known}).")
    default = None
    if "default_epsilon" in config:
        key = "privacy.budgets.default_epsilon"
        default = BudgetEntry(key, positive_epsilon(key, config["default_epsilon"]))
    missing = sorted(set(names) - set(given))
    if not missing:
        return given
    if default is None:
        raise ConfigError(
            f"{source} has no epsilon for {len(missing)} silos, for example {missing[0]}. "
            "Add them, or set privacy.budgets.default_epsilon."
        )
    return dict.fromkeys(missing, default) | given


def _budget(name: str, entry: BudgetEntry, common_delta: float | None) -> SiloBudget:
    delta = common_delta if entry.delta is None else entry.delta
    if delta is None:
        raise ConfigError(f"privacy.budgets.delta is missing, and silo {name!r} has no delta of its own. {_FORMS}")
    return SiloBudget(entry.epsilon, delta)
