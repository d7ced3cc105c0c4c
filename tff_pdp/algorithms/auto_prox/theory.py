"""When MR-MTL helps, in closed form: the errors of private federated mean estimation.

Each of K silos holds n values, spread with variance sigma^2 around the silo's own centre, and the centres are spread
with variance tau^2 around a common one. A silo estimates its centre by its mean plus DP noise, with local variance s,
and MR-MTL pulls that estimate towards the average of all silos with strength lambda (`prox_weight`): 0 is local
training, infinity is FedAvg. Errors are expected squared distances to the silo's true centre.

Source: Liu, Hu, Wu and Smith, "On privacy and personalization in cross-silo federated learning", NeurIPS 2022; section
1.6 and appendix D of Liu's thesis, whose formula D.22 has n where it means n_k.

All arguments may be arrays and broadcast, for instance over silos or over settings. Results are float64.
"""

import numpy as np
from numpy.typing import ArrayLike

from tff_pdp.errors import ConfigError


def local_variance(data_variance: ArrayLike, noise_variance: ArrayLike, num_examples: ArrayLike) -> np.ndarray:
    """s = sigma^2 / n + sigma_DP^2 / n^2, the variance of a silo's private mean, and its error under local training.

    Args:
      data_variance: sigma^2, of one value around the silo's centre.
      noise_variance: sigma_DP^2, of the noise on the sum of a silo's values: (noise multiplier * clip norm)^2.
      num_examples: n, at least 1.

    Raises:
      ConfigError: a value is out of range.

    >>> float(local_variance(data_variance=0.16, noise_variance=0.0, num_examples=200))
    0.0008
    """
    count = _checked("num_examples", num_examples, at_least=1)
    return _checked("data_variance", data_variance) / count + _checked("noise_variance", noise_variance) / count**2


def optimal_prox_weight(local_variance: ArrayLike, silo_variance: ArrayLike) -> np.ndarray:
    """lambda* = s / tau^2 where all silos have the same local variance; infinite (FedAvg) where the silos are alike.

    Args:
      local_variance: s.
      silo_variance: tau^2, of the silos' centres.

    Raises:
      ConfigError: a value is out of range.
    """
    return _ratio_or_infinity(_checked("local_variance", local_variance), _checked("silo_variance", silo_variance))


def mr_mtl_error(
    prox_weight: ArrayLike, local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike
) -> np.ndarray:
    """E(lambda) = (1 - 1/K) (s + lambda^2 tau^2) / (1 + lambda)^2 + s / K, for silos of the same local variance.

    Args:
      prox_weight: lambda, from 0 to infinity.
      local_variance: s.
      silo_variance: tau^2.
      num_silos: K, at least 1.

    Raises:
      ConfigError: a value is out of range.

    >>> [float(mr_mtl_error(weight, 1.0, 2.0, num_silos=4)) for weight in (0, 0.5, np.inf)]
    [1.0, 0.75, 1.75]
    """
    variance, spread, own = _checked_setting(local_variance, silo_variance, num_silos)
    kept = 1 / (1 + _checked("prox_weight", prox_weight, infinite=True))
    return (1 - own) * (kept**2 * variance + (1 - kept) ** 2 * spread) + own * variance


def optimal_error(local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike) -> np.ndarray:
    """E* = E(lambda*) = s (s + K tau^2) / (K (s + tau^2)); arguments as `mr_mtl_error`."""
    return mr_mtl_error(optimal_prox_weight(local_variance, silo_variance), local_variance, silo_variance, num_silos)


def fed_avg_error(local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike) -> np.ndarray:
    """E_fed = (s + (K - 1) tau^2) / K; arguments as `mr_mtl_error`."""
    return mr_mtl_error(np.inf, local_variance, silo_variance, num_silos)


def gain_over_local_training(local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike) -> np.ndarray:
    """s - E* = (1 - 1/K) s^2 / (s + tau^2), which grows with the DP noise; arguments as `mr_mtl_error`."""
    variance, spread, own = _checked_setting(local_variance, silo_variance, num_silos)
    return (1 - own) * variance * _share(variance, spread)


def gain_over_fed_avg(local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike) -> np.ndarray:
    """E_fed - E* = (1 - 1/K) tau^4 / (s + tau^2), which shrinks with the DP noise; arguments as `mr_mtl_error`."""
    variance, spread, own = _checked_setting(local_variance, silo_variance, num_silos)
    return (1 - own) * spread * _share(spread, variance)


