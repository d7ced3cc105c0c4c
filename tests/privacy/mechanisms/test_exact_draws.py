"""Draws of the host have exactly the laws they are named for: by enumeration where it is short, else by chi-square."""

import decimal
import hashlib
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from tests.tiers import amount
from tff_pdp.privacy.mechanisms import exact_draws
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws

KEY = bytes(range(32))
# A right law fails one in ten thousand times for a key, and keys are fixed.
CHANCE = 1e-4


class Tape(ExactDraws):
    """Draws from given words, and from zeros after them."""

    def __init__(self, *words):
        super().__init__(KEY)
        self._given = list(words)

    def words(self, size):
        return np.array([self._word() for _ in range(size)], np.uint64)

    def _word(self):
        return self._given.pop(0) if self._given else 0


def check_frequencies(found, probabilities):
    """Chi-square; outcomes too rare for it, and all others, are one."""
    total = sum(found.values())
    often = {value: total * share for value, share in probabilities.items() if total * share >= 10}
    observed = [found.get(value, 0) for value in often]
    wanted = list(often.values())
    if total - sum(wanted) >= 10:
        observed, wanted = [*observed, total - sum(observed)], [*wanted, total - sum(wanted)]
    else:
        wanted = [one * sum(observed) / sum(wanted) for one in wanted]
    assert stats.chisquare(observed, wanted).pvalue > CHANCE


# --- the stream


def test_words_are_the_blocks_of_a_keyed_hash():
    """Worked out anew: prefix, length of the key, key, number of the block."""
    draws = ExactDraws(KEY)
    stream = b"".join(
        hashlib.shake_256(b"tff_pdp exact draws" + (32).to_bytes(8, "big") + KEY + number.to_bytes(16, "big")).digest(
            8192
        )
        for number in range(3)
    )
    assert draws.words(3000).astype("<u8").tobytes() == stream[: 8 * 3000]


@pytest.mark.parametrize("sizes", [(1, 2, 3), (1023, 1, 1), (1024, 1024), (0, 5000, 0, 7), (2049, 1)])
def test_a_stream_is_the_same_in_whatever_parts_it_is_drawn(sizes):
    whole, parts = ExactDraws(KEY).words(sum(sizes)), ExactDraws(KEY)
    np.testing.assert_array_equal(np.concatenate([parts.words(size) for size in sizes]), whole)
    single = ExactDraws(KEY)
    assert [single.below(2**64) for _ in range(20)] == ExactDraws(KEY).words(20).tolist()


def test_keys_have_streams_of_their_own_and_short_ones_are_refused():
    firsts = {ExactDraws(key).below(2**64) for key in (KEY, KEY + b"\0", KEY[:-1], KEY[::-1], bytes(32))}
    assert len(firsts) == 5
    with pytest.raises(ValueError, match="the key has 15 bytes"):
        ExactDraws(bytes(15))


def test_bits_are_balanced_and_do_not_follow_each_other():
    words = ExactDraws(KEY).words(amount(test=100_000, all=1_000_000))
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
    sd = 0.5 / math.sqrt(len(words))
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * sd
    assert np.abs((bits[1:] == bits[:-1]).mean(axis=0) - 0.5).max() < 5 * sd


