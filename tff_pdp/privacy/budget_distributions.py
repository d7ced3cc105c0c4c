"""Budgets drawn from a distribution, as the papers on personalised budgets do."""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from statistics import NormalDist
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.settings import number, positive_number, require_keys

_KEY = "privacy.budgets.distribution"

# From two numbers uniform in (0, 1) to an epsilon.
_Quantile = Callable[[float, float], float]


def draw_epsilons(config: Any, client_ids: Collection[str]) -> dict[str, float]:
    """Draws an epsilon for every silo, from the seed and the silo's name alone: never from data or from other silos.

    A silo keeps its epsilon when others join or leave. The draws are independent and the same on every machine.

    Args:
      config: `{kind: normal_mixture, components: [{share: .., mean: .., stddev: ..}, ..], minimum: .., seed: ..}`,
        where the shares sum to 1 and draws below `minimum` count as `minimum`; or
        `{kind: log_uniform, low: .., high: .., seed: ..}`. The seed is 0 where none is given.
      client_ids: every silo that takes part.

    Raises:
      ConfigError: naming the key that is unknown, missing or out of range.

    Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021: mixtures of
    Gaussians, for example nine silos in ten around 0.5 and one around 10.

    >>> spread = {"kind": "log_uniform", "low": 0.5, "high": 8, "seed": 0}
    >>> {silo: round(epsilon, 3) for silo, epsilon in draw_epsilons(spread, ["a", "b"]).items()}
    {'a': 2.766, 'b': 5.665}
    >>> draw_epsilons(spread, ["b"])["b"] == draw_epsilons(spread, ["a", "b"])["b"]
    True
    """
    kind = config.get("kind") if isinstance(config, Mapping) else None
    if kind not in _KINDS:
        raise ConfigError(f"{_KEY} is {config!r}; it must be a mapping whose `kind` is {' or '.join(_KINDS)}.")
    quantile = _KINDS[kind](config)
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"{_KEY}.seed is {seed!r}; it must be a whole number.")
    return {name: quantile(*_uniforms(seed, name)) for name in sorted(client_ids)}


def _uniforms(seed: int, name: str) -> tuple[float, float]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 52 bits and a half: exact in float64, and never 0 or 1.
    first, second = (((int.from_bytes(digest[at : at + 8]) >> 12) + 0.5) / 2**52 for at in (0, 8))
    return first, second


def _log_uniform(config: Mapping[str, Any]) -> _Quantile:
    require_keys(_KEY, config, ["kind", "low", "high"], ["seed"])
    low, high = (positive_number(f"{_KEY}.{name}", config[name]) for name in ("low", "high"))
    if not low < high:
        raise ConfigError(f"{_KEY}.low is {low:g}, which is not below {_KEY}.high, {high:g}.")
    return lambda first, _: low * math.exp(first * math.log(high / low))


def _normal_mixture(config: Mapping[str, Any]) -> _Quantile:
    require_keys(_KEY, config, ["kind", "components", "minimum"], ["seed"])
    minimum = positive_number(f"{_KEY}.minimum", config["minimum"])
    given = config["components"]
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"{_KEY}.components is {given!r}; it must be a list of {{share, mean, stddev}}.")
    components = [_component(f"{_KEY}.components[{position}]", each) for position, each in enumerate(given)]
    total = math.fsum(share for share, _ in components)
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(f"{_KEY}.components have shares that sum to {total:g}; they must sum to 1.")

    def quantile(first: float, second: float) -> float:
        chosen, below = components[-1][1], 0.0
        for share, normal in components:
            below += share
            if first < below:
                chosen = normal
                break
        return max(minimum, chosen.inv_cdf(second))

    return quantile


def _component(key: str, config: Any) -> tuple[float, NormalDist]:
    require_keys(key, config, ["share", "mean", "stddev"])
    mean = number(f"{key}.mean", config["mean"])
    if not math.isfinite(mean):
        raise ConfigError(f"{key}.mean is {config['mean']!r}; it must be finite.")
    share, stddev = (positive_number(f"{key}.{name}", config[name]) for name in ("share", "stddev"))
    return share, NormalDist(mean, stddev)


_KINDS: dict[str, Callable[[Mapping[str, Any]], _Quantile]] = {
    "normal_mixture": _normal_mixture,
    "log_uniform": _log_uniform,
}
