import dataclasses
import json
import math

import pytest

from tests.reports import report_samples as samples
from tff_pdp import errors
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reports import content


@pytest.mark.parametrize("metric", [ACCURACY, MEAN_SQUARED_ERROR])
def test_report_survives_json(metric):
    report = samples.sample_report(3, metric=metric)
    assert content.Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False))) == report


def test_infinite_budgets_and_awkward_names_survive_json():
    silo = dataclasses.replace(samples.sample_silos(1)[0], id="nan", epsilon_target=math.inf, epsilon_pld=math.nan)
    back = content.SiloResult.from_dict(json.loads(json.dumps(silo.to_dict(), allow_nan=False)))
    assert back.id == "nan"
    assert back.epsilon_target == math.inf
    assert math.isnan(back.epsilon_pld)


def test_unknown_and_missing_keys_are_named():
    data = samples.sample_silos(1)[0].to_dict()
    del data["delta"]
    with pytest.raises(errors.DataError, match=r"unknown keys \['colour'\], missing keys \['delta'\]"):
        content.SiloResult.from_dict({**data, "colour": 1})
