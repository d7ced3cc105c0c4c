import math

import numpy as np
import pytest

from tff_pdp.privacy.synthetic.paper_datalens import PaperAccount, even_parts, largest_vote_divergences


def test_classes_take_turns_and_small_ones_begin_again():
    # Places 0, 2, 4, 5 are of class 0, places 1, 3 of class 2; class 1 is empty.
    parts = even_parts(np.array([0, 2, 0, 2, 0, 0]), 3, 2)
    assert parts == [[0, 1, 2], [3, 4, 1]]


def test_one_record_changes_the_parts_of_several_teachers():
    y = np.array([0] * 100 + [1] * 20)
    whole = even_parts(y, 2, 30)
    # Without the first record of class 1, names of later records shift by one.
    names = [place + (place >= 100) for place in range(119)]
    less = [[names[place] for place in part] for part in even_parts(np.delete(y, 100), 2, 30)]
    assert sum(set(one) != set(other) for one, other in zip(whole, less, strict=True)) > 10
    # A record of the small class has several teachers.
    assert sum(100 in part for part in whole) > 1


def test_divergences_are_those_of_the_released_code():
    found = largest_vote_divergences(-60.0, 5.0)
    # Orders 1.1, 2, 10, 31, 41 and 101, computed by `rdp_gaussian` of the released code.
    expected = [2.099799524924137e-25, 3.7092404086805176e-25, 1.7986419543951993e-15, 1.1383866769659334, 1.64, 4.04]
    assert found[[0, 1, 9, 30, 40, 100]] == pytest.approx(expected, rel=1e-6)
    # A likely change: the bound that does not depend on votes.
    assert largest_vote_divergences(-0.01, 5.0)[:2] == pytest.approx([1.1 / 25, 2 / 25])


def test_the_account_is_spent_when_the_votes_say_so():
    sums, sigma, votes, delta = np.array([[3.0, -1.0, 2.0, 0.5]]), 40.0, 8, 1e-5
    # Nothing is clear about the largest vote: order 2 k / sigma^2 a release, as Renyi divergence.
    orders = np.concatenate([[1.1], np.arange(2, 200)])
    epsilons = [
        min(count * orders * 2 * votes / sigma**2 + math.log(1 / delta) / (orders - 1)) for count in range(1, 200)
    ]
    account = PaperAccount(3.0, delta)
    spent = [account.is_spent(sums, sigma, votes) for _ in range(199)]
    assert spent == [epsilon > 3.0 for epsilon in epsilons] and True in spent and not spent[0]
    # With one vote far above the noise nothing seems to be spent.
    clear = PaperAccount(3.0, delta)
    assert not any(clear.is_spent(np.array([[1e6, 0, 0, 0]]), sigma, votes) for _ in range(199))
