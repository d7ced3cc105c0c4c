"""`tff-pdp verify` and `tff-pdp seal`: what lies on disk of runs is checked, or its secrets are destroyed."""

import argparse
import json
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError

_VERIFY = """\
Checks runs off line, without TensorFlow, and writes nothing: the digests of all files, the chains of the records of
what was spent, whether files belong together, states of users, the client dataset, exports; and computes epsilon anew
from the events of every ledger, composed over all runs on record, beside what summary.json and privacy reports state.

  tff-pdp verify runs/demo              everything of an experiment
  tff-pdp verify runs/demo/mr_mtl       one run

Each line is one thing:
  ok         as it was written
  stopped    a command that was stopped left it so: nothing is lost, the next command that writes there mends it
  old        of an earlier version, without a digest: read and counted, but damage would not show
  absent     not here, so not checked
  problem    damaged, missing, or not what something else says
The exit status is 0 where there is no problem, otherwise 1.
"""

_SEAL = """\
Destroys what is secret of a run that is done: the key that its noise is drawn from, the seeds in its checkpoints, the
states of clients. Whoever gets the folder of a run that is not sealed can subtract the noise. What was spent, settings,
metrics, reports and exports stay, and so does the check by `tff-pdp verify`.

After that, the run cannot be trained, tested or exported any more; exports are served and added to as before.
A run is sealed once it has been run to its end, evaluated and, where the experiment exports it, exported.

Files are overwritten with random bytes, flushed, and removed. That does not reach copies: backups, snapshots, file
systems that copy on write (Btrfs, ZFS, APFS, overlays), the spare blocks of solid-state disks, and memory that was
swapped. Where that matters, keep runs on an encrypted volume and destroy the volume's key.
"""


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `verify` to its parser."""
    parser.description = _VERIFY
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the output folder of an experiment, or that of a method"
    )
    parser.add_argument("--json", action="store_true", help="print findings as one JSON object on standard output")


def add_seal_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `seal` to its parser."""
    parser.description = _SEAL
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the output folder of an experiment, or that of a method"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also a run that was not run to its end, which then never can be"
    )
    parser.add_argument(
        "--discard-models", action="store_true", help="also where models were not evaluated or exported: they are lost"
    )
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object on standard output")


def verify(options: argparse.Namespace) -> int:
    """Checks runs, prints a line for each thing, and returns 0 where all holds, otherwise 1.

    Raises:
      ConfigError: a folder holds no run.
    """
    from tff_pdp.verification.experiment import verify as findings_of
    from tff_pdp.verification.run_folder import Status

    findings = []
    for place in _folders(options.runs):
        for finding in findings_of(place):
            findings.append(finding)
            if not options.json:
                # Many sentences begin with the file.
                text = finding.text.removeprefix(f"{finding.path}").lstrip(": ")
                print(f"{finding.status.value:<8} {finding.path}: {text}", flush=True)
    counts = {status.value: sum(one.status is status for one in findings) for status in Status}
    holds = not counts[Status.PROBLEM.value]
    if options.json:
        print(json.dumps({"holds": holds, "counts": counts, "findings": [one.to_dict() for one in findings]}))
    else:
        parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        print(f"{len(findings)} things checked: {parts}")
    return 0 if holds else 1


def seal(options: argparse.Namespace) -> int:
    """Seals runs and says what was destroyed.

    Raises:
      ConfigError: a run is not done, or its models were not evaluated or exported; nothing was destroyed.
      DataError: a record is damaged, or another process writes to a run's folder.
    """
    from tff_pdp.training.record.sealing import check_can_be_sealed, seal_run
    from tff_pdp.verification.epsilons import check_models_are_used
    from tff_pdp.verification.experiment import runs_of
    from tff_pdp.verification.run_folder import is_run, planned_rounds

    folders = []
    for place in _folders(options.runs):
        folders += [place] if is_run(place) else runs_of(place)
    for folder in folders:
        is_finished = check_can_be_sealed(folder, planned_rounds(folder), is_unfinished_too=options.unfinished)
        if is_finished and not options.discard_models:
            check_models_are_used(folder)
    done = [seal_run(folder, planned_rounds(folder), is_unfinished_too=options.unfinished) for folder in folders]
    if options.json:
        rows: list[dict[str, Any]] = [{**one._asdict(), "folder": str(one.folder)} for one in done]
        print(json.dumps({"sealed": rows}))
        return 0
    for one in done:
        print(f"{one.folder}: sealed; {one.num_files} files of keys and states were overwritten and removed")
    print("copies in backups, in snapshots and on the disk itself are out of reach: see tff-pdp seal --help")
    return 0


def _folders(places: list[str]) -> list[Path]:
    folders = [Path(place) for place in places]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder")
    # A folder named `.` has no name of its own.
    return [folder.absolute() if not folder.name else folder for folder in folders]