# --- whole numbers and orders


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 9, 2**63 + 1, 2**64, 2**64 + 1, 10**40])
def test_numbers_below_another_come_from_the_first_bits_that_do(number):
    """The rejection worked out on the words themselves."""
    bits, words = (number - 1).bit_length(), ExactDraws(KEY).words(4000).tolist()
    length, draws, place = -(-bits // 64), ExactDraws(KEY), 0
    for _ in range(200):
        expected = number
        while expected >= number:
            joined = sum(word << 64 * (length - 1 - at) for at, word in enumerate(words[place : place + length]))
            expected, place = joined >> (64 * length - bits), place + length
        assert draws.below(number) == expected


def test_numbers_below_another_are_alike_over_all_words_that_decide():
    """Three bits of a word decide about numbers below 6: each of the six comes of as many words."""
    assert Counter(Tape(word << 61).below(6) for word in range(6)) == Counter(range(6))
    # The two that are left are drawn again.
    assert {Tape(word << 61, 4 << 61).below(6) for word in (6, 7)} == {4}
    for number in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            ExactDraws(KEY).below(number)


def test_each_order_is_as_likely_and_equal_words_are_drawn_again():
    orders = Counter(tuple(Tape(*words).permutation(3)) for words in itertools.permutations([5, 9, 2**63]))
    assert set(orders.values()) == {1} and len(orders) == 6
    assert Tape(4, 4, 1, 3, 1, 2).permutation(3).tolist() == [1, 2, 0]
    draws = ExactDraws(KEY)
    found = Counter(tuple(draws.permutation(4)) for _ in range(amount(test=5_000, all=50_000)))
    check_frequencies(found, dict.fromkeys(itertools.permutations(range(4)), 1 / 24))
    assert draws.permutation(0).tolist() == [] and draws.permutation(1).tolist() == [0]
    assert np.sort(draws.permutation(10_000)).tolist() == list(range(10_000))


# --- coins


def tails_by_definition(uniform_words, probability):
    """Floor of log(1 - U) / log(1 - p), of a U that ends with these words, at two hundred digits."""
    with decimal.localcontext(decimal.Context(prec=200)):
        rest = 1 - sum(decimal.Decimal(word) / 2 ** (64 * at) for at, word in enumerate(uniform_words, 1))
        return math.floor(rest.ln() / (1 - decimal.Decimal(probability)).ln())


@pytest.mark.parametrize("probability", [0.5, 0.4, 0.1, 1 / 3, 1e-3, 1e-9, 2.0**-40, 1e-15])
def test_tails_before_heads_are_those_of_the_exact_logarithms(probability):
    words = ExactDraws(KEY).words(amount(test=40, all=1_000))
    # Beside each end, and beside places where the number of tails changes, to the last bit of a word.
    edges = [2**64 - 1, 2**64 - 2**10, 1, 2, 2**63]
    for number in (1, 2, 5, 1000):
        with decimal.localcontext(decimal.Context(prec=200)):
            edge = int((1 - (1 - decimal.Decimal(probability)) ** number) * 2**64)
        edges += [edge - 1, edge, edge + 1] if 0 < edge < 2**64 - 2 else []
    words = [*words.tolist(), *edges]
    further = 0x9E3779B97F4A7C15
    for word in words:
        draws = Tape(word, further, further, further)
        assert draws._tails(1, probability, 2**61)[0] == tails_by_definition([word] + 3 * [further], probability)


def test_floats_alone_would_be_wrong_where_a_word_does_not_decide(monkeypatch):
    """Without the exact logarithms, some tails of a rare head are others."""
    probability, words = 1e-15, ExactDraws(KEY).words(300)
    asked = []
    real = ExactDraws._exact_tails
    monkeypatch.setattr(ExactDraws, "_exact_tails", lambda *given: asked.append(given[1]) or real(*given))
    found = Tape(*words.tolist())._tails(300, probability, 2**61)
    assert len(asked) > 250
    floats = np.floor(np.log1p(-words.astype(np.float64) * 2.0**-64) / math.log1p(-probability))
    assert (found != floats).any()


@pytest.mark.parametrize("probability", [0.5, 0.25, 0.9, 0.03])
def test_sets_of_heads_have_the_law_of_independent_coins(probability):
    draws, size = ExactDraws(KEY), 5
    found = Counter(tuple(draws.heads(size, probability)) for _ in range(amount(test=6_000, all=20_000)))
    law = {
        places: probability ** len(places) * (1 - probability) ** (size - len(places))
        for count in range(size + 1)
        for places in itertools.combinations(range(size), count)
    }
    check_frequencies(found, law)


def test_heads_among_many_coins_are_as_many_and_as_far_apart_as_they_should_be():
    draws, size, probability = ExactDraws(KEY), 100_000, 0.003
    places = [draws.heads(size, probability) for _ in range(100)]
    counts = np.array([len(one) for one in places])
    assert (
        stats.kstest(counts + draws.words(100) * 2.0**-64, lambda x: smoothed_binomial(x, size, probability)).pvalue
        > CHANCE
    )
    everything = np.concatenate(places)
    assert stats.kstest(everything / size, "uniform").pvalue > CHANCE
    assert all((np.diff(one) > 0).all() and one.dtype == np.int64 for one in places)


def smoothed_binomial(values, size, probability):
    """Distribution function of a binomial number plus a uniform one."""
    whole = np.floor(values)
    below = stats.binom.cdf(whole - 1, size, probability)
    return below + (values - whole) * stats.binom.pmf(whole, size, probability)


def test_certain_and_impossible_coins_and_any_number_of_them():
    draws = ExactDraws(KEY)
    assert draws.heads(7, 1.0).tolist() == list(range(7))
    assert draws.heads(7, 0.0).tolist() == draws.heads(0, 0.5).tolist() == draws.heads(0, 1.0).tolist() == []
    for tiny in (5e-324, 1e-300, 2.0**-60):
        assert draws.heads(10**6, tiny).tolist() == []
    assert len(draws.heads(50, 1 - 2.0**-53)) == 50
    for size, probability in ((5, -0.1), (5, 1.1), (5, math.nan), (-1, 0.5), (2**62, 0.5)):
        with pytest.raises(ValueError, match="coins"):
            draws.heads(size, probability)


@pytest.mark.parametrize("probability", [0.03, 0.3])
def test_chunks_join_without_a_seam(monkeypatch, probability):
    whole = ExactDraws(KEY).heads(20_000, probability)
    monkeypatch.setattr(exact_draws, "_MOST_GAPS", 3)
    np.testing.assert_array_equal(ExactDraws(KEY).heads(20_000, probability), whole)


@pytest.mark.parametrize("probability", [2.0**-4, 0.1, 1 / 3, 0.5, 1 - 2.0**-53, 1.0])
def test_a_frequent_head_has_exactly_its_share_of_all_words(probability):
    share = Fraction(probability) * 2**64
    assert share.denominator == 1
    words = [0, max(0, share.numerator - 1), min(share.numerator, 2**64 - 1), 2**64 - 1]
    expected = [place for place, word in enumerate(words) if word < share]
    assert Tape(*words).heads(4, probability).tolist() == expected


@pytest.mark.parametrize("often", [0.0, 0.5])
def test_both_ways_to_toss_coins_have_their_law(monkeypatch, often):
    """One by one, and by the tails between heads, where either would do."""
    monkeypatch.setattr(exact_draws, "_OFTEN", often)
    draws, size, probability = ExactDraws(KEY), 4, 0.375
    found = Counter(tuple(draws.heads(size, probability)) for _ in range(amount(test=4_000, all=20_000)))
    law = {
        places: probability ** len(places) * (1 - probability) ** (size - len(places))
        for count in range(size + 1)
        for places in itertools.combinations(range(size), count)
    }
    check_frequencies(found, law)


# --- exponentials, Laplace, Gaussians


def test_a_coin_of_a_fraction_is_decided_by_whole_numbers():
    assert [Tape(word << 61).bernoulli(Fraction(2, 5)) for word in range(5)] == [True, True, False, False, False]
    assert not ExactDraws(KEY).bernoulli(Fraction(0)) and ExactDraws(KEY).bernoulli(Fraction(1))


class Script(ExactDraws):
    """Draws what is given, and asks for more where nothing is."""

    def __init__(self, choices):
        super().__init__(KEY)
        self._choices = list(choices)

    def below(self, number):
        return self._choose(number, dict.fromkeys(range(number), 1 / number))

    def _choose(self, asked, law):
        if not self._choices:
            raise Unwritten(asked, law)
        return self._choices.pop(0)


class ScriptOfCoins(Script):
    """The same where coins of exponentials have their law, so that it is enumerated what is made of them."""

    def bernoulli_exp(self, exponent):
        heads = math.exp(-exponent)
        return self._choose(exponent, {True: heads, False: 1 - heads})


class Unwritten(Exception):
    pass


def enumerated(draw, script, smallest):
    """The exact law of a draw: of all that may be given to it, and what less likely sequences add up to."""
    law, rest, open_ones = Counter(), 0.0, [((), 1.0)]
    while open_ones:
        choices, probability = open_ones.pop()
        if probability < smallest:
            rest += probability
            continue
        try:
            law[draw(script(choices))] += probability
        except Unwritten as unwritten:
            further = unwritten.args[1]
            open_ones += [((*choices, value), probability * share) for value, share in further.items() if share]
    return law, rest


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(1, 2), Fraction(1), Fraction(3, 2)])
def test_enumerated_coins_of_exponentials_have_their_law(exponent):
    law, rest = enumerated(lambda draws: draws.bernoulli_exp(exponent), Script, 2.0**-24)
    assert law[True] <= math.exp(-exponent) * (1 + 1e-15) and math.exp(-exponent) <= law[True] + rest
    assert rest < 1e-4
    if exponent == Fraction(1, 2):
        of_gaussians, other = enumerated(lambda draws: draws._is_half_exponential(), Script, 2.0**-24)
        assert abs(of_gaussians[True] - law[True]) <= max(rest, other)