def cost_of_privacy(
    prox_weight: ArrayLike, noise_variance: ArrayLike, num_examples: ArrayLike, num_silos: ArrayLike
) -> np.ndarray:
    """How much DP noise adds to E(lambda): ((1 - 1/K) / (1 + lambda)^2 + 1/K) sigma_DP^2 / n^2.

    Args:
      prox_weight: lambda, from 0 to infinity.
      noise_variance: sigma_DP^2, of the noise on the sum of a silo's values.
      num_examples: n, at least 1.
      num_silos: K, at least 1.

    Raises:
      ConfigError: a value is out of range.
    """
    return mr_mtl_error(prox_weight, local_variance(0.0, noise_variance, num_examples), 0.0, num_silos)


def optimal_prox_weights_of_silos(local_variances: ArrayLike, silo_variance: ArrayLike) -> np.ndarray:
    """The best lambda of each silo where their local variances differ, as they do with budgets of their own.

    lambda_k* = s_k / (tau^2 + (mean of the other silos' s - s_k) / K). Where the denominator is not positive, a silo is
    so much noisier than the others that no finite pull is strong enough: lambda_k* is infinite, which is FedAvg.

    Args:
      local_variances: s_k, `[..., silos]`, at least two silos.
      silo_variance: tau^2, broadcast against `[...]`.

    Returns:
      `[..., silos]`.

    Raises:
      ConfigError: a value is out of range, or there are fewer than two silos.

    >>> optimal_prox_weights_of_silos([0.1, 0.4], silo_variance=0.25).round(3).tolist()
    [0.25, 4.0]
    """
    variances, others, num_silos = _checked_silos(local_variances)
    spread = _checked("silo_variance", silo_variance)[..., np.newaxis]
    return _ratio_or_infinity(variances, spread + (others - variances) / num_silos)


def errors_of_silos(prox_weights: ArrayLike, local_variances: ArrayLike, silo_variance: ArrayLike) -> np.ndarray:
    """The error of each silo where local variances differ and each has a lambda of its own.

    A silo's estimate is a * its own + (1 - a) * the mean of the others', with a = (K + lambda) / ((1 + lambda) K), so
    its error is a^2 s_k + (1 - a)^2 (K tau^2 + mean of the other silos' s) / (K - 1).

    Args:
      prox_weights: lambda_k, `[..., silos]` or broadcast to it, from 0 to infinity.
      local_variances: s_k, `[..., silos]`, at least two silos.
      silo_variance: tau^2, broadcast against `[...]`.

    Returns:
      `[..., silos]`.

    Raises:
      ConfigError: a value is out of range, or there are fewer than two silos.
    """
    variances, others, num_silos = _checked_silos(local_variances)
    spread = _checked("silo_variance", silo_variance)[..., np.newaxis]
    kept = 1 / (1 + _checked("prox_weights", prox_weights, infinite=True))
    own = (1 + kept * (num_silos - 1)) / num_silos
    return own**2 * variances + (1 - own) ** 2 * (num_silos * spread + others) / (num_silos - 1)


def _checked_setting(
    local_variance: ArrayLike, silo_variance: ArrayLike, num_silos: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """s, tau^2 and 1 / K."""
    count = _checked("num_silos", num_silos, at_least=1)
    return _checked("local_variance", local_variance), _checked("silo_variance", silo_variance), 1 / count


def _checked_silos(local_variances: ArrayLike) -> tuple[np.ndarray, np.ndarray, int]:
    """s_k, the mean of the other silos' s, and K."""
    variances = _checked("local_variances", local_variances)
    num_silos = variances.shape[-1] if variances.ndim else 0
    if num_silos < 2:
        raise ConfigError("local_variances has fewer than two silos, and MR-MTL pulls each silo towards the others.")
    others = (variances.sum(axis=-1, keepdims=True) - variances) / (num_silos - 1)
    return variances, others, num_silos


def _checked(name: str, value: ArrayLike, *, at_least: float = 0.0, infinite: bool = False) -> np.ndarray:
    numbers = np.asarray(value, np.float64)
    if not ((numbers >= at_least) & (infinite | np.isfinite(numbers))).all():
        raise ConfigError(f"{name} is {value!r}; it must be at least {at_least:g}{'' if infinite else ' and finite'}.")
    return numbers


def _ratio_or_infinity(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    infinity = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.inf)
    return np.divide(numerator, denominator, out=infinity, where=denominator > 0)


def _share(part: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """part / (part + rest), or 0 where both are 0."""
    total = part + rest
    return np.divide(part, total, out=np.zeros_like(total), where=total > 0)
