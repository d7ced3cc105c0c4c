"""Teachers of DataLens: small discriminators on disjoint parts of the records, and their votes.

A teacher sees its own records and examples that the student has made. All teachers have the same shapes, which are
public, and every operation treats each teacher on its own. NumPy multiplies a stack of matrices one by one, so the bits
of one teacher do not depend on the records of the others.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import draw_uniform
from tff_pdp.privacy.synthetic.conditional import one_hot

# Slope of the leaky rectifier.
_LEAK = np.float32(0.2)
# Adam's constants, as in the released code of DataLens.
_FIRST, _SECOND, _SMALL = 0.5, 0.999, 1e-8


def parts_by_hash(names: Sequence[bytes], key: bytes, num_teachers: int) -> list[list[int]]:
    """Divides records among teachers: a list of places for each teacher, in the order of the keyed hashes of names.

    Guarantee: a record's teacher is a function of its own name and of the key. Adding or removing one record, or
      changing what a name stands for, changes the part of one teacher only.

    Args:
      names: a name for each record, which must not depend on other records.
      key: at most 64 bytes.
      num_teachers: number of teachers M.
    """
    parts: list[list[tuple[int, int]]] = [[] for _ in range(num_teachers)]
    for place, name in enumerate(names):
        value = int.from_bytes(hashlib.blake2b(name, key=key, digest_size=16).digest(), "big")
        parts[value % num_teachers].append((value, place))
    return [[place for _, place in sorted(part)] for part in parts]


def content_names(x: np.ndarray, y: np.ndarray) -> list[bytes]:
    """Names records by their content: features as float64, and the class."""
    rows = np.ascontiguousarray(x, np.float64).reshape(len(x), math.prod(x.shape[1:]))
    return [row.tobytes() + int(label).to_bytes(8, "big") for row, label in zip(rows, y, strict=True)]


class Teachers:
    """M discriminators D(x, y) with one hidden layer, each trained on a part of the records.

    A teacher without records abstains. A teacher with more records than `capacity` uses the first ones of its part.
    """

    def __init__(
        self,
        rows: np.ndarray,
        labels: np.ndarray,
        parts: Sequence[Sequence[int]],
        *,
        num_classes: int,
        capacity: int,
        hidden_units: int,
        learning_rate: float,
        draws: ExactDraws,
    ):
        """Stacks the records of all teachers, and draws initial weights.

        Args:
          rows: features in [0, 1], float32 `[n, features]`.
          labels: classes `[n]`.
          parts: places of each teacher's records.
          num_classes: number of classes.
          capacity: largest number of records that a teacher uses, which is public.
          hidden_units: number of units of the hidden layer.
          learning_rate: rate of Adam.
          draws: random draws, which need not be secret, and of which as many are taken whatever the records.
        """
        self._num_features, self._num_classes, self._rate = rows.shape[1], num_classes, learning_rate
        joined = np.concatenate([rows, one_hot(labels.astype(np.int64), num_classes)], axis=1)
        size = joined.shape[1]
        self._records = np.zeros((len(parts), capacity, size), np.float32)
        # The weight of each record in the mean over its teacher's records.
        self._shares = np.zeros((len(parts), capacity, 1), np.float32)
        for teacher, part in enumerate(parts):
            used = list(part[:capacity])
            self._records[teacher, : len(used)] = joined[used]
            self._shares[teacher, : len(used)] = 1 / max(1, len(used))
        self._has_records = self._shares.any(axis=(1, 2))
        # Glorot and Bengio's uniform weights, as of other networks.
        kernels = []
        for shape in ((len(parts), size, hidden_units), (len(parts), hidden_units, 1)):
            limit = math.sqrt(6 / (shape[1] + shape[2]))
            drawn = (2 * draw_uniform(math.prod(shape), draws) - 1) * limit
            kernels.append(drawn.astype(np.float32).reshape(shape))
        biases = [np.zeros((len(parts), 1, units), np.float32) for units in (hidden_units, 1)]
        self._weights = [kernels[0], biases[0], kernels[1], biases[1]]
        self._moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in self._weights]
        self._steps = 0

    def train(self, examples: np.ndarray, labels: np.ndarray) -> None:
        """Takes a step of Adam in each teacher, with the loss BCE(D(record), 1) + BCE(D(example), 0), each a mean.

        Args:
          examples: the student's, float32 `[examples, features]`.
          labels: their classes, `[examples]`.
        """
        made = self._joined(examples, labels)
        first_kernel, first_bias, second_kernel, second_bias = self._weights
        gradients: list[Any] = [0.0] * 4
        for inputs, shares, target in ((self._records, self._shares, 1.0), (made, np.float32(1 / len(examples)), 0.0)):
            before = np.matmul(inputs, first_kernel) + first_bias
            hidden = np.where(before > 0, before, _LEAK * before)
            scores = np.matmul(hidden, second_kernel) + second_bias
            of_scores = shares * (_sigmoid(scores) - np.float32(target))
            of_hidden = of_scores * second_kernel.transpose(0, 2, 1) * np.where(before > 0, np.float32(1), _LEAK)
            own = (
                np.matmul(inputs.transpose(0, 2, 1), of_hidden),
                of_hidden.sum(axis=1, keepdims=True),
                np.matmul(hidden.transpose(0, 2, 1), of_scores),
                of_scores.sum(axis=1, keepdims=True),
            )
            gradients = [total + one for total, one in zip(gradients, own, strict=True)]
        self._steps += 1
        scale = np.float32(self._rate * np.sqrt(1 - _SECOND**self._steps) / (1 - _FIRST**self._steps))
        for weight, gradient, (first, second) in zip(self._weights, gradients, self._moments, strict=True):
            first += np.float32(1 - _FIRST) * (gradient - first)
            second += np.float32(1 - _SECOND) * (gradient * gradient - second)
            weight -= scale * first / (np.sqrt(second) + np.float32(_SMALL))

    def gradients(self, examples: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns what each teacher would have changed: minus the gradient of BCE(D(x, y), 1) with respect to x.

        Returns:
          float32 `[teachers, examples, features]`, zero for teachers without records.
        """
        first_kernel, first_bias, second_kernel, second_bias = self._weights
        before = np.matmul(self._joined(examples, labels), first_kernel) + first_bias
        scores = np.matmul(np.where(before > 0, before, _LEAK * before), second_kernel) + second_bias
        of_scores = (1 - _sigmoid(scores)) * self._has_records[:, None, None]
        of_hidden = of_scores * second_kernel.transpose(0, 2, 1) * np.where(before > 0, np.float32(1), _LEAK)
        return np.matmul(of_hidden, first_kernel[:, : self._num_features].transpose(0, 2, 1))

    def votes(
        self, examples: np.ndarray, labels: np.ndarray, num_votes: int, max_grad: float | None, draws: ExactDraws
    ) -> Iterator[np.ndarray]:
        """Yields the votes of all teachers on one example after the other: int8 `[teachers, features]`, each -1, 0, 1.

        A teacher votes on the k features with the largest gradients g, and abstains elsewhere. A stochastic vote is +1
        with probability 1/2 + g / (2 b), where b is the teacher's largest |g|, at most `max_grad`.

        Guarantee: a teacher's votes have an L2 norm of at most the root of k, and are a function of its own records, of
          the released examples and of draws that do not depend on records. So adding or removing a record, or replacing
          its content under the same name, moves the sum of all votes by at most twice the root of k.

        Args:
          examples: float32 `[examples, features]`.
          labels: classes `[examples]`.
          num_votes: k, at most the number of features.
          max_grad: bound of b for stochastic votes; None for the plain sign of g.
          draws: random draws, which need not be secret, and of which as many are taken whatever the records.
        """
        gradients = self.gradients(examples, labels)
        for place in range(len(examples)):
            own = gradients[:, place]
            chosen = np.argpartition(np.abs(own), -num_votes, axis=1)[:, -num_votes:]
            values = np.take_along_axis(own, chosen, axis=1)
            if max_grad is None:
                # A network that has diverged votes for nothing.
                signs = np.nan_to_num(np.sign(values))
            else:
                bound = np.maximum(np.minimum(np.abs(values).max(axis=1, keepdims=True), max_grad), 1e-30)
                # The chance of +1 has 16 bits.
                bits = draws.words(-(-values.size // 4)).view(np.uint16)[: values.size].reshape(values.shape)
                signs = np.where((bits + np.float32(0.5)) * np.float32(2.0**-16) < 0.5 + values / (2 * bound), 1, -1)
            votes = np.zeros(own.shape, np.int8)
            np.put_along_axis(votes, chosen, (signs * self._has_records[:, None]).astype(np.int8), axis=1)
            yield votes

    def _joined(self, examples: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.concatenate([examples, one_hot(labels, self._num_classes)], axis=1)[None]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(np.minimum(-values, np.float32(80))))
