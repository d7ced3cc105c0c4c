"""Declared hyper-parameters: their ranges in words, in checks and in schemas, and how gradients are counted."""

import dataclasses

import numpy as np
import pytest

from tff_pdp.algorithms.hyper_parameters import (
    ADAPT_STEPS,
    LEARNING_RATE,
    LOCAL_STEPS,
    SET_BY_RUNTIME,
    Hook,
    HParam,
    Steps,
    count_gradients,
    step_names,
)
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.errors import ConfigError

SHARE = HParam(0.5, "share", high=1.0)
AUTOMATIC = HParam(1.0, is_auto=True)
FED_AVG = build_fed_avg()


@pytest.mark.parametrize(
    ("declared", "words", "good", "bad"),
    [
        (LEARNING_RATE, "a number of at least 0", [0, 0.5, 3], [-0.1, "0.1", "auto", True, None, np.inf, np.nan]),
        (SHARE, "a number of at least 0 and at most 1", [0, 1, 0.25], [1.01, -1]),
        (AUTOMATIC, "a number of at least 0, or auto", [2.5, "auto"], ["Auto", "epoch"]),
        (
            LOCAL_STEPS,
            "a whole number of at least 1, or epochs, such as '5 epochs'",
            [1, 2**31 - 1, "epoch", "12 epochs"],
            [0, 2**31, 1.0, True, "auto", "0 epochs"],
        ),
    ],
)
def test_a_value_is_checked_as_it_is_said(declared, words, good, bad):
    assert declared.words == words
    for value in good:
        declared.check("algorithms.mine.one", value)
    for value in bad:
        with pytest.raises(ConfigError) as error:
            declared.check("algorithms.mine.one", value)
        assert str(error.value) == f"algorithms.mine.one must be {words}, not {value!r}"


def test_why_a_value_cannot_be_auto_is_said():
    with pytest.raises(ConfigError, match=r"not 'auto': nobody knows$"):
        dataclasses.replace(AUTOMATIC, is_auto=False, not_auto="nobody knows").check("one", "auto")


def test_schemas_are_of_the_same_values():
    assert SHARE.schema == {"type": "number", "minimum": 0, "maximum": 1}
    assert AUTOMATIC.schema["anyOf"][1] == {"const": "auto"}
    numbers, text = LOCAL_STEPS.schema["anyOf"]
    assert (numbers["type"], numbers["minimum"], text["type"]) == ("integer", 1, "string")


def test_gradients_are_counted_by_steps_and_products_of_steps():
    hparams = {
        "learning_rate": LEARNING_RATE,
        "head_steps": Steps(3),
        "outer": Steps(2, factors=("inner", "innermost")),
        "inner": Steps(5),
        "innermost": Steps(1),
        "adapt_steps": ADAPT_STEPS,
    }
    values = {"head_steps": np.array([1, 4]), "outer": np.array([2, 3]), "inner": 5, "innermost": 7, "adapt_steps": 11}
    assert count_gradients(hparams, values).tolist() == [1 + 2 * 35, 4 + 3 * 35]
    assert count_gradients(hparams, values, in_adapt=True) == 11
    assert step_names(hparams) == ("head_steps", "outer", "inner", "innermost")
    assert step_names(hparams, in_adapt=True) == ("adapt_steps",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hparams": {**FED_AVG.hparams, "round": SET_BY_RUNTIME}},
            "client_index, budget_epsilon can be set by the run",
        ),
        ({"public": {"steps": "weighted_mean"}}, "set `public` and `public_values` together"),
        ({"public": {"update": "weighted_mean"}, "public_values": dict}, "no name may also be `released`"),
        ({"released": {"update": "rows"}}, "`rows` need `num_clients` and the hyper-parameter `client_index`"),
        ({"released": {"update": "rows"}, "num_clients": 3}, "`rows` need `num_clients`"),
    ],
)
def test_contracts_that_cannot_be_kept_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"fed_avg: .*{message}"):
        dataclasses.replace(FED_AVG, **changes)


def test_a_hook_does_nothing_unless_it_says_so():
    hook, places = Hook(), np.arange(2)
    assert hook.init() == {} == hook.hparams({}, places)
    state = {"known": np.ones(2)}
    assert hook.after(state, None, None) is state
