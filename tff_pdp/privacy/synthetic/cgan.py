"""Makes synthetic examples by a conditional generative adversarial network whose discriminator learns by DP-SGD.

The discriminator sees records and made examples. Only the gradients of records' losses are clipped and noised, because
made examples follow from released values. The network that makes examples learns from the discriminator, which is a
function of released gradients.

The defaults suit some 6,000 records. They were chosen on held-out training images of MNIST.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import next_float32, poisson_gaussian_event
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.facts import Claim, condition_of_examples
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples, check_labels, draw_labels
from tff_pdp.privacy.synthetic.conditional import ExampleNetwork, noised_counts, to_unit
from tff_pdp.settings import Count, Positive, Share

# Largest discriminator. Noise is charged for as if each were this large, so that the event does not depend on shapes.
MOST_PARAMETERS = 2**18
# Largest expected batch. Clip norms are shortened by what float64 may round in the sum over such a batch.
LARGEST_BATCH = 2**14
# Rates of the sampler are multiples of this number.
_RATE_STEP = 2.0**-23
_GENERATOR = "chacha20"


class DpCgan(Generator, tag="dp_cgan"):
    """Trains a conditional generative adversarial network, with DP-SGD in the discriminator.

    Attributes:
      steps: number of the example network's steps.
      discriminator_steps: steps of the discriminator before each step of the example network.
      sampling_rate: q, public probability that a record is in a batch; rounded up to a multiple of 2**-23.
      batch_size: B, the public number that a noised sum of gradients is divided by. The best value is near q times the
        number of records, as far as that number is known to the public.
      clip_norm: C, L2 bound on each record's gradient.
      fakes_per_step: number of made examples in each step of either network.
      discriminator_rate: Adam's rate of the discriminator.
      generator_rate: Adam's rate of the example network.
      latents: number of latent numbers.
      generator_units: units of the example network's hidden layers.
      discriminator_units: units of the discriminator's hidden layers.
      count_noise: standard deviation of the noise on each class count, in noise multipliers of the gradients.
    """

    steps: Count = 200
    discriminator_steps: Count = 5
    sampling_rate: Share = 0.1
    batch_size: Positive = 600.0
    clip_norm: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    fakes_per_step: Annotated[int, Meta(ge=1, le=10**4)] = 64
    discriminator_rate: Positive = 1e-3
    generator_rate: Positive = 3e-3
    latents: Count = 50
    generator_units: Sequence[Count] = (256, 256)
    discriminator_units: Sequence[Count] = (64,)
    count_noise: Positive = 5.0

    @property
    def rate(self) -> float:
        """The sampling rate, as a multiple of 2**-23."""
        return math.ceil(self.sampling_rate / _RATE_STEP) * _RATE_STEP

    @property
    def claim(self) -> tuple[Claim, str]:
        """The strength of the guarantee, and its conditions."""
        return "formal-conditional", condition_of_examples(_GENERATOR)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of the class counts, of all Poisson-sampled sums of gradients, and of drawn noise.

        Args:
          noise_multiplier: standard deviation of the noise on a sum of gradients divided by the clip norm.
        """
        gradients = self.steps * self.discriminator_steps
        return dp_accounting.ComposedDpEvent(
            [
                dp_accounting.GaussianDpEvent(self.count_noise * noise_multiplier),
                poisson_gaussian_event(self.rate, noise_multiplier, gradients),
                GridNoiseDpEvent(MOST_PARAMETERS * gradients),
            ]
        )

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks shapes, labels, and the size of the discriminator."""
        sizes = [math.prod(x.shape[1:]), *self.discriminator_units, self.num_classes]
        parameters = sum((before + 1) * after for before, after in itertools.pairwise(sizes))
        if not sizes[0]:
            raise ConfigError("the examples have no features")
        # Noise is drawn in pairs.
        if parameters + parameters % 2 > MOST_PARAMETERS:
            raise ConfigError(
                f"discriminator_units {list(self.discriminator_units)} and examples of shape {list(x.shape[1:])} make "
                f"{parameters:,} weights; at most {MOST_PARAMETERS:,} are possible"
            )
        check_labels(x, y, self.num_classes)
        if len(x) * self.rate > LARGEST_BATCH:
            raise ConfigError(f"sampling_rate is {self.sampling_rate:g}; batches must have at most {LARGEST_BATCH:,}")

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        noise_multiplier: float,
        draws: ExactDraws,
        *,
        ids: Sequence[str] | None = None,
    ) -> SyntheticExamples:
        """Makes synthetic examples by `dp_cgan`, whose sums treat all records alike, whatever their `ids`."""
        return dp_cgan(x, y, self, noise_multiplier, draws)


def dp_cgan(
    x: np.ndarray, y: np.ndarray, settings: DpCgan, noise_multiplier: float, draws: ExactDraws
) -> SyntheticExamples:
    """Trains a conditional network against a discriminator with private gradients, and makes synthetic examples.

    Guarantee: under ADD_OR_REMOVE_ONE adjacency, `settings.event(noise_multiplier)` covers the result. Records are used
      in two places: in the noised counts, and in sums of clipped gradients of Poisson batches (`build_dp_sgd`), whose
      noise is on a grid and charged for. The divisor of a sum is public.
    Assumes: as in `Generator.fit` and `build_dp_sgd`.

    Source: Xie, Lin, Wang, Wang and Zhou, "Differentially Private Generative Adversarial Network", arXiv:1802.06739,
      2018; conditional as in Torkzadehmahani, Kairouz and Paten, "DP-CGAN", CVPR workshops 2019; many discriminator
      steps for each step of the other network as in Bie, Kamath and Zhang, "Private GANs, Revisited", TMLR 2023.

    Args, Raises: as in `Generator.fit`.
    """
    import tensorflow as tf

    settings.check_noise(noise_multiplier)
    settings.check(x, y)
    # Sums that a GPU rounds in any order would not be the same in a repetition with the same noise.
    with tf.device("/CPU:0"):
        rows = to_unit(x, settings)
        counts = noised_counts(y, settings.num_classes, settings.count_noise * noise_multiplier, draws)
        maker = ExampleNetwork(
            rows.shape[1],
            settings.num_classes,
            settings.latents,
            settings.generator_units,
            settings.generator_rate,
            draws,
        )
        discriminator = _Discriminator(rows, y, settings, noise_multiplier, draws)
        for _ in range(settings.steps):
            labels = draw_labels(counts, settings.fakes_per_step * (settings.discriminator_steps + 1), draws)
            inputs, own = maker.inputs(labels), settings.fakes_per_step
            discriminator.learn(maker, inputs[own:], labels[own:])
            discriminator.teach(maker, inputs[:own], labels[:own])
        return maker.synthetic(counts, x.shape[1:], settings)


class _Discriminator:
    """A network D(x, y) that learns from records by DP-SGD, and from made examples without noise.

    The last layer has a score for each class, of which D(x, y) is the score of class y.
    """

    def __init__(self, rows: np.ndarray, y: np.ndarray, settings: DpCgan, noise_multiplier: float, draws: ExactDraws):
        """Draws initial weights; `rows` are features in [0, 1], float32 `[n, features]`."""
        import tensorflow as tf

        from tff_pdp.algorithms.base import ClientData
        from tff_pdp.models.dense import build_mlp
        from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd

        def score(scores: Any, labels: Any) -> Any:
            return tf.reduce_sum(scores * tf.one_hot(labels, settings.num_classes), axis=1)

        model = build_mlp(rows.shape[1:], settings.num_classes, settings.discriminator_units)
        # BCE(D, 1) for the score before the logistic function.
        model = dataclasses.replace(model, output_loss=lambda scores, labels: tf.nn.softplus(-score(scores, labels)))
        self._settings, self._draws = settings, draws
        self._weights: dict[str, Any] = collections.OrderedDict(
            (name, tf.Variable(tf.constant(value))) for name, value in model.init(draws.below(2**32)).items()
        )
        estimator = build_dp_sgd(model, "poisson", _GENERATOR)
        mechanism = {
            "clip_norm": settings.clip_norm,
            "noise_multiplier": next_float32(noise_multiplier),
            "sampling_rate": settings.rate,
            # Bounds the rounding of sums; `scale` makes the public divisor of it.
            "expected_batch_size": LARGEST_BATCH,
        }
        scalars = {name: tf.constant(mechanism[name], tf.float32) for name in estimator.mechanism}
        scale = tf.constant(LARGEST_BATCH / settings.batch_size, tf.float32)
        num_rows, num_steps = len(rows), settings.discriminator_steps
        # There is at least one row, of zeros if there are no records.
        missing = max(0, 1 - num_rows)
        max_rows = tf.constant(num_rows + missing)
        padded = tf.constant(np.pad(rows, ((0, missing), (0, 0))))
        data = ClientData(padded, tf.constant(np.pad(y.astype(np.int64), (0, missing))), tf.constant(num_rows))
        optimizer = tf.keras.optimizers.Adam(settings.discriminator_rate, beta_1=0.5)
        optimizer.build(list(self._weights.values()))

        @tf.function(autograph=False)
        def draw(seed: Any) -> Any:
            each = {name: value[tf.newaxis] for name, value in scalars.items()}
            drawn = estimator.draw(each, tf.constant([num_rows]), max_rows, tf.constant([num_steps]), seed)
            return tf.nest.map_structure(lambda value: value[0], drawn)

        @tf.function(autograph=False, reduce_retracing=True)
        def learn(drawn: Any, index: Any, made: Any, labels: Any) -> None:
            of_records = estimator.gradient(scalars, drawn, self._weights, data, index, scale)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(score(model.predict(self._weights, made), labels)))
            of_made = tape.gradient(loss, list(self._weights.values()))
            total = [of_records[name] + value for name, value in zip(self._weights, of_made, strict=True)]
            optimizer.apply_gradients(zip(total, self._weights.values(), strict=True))

        self._model, self._draw, self._learn = model, draw, learn

    def learn(self, maker: ExampleNetwork, inputs: np.ndarray, labels: np.ndarray) -> None:
        """Takes the steps that come before one step of the other network.

        Args:
          maker: the network that makes examples.
          inputs: inputs of the examples of all steps.
          labels: their classes.
        """
        import tensorflow as tf

        seed = self._draws.words(2).astype(np.int64)[np.newaxis]
        drawn = self._draw(tf.constant(seed))
        made, steps = maker.examples(inputs), self._settings.discriminator_steps
        for index, (part, classes) in enumerate(zip(tf.split(made, steps), tf.split(labels, steps), strict=True)):
            self._learn(drawn, tf.constant(index), part, classes)

    def teach(self, maker: ExampleNetwork, inputs: np.ndarray, labels: np.ndarray) -> None:
        """Takes a step of the network that makes examples, toward a higher score of this discriminator."""
        import tensorflow as tf

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(maker.weights.values()))
            loss = tf.reduce_mean(self._model.loss(self._weights, maker.examples(inputs), tf.constant(labels)))
        maker.learn(tape.gradient(loss, list(maker.weights.values())))
