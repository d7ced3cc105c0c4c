"""Adds clients after training: fits each client's personal part to its own examples, and writes a new version.

Shared weights and the rows of other clients do not change. A new row may reveal as much about its client's examples as
the row of a trained client may. A user's row may reveal anything, because only that user gets it; a silo's row reveals
no more than the silo's (epsilon, delta) allows.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tqdm.auto import tqdm

from tff_pdp.engines.devices import resolve_device
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.lock import only_writer
from tff_pdp.personal_models.new_clients.costs import claim_of_fit
from tff_pdp.personal_models.new_clients.examples import prepared_examples, read_new_clients
from tff_pdp.personal_models.new_clients.fit import Metrics, fit_budget, fit_new_rows, fit_settings, measure
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.version import adding_to_export, publish_with_clients
from tff_pdp.privacy.facts import Generator
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import plain, upper
from tff_pdp.training.record.all_runs import Composed

# The largest number of clients that are listed one by one in text.
_MOST_LISTED = 20


@dataclasses.dataclass(frozen=True)
class AddedClient:
    """A client that was added, or fitted again.

    Attributes:
      client_id: the client's id in the examples.
      served_as: the client's id in requests.
      num_examples: number of examples that the client was fitted with.
      before: mean metrics of the global model on held-out examples, exact and not private; None without such examples.
      after: mean metrics of the client's own model on the same examples, exact and not private; None as for `before`.
      epsilon: epsilon that this fit spent; None if the client's examples are not protected.
      delta: delta of this fit; None if the client's examples are not protected.
      noise_multiplier: noise multiplier of the gradients; None if there are no gradients or no noise.
      recorded: cost of all that is on record about the silo, this fit included; None if the silo is not protected.
    """

    client_id: str
    served_as: str
    num_examples: int
    before: Metrics
    after: Metrics
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    recorded: Composed | None


@dataclasses.dataclass(frozen=True)
class Personalized:
    """A new version of an export: its folder, added clients, clients left out for lack of examples, and generator."""

    version: Path
    clients: Sequence[AddedClient]
    left_out: Sequence[str]
    generator: Generator = "philox"


def personalize(
    config: ExperimentConfig,
    path: Path,
    client_ids: Sequence[str] = (),
    options: FitOptions | None = None,
    *,
    progress: bool = True,
) -> Personalized:
    """Adds clients to the experiment's export: publishes a new version, made from the newest one.

    A silo's fit is on record before anything is computed from the silo's examples: even a stopped fit keeps its cost.
    Random draws come from a key of the operating system's entropy, even if `training.test_only_seed` is set.

    Guarantee: other clients' rows and the shared weights do not change by a bit, so others can learn about a new client
      only from that client's own row. As in training, a user's row is not protected from anyone who sees it
      (joint DP). A silo's row under `silo_example` is (epsilon, delta)-DP for the silo's training examples, and the
      version's privacy report has the cost of all that is on record about the silo.
    Assumes: numbers of examples, and all options, are public and chosen without looking at the examples; no other
      client has examples of a new client. Held-out examples are used only for metrics, which are not private.

    Args:
      config: the experiment, which has been exported.
      path: file or folder of examples, as in `prepared_examples`.
      client_ids: ids of the clients to add; by default all clients of a client dataset.
      options: options of the fit.
      progress: whether to show the planned fit and a progress bar on standard error.

    Raises:
      ConfigError: the method has no personal part, the plan does not allow new clients, or an option is out of range,
        missing, or for another kind of clients or models.
      DataError: examples cannot be used, the record of costs cannot be read, or another process exports at the same
        time or writes to the run's folder.
      BudgetError: no noise is enough for a silo's budget.
      ServingError: there is no usable export, a client is in the export already, or the new version failed its checks.

    >>> from tff_pdp.experiment.config import with_values
    >>> from tff_pdp.personal_models.export import export_experiment
    >>> growing = with_values(config, {"export.model_name": "growing"}, "example")
    >>> first = export_experiment(growing, drop_added=True)
    >>> fit = FitOptions(steps=2, epsilon=1.0, delta=1e-4)
    >>> [one.client_id for one in personalize(growing, newcomer, ["silo_4"], fit, progress=False).clients]
    ['silo_4']
    """
    options = options or FitOptions()
    budget = fit_budget(config.privacy, options)
    # Held before a silo pays, so that no other version is published in between, without the new clients.
    with (
        only_writer(config.algorithm_folder(config.export.algorithm)),
        prepared_examples(config, path) as examples,
        adding_to_export(config) as exported,
    ):
        models = exported.models
        settings = fit_settings(config, options, budget, exported)
        new = read_new_clients(examples, client_ids, models.model)
        config.privacy.check_rows(new.row_influence)
        served_as = exported.check_new(new.client_ids, replace=options.replace)
        if progress:
            print(settings.text(models, len(new.client_ids)), file=sys.stderr, flush=True)
        with (
            tf.device(resolve_device(config.training.device)),
            tqdm(total=len(new.client_ids), desc="personalize", unit="client", disable=not progress) as bar,
        ):
            rows = fit_new_rows(config, models, new, settings, RunKey.from_entropy(), bar.update)
            before, after = measure(models, new.held_out, rows)
        costs = {
            served_id: rows.recorded[one] for served_id, one in zip(served_as, new.client_ids, strict=True) if budget
        }
        version = publish_with_clients(config, exported, rows.each(models, served_as), costs, replace=options.replace)
        clients = [
            AddedClient(
                client_id=client_id,
                served_as=served_as[place],
                num_examples=new.num_examples[client_id],
                before=before[place],
                after=after[place],
                epsilon=rows.epsilons.get(client_id),
                delta=budget.delta if budget else None,
                noise_multiplier=rows.noise_multipliers.get(client_id),
                recorded=rows.recorded.get(client_id),
            )
            for place, client_id in enumerate(new.client_ids)
        ]
        return Personalized(version, clients, new.left_out, config.privacy.generator)


def personalized_content(done: Personalized) -> dict[str, Any]:
    """Returns a result of `personalize` as plain data for JSON."""
    of_protected = claim_of_fit(done.generator)
    of_others = ("none", "fitted to the client's own examples without noise")
    clients = []
    for client in done.clients:
        claim, reason = of_others if client.epsilon is None else of_protected
        recorded = client.recorded and client.recorded.to_dict(*of_protected)
        content = {**dataclasses.asdict(client), "claim": claim, "claim_reason": reason, "recorded": recorded}
        clients.append(content)
    others = {"left_out": done.left_out, "before_and_after_are_private": False}
    return json_safe({"version": str(done.version), "clients": clients, **others})


def personalized_text(done: Personalized) -> str:
    """Returns a result of `personalize` as text for people."""
    lines = [f"{len(done.clients)} clients added: {done.version}"]
    lines += [_line(client) for client in done.clients[:_MOST_LISTED]]
    if len(done.clients) > _MOST_LISTED:
        lines.append(f"and {len(done.clients) - _MOST_LISTED} more; --json lists them all")
    if done.left_out:
        lines.append(f"{len(done.left_out)} clients left out, without training examples, such as {done.left_out[0]}")
    if any(client.before for client in done.clients):
        lines.append("note: figures on held-out examples are exact, not private; keep them where the examples are")
    return "\n".join(lines)


def _line(client: AddedClient) -> str:
    words = [f"{client.client_id}: {client.num_examples} examples"]
    if client.served_as != client.client_id:
        words[0] = f"{client.client_id} (served as {client.served_as}): {client.num_examples} examples"
    if client.before and client.after:
        words += [f"{name} {plain(client.before[name])} -> {plain(client.after[name])}" for name in client.before]
    if client.epsilon is not None and client.recorded is not None and client.delta is not None:
        noise = f", noise multiplier {plain(client.noise_multiplier)}" if client.noise_multiplier else ""
        words.append(f"spent epsilon {upper(client.epsilon)} at delta {client.delta:g}{noise}")
        if client.recorded.releases > 1:
            recorded = client.recorded
            none = f"claim: none, and no epsilon: {recorded.why_no_bound}"
            cost = none if recorded.why_no_bound else f"epsilon {upper(recorded.epsilon)} at delta {recorded.delta:g}"
            words.append(f"with all {recorded.releases} releases on record {cost}")
    return "; ".join(words)
