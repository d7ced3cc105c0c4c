from tff_pdp.api.experiment import Experiment
from tff_pdp.errors import UserError
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.experiment.prepare import prepare_clients as prepare
from tff_pdp.personal_models.export import export_experiment as export
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.personalize import personalize
from tff_pdp.training.evaluate import evaluate_experiment as evaluate
from tff_pdp.training.search.tune import tune
from tff_pdp.training.train import train
from tff_pdp.verification.experiment import verify

__version__: str
__all__ = [
    "Experiment",
    "ExperimentConfig",
    "FitOptions",
    "UserError",
    "evaluate",
    "export",
    "load_experiment",
    "personalize",
    "prepare",
    "train",
    "tune",
    "verify",
]
