"""Who may spend how much: the `budgets` part of a configuration, read into one (epsilon, delta) for each silo."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tff_pdp.errors import ConfigError

_FORMS = (
    "Use one of: `{epsilon: 4.0, delta: 1e-4}` for all silos; "
    "`{delta: 1e-4, silos: {silo_a: 1.0}, default_epsilon: 4.0}`; "
    "`{delta: 1e-4, cycle: [1, 2, 4, 8]}`, assigned in sorted order of the silo names."
)
_KEYS_OF_FORM = {"epsilon": {"epsilon"}, "silos": {"silos", "default_epsilon"}, "cycle": {"cycle"}}


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
        _positive("epsilon", self.epsilon)
        _delta("delta", self.delta)


def parse_budgets(config: Mapping[str, Any], client_ids: Collection[str]) -> dict[str, SiloBudget]:
    """Reads the budgets of all silos from a configuration mapping.

    Args:
      config: one of the three forms in the example below.
      client_ids: every silo that takes part.

    Returns:
      The budget by silo, in sorted order.

    Raises:
      ConfigError: naming the key: it is unknown, missing or out of range, or names a silo that does not exist.

    >>> parse_budgets({"epsilon": 4.0, "delta": 1e-4}, ["b", "a"])
    {'a': SiloBudget(epsilon=4.0, delta=0.0001), 'b': SiloBudget(epsilon=4.0, delta=0.0001)}
    >>> [b.epsilon for b in parse_budgets({"delta": 1e-4, "cycle": [1, 2]}, ["a", "b", "c"]).values()]
    [1.0, 2.0, 1.0]
    >>> parse_budgets({"delta": 1e-4, "silos": {"a": 1}, "default_epsilon": 4}, ["a", "b"])["b"].epsilon
    4.0
    """
    forms = [form for form in _KEYS_OF_FORM if form in config]
    if "default_epsilon" in config and not forms:
        forms = ["silos"]
    if len(forms) != 1:
        found = "none of `epsilon`, `silos` and `cycle`" if not forms else " and ".join(f"`{form}`" for form in forms)
        raise ConfigError(f"privacy.budgets has {found}; exactly one is needed. {_FORMS}")
    form = forms[0]
    unknown = sorted(str(key) for key in set(config) - _KEYS_OF_FORM[form] - {"delta"})
    if unknown:
        raise ConfigError(f"privacy.budgets has the unknown key `{unknown[0]}`. {_FORMS}")
    if "delta" not in config:
        raise ConfigError(f"privacy.budgets.delta is missing. {_FORMS}")
    delta = _delta("privacy.budgets.delta", config["delta"])
    names = sorted(client_ids)
    if form == "epsilon":
        epsilon = _positive("privacy.budgets.epsilon", config["epsilon"])
        epsilons = dict.fromkeys(names, epsilon)
    elif form == "cycle":
        epsilons = _cycled(config["cycle"], names)
    else:
        epsilons = _by_silo(config, names)
    return {name: SiloBudget(epsilons[name], delta) for name in names}


def _cycled(cycle: Any, names: list[str]) -> dict[str, float]:
    if not isinstance(cycle, list | tuple) or not cycle:
        raise ConfigError(f"privacy.budgets.cycle is {cycle!r}; it must be a list of epsilons, such as [1, 2, 4, 8].")
    values = [_positive(f"privacy.budgets.cycle[{position}]", value) for position, value in enumerate(cycle)]
    return {name: values[position % len(values)] for position, name in enumerate(names)}


def _by_silo(config: Mapping[str, Any], names: list[str]) -> dict[str, float]:
    named = config.get("silos", {})
    if not isinstance(named, Mapping):
        raise ConfigError(f"privacy.budgets.silos is {named!r}; it must map silo names to epsilons.")
    # YAML reads an unquoted 7 as a number, while silo names are always text.
    given = {str(name): _positive(f"privacy.budgets.silos.{name}", value) for name, value in named.items()}
    strangers = sorted(set(given) - set(names))
    if strangers:
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ConfigError(f"privacy.budgets.silos.{strangers[0]} names no silo of this data set (it has {known}).")
    missing = sorted(set(names) - set(given))
    if not missing:
        return given
    if "default_epsilon" not in config:
        raise ConfigError(
            f"privacy.budgets.silos has no epsilon for {len(missing)} silos, for example {missing[0]}. "
            "Add them, or set privacy.budgets.default_epsilon."
        )
    return dict.fromkeys(missing, _positive("privacy.budgets.default_epsilon", config["default_epsilon"])) | given


def _positive(key: str, value: Any) -> float:
    number = _number(key, value)
    if not number > 0:
        raise ConfigError(f"{key} is {value!r}; epsilon must be positive.")
    return number


def _delta(key: str, value: Any) -> float:
    number = _number(key, value)
    if not 0 < number < 1:
        raise ConfigError(f"{key} is {value!r}; delta must lie strictly between 0 and 1, for example 1e-5.")
    return number


def _number(key: str, value: Any) -> float:
    # YAML 1.1 reads 1e-4 as text and 1.0e-4 as a number; both are meant as numbers here.
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} is {value!r}; it must be a number.") from None
