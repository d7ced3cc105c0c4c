import json

import dp_accounting
import numpy as np
import pytest

from tff_pdp.errors import BudgetError
from tff_pdp.privacy.accounting.accountants import exact_gaussian_epsilon
from tff_pdp.privacy.accounting.events import event_from_dict
from tff_pdp.privacy.synthetic.gaussian import DpGaussian
from tff_pdp.privacy.synthetic.release import plan_release, statement

GENERATOR = DpGaussian(examples=50, num_classes=2)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_noise_is_the_least_within_the_budget(epsilon):
    planned = plan_release(GENERATOR, epsilon, 1e-5)
    assert planned.event == dp_accounting.GaussianDpEvent(planned.noise_multiplier)
    assert planned.epsilon <= epsilon < exact_gaussian_epsilon(planned.noise_multiplier * 0.999, 1e-5)
    ledger = planned.ledger("ward")
    assert ledger.epsilon("ward").best == planned.epsilon and ledger.num_events == 1


def test_no_budget_is_no_release():
    with pytest.raises(BudgetError):
        plan_release(GENERATOR, 1e-9, 1e-5)


def test_releases_differ():
    planned = plan_release(GENERATOR, 5, 1e-5)
    x, y = np.tile([[0.1, 0.7], [0.3, 0.2]], (200, 1)), np.tile([0, 1], 200)
    first, second = planned.make(x, y), planned.make(x, y)
    assert first.x.shape == (50, 2) and not (first.x == second.x).all()


def test_the_statement_says_unit_adjacency_budget_and_what_is_public():
    planned = plan_release(GENERATOR, 2, 1e-6)
    stated = json.loads(json.dumps(statement(planned, ["the schema"], "one row")))
    assert stated["claim"] == "formal" and stated["unit"] == "one row" and stated["adjacency"] == "add_or_remove_one"
    assert stated["epsilon"] == planned.epsilon <= stated["epsilon_target"] == 2 and stated["delta"] == 1e-6
    assert event_from_dict(stated["event"]) == planned.event
    assert stated["public"] == ["the schema"] and stated["generator"]["examples"] == 50
