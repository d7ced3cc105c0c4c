"""Builds partial sharing without client state, through `tff.learning`: clients train a new head in every round.

Federated reconstruction (Singhal et al., "Federated Reconstruction: Partially Local Federated Learning", NeurIPS 2021)
suits populations in which users seldom take part twice. The result is a `tff.learning.templates.LearningProcess`, for
existing training loops. Methods with client state are in `tff_pdp.processes.compose`.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_privacy

from tff_pdp import _tff
from tff_pdp.algorithms.base import split
from tff_pdp.models.base import Model
from tff_pdp.privacy.plans.user import UserPlan


def build_reconstruction(
    model: Model,
    *,
    learning_rate: float = 0.1,
    reconstruction_learning_rate: float = 0.1,
    reconstruction_epochs: int = 1,
    server_learning_rate: float = 1.0,
    plan: UserPlan | None = None,
    seeds: np.ndarray | None = None,
) -> _tff.LearningProcess:
    """Builds federated reconstruction of a model's head, with a shared body.

    In a round, a client first trains the head from the head's initial value, while the body is frozen. The client then
    trains the body for one epoch, while the head is frozen, and releases the change of the body. Clients' data are
    `tf.data.Dataset`s of batches, `{x: float32 [batch, *input_shape], y: [batch]}`; `client_batches` makes such a data
    set from arrays.

    Guarantee: with a plan, all results of the process are functions of the noised sums that the plan accounts for;
      clients' metrics, which have no noise, are left out.
    Assumes: the caller draws every round's clients by the plan's `cohort`, and charges the plan's ledger. The seeds are
      secret, and so is the process, which contains the seeds. Each training needs new seeds: a second training with the
      same process, or from an earlier state with other clients, would repeat the noise.

    Args:
      model: model whose head is reconstructed.
      learning_rate: clients' learning rate for the body.
      reconstruction_learning_rate: clients' learning rate for the head.
      reconstruction_epochs: number of epochs in which a client trains the head.
      server_learning_rate: learning rate of the server.
      plan: plan for user-level privacy; None for the plain mean and TFF's own metrics.
      seeds: seeds of the noise, int64 `[2, 2]`, such as those of `tff_pdp.experiment.run_key.RunKey.server_seeds`; None
        without a plan.

    Raises:
      ValueError: there is a plan but no seeds, or the plan has users who add noise themselves.
    """
    if plan is not None and plan.noise_on_own_support:
        raise ValueError("plan: users add noise to their own records, but reconstruction needs noise at the server")
    if plan is not None and seeds is None:
        raise ValueError("seeds are missing: a plan's noise needs secret seeds, for example from RunKey.server_seeds")
    sgd = _tff.build_sgdm
    options: dict[str, Any] = {} if plan is None else {"metrics_aggregator": _without_metrics}
    return _tff.build_fed_recon(
        lambda: _HeadReconstruction(model),
        loss_fn=lambda: _loss(model),
        server_optimizer_fn=sgd(server_learning_rate),
        client_optimizer_fn=sgd(learning_rate),
        reconstruction_optimizer_fn=sgd(reconstruction_learning_rate),
        dataset_split_fn=_tff.ReconstructionModel.build_dataset_split_fn(recon_epochs=reconstruction_epochs),
        client_weighting=_tff.ClientWeighting.UNIFORM,
        model_aggregator_factory=_tff.UnweightedMeanFactory() if plan is None else _NoisedMeanFactory(plan, seeds),
        **options,
    )


def client_batches(model: Model, x: np.ndarray, y: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """Batches one client's examples for `build_reconstruction`: `x` `[examples, *input_shape]`, `y` `[examples]`."""
    rows: Any = collections.OrderedDict(x=np.asarray(x, np.float32), y=np.asarray(y, model.label_dtype))
    return tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)


class _HeadReconstruction(_tff.ReconstructionModel):
    """Wraps a model whose head is local, with weights as variables, as TFF needs them."""

    def __init__(self, model: Model):
        self._model = model
        self._variables = collections.OrderedDict(
            (name, tf.Variable(tf.constant(value), name=name.replace("/", "_")))
            for name, value in model.init(0).items()
        )
        self._head, self._body = split(self._variables, model.head)

    @property
    def global_trainable_variables(self):
        return list(self._body.values())

    @property
    def global_non_trainable_variables(self):
        return []

    @property
    def local_trainable_variables(self):
        return list(self._head.values())

    @property
    def local_non_trainable_variables(self):
        return []

    @property
    def input_spec(self):
        return collections.OrderedDict(
            x=tf.TensorSpec([None, *self._model.input_shape], tf.float32),
            y=tf.TensorSpec([None], tf.int64 if self._model.num_classes else tf.float32),
        )

    def forward_pass(self, batch_input, training=True):
        weights = collections.OrderedDict((name, variable.read_value()) for name, variable in self._variables.items())
        return _tff.ReconstructionBatchOutput(
            predictions=self._model.predict(weights, batch_input["x"]),
            labels=batch_input["y"],
            num_examples=tf.shape(batch_input["y"])[0],
        )


class _NoisedMeanFactory(_tff.UnweightedAggregationFactory):
    """Divides the plan's noised sum of all released values by its constant cohort."""

    def __init__(self, plan: UserPlan, seeds: Any):
        self._plan, self._seeds = plan, seeds

    def create(self, value_type: Any) -> _tff.AggregationProcess:
        cohort = self._plan.mechanism.expected_cohort
        query = tensorflow_privacy.NormalizedQuery(self._plan.build_query(self._seeds), cohort)
        # The query's records are flat.
        return _tff.concat_factory(_tff.DifferentiallyPrivateFactory(query)).create(value_type)


def _without_metrics(finalizers: Any, unfinalized_type: Any) -> _tff.Computation:
    """Returns no metrics in place of clients' summed metrics, which carry no noise."""

    @_tff.federated_computation(_tff.at_clients(unfinalized_type))
    def nothing(metrics):
        return _tff.federated_value(collections.OrderedDict(), _tff.SERVER)

    return nothing


def _loss(model: Model) -> Any:
    if model.num_classes:
        return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tf.keras.losses.MeanSquaredError()
