"""Draws from exact distributions with a secret key, in integer arithmetic on the host, and adds exact noise to sums.

The bits are those of SHAKE-256 (FIPS 202), keyed and in counter mode: a way to tell them from fair coin tosses would
break a standard hash function. No intermediate result is rounded, so accountants charge nothing for rounding.

Noised sums lie on a grid with steps of `stddev * 2**-GRID_BITS`. The noise is K = floor(G * 2**GRID_BITS) steps, with
an ideal standard Gaussian G. A sum of whole steps plus this noise equals the sum plus `stddev * G`, rounded down to
whole steps. The rounding is post-processing of the ideal mechanism, and costs nothing more. Each record's part of a sum
is rounded toward zero before the parts are added up, so no part gets larger; whole numbers are added up without
rounding.
"""

import decimal
import hashlib
import math
from fractions import Fraction

import numpy as np

# Longer blocks are no faster; the first draw of a key waits for a whole one: 40 microseconds.
_BLOCK_WORDS = 1024
_WORD_BITS = 64
_LEAST_KEY_BYTES = 16
# Rounded noise has 2**GRID_BITS steps to a standard deviation.
GRID_BITS = 26
# Coins, or gaps between heads, that are drawn together.
_MOST_GAPS = 2**18
# From this probability of heads on, coins are tossed one by one, which is faster.
_OFTEN = 2.0**-4
_HALF = Fraction(1, 2)
# A share by which parts, and the noise's standard deviation, may have been rounded before.
_ROUNDED = 2.0**-48
# Sums below this are added up as int64.
_LARGEST = 2.0**62


