"""The section `privacy` of an experiment: the plan, its budgets, its noise."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrivacyConfig:
    """What is promised to whom.

    Attributes:
      plan: what is protected: `silo_example`, each example of a silo, inside the silo; `user`, each client as a whole,
        from what the server releases; or `none` for a comparison without privacy, of users where `users_per_round` is
        given.
      batch_size: expected size of a Poisson batch; of users' plain batches, their size.
      clip_norm: L2 bound on each example's gradient, or on all that a user releases in a round.
      budgets: epsilon and delta for each silo, or for all users; forms in `tff_pdp.privacy.accounting.budgets`.
      noise_multiplier: the same for all silos; each leaves when its budget is spent. Without it every silo stays to the
        last round, with the noise its own budget asks for.
      noise_calibration: `tightest`, the least noise that a budget allows; or `paper_rdp`, the more of
        `tff_pdp.privacy.accounting.calibration`, to compare with published figures.
      selection_share: of a silo's epsilon, for each private selection of a cluster.
      selection_loss_bound: the largest loss of one example that counts in a selection, for a regression.
      num_examples: whether silos' numbers of training examples are public or noised; forms in
        `tff_pdp.privacy.mechanisms.silo_statistics`.
      feature_scaling: what features are shifted and scaled by; forms in `tff_pdp.privacy.mechanisms.feature_scaling`.
      sampler: `poisson`, or `paper_shuffled`, for which no guarantee holds.
      users_per_round: of a user-level plan, the expected number of users in a round.
      num_users: of the population, a public constant; without it, the number of clients in the data counts as public.
      user_noise: what a user-level plan adds to sums of updates; forms in `tff_pdp.privacy.mechanisms.user_noise`.
      generator: of random bits inside computations: `philox`, which is fast and no cryptographic generator, so that
        claims are conditional on it; or `chacha20`, which is one.
      registry: folder of the registry that all runs on the same records are counted in, over all folders; without it
        the user's own, `$XDG_STATE_HOME/tff_pdp/registry`, by default in `~/.local/state`.
    """

    plan: str
    batch_size: int
    clip_norm: float = 1.0
    budgets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    noise_multiplier: float | None = None
    noise_calibration: str = "tightest"
    selection_share: float = 0.03
    selection_loss_bound: float = 0.1
    num_examples: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "public"})
    feature_scaling: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "none"})
    sampler: str = "poisson"
    users_per_round: float | None = None
    num_users: int | None = None
    user_noise: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "fixed_clip"})
    generator: str = "philox"
    registry: str | None = None
