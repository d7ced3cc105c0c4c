"""Runs `tff-pdp verify`, `seal` and `forget`: checks runs on disk, destroys their secrets, or removes a client."""

from pathlib import Path
from typing import Annotated

from tff_pdp.command_line import Option, Outcome, Positional, Reporting, loading
from tff_pdp.commands.experiment import OnExperiment
from tff_pdp.errors import ConfigError


class _OnRuns(Reporting):
    """Looks at runs.

    Attributes:
      runs: output folder of an experiment, or folder of one method in it.
    """

    runs: Annotated[tuple[Path, ...], Positional("RUN")]


class Verify(_OnRuns):
    """Check a run's files and records, and recompute epsilon.

    Checks the digests of all files, the chains of spending records, whether files belong together, states of users, the
    client dataset, and exports. Recomputes epsilon from the events of every ledger, composed over all runs on record,
    and compares the result with summary.json and privacy reports. Needs no network and no TensorFlow, and writes
    nothing. `tff-pdp verify-export` checks an export alone.

      tff-pdp verify runs/demo              all runs of an experiment
      tff-pdp verify runs/demo/mr_mtl       one run

    Each line of the output is about one item, such as a file or an epsilon:
      ok         unchanged since it was written
      stopped    left by a stopped command: nothing is lost, the next command that writes there repairs it
      old        written by an earlier version, without a digest: read and counted, but damage would not show
      absent     not in this folder, so not checked
      problem    damaged, missing, or contradicting another file
    The exit status is 0 if there is no problem, otherwise 1.
    """

    def run(self) -> Outcome:
        """Checks runs, and prints a line about each item.

        Raises:
          ConfigError: a folder contains no run.
        """
        from tff_pdp.verification.experiment import verify
        from tff_pdp.verification.run_folder import Status

        findings = []
        for place in _folders(self.runs):
            for finding in verify(place):
                findings.append(finding)
                if not self.json:
                    # Many sentences begin with the file.
                    text = finding.text.removeprefix(f"{finding.path}").lstrip(": ")
                    print(f"{finding.status.value:<8} {finding.path}: {text}", flush=True)
        counts = {status.value: sum(one.status is status for one in findings) for status in Status}
        holds = not counts[Status.PROBLEM.value]
        parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        content = {
            "holds": holds,
            "counts": counts,
            "findings": [{**one._asdict(), "path": str(one.path)} for one in findings],
        }
        return Outcome(f"{len(findings)} things checked: {parts}", content, int(not holds))


class Seal(_OnRuns):
    """Destroy the key and the states of a finished run; keep the run's record.

    Destroys the secrets of a finished run: the key from which the noise was drawn, the seeds in checkpoints, and the
    states of clients. Anyone who gets the folder of a run that is not sealed can subtract the noise. Records of
    spending, settings, metrics, reports and exports stay, and `tff-pdp verify` still checks them.

    After that, the run cannot be trained, tested or exported any more; but exports can still be served and extended.
    Before sealing, a run must be trained to its end and evaluated and, if the experiment exports the run's method,
    exported.

    Files are overwritten with random bytes, flushed, and removed. Copies are not reached: backups, snapshots, file
    systems that copy on write (Btrfs, ZFS, APFS, overlays), the spare blocks of solid-state disks, and memory that was
    swapped. Where that matters, keep runs on an encrypted volume and destroy the volume's key.

    Attributes:
      unfinished: also seal runs that were not trained to the end; these runs can never be finished then.
      discard_models: also seal runs whose models were not evaluated or exported; these models are lost.
    """

    unfinished: bool = False
    discard_models: bool = False

    def run(self) -> Outcome:
        """Seals runs, and prints what was destroyed.

        Raises:
          ConfigError: a run is not finished, or its models were not evaluated or exported; nothing was destroyed.
          DataError: a record is damaged, or another process writes to a run's folder.
        """
        from tff_pdp.training.record.sealing import check_can_be_sealed, seal_run
        from tff_pdp.training.run_folder import remove_far_states
        from tff_pdp.verification.epsilons import check_models_are_used
        from tff_pdp.verification.experiment import runs_of
        from tff_pdp.verification.run_folder import is_run, planned_rounds

        folders = []
        for place in _folders(self.runs):
            folders += [place] if is_run(place) else runs_of(place)
        for folder in folders:
            is_finished = check_can_be_sealed(folder, planned_rounds(folder), is_unfinished_too=self.unfinished)
            if is_finished and not self.discard_models:
                check_models_are_used(folder)
        for folder in folders:
            remove_far_states(folder)
        done = [seal_run(folder, planned_rounds(folder), is_unfinished_too=self.unfinished) for folder in folders]
        lines = [
            *(
                f"{one.folder}: sealed; {one.num_files} files of keys and states were overwritten and removed"
                for one in done
            ),
            "copies in backups, in snapshots and on the disk itself are out of reach: see tff-pdp seal --help",
        ]
        return Outcome("\n".join(lines), {"sealed": [{**one._asdict(), "folder": str(one.folder)} for one in done]})


class Forget(OnExperiment):
    """Remove a client from an experiment: its records, states, rows and results.

    Removes, in the experiment's folder:
      - the client's examples and dead letters, from the client dataset and beside it
      - the client's row, from the export: the next version has all other clients, and older versions with the client
        are deleted; requests of the client get the answers of the global model
      - states of the experiment's runs, with the runs' keys: as in tff-pdp seal, runs cannot be trained, tested or
        exported any more, because they belong to a dataset that is gone. Exports can still be served and extended
      - the client's results and hyper-parameters: summary.json, report.html, selected.json
    States what remains: the effect of the client's records on models of others, with its epsilon and delta, and the
    record of spending. The raw data at data.input, and copies of the folder, are not touched. A command that was
    stopped is completed by the same command.

    Attributes:
      client: id of the client, as in the client dataset.
      unfinished: also if runs were not trained to the end; these runs can never be finished then.
      discard_models: also if models were not evaluated or exported; these models are lost.
    """

    client: Annotated[str, Option("ID")]
    unfinished: bool = False
    discard_models: bool = False

    def run(self) -> Outcome:
        """Removes the client, and prints what was removed and what remains."""
        with loading():
            from tff_pdp.commands.forget import forget

        done = forget(self.experiment(), self.client, unfinished=self.unfinished, discard_models=self.discard_models)
        return Outcome(done.text(), done.content())


def _folders(folders: tuple[Path, ...]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
    # A folder named `.` has no name of its own.
    return [folder.absolute() if not folder.name else folder for folder in folders]
