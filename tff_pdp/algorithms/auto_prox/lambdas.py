"""Setting MR-MTL's lambda during training, from the silos' released noisy models alone.

Guarantee: lambda is a function of released models and public parameters only: by post-processing it costs no epsilon.
Assumes: every silo's weights after every round are covered by that silo's ledger, as DP-SGD's iterates are, also where
  a step was chosen from earlier ones; whoever computes lambda may see each silo's weights, not only their mean; the
  values of `SiloParameters` are public. All silos take part in every round, pulled to the plain mean of their weights
  (to a weighted one, what is corrected for a silo's own noise in the mean is approximate).

The rule is MR-MTL's closed form, lambda_k = s_k / tau^2 (`tff_pdp.algorithms.auto_prox.theory`), carried over from one
noisy mean to noisy SGD. Write u_k for silo k's weights less the mean of all silos' (its offset), and take the prox term
out of a round's movement, divide by the learning rate and centre it across silos. What is left is the pull of the data:

    pull_k = f_k - H u_k + noise,    Var(noise) = (z_k C / B_k)^2 for each step and weight, known exactly.

f_k, the force, is what silo k's data asks for at the mean. Its variance between silos is F, a weight's share of it. The
part of it that only stems from the silo's few examples has the variance xi_k = G / (n_k d), where G <= C^2 is the total
variance of a clipped gradient. Small lambda follows the force and gathers noise: with curvature h and learning rate eta
the offset settles at p (f_k + noise) with p = 1 / (h + lambda), and the expected loss, beyond that of the mean, is

    R(p) = h p^2 (F + xi_k) / 2 - p F + p c_k,    c_k = eta h_mean (z_k C / B_k)^2 / 4,

least at lambda_k = h (xi_k + c_k) / (F - c_k). Where F does not exceed the noise, lambda_k is as large as it may be.
(The theory's correction for a silo's noise in the mean is added, with F - c_k for tau^2.) What is not known:

* h_mean, the mean curvature: from the regression of pulls on offsets, each window of rounds for itself.
* h. Noise moves all d weights alike, but data pulls where the loss is curved. We take 1 / kappa of all directions to
  have curvature kappa h_mean and the others none, with kappa = sqrt(d) / 2, between 1 (all alike) and d (one only).
* G: from how much the pulls scatter in excess of the DP noise, shrunk to C^2 / 3: wholly with full batches, where there
  is no such scatter, and nearly so where DP noise drowns it, whose effect on pulls is known to a few percent only.
* F: from products of pulls in neighbouring windows, whose noise is independent up to what the offsets remember of it.

The force at the mean is seen only where offsets are small, and silos that stray keep the mean from learning: so the
first half of training goes near FedAvg, and then lambda falls, at most threefold at a time. Were h larger than taken, a
falling lambda would shrink the pulls, hence F, more than predicted, and stop falling early: an error is on the safe
side, of FedAvg. F enters less one standard error, since at small lambda the loss from noise has no bound.

The last refresh lets lambda grow to 0.9 / eta where there is nothing to follow, which leaves one step's noise.

The constants were chosen once, by simulation on the School data and on digits. The estimates are good to about a factor
of two, and the loss is flat enough around the best lambda for that. Known limits: training that ends far from
convergence (the near-FedAvg half slows it further: on School with a learning rate of 0.003 and epsilon 3 lambda ends
worse than the mean of local training and FedAvg), and silos so different that half of the rounds is too few for local
models. Then lambda is better given.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_pdp.algorithms.auto_prox.estimates import (
    SiloParameters,
    State,
    curvature_from,
    estimate_curvature_and_variance,
    estimate_force,
    geometric,
    gradient_variance_from,
    kappa,
    kept_in_step,
    noise_of_pull,
)
from tff_pdp.algorithms.auto_prox.theory import optimal_prox_weights_of_silos
from tff_pdp.algorithms.hyper_parameters import Hook, Observed

Weights = Mapping[str, np.ndarray]

_WINDOWS = 20
_NEAR_FED_AVG = 0.5  # Share of the rounds before lambda may fall.
_LARGEST_STEP = 3.0  # Factor by which one refresh changes lambda.
# Largest learning rate * local steps * lambda, except at the end: beyond, the pull back slows the mean's learning.
_CALM_PULL = 0.3
# Largest learning rate * lambda, for the last rounds of silos without a force of their own; 1 resets in every step.
_STRONG_PULL = 0.9


@dataclasses.dataclass(frozen=True)
class AutoProx(Hook):
    """Sets every silo's lambda, `prox_weight`, in a method whose silos keep `weights` and pull them to their `mean`.

    Guarantee: as of this module.

    Attributes:
      parameters: of all silos.
      num_weights: d, the number of weights of one model, all tensors together.
    """

    parameters: SiloParameters
    num_weights: int

    def init(self) -> Mapping[str, Any]:
        """Returns what is known before the first round: a nest of arrays of fixed shapes and dtypes.

        Its `prox_weights` are each silo's lambda for the next round, float32 `[silos]`, such that learning rate *
        lambda < 1.
        """
        num_silos = self.parameters.num_silos
        return {
            "prox_weights": _calm(self.parameters).astype(np.float32),
            "window": _empty_window(num_silos, self.num_weights),
            "previous": {
                "rounds": np.int64(0),
                "force": np.zeros([num_silos, self.num_weights]),
                "noise": np.zeros(num_silos),
            },
            "offset_noise": np.zeros(num_silos),
            # Means weighted with precisions, each as (their weighted sum, their precisions' sum).
            "curvature": np.zeros(2),
            "variance": np.zeros(3),  # And what DP noise alone would make of the first.
            "force": np.zeros(2),
        }

    def hparams(self, state: State, places: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns the lambdas of a round."""
        return {"prox_weight": state["prox_weights"][places]}

    def after(self, state: State, before: Observed, after: Observed) -> Mapping[str, Any]:
        """Returns what is known after a round, with new lambdas where that is due."""
        mean = {name: np.asarray(value) for name, value in before.server_state["mean"].items()}
        weights = before.client_states["weights"], after.client_states["weights"]
        learned = observe(state, self.parameters, *weights, mean)
        if is_refresh_round(after.round_number, self.parameters.rounds):
            return refresh(learned, self.parameters, after.round_number)
        return learned


