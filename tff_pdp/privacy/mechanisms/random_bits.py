"""Draws random bits for several clients at once, and makes Gaussians from them.

A client's bits depend on the client's seed alone: they are equal on every engine, for one or several clients. There are
two generators. `philox` is TensorFlow's own generator, Philox 4x32-10 in counter mode (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011), and is not cryptographic. Its key is one half of a seed; the other half is the
upper half of its counter. The module `philox` has the same generator for GPUs. `chacha20` (module `chacha20`) is
cryptographic, at several times the cost. Its key is the whole seed.
"""

import decimal
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.errors import EngineError
from tff_pdp.generators import chacha20, philox
from tff_pdp.privacy.accounting.grid_distance import ROUNDING
from tff_pdp.privacy.facts import Generator

_Function = Callable[[tf.Tensor], tf.Tensor]
_PHILOX = 1
# Draws of one seed lie 2**_PLACE_BITS blocks of 128 bits apart.
_PLACE_BITS = 40
_WORDS_OF_A_PAIR = 6
# Steps on fewer values at once are not compiled.
_MANY = 4096
# Length of the longest pair that is checked; number of checked pairs near an end of (0, 1), and the stride elsewhere.
_LARGEST_CHECKED, _NEAR_AN_END, _CHECKED_EACH = 10.6, 180, 7
_PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
# Clients whose bits are drawn in one step of the loop over clients. Unrolled, they run in parallel.
_UNROLLED = 32


def draw_bits(
    seed: tf.Tensor, size: tf.Tensor | int, place: tf.Tensor | int = 0, generator: Generator = "philox"
) -> tf.Tensor:
    """Draws random words, uint32 `[size]`. A longer draw with equal seed and place begins with the shorter draw.

    Args:
      seed: int64 `[2]`, secret.
      size: number of words, int32 scalar.
      place: number of the stream, int, at least 0 and below 2**23; each use of a seed needs a different place.
      generator: generator of the bits.
    """
    if generator == "chacha20":
        return chacha20.keystreams(seed[tf.newaxis], size, place)[0]
    if gpu_is_visible():
        return philox.keystreams(seed[tf.newaxis], size, place)[0]
    words = tf.bitcast(seed, tf.uint64)
    start = tf.cast(place, tf.uint64) * (1 << _PLACE_BITS)
    return _philox(words[:1], tf.stack([start, words[1]]), size)


def draw_bits_of_all(seeds: tf.Tensor, size: tf.Tensor | int, generator: Generator = "philox") -> tf.Tensor:
    """Draws random words, uint32 `[clients, size]`: row i equals `draw_bits` of `seeds[i]` at place 0.

    Args:
      seeds: int64 `[clients, 2]`, secret.
      size: number of words for each client, int32 scalar.
      generator: generator of the bits.
    """
    if generator == "chacha20":
        return chacha20.keystreams(seeds, size, nonce=0)
    if gpu_is_visible():
        return philox.keystreams(seeds, size, place=0)
    if seeds.shape[0] == 1:
        return draw_bits(seeds[0], size)[tf.newaxis]
    num_clients: Any = tf.shape(seeds)[0]
    padded = tf.pad(seeds, [[0, -num_clients % _UNROLLED], [0, 0]])
    words = tf.reshape(tf.bitcast(padded, tf.uint64), [-1, _UNROLLED, 2])

    def draw_block(block: tf.Tensor) -> tf.Tensor:
        keys = tf.unstack(block[:, :1])
        counters = tf.unstack(tf.concat([tf.zeros([_UNROLLED, 1], tf.uint64), block[:, 1:]], axis=1))
        return tf.stack([_philox(key, counter, size) for key, counter in zip(keys, counters, strict=True)])

    blocks = tf.map_fn(
        draw_block, words, fn_output_signature=tf.TensorSpec([_UNROLLED, None], tf.uint32), parallel_iterations=1
    )
    return tf.reshape(blocks, [-1, size])[:num_clients]


def _philox(key: tf.Tensor, counter: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size], key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )


def bits_for_gaussians(size: int) -> int:
    """Returns the number of 32-bit words from which `gaussians` makes `size` draws."""
    return _WORDS_OF_A_PAIR * math.ceil(size / 2)


