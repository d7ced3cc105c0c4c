"""Sets MR-MTL's lambda during training, from the silos' released noisy models alone.

Guarantee: lambda is a function of released models and public parameters only: by post-processing it costs no epsilon.
Assumes: every silo's weights after every round are covered by that silo's ledger, as DP-SGD's iterates are, even if a
  step depends on earlier iterates; the party that computes lambda may see each silo's weights, not only their mean; the
  values of `SiloParameters` are public. All silos take part in every round, and are pulled to the plain mean of their
  weights (with a weighted mean, the correction for a silo's own noise in the mean is approximate).

The rule is MR-MTL's closed form, lambda_k = s_k / tau^2 (`tff_pdp.algorithms.auto_prox.theory`), applied to noisy SGD
in place of one noisy mean. Let u_k, silo k's offset, be the silo's weights minus the mean of all silos' weights. Take a
round's movement without the prox term, divide by the learning rate, and subtract the mean over silos. The result is the
pull of the data:

    pull_k = f_k - H u_k + noise,    Var(noise) = (z_k C / B_k)^2 for each step and weight, known exactly.

The force f_k is the descent direction of silo k's data at the mean, and H is the curvature (Hessian) of the loss. F is
the variance of forces between silos, per weight. The part of f_k that is due to the finite number of examples has
variance xi_k = G / (n_k d), where d is the number of weights and G <= C^2 the total variance of a clipped gradient. In
a direction of curvature h, the offset settles at p (f_k + noise) with p = 1 / (h + lambda), so a small lambda lets in
both force and noise. The expected loss, minus the loss at the mean, is

    R(p) = h p^2 (F + xi_k) / 2 - p F + p c_k,    c_k = eta h_mean (z_k C / B_k)^2 / 4,

with the learning rate eta. R is minimal at lambda_k = h (xi_k + c_k) / (F - c_k). If F does not exceed the noise c_k,
lambda_k is as large as allowed: 0.3 / eta, divided by the number of local steps. (As in the theory, lambda_k is
corrected for silo k's noise in the mean, with F - c_k in place of tau^2.)

The rounds are divided into about 20 windows. After each window but the last, a refresh updates the estimates of the
unknowns and, in the second half of training, lambda. The unknowns are:

* h_mean, the mean curvature, comes from the regression of pulls on offsets, separately in each window of the first half
  of training.
* h: noise moves all d weights alike, but data pulls only where the loss is curved. We assume h = kappa h_mean in
  1 / kappa of all directions and none in the rest; kappa = sqrt(d) / 2, between 1 (all curved) and d (one curved).
* G comes from the scatter of pulls in excess of DP noise, in the same windows, shrunk towards C^2 / 3. G stays C^2 / 3
  with full batches, which cause no scatter, and nearly so under strong DP noise, whose effect on pulls is known only to
  a few percent.
* F comes from products of pulls in neighbouring windows, whose noises are independent, except for noise that is left
  in offsets.

The force at the mean is visible only while offsets are small, and silos with large offsets slow the mean's learning. So
the first half of training stays near FedAvg; then lambda falls, at most by a factor of three in each refresh. If h is
larger than assumed, a falling lambda shrinks the pulls, hence F, more than predicted. lambda then stops falling early:
the error is on the safe side, towards FedAvg. One standard error is subtracted from F, since at small lambda the loss
from noise has no bound.

At the last refresh, a lambda_k that is as large as allowed may grow to 0.9 / eta; only one step's noise then remains.

The constants were chosen once, by simulation on the School data and on digits. The estimates are right to about a
factor of two, which is enough: the loss is flat around the best lambda. Set lambda by hand where training ends far from
convergence (the half near FedAvg slows convergence further: on School with a learning rate of 0.003 and epsilon 3, the
result is worse than the average of the results of local training and of FedAvg), or where silos are so different that
local models need more than half of the rounds.
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
_LARGEST_STEP = 3.0  # Largest factor by which one refresh changes lambda.
# Largest learning rate * local steps * lambda, except at the end: a stronger pull slows the mean's learning.
_CALM_PULL = 0.3
# Largest learning rate * lambda, for the last rounds of silos without a force of their own; 1 would reset each step.
_STRONG_PULL = 0.9


@dataclasses.dataclass(frozen=True)
class AutoProx(Hook):
    """Sets every silo's lambda (`prox_weight`), where silos keep `weights` and the server keeps their `mean`.

    Guarantee: as in the docstring of this module.

    Attributes:
      parameters: public parameters of all silos.
      num_weights: d, number of scalar weights of one model.
    """

    parameters: SiloParameters
    num_weights: int

    def init(self) -> Mapping[str, Any]:
        """Returns the state before the first round: a nest of arrays of fixed shapes and dtypes.

        `prox_weights` has each silo's lambda for the next round, float32 `[silos]`, below 1 / learning rate.
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
            # Means weighted with precisions, each as (sum weighted with precisions, sum of precisions).
            "curvature": np.zeros(2),
            "variance": np.zeros(3),  # The third number is the first sum under DP noise alone.
            "force": np.zeros(2),
        }

    def hparams(self, state: State, places: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns a round's lambdas, under the name `prox_weight`."""
        return {"prox_weight": state["prox_weights"][places]}

    def after(self, state: State, before: Observed, after: Observed) -> Mapping[str, Any]:
        """Returns the state after a round, with new lambdas if a refresh is due."""
        mean = {name: np.asarray(value) for name, value in before.server_state["mean"].items()}
        weights = before.client_states["weights"], after.client_states["weights"]
        learned = observe(state, self.parameters, *weights, mean)
        if is_refresh_round(after.round_number, self.parameters.rounds):
            return refresh(learned, self.parameters, after.round_number)
        return learned


def is_refresh_round(round_number: int, rounds: int) -> bool:
    """Checks whether `refresh` is due after round `round_number`."""
    return round_number < rounds and round_number % _window_rounds(rounds) == 0


def observe(
    state: State, parameters: SiloParameters, before: Weights, after: Weights, mean_before: Weights
) -> dict[str, Any]:
    """Adds one round to the running sums and returns the state after it.

    Args:
      state: state before the round, with the lambdas of the round.
      parameters: public parameters of all silos.
      before: every silo's weights before the round, by name, `[silos, *shape]`, in the parameters' order of silos.
      after: every silo's weights after the round, in the form of `before`.
      mean_before: mean that the round pulled the weights to, by name, `[*shape]`.
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
    """Returns the state with new lambdas and an empty window; call it if `is_refresh_round` is true."""
    num_silos, num_weights = state["window"]["pull"].shape
    noise = noise_of_pull(state, parameters, num_weights)
    if round_number <= _NEAR_FED_AVG * parameters.rounds:
        # Later, offsets follow the force, and their movement says less about the mean curvature.
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
    # Each silo's noise is in the common mean, so all errors count for a silo; only the silo's own signal counts.
    errors = np.broadcast_to(error, [parameters.num_silos, parameters.num_silos])
    best = curvature * np.diagonal(optimal_prox_weights_of_silos(errors, signal))
    calm, current = _calm(parameters), state["prox_weights"].astype(np.float64)
    chosen = np.minimum(np.clip(best, current / _LARGEST_STEP, current * _LARGEST_STEP), calm)
    if not is_last:
        return chosen
    # In the last few rounds slow learning of the mean costs little, but noise in the offset still does.
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
