"""Lets a run go on after its last round: more rounds, with the rest of each budget, or with a larger budget.

The noise of rounds that were made stays charged as it was drawn. The noise of the further rounds is calibrated so that
everything together stays within the budget. The further rounds are an attempt of their own: their batches and noise are
independent of all others, because their seeds also depend on a number that is drawn when they are planned.

Apart from `training.rounds` and `privacy.budgets`, the settings stay those of the run. The new values are in the run's
record (`tff_pdp.training.record.charges`), and the privacy statement tells both parts of the training.
"""

import dataclasses
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.config import ExperimentConfig, experiment_of
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.plans.extension import EarlierRounds
from tff_pdp.reports.words import between, upper
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import ChargesWriter, Extension, read_charges
from tff_pdp.training.record.releases import CHECKPOINTS
from tff_pdp.training.run_folder import EXTENDED, other_settings, settings_of_run

_SALT_BYTES = 16


def earlier_rounds(config: ExperimentConfig, name: str, folder: Path) -> EarlierRounds | None:
    """Returns the rounds that the run in a folder had made before its newest extension; None without an extension.

    Raises:
      ConfigError: the experiment has fewer rounds than the run.
      DataError: the run's record is damaged.
    """
    charges = read_charges(folder)
    earlier = None if charges is None else charges.earlier
    if charges is not None and earlier is not None and config.training.rounds <= earlier.rounds:
        raise ConfigError(other_settings(config, name, folder, f"{charges.through_round} rounds"))
    return earlier


def plan_extension(config: ExperimentConfig, name: str, folder: Path) -> Extension | None:
    """Plans an extension of the run in a folder; None if the run has not ended, or has all rounds of the experiment.

    Nothing is written. The digest of the new settings is left empty.

    Raises:
      ConfigError: a setting other than the number of rounds and the budgets differs from the run's.
      DataError: the run's record, or its checkpoint, is damaged.
    """
    charges = read_charges(folder)
    if charges is None or charges.is_sealed or not charges.is_closed:
        return None
    saved = checkpoint_files.newest(folder / CHECKPOINTS, with_arrays=False)
    if saved is None or saved.run_key is None or config.training.rounds <= charges.through_round:
        return None
    before = _with(config, settings_of_run(folder))
    digest = build_method(before, name, earlier=charges.earlier).config_hash
    if saved.config_hash not in (saved.run_key.keyed(digest), digest):
        raise ConfigError(other_settings(before, name, folder, f"{charges.through_round} rounds"))
    content = config.to_dict()
    return Extension(
        after_round=charges.through_round,
        settings={key: _at(content, key) for key in EXTENDED},
        config_hash="",
        replaces=saved.config_hash,
        salt="" if saved.run_key.is_test_only else secrets.token_hex(_SALT_BYTES),
        ended_with=None if charges.ledger is None else charges.ledger.to_json(),
    )


def begin_extension(writer: ChargesWriter, method: Method, saved: Checkpoint, planned: Extension) -> None:
    """Records an extension; the budgets of the further rounds are in force from then on.

    `method` was built with `planned.earlier`, and `saved` is the state after the last round.

    Raises:
      BudgetError: the further rounds do not fit into the budgets; nothing is recorded.
    """
    digest = saved.run_key.keyed(method.config_hash)
    ledger = method.plan.build_ledger()
    writer.extend(ledger, dataclasses.replace(planned, config_hash=digest))
    rounds = f"rounds {planned.after_round + 1} to {method.plan.rounds}"
    print(f"{method.algorithm.name}: going on after round {planned.after_round}, with {rounds}", file=sys.stderr)
    if ledger is None:
        return
    spent = [bounds.best for bounds in ledger.epsilons().values()]
    noise = method.plan.client_mechanism(method.clients.client_ids).get("noise_multiplier", [])
    print(
        f"{method.algorithm.name}: epsilon spent so far is {between(spent, upper)}, budgets are "
        f"{between([budget.epsilon for budget in method.plan.budgets.values()])}; noise multipliers of the further "
        f"rounds are {between([float(one) for one in noise])}",
        file=sys.stderr,
    )


def is_before_extension(folder: Path, method: Method, saved: Checkpoint) -> bool:
    """Checks if a state is that before the newest extension, and the method's settings are those of the extension."""
    charges = read_charges(folder)
    if charges is None or not charges.extensions:
        return False
    extension = charges.extensions[-1]
    return (saved.round_number, saved.config_hash, saved.run_key.keyed(method.config_hash)) == (
        extension.after_round,
        extension.replaces,
        extension.config_hash,
    )


def _with(config: ExperimentConfig, settings: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the experiment with the values that a run has of the settings that an extension may change."""
    content = config.to_dict()
    for key in EXTENDED:
        section, _, last = key.rpartition(".")
        value = _at(settings, key)
        if value is None:
            content[section].pop(last, None)
        else:
            content[section][last] = value
    return experiment_of(content, "the experiment")


def _at(content: Mapping[str, Any], key: str) -> Any:
    """Returns a value of nested mappings by its dotted key; None without such a value."""
    found: Any = content
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