def gaussians(bits: tf.Tensor, size: int) -> tf.Tensor:
    """Makes standard Gaussians, float64 `[..., size]`, from uint32 `[..., bits_for_gaussians(size)]`.

    Box and Muller's transform ("A Note on the Generation of Random Normal Deviates", 1958) makes a pair of Gaussians
    from a radius with 128 random bits and an angle with 64, which are used for no other pair. TensorFlow's own draws
    end at 5.68 standard deviations; these end at 13.4.

    For large draws, logarithm, sine and cosine are series, which XLA compiles into one loop. This is several times as
    fast as TensorFlow's own functions, which XLA would call value by value. Small draws use TensorFlow's functions, one
    operation each. The results of the two ways differ in the last digits.

    Guarantee: let the bits be the first digits of ideal uniform numbers, and x the ideal pair that these numbers make.
      The pair made here is within `grid_distance.ROUNDING * |x|` of x, if |x| is at most 10.6.

      Let u = 2**-53. The radius comes from a uniform number v. The drawn bits are the digits of v's distance from the
      nearer end of (0, 1). Computations use this distance, so that v has a relative error of 2 u at either end. The
      exponential variable -log(v) then has errors of 2.9 u from v, 2.5 u from the logarithm, and u from the digits of
      1 - v that float64 cannot store. The radius, a square root, then has an error of 4.2 u. The angle in its quarter,
      of at most pi / 4, is off by up to 2.4 u; sine and cosine are off by 1.8 u together, products by u. In all that
      makes sqrt(4.2^2 + 2.4^2) + 2.8 < 7.7 times u |x|. The digits that are not drawn add less than 0.3 u |x| for these
      lengths. The last u in `ROUNDING` is for a product with a standard deviation.
    Assumes: bits are uniform and independent; float64 is that of IEEE 754, with or without fused multiply-add; relative
      errors are at most 2.5 u for logarithms and, for angles up to pi / 4, 1.6 u for sines and 1.4 u for cosines, in
      TensorFlow's functions and in the series. Tests compare a hundred thousand values with exact values; each process
      compares some hundreds (`check_pairs`).

    Raises:
      EngineError: as in `check_pairs`.
    """
    compiled = bits.shape.rank == 1 and are_compiled(size)
    check_pairs(compiled)
    draws = tf.concat(_pairs(bits, compiled), axis=-1)
    return tf.split(draws, [size, 1], axis=-1)[0] if size % 2 else draws


def draw_gaussians(
    seed: tf.Tensor, size: int, place: tf.Tensor | int = 0, generator: Generator = "philox"
) -> tf.Tensor:
    """Draws standard Gaussians, float64 `[size]`; arguments and guarantee as in `draw_bits` and `gaussians`."""
    draw = _compiled_bits if generator == "philox" and are_compiled(size) else draw_bits
    return gaussians(draw(seed, bits_for_gaussians(size), tf.cast(place, tf.int32), generator), size)


def are_compiled(size: int) -> bool:
    """Decides if XLA compiles operations on `size` values; compilation takes tenths of a second for each size.

    False if there is a GPU, for which XLA needs tools that TensorFlow does not install.
    """
    return size >= _MANY and not gpu_is_visible()


def gpu_is_visible() -> bool:
    """Decides if graphs use the operations that have kernels on a GPU, rather than those that a CPU is fastest with.

    True if TensorFlow finds a GPU. Both forms of a computation have the same random bits and the same batches.
    """
    return bool(tf.config.list_physical_devices("GPU"))


