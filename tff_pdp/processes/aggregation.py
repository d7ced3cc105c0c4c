"""How a server combines what clients release: the plain means and sums an algorithm asks for, or noised user sums."""

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.random_bits import draw_gaussians
from tff_pdp.privacy.mechanisms.user_noise import UserSum
from tff_pdp.privacy.mechanisms.user_queries import clip_record

# Of a client's seed, a place that no gradient estimator draws from.
_NOISE_SHARE = 2**22


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """TFF computations.

    Attributes:
      initialize: `( -> state@SERVER)`.
      next: `(state@SERVER, released@CLIENTS, client_params@CLIENTS) -> (state@SERVER, aggregates@SERVER)`, where
        aggregates are by name of what is released, and shaped like it.
    """

    initialize: _tff.Computation
    next: _tff.Computation

    @property
    def aggregates_type(self) -> Any:
        """TFF type of the aggregates."""
        result: Any = self.next.type_signature.result
        return result[1].member


def build_plain_aggregation(algorithm: Algorithm, released_type: Any, params_type: Any) -> Aggregation:
    """Builds the mean or sum that the algorithm asks for, of each name.

    What is released is private when it arrives, and counted uniformly: no zeroing or clipping that would read it
    un-noised.
    """
    kinds = {"mean": _tff.UnweightedMeanFactory, "sum": _tff.SumFactory}
    aggregators = {name: kinds[kind]().create(released_type[name]) for name, kind in algorithm.released.items()}

    @_tff.federated_computation
    def initialize():
        return at_server(**{name: aggregator.initialize() for name, aggregator in aggregators.items()})

    @_tff.federated_computation(
        initialize.type_signature.result, _tff.at_clients(released_type), _tff.at_clients(params_type)
    )
    def next_aggregates(state, released, params):
        del params
        outputs = {name: aggregator.next(state[name], released[name]) for name, aggregator in aggregators.items()}
        return (
            at_server(**{name: output.state for name, output in outputs.items()}),
            at_server(**{name: output.result for name, output in outputs.items()}),
        )

    return Aggregation(initialize, next_aggregates)


def build_user_aggregation(
    algorithm: Algorithm, released_type: Any, params_type: Any, user_sum: UserSum, *, is_weighted: bool = False
) -> Aggregation:
    """Builds means of what users release, by a noised sum of tensorflow-privacy over a constant.

    All that a user releases is one record, clipped jointly. A weight, at most one, multiplies the clipped record.

    It is one computation for every clip norm and noise multiplier: the state holds them, and `UserPlan.start` enters
    them. Before that they are NaN, and so is every result.

    Raises:
      ValueError: the algorithm releases other things than means.
    """
    if set(algorithm.released.values()) != {"mean"}:
        raise ValueError(f"{algorithm.name}: noised sums are for means")
    specs = _specs(released_type)
    sizes = [spec.shape.num_elements() for spec in tf.nest.flatten(specs)]
    unset = UserMechanism(math.nan, math.nan, user_sum.sampling_rate, math.nan)
    query = user_sum.noise.build_query(sum(sizes), unset, np.zeros([2, 2], np.int64), user_sum.generator)
    # No other factory around it: TFF's default zeroing reads norms that carry no noise.
    process = _tff.DifferentiallyPrivateFactory(query).create(_tff.TensorType(np.float32, [sum(sizes)]))

    def clipped(record, params):
        return tf.cast(clip_record(record, params["clip_norm"])[0], tf.float32)

    @_tff.tensorflow_computation(released_type, params_type)
    def record_of(released, params):
        record = tf.concat([tf.reshape(value, [-1]) for value in tf.nest.flatten(released)], axis=0)
        if is_weighted:
            record = params["weight"] * clipped(record, params)
        if algorithm.claims.noise_on_own_support:
            record = _with_noise_share(clipped(record, params), params)
        return record

    @_tff.tensorflow_computation
    def unset_cohort():
        return tf.constant(math.nan)

    @_tff.tensorflow_computation(_tff.TensorType(np.float32, [sum(sizes)]), np.float32)
    def means_of(total, cohort):
        parts = tf.split(total / cohort, sizes)
        shaped = [tf.reshape(part, spec.shape) for part, spec in zip(parts, tf.nest.flatten(specs), strict=True)]
        return tf.nest.pack_sequence_as(specs, shaped)

    @_tff.federated_computation
    def initialize():
        return at_server(sum=process.initialize(), cohort=_tff.federated_eval(unset_cohort, _tff.SERVER))

    @_tff.federated_computation(
        initialize.type_signature.result, _tff.at_clients(released_type), _tff.at_clients(params_type)
    )
    def next_aggregates(state, released, params):
        output = process.next(state["sum"], _tff.federated_map(record_of, (released, params)))
        aggregates = _tff.federated_map(means_of, (output.result, state["cohort"]))
        return at_server(sum=output.state, cohort=state["cohort"]), aggregates

    return Aggregation(initialize, next_aggregates)


def at_server(**values: Any) -> Any:
    """Zips federated values at the server into one; an empty zip is a constant."""
    if not values:
        return _tff.federated_value(collections.OrderedDict(), _tff.SERVER)
    return _tff.federated_zip(collections.OrderedDict(values))


def _with_noise_share(record: tf.Tensor, params: Any) -> tf.Tensor:
    """A paper's noise: a user's share of it, only where the user's own record is not zero."""
    size = record.shape.num_elements()
    noise = params["noise_share"] * tf.cast(draw_gaussians(params["seed"], size, _NOISE_SHARE), tf.float32)
    return record + tf.where(tf.equal(record, 0.0), 0.0, noise)


def _specs(released: Any) -> Any:
    if isinstance(released, _tff.TensorType):
        return tf.TensorSpec(tuple(released.shape or ()), tf.as_dtype(released.dtype))
    return collections.OrderedDict((name, _specs(member)) for name, member in _tff.iter_elements(released))
