"""Checks a model, a kind of raw data or a privacy plan against the contract of the package's own kinds."""

import collections
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import RawData, SourceSettings, Summary
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model
from tff_pdp.models.independence import check_model_treats_examples_apart
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.mechanisms.per_example import clipped_sum
from tff_pdp.privacy.plans.plan import PlannedTraining, PlanSettings, PrivacyPlan
from tff_pdp.settings import read_settings
from tff_pdp.testing.algorithms import require

# Numbers of examples of silos, or of users.
_SIZES = {f"client {number}": 20 + 7 * number for number in range(12)}
# Tolerance for float32 sums of some thousand terms, in another order.
_ROUNDING = 1e-4


def check_model(
    build: Callable[..., Model], input_shape: tuple[int, ...] = (4,), num_classes: int = 3, **settings: Any
) -> None:
    """Checks a model: its functions are pure, and each example's loss depends on that example and the weights alone.

    Args:
      build: builder `(input_shape, num_classes, **settings) -> Model`; for a Keras model, one that calls `from_keras`.
      input_shape: shape of one example.
      num_classes: number of classes; 0 for a regression.
      settings: the model's settings.

    Raises:
      AssertionError: a rule is broken.
      ConfigError: the settings are wrong.
    """
    model = build(input_shape, num_classes, **settings)
    require(model.input_shape == tuple(input_shape), "Model.input_shape equals the builder's argument")
    require(model.num_classes == num_classes, "Model.num_classes equals the builder's argument")
    initial, again = model.init(3), model.init(3)
    require(bool(initial), "a model has weights")
    require(
        all(array.dtype == np.float32 and np.isfinite(array).all() for array in initial.values()),
        "initial weights are finite float32 arrays",
    )
    require(
        list(initial) == list(again) and all(np.array_equal(initial[name], again[name]) for name in initial),
        "one seed gives the same initial weights, in the same order",
    )
    require(bool(model.head) and set(model.head) <= set(initial), "head names some of the weights")
    rng = np.random.default_rng(5)
    weights = {
        name: tf.constant(array + rng.normal(0, 0.1, array.shape).astype(np.float32)) for name, array in initial.items()
    }
    x = tf.constant(rng.normal(size=(6, *input_shape)).astype(np.float32))
    labels = rng.integers(0, num_classes, 6) if num_classes else rng.normal(size=6)
    y = tf.constant(labels.astype(model.label_dtype))
    for rows in (6, 1):
        outputs = model.predict(weights, x[:rows])
        require(
            tuple(outputs.shape) == ((rows, num_classes) if num_classes else (rows,)) and outputs.dtype == tf.float32,
            "predict gives float32 logits [batch, num_classes], or values [batch] of a regression",
        )
        losses = model.loss(weights, x[:rows], y[:rows])
        require(tuple(losses.shape) == (rows,), "output_loss gives one loss for each example")
    losses = model.loss(weights, x, y).numpy()
    require(bool(np.isfinite(losses).all()), "losses are finite")
    alone = np.concatenate([model.loss(weights, x[row : row + 1], y[row : row + 1]).numpy() for row in range(6)])
    require(
        np.allclose(losses, alone, rtol=_ROUNDING, atol=_ROUNDING),
        "an example's loss depends on this example alone: no batch statistics, no random numbers",
    )
    _check_clipped_sum(model, weights, x, y)
    try:
        check_model_treats_examples_apart(model)
    except ConfigError as error:
        require(False, str(error).rstrip("."))


