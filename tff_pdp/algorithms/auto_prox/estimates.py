"""Estimates curvature, gradient variance and force from windows of rounds, for MR-MTL's automatic lambda.

Module `tff_pdp.algorithms.auto_prox.lambdas` defines the state, the notation and the model behind the estimates.
`SiloParameters` has the public parameters that determine lambda.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_pdp.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class SiloParameters:
    """Public parameters of all silos' training; all arrays have shape `[silos]`, in one order of silos.

    Guarantee: of all parameters, only the numbers of examples are computed from data.
    Assumes: the numbers of examples are public, or released with noise, as in
      `tff_pdp.privacy.plans.plan.PrivacyPlan.num_examples`.

    Attributes:
      learning_rate: learning rate of the local steps, the same in all silos.
      rounds: planned number of rounds.
      local_steps: m, number of local steps in a round.
      num_examples: n, number of training examples.
      clip_norm: C, L2 bound of each example's gradient.
      noise_multiplier: z, standard deviation of the noise divided by C.
      sampling_rate: q, expected share of the examples that are in a batch, in (0, 1].
      expected_batch_size: B, divisor of a step's noised sum.

    Raises:
      ConfigError: there is a single silo, or a value is out of range (such as a noise multiplier of 0).
    """

    learning_rate: float
    rounds: int
    local_steps: np.ndarray
    num_examples: np.ndarray
    clip_norm: np.ndarray
    noise_multiplier: np.ndarray
    sampling_rate: np.ndarray
    expected_batch_size: np.ndarray

    def __post_init__(self):
        size = len(self.local_steps)
        if size < 2:
            raise ConfigError("prox_weight: auto compares silos, and there is only one: give prox_weight a number")
        for field in dataclasses.fields(self)[2:]:
            dtype = np.int64 if field.name in ("local_steps", "num_examples") else np.float64
            value = np.asarray(getattr(self, field.name), dtype)
            object.__setattr__(self, field.name, value)
            if value.shape != (size,) or not np.all((value > 0) & np.isfinite(value)):
                raise ConfigError(
                    f"prox_weight: auto needs a positive and finite {field.name} of each of the {size} silos, not "
                    f"{value.tolist()}: give prox_weight a number, or train with privacy"
                )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"prox_weight: auto needs a positive learning_rate, not {self.learning_rate}")

    @property
    def num_silos(self) -> int:
        """Number of silos."""
        return len(self.local_steps)

    @property
    def dp_variance(self) -> np.ndarray:
        """Variance that DP noise adds to one weight's gradient in one step: `[silos]`."""
        return (self.noise_multiplier * self.clip_norm / self.expected_batch_size) ** 2

    def sampling_variance(self, num_weights: int) -> np.ndarray:
        """Returns the variance, `[silos]`, that Poisson sampling adds to a weight's gradient in a step if G = C^2."""
        return (1 - self.sampling_rate) * self.clip_norm**2 / (self.expected_batch_size * num_weights)

    def example_variance(self, num_weights: int) -> np.ndarray:
        """Returns the variance of a weight's mean gradient over random draws of examples, `[silos]`, if G = C^2."""
        return self.clip_norm**2 / (self.num_examples * num_weights)


State = Mapping[str, Any]

_KEEP_FORCE, _KEEP_CURVATURE = 0.5, 0.85  # Factors by which sums of earlier windows decay in each window.
# Prior of the mean curvature: mean and standard deviation, in units of 1 / (learning rate * local steps).
_CURVATURE_PRIOR, _CURVATURE_PRIOR_STDDEV = 0.05, 0.3
_VARIANCE_PRIOR = 1 / 3  # Mean and standard deviation of G / C^2.
# Assumed relative error of the model of noise in pulls, for any number of observed rounds.
_MODEL_ERROR = 0.05
# Largest curvature, in mean curvatures, in the offsets' share of the force; less than kappa errs towards FedAvg.
_MAX_ADDED_BACK = 3.0


def kappa(num_weights: int) -> float:
    """Returns kappa: one in kappa directions is assumed to be curved, with kappa times the mean curvature."""
    return max(1.0, math.sqrt(num_weights) / 2)


def estimate_curvature_and_variance(state: State, parameters: SiloParameters, noise: np.ndarray) -> dict[str, Any]:
    """Updates the estimates of h_mean and G by regression of pulls on offsets; centring per silo removes the force."""
    window, rate, steps = state["window"], parameters.learning_rate, parameters.local_steps
    rounds, num_weights = int(window["rounds"]), window["pull"].shape[1]
    if rounds < 2:
        return dict(state)
    kept = kept_in_step(state, parameters)
    # An offset has the noise of earlier rounds of the window, and so has the subtracted mean pull. Without the known
    # product of both the regression would find a curvature where there is none (Nickell's bias).
    remembered = np.minimum(np.clip(kept - rate * curvature_from(state, parameters), 0, 1) ** steps, 0.9999)
    lag = np.arange(1, rounds)[:, np.newaxis]
    pairs = ((rounds - lag) * remembered ** (lag - 1)).sum(axis=0) / rounds
    shared = noise * rate * steps * kept ** (steps - 1) * pairs
    product = window["product"] - np.einsum("kd,kd->k", window["offset"], window["pull"]) / rounds
    square = window["offset_square"] - np.einsum("kd,kd->k", window["offset"], window["offset"]) / rounds
    weight = 1 / _centred(noise)
    found = [-(weight * (product + num_weights * _centred(shared))).sum(), (weight * square).sum()]
    state = {**state, "curvature": _KEEP_CURVATURE * state["curvature"] + found}

    # The scatter around the regression is noise, from DP and from the choice of a batch's examples.
    curvature = curvature_from(state, parameters)
    pulls = window["pull_square"] - np.einsum("kd,kd->k", window["pull"], window["pull"]) / rounds
    freedom = (rounds - 1) * num_weights
    scatter = (pulls + 2 * curvature * product + curvature**2 * square) / freedom
    per_pull = _noise_ratio(state, parameters)
    expected = _centred(parameters.dp_variance * per_pull)
    unit = _centred(parameters.sampling_variance(num_weights) * per_pull)
    precision = unit * weight**2 * freedom / 2
    found = [(precision * values).sum() for values in (scatter - expected, unit, expected)]
    return {**state, "variance": _KEEP_CURVATURE * state["variance"] + found}