@functools.cache
def check_pairs(compiled: bool) -> None:
    """Checks pairs of Gaussians, once in a process: each must be as close to its ideal pair as `gaussians` guarantees.

    XLA flags for fast mathematics, which environment variables and files may set, break IEEE 754: draws may then be
    wrong, or far less exact than the ledger's charge assumes.

    Args:
      compiled: whether to check the pairs that XLA's compiled loop makes, instead of the pairs that TensorFlow's own
        functions make.

    Raises:
      EngineError: a pair is too far from its ideal pair.
    """
    # Ordinary digits, except that the radius's numbers of the first pairs lie ever nearer to either end of (0, 1).
    digits = hashlib.shake_256(b"pairs that are checked").digest(4 * _WORDS_OF_A_PAIR * _MANY // 2)
    words = np.frombuffer(digits, np.uint32).reshape(_WORDS_OF_A_PAIR, -1).copy()
    for place in range(_NEAR_AN_END):
        # Every other number is half as large, down to and beyond the 2**-78 of lengths of 10.6.
        number = int(words[0, place]) << 64 | int(words[1, place]) << 32 | int(words[2, place])
        number >>= place // 2
        number = number if place % 2 else 2**96 - 1 - number
        words[0, place], words[1, place] = number >> 64, number >> 32 & 2**32 - 1

    @tf.function(autograph=False)
    def draw(bits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _pairs(bits, compiled)

    def drawn_on(device: str) -> np.ndarray:
        with tf.device(device):
            return np.stack(draw(tf.constant(words.reshape(-1))), axis=1)

    devices = ["/CPU:0", *(["/GPU:0"] if tf.config.list_physical_devices("GPU") else [])]
    # The caller may be building a graph; another thread is not.
    with ThreadPoolExecutor(1) as thread:
        for found in thread.map(drawn_on, devices):
            _check_exact(found, words)


def _check_exact(found: np.ndarray, words: np.ndarray) -> None:
    """Checks pairs, float64 `[pairs, 2]`, against the ideal pairs of their words, uint32 `[6, pairs]`."""
    # Some pairs of each lane of a vector.
    for number in (*range(_NEAR_AN_END), *range(_NEAR_AN_END, len(found), _CHECKED_EACH)):
        exact = exact_pair(words[:, number].tolist())
        length = math.hypot(*map(float, exact))
        errors = (decimal.Decimal(float(one)) - other for one, other in zip(found[number], exact, strict=True))
        error = math.hypot(*map(float, errors))
        # One of the units that are charged for belongs to the product with a standard deviation.
        if length <= _LARGEST_CHECKED and not error <= (ROUNDING - 2.0**-53) * length:
            raise EngineError(
                f"TensorFlow's float64 functions are too inexact for noise here: a pair of length {length:.3g} is off "
                f"by {error / length * 2**53:.3g} units in the last place, and at most {ROUNDING * 2**53 - 1:g} are "
                "accounted for. Remove flags for fast mathematics from XLA_FLAGS, TF_XLA_FLAGS and the files they name"
            )


def exact_pair(words: Sequence[int]) -> tuple[decimal.Decimal, decimal.Decimal]:
    """Computes the ideal pair of Gaussians of six random words, to forty decimal digits."""
    first, second, third, fourth, high, low = words
    with decimal.localcontext(prec=50):
        half = decimal.Decimal("0.5")
        is_upper = first >= 2**31
        upper_words = [2**32 - 1 - word if is_upper else word for word in (first, second)]
        distance = functools.reduce(lambda number, word: number * 2**32 + word, [*upper_words, third, fourth])
        nearer = (decimal.Decimal(distance) + half) / 2**128
        radius = (-2 * (1 - nearer if is_upper else nearer).ln()).sqrt()
        quarter, rest = divmod(high, 2**30)
        angle = (decimal.Decimal((rest - 2**29) * 2**32 + low) / 2**63) * _PI
        sine, cosine = _sum_of_powers(angle, 1), _sum_of_powers(angle, 0)
        # Turned by quarters.
        for _ in range(quarter):
            sine, cosine = cosine, -sine
        return radius * cosine, radius * sine


def _sum_of_powers(angle: decimal.Decimal, first: int) -> decimal.Decimal:
    """Computes the sine, if `first` is 1, or the cosine, if it is 0, from its power series."""
    term = total = angle if first else decimal.Decimal(1)
    for power in range(first + 1, 45, 2):
        term *= -angle * angle / (power * (power + 1))
        total += term
    return total


def _pairs(bits: tf.Tensor, compiled: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes both values of each pair from `bits`, the words of the pairs."""
    if compiled:
        # The radius has a loop of its own: in a single loop it would be computed once for each of the two values.
        return _compiled_parts(bits, _compiled_radius(bits))
    words = _words(bits)
    return _parts(words, _radius(words, tf.math.log), tf.math.sin, tf.math.cos)


def _words(bits: tf.Tensor) -> list[tf.Tensor]:
    """Returns all first words, all second words, and so on, as float64: GPUs do not split lists of integers."""
    return tf.split(tf.cast(bits, tf.float64), _WORDS_OF_A_PAIR, axis=-1)


_compiled_bits = tf.function(draw_bits, jit_compile=True, autograph=False)


@tf.function(jit_compile=True, autograph=False)
def _compiled_radius(bits: tf.Tensor) -> tf.Tensor:
    return _radius(_words(bits), _log)


@tf.function(jit_compile=True, autograph=False)
def _compiled_parts(bits: tf.Tensor, radius: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return _parts(_words(bits), radius, _sin, _cos)


def _radius(words: Sequence[tf.Tensor], log: _Function) -> tf.Tensor:
    """Makes lengths of pairs, roots of twice an exponential variable, from the digits of a uniform number."""
    first, second, third, fourth, *_ = words
    # The first bit says which end of (0, 1) is nearer: the distance from that end keeps all its digits. Half of a last
    # digit keeps the distance above zero.
    is_upper = first >= 2.0**31
    high, following = (tf.where(is_upper, (2.0**32 - 1) - word, word) for word in (first, second))
    distance = (high + following * 2.0**-32) * 2.0**-32 + (third + (fourth + 0.5) * 2.0**-32) * 2.0**-96
    uniform = tf.where(is_upper, 1.0 - distance, distance)
    # The part rounded away is known exactly, and so short that it is the change of the logarithm times the number.
    lost = tf.where(is_upper, distance - (1.0 - uniform), tf.zeros_like(distance))
    return tf.sqrt(2.0 * (lost / uniform - log(uniform)))


def _parts(
    words: Sequence[tf.Tensor], radius: tf.Tensor, sin: _Function, cos: _Function
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes both values of pairs, from the digits of their angles and from their lengths."""
    *_, high, low = words
    # Two bits say which quarter of the circle it is, the others how far it is from the quarter's middle.
    quarter = tf.floor(high * 2.0**-30)
    angle = ((high - quarter * 2.0**30 - 2.0**29) + low * 2.0**-32) * (math.pi * 2.0**-31)
    sine, cosine = sin(angle), cos(angle)
    is_odd = tf.equal(tf.abs(quarter - 2.0), 1.0)
    signed = tf.where(quarter > 1.0, -radius, radius)
    return signed * tf.where(is_odd, -sine, cosine), signed * tf.where(is_odd, cosine, sine)


# 2 / 3, 2 / 5, ... of log((1 + x) / (1 - x)) = 2 x + x^3 * these, -1 / 3!, 1 / 5!, ... of the sine, and 1 / 4!,
# -1 / 6!, ... of the cosine, as far as what follows is below a thirtieth of 2**-53 of the result, for all that come.
_LOGARITHM = [2 / (2 * k + 1) for k in range(1, 11)]
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(1, 9)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(2, 9)]
# The logarithm of 2 in two parts; the first part times a whole number below 2**8 is exact.
_LOG_2 = float.fromhex("0x1.62e42fefa39p-1"), float.fromhex("0x0.ef35793c7673007e5ed5e8p-45")
_ROOT_OF_A_HALF = 0x3FE6A09E667F3BCD


def _sin(angles: tf.Tensor) -> tf.Tensor:
    """Computes the sine of float64 angles up to pi / 4."""
    square = angles * angles
    return angles + angles * square * _polynomial(_SINE, square)


def _cos(angles: tf.Tensor) -> tf.Tensor:
    """Computes the cosine of float64 angles up to pi / 4."""
    square = angles * angles
    return 1.0 - 0.5 * square + square * square * _polynomial(_COSINE, square)


def _log(values: tf.Tensor) -> tf.Tensor:
    """Computes the logarithm of float64 values from 2**-200 to 1."""
    # As a fraction times 2**exponent, with a fraction between the roots of a half and of two: from the digits that say
    # which float64 it is.
    shifted = tf.bitcast(values, tf.int64) + ((1023 << 52) - _ROOT_OF_A_HALF)
    exponent = tf.bitwise.right_shift(tf.bitcast(shifted, tf.uint64), tf.constant(52, tf.uint64))
    # A small whole number below the digits of 2**52: a cast that takes no time.
    exponent = tf.bitcast(tf.bitwise.bitwise_or(exponent, tf.constant(1075 << 52, tf.uint64)), tf.float64)
    exponent -= 2.0**52 + 1023
    digits = tf.bitwise.bitwise_and(shifted, (1 << 52) - 1) + _ROOT_OF_A_HALF
    part = tf.bitcast(digits, tf.float64) - 1.0
    # log(1 + part) = part - part^2 / 2 + ratio (part^2 / 2 + ...): the largest terms are known to the last digit.
    ratio = part / (2.0 + part)
    square, half = ratio * ratio, 0.5 * part * part
    small = ratio * (half + square * _polynomial(_LOGARITHM, square)) + exponent * _LOG_2[1]
    return exponent * _LOG_2[0] - ((half - small) - part)


def _polynomial(coefficients: Sequence[float], argument: tf.Tensor) -> tf.Tensor:
    """Sums coefficients times powers from zero up, by Horner's rule."""
    total = tf.constant(coefficients[-1], tf.float64)
    for coefficient in coefficients[-2::-1]:
        total = total * argument + coefficient
    return total
