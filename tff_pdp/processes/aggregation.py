"""Aggregates clients' releases at the server: means, sums or rows (one row per client), or noised sums over users."""

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
from tff_pdp.privacy.mechanisms.user_queries import (
    build_query,
    clip_record,
    record_in_steps,
    records_in_steps,
    sum_in_steps,
)
from tff_pdp.processes.client_work import build_public_work
from tff_pdp.processes.vectorizable import vectorizable

# A place in the random stream of a client's seed, which no gradient estimator draws from.
_NOISE_SHARE = 2**22


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The TFF computations of an aggregation.

    Attributes:
      initialize: `( -> state@SERVER)`.
      next: `(state@SERVER, released@CLIENTS, client_params@CLIENTS) -> (state@SERVER, aggregates@SERVER)`. Aggregates
        have the names of the released and public values. Except for rows, aggregates also have the values' shapes.
    """

    initialize: _tff.Computation
    next: _tff.Computation

    @property
    def aggregates_type(self) -> Any:
        """The TFF type of the aggregates."""
        result: Any = self.next.type_signature.result
        return result[1].member


def build_plain_start() -> _tff.Computation:
    """Builds the first state of `build_plain_aggregation`, which is the same for all algorithms."""

    # Means and sums keep nothing between rounds. So methods with other releases have server states of the same type.
    @_tff.federated_computation
    def initialize():
        return at_server()

    return initialize


def build_plain_aggregation(
    algorithm: Algorithm, released_type: Any, params_type: Any, *, is_weighted: bool = False
) -> Aggregation:
    """Builds the mean, sum or rows of each released value, as the algorithm declares, and means of public scalars.

    Clients have already made the released values private; the server only averages, sums or collects the values.
    """
    kinds = {"mean": _tff.UnweightedMeanFactory, "sum": _tff.SumFactory}
    aggregators = {
        name: kinds[kind]().create(released_type[name]) for name, kind in algorithm.released.items() if kind in kinds
    }
    num_clients = algorithm.num_clients or 0
    collectors = {
        name: _build_rows(released_type[name], params_type, num_clients)
        for name, kind in algorithm.released.items()
        if kind == "rows"
    }
    public_of = None
    if algorithm.public:
        public_of = _tff.tensorflow_computation(build_public_work(algorithm, is_weighted=is_weighted), params_type)

    initialize = build_plain_start()

    @_tff.federated_computation(
        initialize.type_signature.result, _tff.at_clients(released_type), _tff.at_clients(params_type)
    )
    def next_aggregates(state, released, params):
        del state
        outputs = {
            name: aggregator.next(aggregator.initialize(), released[name]) for name, aggregator in aggregators.items()
        }
        found = {name: output.result for name, output in outputs.items()}
        found |= {name: collect(released[name], params) for name, collect in collectors.items()}
        if public_of is not None:
            means = _tff.federated_mean(_tff.federated_map(public_of, params))
            found |= {name: means[name] for name in algorithm.public}
        return at_server(), at_server(**found)

    return Aggregation(initialize, next_aggregates)


def _build_rows(row_type: Any, params_type: Any, num_clients: int) -> _tff.Computation:
    """Builds `(row@CLIENTS, client_params@CLIENTS) -> {rows: [num_clients, ...], present: [num_clients]}@SERVER`."""

    @_tff.tensorflow_computation
    def no_rows():
        rows = tf.nest.map_structure(lambda spec: tf.zeros([num_clients, *spec.shape], spec.dtype), _specs(row_type))
        return collections.OrderedDict(rows=rows, present=tf.zeros([num_clients]))

    rows_type = no_rows.type_signature.result

    @_tff.tensorflow_computation(row_type, params_type)
    def in_place(row, params):
        return collections.OrderedDict(rows=row, place=params["hparams"]["client_index"])

    @_tff.tensorflow_computation(rows_type, in_place.type_signature.result)
    def with_row(rows, own):
        def put(stacked: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
            return tf.tensor_scatter_nd_update(stacked, [[own["place"]]], row[tf.newaxis])

        return collections.OrderedDict(
            rows=tf.nest.map_structure(put, rows["rows"], own["rows"]), present=put(rows["present"], tf.constant(1.0))
        )

    @_tff.tensorflow_computation(rows_type, rows_type)
    def of_both(one, other):
        # No client is in both; places of absent clients are zeros.
        return tf.nest.map_structure(tf.add, one, other)

    @_tff.tensorflow_computation(rows_type)
    def as_they_are(rows):
        return rows

    @_tff.federated_computation(_tff.at_clients(row_type), _tff.at_clients(params_type))
    def collect(row, params):
        placed = _tff.federated_map(in_place, (row, params))
        return _tff.federated_aggregate(placed, no_rows(), with_row, of_both, as_they_are)

    return collect


def build_user_aggregation(
    algorithm: Algorithm, released_type: Any, params_type: Any, user_sum: UserSum, *, is_weighted: bool = False
) -> Aggregation:
    """Builds noised means of users' releases: the noised sum of a tensorflow-privacy query, divided by a constant.

    All releases of a user in a round are one record, clipped jointly. The clipped record is multiplied by the user's
    weight, which is at most one. Clip norm and noise multiplier are part of the state, so that one computation serves
    all clip norms and noise multipliers. In the initial state both are NaN, and so is every result, until
    `UserPlan.start` has set both.

    Raises:
      ValueError: a release has another aggregation than `mean`, or the algorithm has public scalars.
    """
    if set(algorithm.released.values()) != {"mean"} or algorithm.public:
        raise ValueError(f"{algorithm.name}: noised sums need releases that are all means, and no public scalars")
    specs = _specs(released_type)
    sizes = [spec.shape.num_elements() for spec in tf.nest.flatten(specs)]
    unset = UserMechanism(math.nan, math.nan, user_sum.sampling_rate, math.nan)
    in_steps = vectorizable(record_in_steps, records_in_steps, num_shared=2, summed=sum_in_steps)
    query = build_query(user_sum.noise, sum(sizes), unset, np.zeros([2, 2], np.int64), user_sum.generator, in_steps)
    # No other factory around this one: TFF's default zeroing reads norms that carry no noise.
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
    """Zips federated values at the server into one structure by name; without values, the result is a constant."""
    if not values:
        return _tff.federated_value(collections.OrderedDict(), _tff.SERVER)
    return _tff.federated_zip(collections.OrderedDict(values))


def _with_noise_share(record: tf.Tensor, params: Any) -> tf.Tensor:
    """Adds a user's share of the noise where the user's own record is not zero, as in a paper's variant."""
    size = record.shape.num_elements()
    noise = params["noise_share"] * tf.cast(draw_gaussians(params["seed"], size, _NOISE_SHARE), tf.float32)
    return record + tf.where(tf.equal(record, 0.0), 0.0, noise)


def _specs(released: Any) -> Any:
    if isinstance(released, _tff.TensorType):
        return tf.TensorSpec(tuple(released.shape or ()), tf.as_dtype(released.dtype))
    return collections.OrderedDict((name, _specs(member)) for name, member in _tff.iter_elements(released))