def estimate_force(state: State, parameters: SiloParameters, noise: np.ndarray) -> dict[str, Any]:
    """Updates the estimate of F from products of the silos' mean forces in this window and in the previous window."""
    window, previous = state["window"], state["previous"]
    rounds, earlier_rounds = int(window["rounds"]), int(previous["rounds"])
    num_silos, num_weights = window["pull"].shape
    concentration = kappa(num_weights)
    mean_curvature = curvature_from(state, parameters)
    added_back = min(concentration, _MAX_ADDED_BACK) * mean_curvature
    force = (window["pull"] + added_back * window["offset"]) / rounds
    kept, steps = kept_in_step(state, parameters), parameters.local_steps
    moved_by_noise = parameters.learning_rate * geometric(kept, steps)
    # An offset keeps noise the longest where the loss is flat.
    remembered = np.minimum(kept**steps, 0.99999)
    scatter = _centred(noise) / rounds
    state = dict(state)
    if earlier_rounds:
        # Adding back more curvature than a direction has leaves noise of the earlier window in this window's force.
        overlap = _sums(remembered, rounds) * _sums(remembered, earlier_rounds) / (rounds * earlier_rounds)
        seen = steps * kept ** (steps - 1) / geometric(kept, steps)
        of_pull = seen * moved_by_noise * noise * overlap
        of_offset = seen**2 * state["offset_noise"] * remembered * overlap
        spread = (added_back - mean_curvature) ** 2 + (concentration - 1) * mean_curvature**2
        left = (added_back - mean_curvature) * of_pull + spread * of_offset
        by_chance = gradient_variance_from(state) * parameters.example_variance(num_weights)
        product = np.einsum("kd,kd->k", force, previous["force"]) / num_weights
        found = product / (1 - 1 / num_silos) - left - by_chance
        known = state["force"][0] / state["force"][1] if state["force"][1] else 0.0
        level = max(known, 0.0) + by_chance
        earlier = previous["noise"]
        precision = num_weights / (scatter * earlier + level * (scatter + earlier) + 2 * level**2)
        state["force"] = _KEEP_FORCE * state["force"] + [(precision * found).sum(), precision.sum()]
    variance = state["offset_noise"]
    for _ in range(rounds):
        variance = remembered**2 * variance + moved_by_noise**2 * noise
    state["offset_noise"] = variance
    state["previous"] = {"rounds": np.int64(rounds), "force": force, "noise": scatter}
    return state


def curvature_from(state: State, parameters: SiloParameters) -> float:
    """Returns the current estimate of the mean curvature h_mean: shrunk towards a prior, and positive."""
    unit = 1 / (parameters.learning_rate * float(np.mean(parameters.local_steps)))
    prior, precision = _CURVATURE_PRIOR * unit, (_CURVATURE_PRIOR_STDDEV * unit) ** -2
    found, known = state["curvature"]
    return float(max((precision * prior + found) / (precision + known), prior / 10))


def gradient_variance_from(state: State) -> float:
    """Returns the current estimate of G / C^2, in [0, 1]."""
    precision = _VARIANCE_PRIOR**-2
    found, known, expected = state["variance"]
    if known > 0:
        # `found` is the scatter in excess of DP noise, whose own scatter is known only up to the model's error.
        error = _MODEL_ERROR * expected / known
        trust = 1 / (1 + known * error**2)
        found, known = found * trust, known * trust
    return float(np.clip((precision * _VARIANCE_PRIOR + found) / (precision + known), 0, 1))


def noise_of_pull(state: State, parameters: SiloParameters, num_weights: int) -> np.ndarray:
    """Returns the noise variance of one weight of a round's pull, `[silos]`."""
    sampling = gradient_variance_from(state) * parameters.sampling_variance(num_weights)
    return (parameters.dp_variance + sampling) * _noise_ratio(state, parameters)


def _noise_ratio(state: State, parameters: SiloParameters) -> np.ndarray:
    """Returns the noise variance of a pull divided by that of one step; later steps partly undo earlier noise."""
    kept, steps = kept_in_step(state, parameters), parameters.local_steps
    answered = np.clip(kept - parameters.learning_rate * curvature_from(state, parameters), 0, 1)
    return geometric(answered**2, steps) / geometric(kept, steps) ** 2


def kept_in_step(state: State, parameters: SiloParameters) -> np.ndarray:
    """Returns the share of an offset that remains after one step of the prox term: `[silos]`."""
    return 1 - parameters.learning_rate * state["prox_weights"].astype(np.float64)


def _centred(variances: np.ndarray) -> np.ndarray:
    """Returns the variances of independent values after subtraction of their mean."""
    return variances * (1 - 2 / len(variances)) + variances.mean() / len(variances)


def geometric(ratio: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the sum of `ratio ** i` over i from 0 to `counts - 1`, by element: `[silos]`."""
    power = np.arange(int(counts.max()))[:, np.newaxis]
    return np.where(power < counts, ratio**power, 0.0).sum(axis=0)


def _sums(ratio: np.ndarray, count: int) -> np.ndarray:
    return geometric(ratio, np.full(ratio.shape, count))