class ExactDraws:
    """A stream of random bits, and draws from exact distributions that use the stream.

    Guarantee: if the bits are independent tosses of a fair coin, each draw has exactly the distribution that its method
      states, and draws are independent of each other. Equal keys and equal calls give equal draws.
    Assumes: the key is secret and serves one purpose; SHAKE-256 with a secret prefix is a pseudo-random function. The
      duration of a draw, which depends on the drawn value, stays secret.
    """

    def __init__(self, key: bytes):
        """Begins the stream of a key of at least 16 bytes; every purpose needs a separate key.

        Raises:
          ValueError: the key has fewer than 16 bytes.
        """
        if len(key) < _LEAST_KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes; at least {_LEAST_KEY_BYTES} are needed")
        # The length comes before the key, so that no two keys and counters run together.
        self._prefix = b"tff_pdp exact draws" + len(key).to_bytes(8, "big") + key
        self._num_blocks = 0
        self._block, self._place = np.zeros(0, np.uint64), 0
        self._as_integers: list[int] = []

    def words(self, size: int) -> np.ndarray:
        """Draws uniform words, uint64 `[size]`; successive draws are consecutive parts of one stream."""
        found, filled = np.empty(size, np.uint64), 0
        while filled < size:
            if self._place == len(self._block):
                self._refill()
            taken = min(size - filled, len(self._block) - self._place)
            found[filled : filled + taken] = self._block[self._place : self._place + taken]
            filled, self._place = filled + taken, self._place + taken
        return found

    def _word(self) -> int:
        if self._place == len(self._block):
            self._refill()
        if not self._as_integers:
            self._as_integers = self._block.tolist()
        self._place += 1
        return self._as_integers[self._place - 1]

    def _refill(self) -> None:
        message = self._prefix + self._num_blocks.to_bytes(16, "big")
        block = hashlib.shake_256(message).digest(_BLOCK_WORDS * _WORD_BITS // 8)
        self._block, self._place, self._as_integers = np.frombuffer(block, "<u8").astype(np.uint64), 0, []
        self._num_blocks += 1

    def below(self, number: int) -> int:
        """Draws a uniform whole number in `[0, number)`.

        Raises:
          ValueError: `number` is below 1.
        """
        if number < 1:
            raise ValueError(f"number is {number}; it must be at least 1")
        bits = (number - 1).bit_length()
        while True:
            value = 0
            for _ in range(-(-bits // _WORD_BITS)):
                value = value << _WORD_BITS | self._word()
            value >>= -bits % _WORD_BITS
            if value < number:
                return value

    def permutation(self, size: int) -> np.ndarray:
        """Draws a uniform permutation, int64 `[size]`.

        Positions are sorted by random words. If two words are equal, sorting would favour one order, so all words are
        drawn again.
        """
        while True:
            words = self.words(size)
            order = np.argsort(words)
            ordered = words[order]
            if not (ordered[1:] == ordered[:-1]).any():
                return order.astype(np.int64, copy=False)

    def heads(self, size: int, probability: float) -> np.ndarray:
        """Tosses `size` independent coins, and returns the positions of the heads, int64 `[heads]`, ascending.

        If heads are rare, coins are not tossed one by one: the numbers of tails between heads are drawn from a
        geometric distribution. Time and memory then grow with the number of heads.

        Args:
          size: number of coins, below 2**62.
          probability: probability of heads, in `[0, 1]`; coins have exactly this float64 as their probability.

        Raises:
          ValueError: the probability, or the size, is out of range.
        """
        if not (0 <= probability <= 1 and 0 <= size < 2**62):
            raise ValueError(
                f"cannot toss {size} coins with probability {probability} of heads: the size must be in [0, 2**62), "
                "the probability in [0, 1]"
            )
        found, last = [np.zeros(0, np.int64)], -1 if probability else size
        if probability >= _OFTEN:
            # A multiple of 2**-57 at least, so that a word decides exactly.
            limit, last = math.ldexp(probability, _WORD_BITS), size
            for start in range(0, size, _MOST_GAPS):
                words = self.words(min(_MOST_GAPS, size - start))
                is_head = words <= np.uint64(int(limit) - 1)
                found.append(start + np.flatnonzero(is_head))
        while last < size - 1:
            expected = (size - 1 - last) * probability
            # Places stay below 2**63, and one draw mostly does.
            number = min(math.ceil(expected + 6 * math.sqrt(expected)) + 8, _MOST_GAPS, max(1, 2**62 // size))
            places = last + np.cumsum(self._tails(number, probability, size) + 1)
            found.append(places[places < size])
            last = int(places[-1])
        return np.concatenate(found)

    def _tails(self, number: int, probability: float, most: int) -> np.ndarray:
        """Counts the tails before a coin's first head, `number` times: int64, at most `most`.

        With U uniform the count is floor(x), x = log(1 - U) / log(1 - p). A word is the beginning of U; where a word
        does not decide the floor by itself, for all that float64 may round, U gets more words and more precision.
        """
        words = self.words(number)
        uniform = words.astype(np.float64) * 2.0**-_WORD_BITS
        scale = -math.log1p(-probability)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            logs = -np.log1p(-uniform)
            # The word is rounded to 53 bits and is U's beginning only; a logarithm is right to far more than 46 bits.
            margin = ((uniform * 2.0**-51 + 2.0**-63) / (1 - uniform) + logs * 2.0**-46) / scale
            low, high = np.floor(logs / scale - margin), np.floor(logs / scale + margin)
            is_sure = (low == high) | ((low < 0) & (high == 0)) | (low >= most)
        tails = np.where(is_sure, np.clip(np.nan_to_num(high), 0, most), 0).astype(np.int64)
        for place in np.flatnonzero(~is_sure):
            tails[place] = self._exact_tails(int(words[place]), probability, most)
        return tails

    def _exact_tails(self, word: int, probability: float, most: int) -> int:
        bits, start = _WORD_BITS, word
        # Enough digits for 1 - p and 1 - U as they are, and sixty of their quotient.
        own_digits = probability.as_integer_ratio()[1].bit_length()
        while True:
            with decimal.localcontext(decimal.Context(prec=bits + own_digits + 60)):
                # `decimal` rounds logarithms right to the last digit.
                scale = (1 - decimal.Decimal(probability)).ln()
                low = (1 - decimal.Decimal(start) / 2**bits).ln()
                high = (1 - decimal.Decimal(start + 1) / 2**bits).ln() if start + 1 < 2**bits else None
                slack = decimal.Decimal(10) ** -(bits // 4 + 30)
                least = math.floor(low / scale * (1 - slack))
                if least >= most:
                    return most
                if high is not None and least == math.floor(high / scale * (1 + slack)):
                    return least
            start, bits = start << _WORD_BITS | self._word(), bits + _WORD_BITS

    def bernoulli(self, probability: Fraction) -> bool:
        """Returns True with the given probability, which is in `[0, 1]`."""
        return self.below(probability.denominator) < probability.numerator

    def bernoulli_exp(self, exponent: Fraction) -> bool:
        """Returns True with probability exp(-exponent), for an exponent of at least 0.

        Source: Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020, algorithm 1.
        """
        while exponent > 1:
            if not self.bernoulli_exp(Fraction(1)):
                return False
            exponent -= 1
        tries = 1
        while self.bernoulli(exponent / tries):
            tries += 1
        return tries % 2 == 1

    def discrete_laplace(self, scale: Fraction) -> int:
        """Draws a whole number k with a probability proportional to exp(-|k| / scale).

        Source: as in `bernoulli_exp`, algorithm 2.

        Args:
          scale: scale of the distribution, positive.
        """
        whole, step = scale.numerator, scale.denominator
        while True:
            part = self.below(whole)
            if not self.bernoulli_exp(Fraction(part, whole)):
                continue
            times = 0
            while self.bernoulli_exp(Fraction(1)):
                times += 1
            size, is_negative = (part + whole * times) // step, self.bernoulli(_HALF)
            # Zero has one sign only.
            if size or not is_negative:
                return -size if is_negative else size

    def gaussian_floor(self, size: int, fraction_bits: int = GRID_BITS) -> np.ndarray:
        """Draws floor(G * 2**fraction_bits), int64 `[size]`, for standard Gaussians G.

        Add such noise to a sum that is a whole number of steps of `sigma * 2**-fraction_bits`: the result is the sum
        plus `sigma * G`, rounded down to whole steps, and reveals no more than the ideal mechanism's result. Half a
        step, added to the result, offsets the rounding on average.

        Source: Karney, "Sampling exactly from the normal distribution", ACM TOMS 42 (2016), algorithm N; only those
        digits of G are drawn that a comparison or the result needs.

        Args:
          size: number of draws.
          fraction_bits: number of bits after the binary point, at most 50.
        """
        return np.fromiter((self._gaussian_floor(fraction_bits) for _ in range(size)), np.int64, size)

    def _gaussian_floor(self, fraction_bits: int) -> int:
        while True:
            whole = 0
            while self._is_half_exponential():
                whole += 1
            if not all(self._is_half_exponential() for _ in range(whole * (whole - 1))):
                continue
            fraction = [self._word()]
            if all(self._keeps_fraction(whole, fraction) for _ in range(whole + 1)):
                size = (whole << fraction_bits) + (fraction[0] >> (_WORD_BITS - fraction_bits))
                # A number between two steps is rounded down, on either side of zero.
                return size if self._word() >> (_WORD_BITS - 1) else -size - 1

    def _is_half_exponential(self) -> bool:
        """Returns True with probability exp(-1/2), as `bernoulli_exp` draws it."""
        tries = 1
        while self.below(2 * tries) == 0:
            tries += 1
        return tries % 2 == 1

    def _keeps_fraction(self, whole: int, fraction: list[int]) -> bool:
        """Returns True with probability exp(-x (2k + x) / (2k + 2)), k `whole`, x `fraction`: Karney's algorithm B."""
        smallest, is_even = fraction, True
        while True:
            other = [self._word()]
            if not self._is_less(other, smallest):
                return is_even
            # A uniform number below (2k + x) / (2k + 2): by its part of 2k + 2, and where that is the 2k-th, by x.
            part = self.below(2 * whole + 2)
            if part > 2 * whole or (part == 2 * whole and not self._is_less([self._word()], fraction)):
                return is_even
            smallest, is_even = other, not is_even

    def _is_less(self, one: list[int], other: list[int]) -> bool:
        """Compares two numbers in [0, 1) by their words, and draws words that are not known yet."""
        place = 0
        while True:
            for digits in (one, other):
                if len(digits) == place:
                    digits.append(self._word())
            if one[place] != other[place]:
                return one[place] < other[place]
            place += 1


def whole_steps(parts: np.ndarray, stddev: float) -> np.ndarray:
    """Rounds parts toward zero to whole steps, and adds up the steps over axis 0: Python's integers, dtype object.

    Guarantee: each rounded value is, in magnitude, at most `1 - 2**-49` times the value. The margin exceeds float64's
      rounding errors in a part (some units in the last place) and in the standard deviation, so the sensitivity does
      not grow.
    Assumes: the parts are finite, and each depends on its own record alone.

    Args:
      parts: the parts of n records, float64 `[n, ...]`; n may be 0.
      stddev: standard deviation of the noise on the sum; positive.
    """
    shrunk = parts * (1 - _ROUNDED)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = np.trunc(shrunk / (stddev * 2.0**-GRID_BITS))
    if (np.abs(steps) * max(1, len(parts)) < _LARGEST).all():
        return np.asarray(steps.astype(np.int64).sum(axis=0)).astype(object)
    step = Fraction(stddev) / 2**GRID_BITS
    exact = np.array([int(Fraction(part) / step) for part in shrunk.ravel().tolist()], object)
    return np.asarray(exact.reshape(parts.shape).sum(axis=0), object)


def add_noise(steps: np.ndarray, stddev: float, draws: ExactDraws) -> np.ndarray:
    """Adds noise to a sum of whole steps: float64, shaped like `steps`.

    Guarantee: the result is a function of `sum + stddev * G` alone, with an ideal standard Gaussian G for each value.
    Assumes: as in `ExactDraws`.

    Args:
      steps: sum from `whole_steps`.
      stddev: standard deviation of the noise, as passed to `whole_steps`.
      draws: draws from a secret key that has no other use.
    """
    noised = steps.ravel() + draws.gaussian_floor(steps.size).astype(object)
    # The middle of a step: rounded noise is on average half a step less than a Gaussian.
    return (2 * noised + 1).astype(np.float64).reshape(steps.shape) * (stddev * 2.0 ** -(GRID_BITS + 1))
