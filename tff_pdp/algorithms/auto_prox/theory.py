"""Computes MR-MTL's best lambda in closed form, for private federated mean estimation.

Each of K silos has n values with variance sigma^2 around the silo's own centre; the centres have variance tau^2 around
a common centre. A silo estimates its centre by the mean of its values plus DP noise; s is the local variance of this
estimate. MR-MTL pulls this estimate towards the average of all silos with strength lambda (`prox_weight`): 0 is local
training, infinity is FedAvg. Errors are expected squared distances to the silo's true centre.

Source: Liu, Hu, Wu and Smith, "On privacy and personalization in cross-silo federated learning", NeurIPS 2022; section
1.6 and appendix D of Liu's thesis, whose formula D.22 has n where it means n_k.
"""

import numpy as np
from numpy.typing import ArrayLike

from tff_pdp.errors import ConfigError


def optimal_prox_weights_of_silos(local_variances: ArrayLike, silo_variance: ArrayLike) -> np.ndarray:
    """Returns the best lambda of each silo, for local variances that may differ between silos.

    lambda_k* = s_k / (tau^2 + (m_k - s_k) / K), where m_k is the mean of s over the other silos, and K the number of
    silos. If the denominator is not positive, the silo is so much noisier than the others that no finite pull is strong
    enough: lambda_k* is infinite, which is FedAvg.

    Args:
      local_variances: s_k, `[..., silos]`, at least two silos.
      silo_variance: tau^2, broadcast against the axes `[...]` before the last.

    Returns:
      Float64 `[..., silos]`.

    Raises:
      ConfigError: a value is out of range, or there are fewer than two silos.

    >>> optimal_prox_weights_of_silos([0.1, 0.4], silo_variance=0.25).round(3).tolist()
    [0.25, 4.0]
    """
    variances = _checked("local_variances", local_variances)
    num_silos = variances.shape[-1] if variances.ndim else 0
    if num_silos < 2:
        raise ConfigError("local_variances has fewer than two silos: MR-MTL needs others to pull each silo towards")
    others = (variances.sum(axis=-1, keepdims=True) - variances) / (num_silos - 1)
    denominator = _checked("silo_variance", silo_variance)[..., np.newaxis] + (others - variances) / num_silos
    infinity = np.full(np.broadcast_shapes(variances.shape, denominator.shape), np.inf)
    return np.divide(variances, denominator, out=infinity, where=denominator > 0)


def _checked(name: str, value: ArrayLike) -> np.ndarray:
    numbers = np.asarray(value, np.float64)
    if not ((numbers >= 0) & np.isfinite(numbers)).all():
        raise ConfigError(f"{name} must be at least 0 and finite, not {value!r}")
    return numbers