@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(1), Fraction(3, 2)])
def test_enumerated_discrete_laplace_numbers_have_their_law(scale):
    law, rest = enumerated(lambda draws: draws.discrete_laplace(scale), ScriptOfCoins, 2.0**-16)
    ratio = math.exp(-1 / scale)
    for number in range(-7, 8):
        exact = (1 - ratio) / (1 + ratio) * ratio ** abs(number)
        assert law[number] <= exact * (1 + 1e-12) and exact <= (law[number] + rest) * (1 + 1e-12)
    assert rest < 0.05


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 7), Fraction(1, 2), Fraction(1), Fraction(9, 4)])
def test_coins_of_exponentials(exponent):
    draws, size = ExactDraws(KEY), amount(test=4_000, all=40_000)
    share = math.exp(-exponent)
    count = sum(draws.bernoulli_exp(exponent) for _ in range(size))
    assert abs(count - size * share) <= 4.5 * math.sqrt(size * share * (1 - share))


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(1), Fraction(5, 2), 1 / Fraction(0.1)])
def test_discrete_laplace_numbers(scale):
    draws, ratio = ExactDraws(KEY), math.exp(-1 / scale)
    found = Counter(draws.discrete_laplace(scale) for _ in range(amount(test=4_000, all=40_000)))
    law = {number: (1 - ratio) / (1 + ratio) * ratio ** abs(number) for number in range(-80, 81)}
    check_frequencies(found, law)


