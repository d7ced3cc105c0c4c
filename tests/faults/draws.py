"""An account of what was released that no part of the product keeps: each draw is written down before it is made.

`watching` wraps the places of the commands where noise is drawn. A line of the log is flushed to disk before the draw,
so that a process killed at any moment has drawn nothing that the log does not have. The log lies outside of all folders
that the commands know.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.experiment import before_training
from tff_pdp.experiment.run_key import KEY_BYTES, RunKey
from tff_pdp.personal_models.new_clients import fit
from tff_pdp.training import train as training
from tff_pdp.training.client_store.states import is_store
from tff_pdp.training.search import runs as search_runs
from tff_pdp.training.search import tune as tuning


def key_of(label: str) -> RunKey:
    """The key that a command draws that is watched under a label."""
    return RunKey(hashlib.blake2b(f"key of {label}".encode(), digest_size=KEY_BYTES).digest())


@contextlib.contextmanager
def watching(log: Path, label: str, hold: Path | None = None) -> Iterator[None]:
    """Writes down each draw of a command, and gives it its key.

    Args:
      log: to be added to.
      label: decides the key, in place of the system's entropy.
      hold: the second round waits until this file is gone, once it has made one of the same name with `.reached`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunKey, "from_entropy", classmethod(lambda cls: key_of(label)))
        for module in (training, search_runs):
            patch.setattr(module, "run_round", _watched_round(module.run_round, log, hold))
        # Where each of them has its key, and after it the number of the repetition.
        for name, place in (("repeat", 4), ("noisy_scores", 3)):
            patch.setattr(tuning, name, _watched_search(getattr(tuning, name), log, name, place))
        patch.setattr(fit, "fit_rows", _watched_fit(fit.fit_rows, log))
        release = before_training.release_silo_statistics
        patch.setattr(before_training, "release_silo_statistics", _watched_statistics(release, log))
        own_draws = functools.partial(key_of(label).generator, "statistics")
        patch.setattr(before_training, "statistics_generator", lambda client_id, _: own_draws(client_id))
        yield


def lines(log: Path) -> list[dict[str, Any]]:
    """All that was written down; a line that its process did not finish was never acted upon."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


def rounds(log: Path) -> Counter[int]:
    """How often each round was drawn, each time with other noise: by key, or of another state before it.

    Raises:
      AssertionError: one round of one key had two results.
    """
    drawn, results = set(), {}
    for line in lines(log):
        if line["kind"] == "round":
            drawn.add((line["key"], line["round"], line["before"]))
        elif line["kind"] == "result":
            place = (line["key"], line["round"], line["before"])
            assert results.setdefault(place, line["after"]) == line["after"], f"{place} has two results"
    return Counter(number for _, number, _ in drawn)


def searches(log: Path) -> int:
    """How many searches, by key, have drawn anything."""
    return len({line["key"] for line in lines(log) if line["kind"] in ("repeat", "noisy_scores")})


def keys(log: Path) -> set[str]:
    """Keys with which any round was drawn."""
    return {line["key"] for line in lines(log) if line["kind"] == "round"}


def fits(log: Path) -> int:
    """How many fits of new clients have drawn anything, each with a key of its own."""
    return len({line["seeds"] for line in lines(log) if line["kind"] == "fit"})


def statistics(log: Path) -> int:
    """How often the first silo has released statistics before training: each time with other noise."""
    return sum(line["kind"] == "statistics" for line in lines(log))


def digest(*values: Any) -> str:
    """A digest of all arrays, in whatever kind of nest they are."""
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(values)]
    each = sorted(hashlib.sha256(f"{leaf.dtype.str}{leaf.shape}".encode() + leaf.tobytes()).digest() for leaf in leaves)
    return hashlib.sha256(b"".join(each)).hexdigest()


def digest_of(state: Any) -> str:
    """A digest of a checkpoint's states of server and clients."""
    states = state.client_states
    if is_store(states):
        states = states.read(range(len(state.client_ids)))
    return digest(state.server_state, list(states) if not isinstance(states, Mapping) else states, state.hook)


def _append(log: Path, line: Mapping[str, Any]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _key(run_key: RunKey) -> str:
    return f"{run_key.fingerprint()}.{run_key.attempt}"


def _watched_round(real: Any, log: Path, hold: Path | None) -> Any:
    def run_round(method: Any, state: Any, round_number: int, data: Any) -> Any:
        line = {"key": _key(state.run_key), "round": round_number, "before": digest_of(state)}
        _append(log, {"kind": "round", **line})
        if hold is not None and round_number == 2:
            hold.with_name(f"{hold.name}.reached").touch()
            while hold.exists():
                time.sleep(0.01)
        after = real(method, state, round_number, data)
        _append(log, {"kind": "result", **line, "after": digest_of(after)})
        return after

    return run_round


def _watched_search(real: Any, log: Path, name: str, place: int) -> Any:
    def call(*arguments: Any) -> Any:
        _append(log, {"kind": name, "key": _key(arguments[place]), "run": arguments[place + 1]})
        return real(*arguments)

    return call


def _watched_fit(real: Any, log: Path) -> Any:
    def fit_rows(*arguments: Any) -> Any:
        _append(log, {"kind": "fit", "seeds": digest(arguments[6])})
        return real(*arguments)

    return fit_rows


def _watched_statistics(real: Any, log: Path) -> Any:
    first: list[bytes] = []

    def release_silo_statistics(features: np.ndarray, *others: Any) -> Any:
        if not first:
            first.append(features.tobytes())
        if features.tobytes() == first[0]:
            _append(log, {"kind": "statistics"})
        return real(features, *others)

    return release_silo_statistics
