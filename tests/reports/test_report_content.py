import json
import math

from tff_pdp.reports.content import json_safe


def test_what_is_not_finite_has_a_name_in_json_and_an_epsilon_that_does_not_hold_is_null():
    silo = {
        "id": "nan",
        "epsilon_target": math.inf,
        "epsilon_spent": math.inf,
        "epsilon_pld": math.nan,
        "history": (1, 2),
    }
    assert json.loads(json.dumps(json_safe({"silos": [silo]}), allow_nan=False)) == {
        "silos": [
            {"id": "nan", "epsilon_target": "inf", "epsilon_spent": None, "epsilon_pld": "nan", "history": [1, 2]}
        ]
    }
