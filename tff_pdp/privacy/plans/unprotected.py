"""Builds the plan of training without privacy: of users where their cohorts are given, of silos otherwise."""

from tff_pdp.privacy.plans.plan import PlannedTraining, PrivacyPlan
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.privacy.plans.silo_example import build_unprotected_silo_plan
from tff_pdp.privacy.plans.user import build_unprotected_user_plan


def build_no_privacy_plan(config: PrivacyConfig, training: PlannedTraining) -> PrivacyPlan:
    """Builds a plan without clipping and noise, for comparison.

    Args:
      config: with `users_per_round`, clients are users, some of whom take part in a round.
      training: what is planned.

    Raises:
      ConfigError: a parameter is out of range.
    """
    if config.users_per_round is not None:
        return build_unprotected_user_plan(config, training)
    return build_unprotected_silo_plan(config, training)