def is_refresh_round(round_number: int, rounds: int) -> bool:
    """Says whether `refresh` is due once this many of all rounds have been run and observed."""
    return round_number < rounds and round_number % _window_rounds(rounds) == 0


def observe(
    state: State, parameters: SiloParameters, before: Weights, after: Weights, mean_before: Weights
) -> dict[str, Any]:
    """Adds one round to the running sums and returns the state after it.

    Args:
      state: whose lambdas the round was run with.
      parameters: of all silos.
      before: every silo's weights before the round, by name, `[silos, *shape]`, in the parameters' order of silos.
      after: every silo's weights after the round, likewise.
      mean_before: the mean they were pulled to, by name, `[*shape]`.
    """
    rate, steps = parameters.learning_rate, parameters.local_steps
    kept = kept_in_step(state, parameters)
    forced = geometric(kept, steps)
    start = _flat(before)
    offset = start - np.concatenate([np.ravel(mean_before[name]) for name in before]).astype(np.float64)
    moved = _flat(after) - start
    # Over a round, the prox term alone would leave kept^steps of the offset, and a constant force adds rate * forced.
    pull = (moved + (1 - kept**steps)[:, np.newaxis] * offset) / (rate * forced)[:, np.newaxis]
    seen = (steps * kept ** (steps - 1) / forced)[:, np.newaxis] * offset
    pull, seen = pull - pull.mean(axis=0), seen - seen.mean(axis=0)
    window = state["window"]
    added = {
        "rounds": np.int64(1),
        "pull": pull,
        "offset": seen,
        "pull_square": np.einsum("kd,kd->k", pull, pull),
        "offset_square": np.einsum("kd,kd->k", seen, seen),
        "product": np.einsum("kd,kd->k", pull, seen),
    }
    return {**state, "window": {name: window[name] + value for name, value in added.items()}}


def refresh(state: State, parameters: SiloParameters, round_number: int) -> dict[str, Any]:
    """Returns the state with new lambdas and an empty window, after rounds for which `is_refresh_round` is true."""
    num_silos, num_weights = state["window"]["pull"].shape
    noise = noise_of_pull(state, parameters, num_weights)
    if round_number <= _NEAR_FED_AVG * parameters.rounds:
        # Later, offsets follow the force, and their movement tells less of the mean curvature.
        state = estimate_curvature_and_variance(state, parameters, noise)
    state = estimate_force(state, parameters, noise)
    if round_number > _NEAR_FED_AVG * parameters.rounds and state["force"][1] > 0:
        is_last = round_number + _window_rounds(parameters.rounds) >= parameters.rounds
        state = {**state, "prox_weights": _choose(state, parameters, num_weights, is_last).astype(np.float32)}
    return {**state, "window": _empty_window(num_silos, num_weights)}


def _choose(state: State, parameters: SiloParameters, num_weights: int, is_last: bool) -> np.ndarray:
    force, precision = state["force"][0] / state["force"][1], state["force"][1]
    mean_curvature = curvature_from(state, parameters)
    curvature = kappa(num_weights) * mean_curvature
    variance = gradient_variance_from(state)
    per_step = parameters.dp_variance + variance * parameters.sampling_variance(num_weights)
    from_noise = parameters.learning_rate * mean_curvature * per_step / 4
    error = from_noise + variance * parameters.example_variance(num_weights)
    signal = np.maximum(force - precision**-0.5 - from_noise, 0.0)
    # Noise of a silo is in everyone's mean, so all errors count for a silo; what counts as signal is its own.
    errors = np.broadcast_to(error, [parameters.num_silos, parameters.num_silos])
    best = curvature * np.diagonal(optimal_prox_weights_of_silos(errors, signal))
    calm, current = _calm(parameters), state["prox_weights"].astype(np.float64)
    chosen = np.minimum(np.clip(best, current / _LARGEST_STEP, current * _LARGEST_STEP), calm)
    if not is_last:
        return chosen
    # A mean that learns slowly for the last few rounds is no loss, and noise in the offset is still one.
    return np.where(best >= calm, np.minimum(best, _STRONG_PULL / parameters.learning_rate), chosen)


def _calm(parameters: SiloParameters) -> np.ndarray:
    return _CALM_PULL / (parameters.learning_rate * parameters.local_steps)


def _flat(weights: Weights) -> np.ndarray:
    return np.concatenate([np.reshape(value, [len(value), -1]) for value in weights.values()], axis=1, dtype=np.float64)


def _window_rounds(rounds: int) -> int:
    return max(2, round(rounds / _WINDOWS))


def _empty_window(num_silos: int, num_weights: int) -> dict[str, Any]:
    return {
        "rounds": np.int64(0),
        "pull": np.zeros([num_silos, num_weights]),
        "offset": np.zeros([num_silos, num_weights]),
        "pull_square": np.zeros(num_silos),
        "offset_square": np.zeros(num_silos),
        "product": np.zeros(num_silos),
    }
