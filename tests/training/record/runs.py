"""Runs on disk as training leaves them, made without TensorFlow; and processes that are killed while they seal one."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from tff_pdp import journal
from tff_pdp.digests import as_line, write_json
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.client_store.store import ClientStore
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import ChargesWriter, RunIdentity
from tff_pdp.training.record.releases import CHECKPOINTS, STORE, surroundings_of
from tff_pdp.training.record.sealing import seal_run
from tff_pdp.training.run_folder import CONFIG_FILE, METRICS_FILE

KEY = RunKey(bytes(range(32)))
ROUNDS = 3
# What changes the disk.
_CALLS = ("fsync", "pwrite", "ftruncate", "rename", "replace", "unlink", "rmdir", "urandom")


def ledger_after(rounds, scopes=("a", "b")):
    """The ledger of silos after some rounds."""
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(scopes, SiloBudget(8.0, 1e-4)))
    for scope in scopes:
        ledger.append(scope, poisson_gaussian_event(0.1, 2.0, 1), rounds, "DP-SGD training")
    return ledger


def make_run(folder, *, is_closed=True, has_store=True, key=KEY, non_private=None):
    """A run of three rounds with two checkpoints, after rounds 2 and 3, and users' states in a store."""
    folder.mkdir(parents=True)
    settings = {"training": {"rounds": ROUNDS}, "export": {"algorithm": "another"}}
    write_json(folder / CONFIG_FILE, {"format_version": 1, **settings})
    with ChargesWriter(folder) as writer:
        identity = RunIdentity(folder.name, non_private, key.fingerprint(), "hash", journal.GENESIS)
        writer.open_run(identity, ledger_after(0))
        for number in range(1, ROUNDS + 1):
            writer.reserve(number, ledger_after(number), {})
        rows = [{"format_version": 1, "round": number, "mean": 0.5} for number in (1, 2, 3)]
        (folder / METRICS_FILE).write_text("".join(as_line(row) for row in rows))
        if has_store:
            with ClientStore.create(folder / STORE, {"w": np.zeros(3, np.float32)}, 4, num_shards=2) as store:
                for number in (2, 3):
                    store.write(number, [0, 1, 3], {"w": np.full((3, 3), number, np.float32)})
        for number in (2, 3):
            make_checkpoint(folder, number, key, has_store=has_store)
        if is_closed:
            writer.close_run(ROUNDS, ledger_after(ROUNDS))
    return identity


def make_checkpoint(folder, number, key=KEY, *, has_store=True, part=CHECKPOINTS):
    """One checkpoint of a run."""
    path = folder / part / checkpoint_files.folder_name(number)
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / checkpoint_files.ARRAYS_FILE, seeds=np.frombuffer(key.secret, np.int64))
    saved = checkpoint_files.Saved(
        round_number=number,
        config_hash="hash",
        ledger=ledger_after(number),
        run_key=key,
        surroundings=surroundings_of(folder, (CONFIG_FILE, METRICS_FILE)),
    )
    checkpoint_files.write_files(path, saved, key, {"clients": None if has_store else {}})


def as_first_version(folder):
    """Makes of a run what the first version of this project would have left: no charges, and no digests."""
    for path in folder.glob("charges.*"):
        path.unlink()
    for path in (folder / CHECKPOINTS).glob("*/checkpoint.json"):
        content = json.loads(path.read_text())
        for name in ("digest", "files", "files_beside", "charges_head", "earlier_head", "key_fingerprint"):
            del content[name]
        path.write_text(json.dumps({**content, "format_version": 2}))
    lines = [_undigested(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    (folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines))
    (folder / CONFIG_FILE).write_text(_undigested((folder / CONFIG_FILE).read_text()))


def _undigested(text):
    return json.dumps(
        {key: value for key, value in json.loads(text).items() if key not in ("digest", "format_version")}
    )


def secrets_in(folder):
    """Files below a folder with the run key, as text or as bytes, or with a state of a client."""
    state = np.full(3, 3, np.float32).tobytes()
    needles = (KEY.secret, KEY.secret.hex().encode(), state)
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return [path for path in files if any(needle in path.read_bytes() for needle in needles)]


def seal_and_die(folder, number):
    """Seals a run in a child that is killed before its n-th change of the disk; whether the child came to its end."""
    child = os.fork()
    if not child:
        count = 0

        def dying(call):
            def counted(*arguments, **others):
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), 9)
                return call(*arguments, **others)

            return counted

        for name in _CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            seal_run(Path(folder), ROUNDS)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def spent(output):
    """What is on record, as plain data, wherever the record ends."""
    from tff_pdp.training.record.releases import all_releases

    found = (release._replace(head="", chains=()) for release in all_releases(Path(output)))
    return [{**release._asdict(), "ledger": release.ledger.to_json()} for release in found]


def kill_at_changes(output, step):
    """Kills sealing before every so-manieth change of the disk, each time anew, and prints what was found."""
    from tff_pdp.verification.experiment import verify

    # A killed process loses nothing that was not flushed.
    os.fsync = lambda descriptor: None
    number, is_done, template = 1 - step, False, Path(output) / "template"
    identity = make_run(template / "mr_mtl")
    while not is_done:
        number += step
        folder = Path(output) / str(number) / "mr_mtl"
        shutil.copytree(template, folder.parent)
        before = spent(folder.parent)
        is_done = seal_and_die(folder, number)
        after_kill = spent(folder.parent)
        problems = [one.text for one in verify(folder) if one.status == "problem"]
        sealed = seal_run(folder, ROUNDS)
        row = {
            "number": number,
            "is_done": is_done,
            "is_same": before == after_kill == spent(folder.parent) and before[0]["run_id"] == identity.run_id,
            "problems": problems,
            "left": sealed.num_files,
            "secrets": [str(path) for path in secrets_in(folder)],
            "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
            "later_problems": [one.text for one in verify(folder) if one.status != "ok"],
        }
        print(json.dumps(row))
