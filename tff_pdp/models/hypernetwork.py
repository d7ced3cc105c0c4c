"""Hypernetworks: networks that generate a target model's weights from a client's descriptor, a trained vector.

A client's model is `theta = h(v; phi)`: all clients share the hypernetwork's parameters phi, each has a descriptor v of
its own (Shamsian et al., "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628, ICML 2021). The
transposed Jacobians turn a change d of theta into a change of phi and a change of v.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.models import layers
from tff_pdp.models.base import Weights


@dataclasses.dataclass(frozen=True)
class Hypernetwork:
    """Dense layers with ReLU over the descriptor, and one linear head for each tensor of the target's weights.

    The parameters are named tensors, in the order from descriptor to weights: `hidden_<i>/kernel` `[in, out]` and
    `hidden_<i>/bias` `[out]`; then `head/<name>/kernel` `[in, *shape]` and `head/<name>/bias` `[*shape]`, for every
    weight `<name>` of the target, of shape `shape`. Names and shapes of the parameters define the target.

    TensorFlow can compute all operations for many descriptors at once (`tf.vectorized_map`), with shared parameters or
    with stacked ones.

    Attributes:
      descriptor_size: number of values in a descriptor.
      hidden_units: number of units of each hidden layer; without hidden layers, weights are linear in the descriptor.
      seed: seed of the initial values.
      head_scale: distance of the first generated model from the target's own initial weights: each layer's output
        changes by about `head_scale` times the size of the layer's input. A value of 1 (as large as the weights) would
        spoil a good initialisation; with 0, descriptors have no effect, and at first no gradient.
    """

    descriptor_size: int
    hidden_units: Sequence[int]
    seed: int
    head_scale: float = 0.1

    def init(self, target: Weights) -> Weights:
        """Returns initial parameters, float32, for a target model with the initial weights `target`, of static shapes.

        Hidden kernels have variance `2 / in` (He et al., "Delving Deep into Rectifiers", ICCV 2015); hidden biases are
        zero. The biases of heads are the target's initial weights. Kernels of heads have variance
        `head_scale^2 / (in * fan_in)`, with the fan-in of the generated tensor (Chang et al., "Principled Weight
        Initialization for Hypernetworks", ICLR 2020).
        """
        sizes = [self.descriptor_size, *self.hidden_units]
        parameters = collections.OrderedDict()
        for index, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
            parameters[f"hidden_{index}/kernel"] = self._draw([size_in, size_out], math.sqrt(2.0 / size_in), 1 + index)
            parameters[f"hidden_{index}/bias"] = tf.zeros([size_out])
        for index, (name, value) in enumerate(target.items(), start=len(sizes)):
            bias = tf.convert_to_tensor(value)
            shape: list[Any] = bias.shape.as_list()
            # A bias or a scale has fan-in 1: its shape has no axis before the last.
            stddev = self.head_scale / math.sqrt(sizes[-1] * math.prod(shape[:-1]))
            parameters[f"head/{name}/kernel"] = self._draw([sizes[-1], *shape], stddev, index)
            parameters[f"head/{name}/bias"] = bias
        return parameters

    def init_descriptor(self) -> tf.Tensor:
        """Returns the first descriptor of every client: float32 `[descriptor_size]`, drawn with mean 0 and variance 1.

        The first descriptor is public. Descriptors move apart as their clients' weights move in different directions.
        """
        return self._draw([self.descriptor_size], 1.0, 0)

    def starts_alive(self) -> bool:
        """Checks that the first model depends on the descriptor: some unit of the last hidden layer is active.

        If no unit is active, ReLU passes no gradient, and only the biases of heads learn: all clients get one model.
        """
        with tf.init_scope():
            features = self._features(self.init({}), self.init_descriptor())
            return bool(tf.reduce_any(features != 0.0))

    def generate(self, parameters: Weights, descriptor: tf.Tensor) -> Weights:
        """Returns `h(descriptor; parameters)`: weights by name, in the order and shapes of the target's weights."""
        features = self._features(parameters, descriptor)
        return collections.OrderedDict(
            (name, tf.tensordot(features, parameters[f"head/{name}/kernel"], 1) + parameters[f"head/{name}/bias"])
            for name in _target_names(parameters)
        )

    def pull_back(self, parameters: Weights, descriptor: tf.Tensor, cotangent: Weights) -> tuple[Weights, tf.Tensor]:
        """Returns `J_phi^T d` and `J_v^T d`, with the Jacobians of `generate` w.r.t. parameters and descriptor.

        If d is the gradient of a loss w.r.t. the generated weights, the results are the loss's gradients w.r.t. phi and
        v. If d is a step of the weights, the results are the matching steps of phi and v.

        Args:
          parameters: phi, by name.
          descriptor: v, `[descriptor_size]`.
          cotangent: d, with the names and shapes of the generated weights.

        Returns:
          Tensors by name, in the order and shapes of the parameters, and a tensor `[descriptor_size]`.
        """
        tensors = collections.OrderedDict((name, tf.convert_to_tensor(value)) for name, value in parameters.items())
        descriptor = tf.convert_to_tensor(descriptor)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch((tensors, descriptor))
            generated = self.generate(tensors, descriptor)
        pulled_back: Any = tape.gradient(
            list(generated.values()), (tensors, descriptor), output_gradients=[cotangent[name] for name in generated]
        )
        return pulled_back

    def _features(self, parameters: Weights, descriptor: tf.Tensor) -> tf.Tensor:
        """Returns the inputs of the heads: float32 `[units of the last hidden layer]`."""
        features = descriptor[tf.newaxis]
        for index in range(len(self.hidden_units)):
            features = tf.nn.relu(layers.dense(parameters, f"hidden_{index}", features))
        return features[0]

    def _draw(self, shape: Sequence[int], stddev: float, stream: int) -> tf.Tensor:
        """Draws uniform values of mean zero, one stream for each tensor.

        Values are drawn inside the computation: heads are a hundred times the target's size, and as constants they
        would soon exceed a graph's two gigabytes. The generator is named because the default depends on the device.
        """
        seed = tf.constant([self.seed, stream], tf.int64)
        limit = math.sqrt(3.0) * stddev
        return tf.random.stateless_uniform(shape, seed, -limit, limit, alg="philox")


def _target_names(parameters: Weights) -> list[str]:
    """Lists the names of weights that have a head; the names may themselves end in `/kernel` or `/bias`."""
    kernels = (name for name in parameters if name.startswith("head/") and name.endswith("/kernel"))
    return [name.removeprefix("head/").removesuffix("/kernel") for name in kernels]
