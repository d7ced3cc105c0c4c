"""Defines plans without privacy, for comparison: settings and builder, for silos or users. Nothing is claimed."""

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec.structs import replace

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import OneForAll
from tff_pdp.privacy.mechanisms.feature_scaling import DpMoments
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, FixedClip, UserNoise
from tff_pdp.privacy.plans.plan import PlannedTraining, PlanSettings, PrivacyPlan
from tff_pdp.privacy.plans.silo_example import SiloSettings, plan_without_noise
from tff_pdp.privacy.plans.user import check_for_users, user_plan_without_noise
from tff_pdp.settings import Count, Positive

if TYPE_CHECKING:
    from tff_pdp.algorithms.base import Algorithm


class Unprotected(SiloSettings):
    """Protects nothing, for comparison: no clipping, no noise.

    Attributes:
      unit: with `silo` all clients take part in every round, with `user` some of the clients.
      users_per_round: expected number of users in a round; required with unit `user`, refused with unit `silo`.
      num_users: N, the size of the population, as in kind `user`.
      user_noise: determines only the cohorts, because nothing is clipped or noised: with kind `tree` every user takes
        part once in an epoch, otherwise cohorts are drawn at random.
    """

    unit: Literal["silo", "user"]
    users_per_round: Positive | None = None
    num_users: Count | None = None
    user_noise: UserNoise = FixedClip()

    is_private: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if (self.unit == "user") != (self.users_per_round is not None):
            raise ValueError("users_per_round is required with unit user, and refused with unit silo")
        for name in ("num_examples", "sampler", "selection_loss_bound") if self.are_users else ():
            if getattr(self, name) != getattr(PlanSettings, name):
                raise ValueError(f"{name} is for silos: leave it out with unit user")
        if self.are_users and isinstance(self.feature_scaling, DpMoments):
            raise ValueError("feature_scaling may release nothing of single users: use none, public or public_bounds")

    @property
    def are_users(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether clients are users."""
        return self.unit == "user"

    @property
    def why_it_ends(self) -> str:
        """The reason why a run cannot go on: cohorts of users are planned once."""
        return super().why_it_ends if self.are_users else ""

    def check(self, algorithm: "Algorithm", weighting: str) -> None:
        """Checks that a method and a weighting are for clients of the settings' unit."""
        (check_for_users if self.are_users else super().check)(algorithm, weighting)

    def check_rows(self, row_influence: RowInfluence | None) -> None:
        """Accepts any rows: nothing is protected."""

    def build(self, training: PlannedTraining) -> PrivacyPlan:
        """Builds a plan without clipping and noise.

        Raises:
          ConfigError: a parameter does not suit the training.
        """
        if self.users_per_round is not None:
            plan = user_plan_without_noise(self, training)
            # There is no norm to adapt where nothing is clipped.
            return dataclasses.replace(plan, noise=FixedClip()) if isinstance(plan.noise, AdaptiveClip) else plan
        return plan_without_noise(
            self,
            training,
            "privacy is switched off: no clipping, no noise",
            budgets={},
            selection_rounds=training.selection_rounds,
            search=training.search,
        )


def with_epsilon(settings: PlanSettings, epsilon: float) -> PlanSettings:
    """Copies settings with another epsilon for all clients; if `epsilon` is infinite, calls `without_privacy`.

    Raises:
      ConfigError: budgets differ between silos.
    """
    if math.isinf(epsilon):
        return without_privacy(settings)
    budgets = getattr(settings, "budgets", None)
    if not isinstance(budgets, OneForAll):
        raise ConfigError("another epsilon can be set only for privacy.budgets of kind one_for_all")
    return replace(settings, budgets=replace(budgets, epsilon=epsilon))


def without_privacy(settings: PlanSettings) -> Unprotected:
    """Returns settings of an equal training without clipping and noise, for comparison."""
    names = set(Unprotected.__struct_fields__) - {"kind", "unit"}
    same = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return Unprotected(kind="none", unit="user" if settings.are_users else "silo", **same)
