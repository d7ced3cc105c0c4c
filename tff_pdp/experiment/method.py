"""Holds one method of an experiment, ready to run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.algorithms.hyper_parameters import Hook
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.examples import ClientSource, Examples
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.feature_scaling import FeatureScaling
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.processes.compose import PersonalizedProcess, client_params_columns, client_params_type


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of an experiment, ready to run: algorithm, model, data, privacy plan, computations.

    Attributes:
      clients: the client dataset.
      algorithm: the algorithm that is run.
      hparams: hyper-parameters by name, each an array `[clients]` in the order of `clients.client_ids`; without the
        hyper-parameters that `hook` sets.
      model: the model that is trained.
      plan: the privacy plan.
      scalings: shift and scale of features, by client id; empty if features are used as they are.
      estimator: estimator of clients' gradients.
      process: the TFF computations.
      config_hash: digest of everything that decides the training.
      amounts: amount by which each client counts in means, by client id: the number of examples (public or noised), or
        the budget's epsilon divided by the largest epsilon; None if all clients count the same.
      weight_cap: number of examples at and above which a user has weight 1.
      hook: hook that sets hyper-parameters during training; None if all are given.
      first_phase: method of the first `first_rounds` rounds, which train on synthetic data, with the same states; None
        for a training in one phase.
      first_rounds: number of rounds of `first_phase`.
      source: source of the examples that rounds train on; None for `clients`.
    """

    clients: ClientDataset
    algorithm: Algorithm
    hparams: Mapping[str, np.ndarray]
    model: Model
    plan: PrivacyPlan
    scalings: Mapping[str, FeatureScaling]
    estimator: GradientEstimator
    process: PersonalizedProcess
    config_hash: str
    amounts: Mapping[str, float] | None = None
    weight_cap: int = 1
    hook: Hook | None = None
    first_phase: "Method | None" = None
    first_rounds: int = 0
    source: ClientSource | None = None
    # True for a method whose clients are computed by workers.
    is_at_workers: ClassVar[bool] = False

    def at(self, round_number: int) -> "Method":
        """Returns the method of a round, counted from 1; of the first round for 0."""
        return self.first_phase if self.first_phase is not None and round_number <= self.first_rounds else self

    def trace(self) -> None:
        """Traces the computations of a round, so that an error in a method comes to light before a run begins."""
        for method in filter(None, (self.first_phase, self)):
            _ = method.process.next

    @property
    def is_weighted(self) -> bool:
        """True if clients have weights in means."""
        return self.amounts is not None

    @property
    def client_state_type(self) -> Any:
        """The TFF type of a client's state."""
        member: Any = self.process.init_client.type_signature.result
        return member.member

    @property
    def client_params_type(self) -> Any:
        """The TFF type of a client's parameters."""
        return client_params_type(
            self.algorithm, self.estimator, is_weighted=self.is_weighted, user_sum=self.plan.server_sum()
        )

    def _budget_epsilons(self, client_ids: Sequence[str]) -> np.ndarray:
        budgets = [self.plan.budgets.get(self.plan.scope_of(client_id)) for client_id in client_ids]
        return np.array([math.inf if one is None else one.epsilon for one in budgets])

    def examples(self, split: str) -> Examples:
        """Returns a reader of clients' examples of one split, padded to a few sizes."""
        return Examples(self.source or self.clients, split, self.model, self.scalings)

    def client_data(self, split: str) -> ClientValues:
        """Returns every client's examples of one split, in the order of `clients.client_ids`."""
        return self.examples(split).all()

    def round_data(self, split: str) -> Examples | ClientValues:
        """Returns one split's examples: if clients are silos, all values; if users, a reader that selects cohorts."""
        return self.examples(split) if self.plan.samples_clients else self.client_data(split)

    def client_params(
        self,
        run_key: RunKey,
        round_number: int,
        places: Sequence[int] | np.ndarray | None = None,
        *,
        changed: Mapping[str, np.ndarray] | None = None,
        run: int = 0,
    ) -> ClientValues:
        """Returns the parameters of clients in one round: mechanism, hyper-parameters, seed.

        Args:
          run_key: the run's secret.
          round_number: number of the round, from 1.
          places: positions of the clients in `clients.client_ids`; by default all clients.
          changed: arrays `[places]` by name of the hyper-parameter, one value per client, which replace the method's
            own values.
          run: number of the client's run, as in `RunKey.client_seed`.
        """
        chosen = np.arange(len(self.clients.client_ids)) if places is None else np.asarray(places)
        client_ids = [self.clients.client_ids[place] for place in chosen]
        set_by_runtime = {"client_index": chosen, "budget_epsilon": self._budget_epsilons(client_ids)}
        hparams = {name: set_by_runtime[name] for name, one in self.algorithm.hparams.items() if one.is_set_by_runtime}
        hparams |= {name: values[chosen] for name, values in self.hparams.items()}
        columns = client_params_columns(
            self.algorithm,
            self.estimator,
            mechanism=self.plan.client_mechanism(client_ids),
            hparams={**hparams, **(changed or {})},
            seeds=run_key.client_seeds(round_number, client_ids, run),
            selection_epsilons=[self.plan.selection_epsilon(client_id, round_number) for client_id in client_ids],
            weights=None
            if self.amounts is None
            else self.plan.weights(self.amounts, client_ids, self.weight_cap, round_number),
            **self.plan.release_values(is_weighted=self.is_weighted),
        )
        return ClientValues.from_columns(self.client_params_type, columns)
