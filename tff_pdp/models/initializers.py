"""Random initial kernels, as models draw them from a NumPy generator: the same seed gives the same arrays."""

import math

import numpy as np


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns float32 of variance `2 / (fan_in + fan_out)`, for a kernel `[..., in, out]`.

    Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010.
    """
    window = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (window * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def he_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns float32 of variance `2 / fan_in`, for a kernel `[..., in, out]` whose inputs come out of a ReLU.

    He et al., "Delving Deep into Rectifiers", ICCV 2015.
    """
    return rng.normal(0.0, math.sqrt(2.0 / math.prod(shape[:-1])), shape).astype(np.float32)
