"""Methods that differentiate gradients: refused where gradients have clip and noise, trained where they are plain."""

from pathlib import Path

import numpy as np
import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.config import RELEASES_FILE
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import compose
from tff_pdp.training.train import train

MAML = {"algorithms": {"maml": {"kind": "fed_meta", "order": "second", "local_steps": 2}}, "export__algorithm": "maml"}


def test_a_plan_that_noises_gradients_refuses_before_anything_is_released(experiment):
    config = experiment(**MAML, privacy__num_examples={"kind": "noised", "epsilon": 0.1})
    with pytest.raises(ConfigError, match=r"algorithms\.maml differentiates gradients, and privacy\.kind silo_example"):
        build_method(config, "maml")
    assert not (Path(config.output) / RELEASES_FILE).exists()


def test_no_process_is_made_of_it_and_dp_sgd():
    algorithm, _ = build_algorithm("pppfl", {"order": "second"}, num_clients=2, rounds=1)
    model = build_mlp((2,), 3, (4,))
    with pytest.raises(ConfigError, match=r"algorithms\.pppfl differentiates gradients, which must have neither clip"):
        compose(algorithm, model, estimator=build_dp_sgd(model))


def test_without_privacy_it_trains(experiment):
    config = experiment(**MAML, privacy__kind="none", training__rounds=2)
    assert build_method(config, "maml").estimator.is_plain
    state = train(config, "maml", progress=False)
    weights = state.server_state["algorithm"]["weights"]
    initial = build_method(config, "maml").model.init(0)
    assert all(np.isfinite(value).all() for value in weights.values())
    assert any(not np.array_equal(value, initial[name]) for name, value in weights.items())