@pytest.mark.parametrize("fraction_bits", [0, 2, 5])
def test_rounded_gaussians_have_the_law_of_a_rounded_gaussian(fraction_bits):
    size = amount(test=30_000, all=200_000)
    found = Counter(ExactDraws(KEY).gaussian_floor(size, fraction_bits).tolist())
    steps = range(-8 << fraction_bits, 8 << fraction_bits)
    law = {step: float(np.diff(stats.norm.cdf(np.array([step, step + 1]) / 2**fraction_bits))[0]) for step in steps}
    check_frequencies(found, law)


def test_fine_gaussians_have_the_moments_tails_and_low_bits_of_gaussians():
    size = amount(test=30_000, all=200_000)
    steps = ExactDraws(KEY).gaussian_floor(size)
    values = (steps + 0.5) / 2**GRID_BITS
    assert stats.kstest(values, "norm").pvalue > CHANCE
    assert abs(values.mean()) < 4 / math.sqrt(size)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / size)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / size)
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4 / math.sqrt(size)
    for beyond in (2.0, 3.0):
        share = 2 * stats.norm.sf(beyond)
        assert abs((np.abs(values) > beyond).sum() - size * share) < 4.5 * math.sqrt(size * share)
    # The lowest twelve bits of a number so fine are uniform to far less than can be seen.
    low = Counter((steps & 15).tolist())
    check_frequencies(low, dict.fromkeys(range(16), 1 / 16))


def test_a_coarser_gaussian_is_the_finer_one_rounded_down():
    fine, coarse = (ExactDraws(KEY).gaussian_floor(2_000, bits) for bits in (40, 8))
    np.testing.assert_array_equal(fine >> 32, coarse)
    assert fine.dtype == np.int64


def karney_by_enumeration(whole, fraction_bits):
    """The chance that algorithm B keeps `whole` and each fraction, when numbers have so few bits and ties go on.

    Digit by digit: a number in [0, 1) is one of 2**bits cells, and the law within a cell is that of the algorithm's
    formula, so that the chances of cells are integrals of it.
    """
    cells = 2**fraction_bits
    edges = np.linspace(0, 1, cells + 1)
    grid = np.linspace(0, 1, 2**16 + 1)
    kept = np.exp(-grid * (2 * whole + grid) / (2 * whole + 2))
    total = np.concatenate([[0.0], np.cumsum((kept[1:] + kept[:-1]) / 2)]) / 2**16
    return np.diff(np.interp(edges, grid, total)) * cells


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_fraction_is_kept_as_often_as_karneys_algorithm_b_says(whole):
    draws, size, cells = ExactDraws(KEY), amount(test=4_000, all=40_000), 4
    expected = karney_by_enumeration(whole, 2)
    for cell in range(cells):
        count = sum(draws._keeps_fraction(whole, [(cell << 62) | (draws._word() >> 2)]) for _ in range(size))
        share = expected[cell]
        assert abs(count - size * share) < 4.5 * math.sqrt(size * share * (1 - share))


def test_numbers_that_begin_alike_are_told_apart_by_further_words():
    draws = Tape(1, 2)
    one, other = [7], [7]
    assert draws._is_less(one, other)
    # What was drawn stays: the next comparison sees the same numbers.
    assert (one, other) == ([7, 1], [7, 2])
    assert not Tape(3, 3, 9, 8)._is_less([7], [7])