def _check_clipped_sum(model: Model, weights: Mapping[str, tf.Tensor], x: tf.Tensor, y: tf.Tensor) -> None:
    """Compares DP-SGD's sum without noise with a loop over examples."""
    expected = {name: np.zeros_like(weight.numpy(), np.float64) for name, weight in weights.items()}
    clip = 0.5
    for row in range(len(y)):
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            loss = tf.reduce_sum(model.loss(weights, x[row : row + 1], y[row : row + 1]))
        found: Any = tape.gradient(loss, list(weights.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradient of a table is given by the rows that were read.
        gradients: Any = [tf.convert_to_tensor(gradient) for gradient in found]
        norm = math.sqrt(sum(float(tf.reduce_sum(tf.square(gradient))) for gradient in gradients))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient.numpy() * min(1.0, clip / norm if norm else 1.0)
    total = clipped_sum(model, weights, x, y, clip_norm=tf.constant(clip), included=tf.ones(len(y)))
    require(
        all(np.allclose(total[name], expected[name], rtol=_ROUNDING, atol=_ROUNDING * clip) for name in expected),
        "the sum of clipped gradients equals the sum in a loop over examples",
    )


def check_source(
    kind: type[SourceSettings], settings: Mapping[str, Any], folder: Path, *, num_clients: int | None = None
) -> ClientDataset:
    """Checks a kind of raw data: equal settings give equal datasets, and every example is kept, or dropped and counted.

    Args:
      kind: class of the settings.
      settings: settings as in section `data`, without `kind`.
      folder: empty folder for the data.
      num_clients: expected number of clients, if it is known.

    Returns:
      The dataset, for checks of its content.

    Raises:
      AssertionError: a rule is broken.
      ConfigError, DataError: an error that the kind of raw data raises.
    """
    first, second = (_prepared(kind, settings, folder / name) for name in ("first", "second"))
    manifest = first.manifest
    require(manifest.shards == second.manifest.shards, "the same settings give the same bytes")
    dropped = sum(tally.examples for tally in manifest.dropped.values())
    require(
        manifest.read.examples == manifest.kept.examples + dropped, "examples read are kept, or dropped and counted"
    )
    require(manifest.kept.examples > 0, "some examples are kept")
    require(manifest.kept.examples == sum(manifest.num_examples.values()), "every kept example is in one split")
    require(num_clients in (None, len(manifest.clients)), f"there are {num_clients} clients")
    dataset = ClientDataset.open(first.output, verify=True)
    for client_id in manifest.clients:
        for split in SPLITS:
            examples = dataset.load(client_id, split)
            require(bool(np.isfinite(examples.x).all()), f"client {client_id}: features are finite")
            require(
                examples.x.shape[1:] == tuple(manifest.features.shape), f"client {client_id}: features have their shape"
            )
    return dataset


def _prepared(kind: type[SourceSettings], settings: Mapping[str, Any], folder: Path) -> Summary:
    read = read_settings(kind, {"kind": "outside", **settings}, "check_source", "data")
    options = read.job_options(folder / "clients", overwrite=False)
    source = read.build(folder / "raw")
    return run_client_dataset_job(source, options) if isinstance(source, RawData) else source.run(options)


def check_plan(
    kind: type[PlanSettings], settings: Mapping[str, Any], training: PlannedTraining | None = None
) -> PrivacyPlan:
    """Checks a privacy plan: charges equal the planned charges, stay within budgets, and end with the last round.

    Args:
      kind: class of the settings.
      settings: settings as in section `privacy`, without `kind`.
      training: training that the plan is for; by default 6 rounds of 12 clients of different sizes.

    Returns:
      The plan, for further checks, such as of the plan's mechanism.

    Raises:
      AssertionError: a rule is broken.
      ConfigError, BudgetError: an error that the plan raises.
    """
    training = training or PlannedTraining(
        _SIZES, dict.fromkeys(_SIZES, 2), rounds=6, num_parameters=100, num_released=100
    )
    plan = read_settings(kind, {"kind": "outside", **settings}, "check_plan", "privacy").build(training)
    clients = sorted(training.num_examples)
    require(bool(plan.claim_reason) and "\n" not in plan.claim_reason, "claim_reason is one line")
    require(plan.rounds == training.rounds, "PrivacyPlan.rounds equals the rounds of the training")
    ledger = plan.build_ledger()
    require((ledger is None) == (not plan.budgets), "build_ledger gives a ledger if, and only if, there are budgets")
    if ledger is None:
        require(plan.claim == "none", "without budgets the claim is `none`")
    else:
        _check_charges(plan, ledger, clients)
    _check_clients(plan, training, clients)
    return plan


def _check_charges(plan: PrivacyPlan, ledger: Ledger, clients: list[str]) -> None:
    require(all(plan.scope_of(client) in plan.budgets for client in clients), "every client's scope has a budget")
    for scope in plan.budgets:
        charged = collections.Counter()
        for number in range(1, plan.rounds + 1):
            charged.update({event: count for event, count, _ in plan.charges(scope, number)})
        require(+charged == +plan.training_counts(scope), f"{scope}: all rounds' charges add up to training_counts")
    for number in range(1, plan.rounds + 1):
        plan.charge_round(ledger, number)
    for scope, budget in plan.budgets.items():
        spent = ledger.epsilon(scope).best
        require(spent <= budget.epsilon, f"{scope}: the spent epsilon, {spent:.6g}, is at most {budget.epsilon:g}")
    require(Ledger.from_json(ledger.to_json()).entries == ledger.entries, "the ledger is the same after storing it")
    try:
        plan.charge_round(ledger, plan.rounds + 1)
    except BudgetError:
        return
    raise AssertionError("Rule broken: a charge for a round after the last raises a BudgetError.")


def _check_clients(plan: PrivacyPlan, training: PlannedTraining, clients: list[str]) -> None:
    key = RunKey.from_test_seed(7)
    for number in range(1, plan.rounds + 1):
        places, again = (plan.cohort(number, clients, key.cohort_generator) for _ in range(2))
        require(np.array_equal(places, again), "the round and the key determine the cohort")
        require(
            bool(np.all(np.diff(places) > 0)) and set(places.tolist()) <= set(range(len(clients))),
            "a cohort is an ascending array of places of clients",
        )
        chosen = [clients[place] for place in places]
        weights = plan.weights(training.num_examples, chosen, 1000, number)
        require(
            weights.shape == (len(chosen),) and bool(np.all(np.isfinite(weights) & (weights >= 0))),
            "weights are finite, not negative, and one for each client",
        )
    for name, column in plan.client_mechanism(clients).items():
        require(len(column) == len(clients), f"client_mechanism gives {name} one value for each client")
