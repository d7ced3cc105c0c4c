"""Defines the commands on exports: serve, verify, client-id (hash ids), deploy (write a kit), rollout (move labels).

A command that needs TensorFlow imports it only when the command runs; `verify` uses TensorFlow in another process.
"""

import contextlib
import gc
import ipaddress
import signal
import sys
from pathlib import Path
from typing import Annotated

from serving.production.options import KitOptions
from tff_pdp.command_line import Command, Option, Outcome, Positional, Reporting
from tff_pdp.errors import ServingError
from tff_pdp.settings import Count, CountOrZero, NotNegative, Positive


class Serve(Command):
    """Serve exports on this machine, over TensorFlow Serving's REST and gRPC APIs.

    This server is for development, tests and demonstrations: it has no password and no encryption. Use TensorFlow
    Serving, which gives the same answers, in production. Metrics for Prometheus are on the REST port, at the path
    /monitoring/prometheus/metrics. Ctrl-C or SIGTERM ends the server after all running requests are answered.

    Attributes:
      model_base_path: folder of one model, with a numbered folder for each version.
      model_config_file: file that lists several models, in the text form of TensorFlow Serving's models.config.
      model_name: model's name in requests, with --model-base-path only; default: the folder's name.
      rest_port: port of the REST API; 0 picks a free port.
      grpc_port: port of the gRPC API; 0 picks a free port.
      host: address to listen on; the default can be reached from this machine only.
      poll_seconds: seconds between two searches for new versions; 0: search only at the start.
      batching_parameters_file: file of TensorFlow Serving's batching parameters, for merging waiting requests.
      batching: merging of waiting requests into batches; if switched off, each request runs on its own.
      max_bytes: largest size of a request, in bytes.
      max_elements: largest number of elements in one tensor of a gRPC request.
    """

    model_base_path: Path | None = None
    model_config_file: Path | None = None
    model_name: str | None = None
    rest_port: CountOrZero = 8501
    grpc_port: CountOrZero = 8500
    host: str = "127.0.0.1"
    poll_seconds: NotNegative = 1.0
    batching_parameters_file: Path | None = None
    batching: bool = True
    max_bytes: Count = 64 * 2**20
    max_elements: Count = 16 * 2**20

    exactly_one = (("model_base_path", "model_config_file"),)
    at_most_one = (("batching_parameters_file", "batching"),)

    def run(self) -> Outcome:
        """Serves until Ctrl-C or SIGTERM."""
        from serving.server.embedded import EmbeddedServer
        from serving.server.options import BatchingOptions, Limits, read_batching_file
        from serving.tf_serving import ServedModel, read_model_config_file

        if self.model_base_path:
            models = [ServedModel(self.model_name or self.model_base_path.resolve().name, self.model_base_path)]
        elif self.model_name or not self.model_config_file:
            raise ServingError("--model-name goes with --model-base-path; --model-config-file has the models' names")
        else:
            models = read_model_config_file(self.model_config_file)
        batching = BatchingOptions() if self.batching else None
        if self.batching_parameters_file:
            batching = read_batching_file(self.batching_parameters_file)
        limits = Limits(self.max_bytes, self.max_elements)
        server = EmbeddedServer(models, self.rest_port, self.grpc_port, self.host, self.poll_seconds, batching, limits)
        if not _is_loopback(self.host):
            print(
                f"warning: --host {self.host} is not a loopback address: anyone who reaches it can use every model and "
                "change which models are served, without a password",
                file=sys.stderr,
            )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            # A reader of the banner may end the server in the same moment, before it waits.
            with server, contextlib.suppress(KeyboardInterrupt):
                # Objects of the start stay alive; their garbage collection took a tenth of the time of small requests.
                gc.collect()
                gc.freeze()
                print(server.banner, flush=True)
                server.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
        return Outcome(None)


class Verify(Reporting):
    """Check exports before they are served.

    The exports need not be trusted. The exit status is 0 if all exports pass, 1 if one is refused. An export passes if:
      - it has plain files only, and each file has the hash in the manifest
      - its graph has allowed ops only, reads only its own variables and assets, and writes nothing
      - it has a model card, a privacy report, and a warm-up request for each signature
      - a separate process loads it as TensorFlow Serving does, runs its warm-up requests, and tries saved_model_cli
    A SavedModel is a program: the checks find damage and well-known abuse, but do not make a stranger's export safe to
    serve.

    Attributes:
      directories: folder of one version, or folder of a model's versions.
      latest: in a folder of versions, check only the highest version.
      timeout: time limit for each export, in seconds.
    """

    directories: Annotated[tuple[Path, ...], Positional("DIR")]
    latest: bool = False
    timeout: Positive = 120.0

    def run(self) -> Outcome:
        """Checks every export, and prints the findings."""
        from serving.verify.fresh_process import FreshProcess
        from serving.verify.verify import verify_export, versions_below

        exports = [export for path in self.directories for export in versions_below(path, latest=self.latest)]
        results = []
        with FreshProcess(self.timeout) as process:
            for export_dir in exports:
                try:
                    verified = verify_export(export_dir, process)
                    result, text = verified.to_json(), verified.summary()
                except ServingError as error:
                    # TensorFlow's messages have many lines.
                    reason = " ".join(str(error).split())
                    result = {"export_dir": str(export_dir), "refused": reason}
                    text = f"{export_dir}: REFUSED: {reason}"
                results.append(result)
                if not self.json:
                    print(text, flush=True)
        return Outcome(None, results, int(any("refused" in result for result in results)))


class ClientId(Command):
    """Print the hashes of clients' ids, for requests.

    An export has keyed hashes in place of clients' ids, so requests must send the hash of an id. Keep the key as secret
    as the ids: with the key, anyone can find out who is in an export.

    Attributes:
      ids: clients' ids, as in the clients' data.
      key: key file, which the command export wrote.
    """

    ids: Annotated[tuple[str, ...], Positional("ID")]
    key: Annotated[Path, Option("FILE")]

    def run(self) -> Outcome:
        """Hashes the ids."""
        from serving.client_ids import ClientIdHash

        return Outcome("\n".join(map(ClientIdHash.load(self.key), self.ids)))


class Deploy(Command):
    """Write the files that TensorFlow Serving needs in production.

    The files are models.config (the list of all models that have a complete version), batching and monitoring
    parameters, a Compose file, Kubernetes manifests, and a README with the commands.

    Attributes:
      paths: folder of one model's versions, or folder of several models' folders.
      output: folder to write to.
      replace: replace a kit that is in the output folder already.
      model_name: model's name in requests, for a single model; default: the folder's name.
      versions: versions to serve, for a single model; default: the newest.
      label: label and its version, for a single model; may be repeated.
    """

    paths: Annotated[tuple[Path, ...], Positional("BASE_PATH")]
    output: Annotated[Path, Option("FOLDER")]
    replace: bool = False
    model_name: str | None = None
    versions: tuple[int, ...] = ()
    label: Annotated[tuple[str, ...], Option("LABEL=N", each=True)] = ()
    options: KitOptions

    def run(self) -> Outcome:
        """Writes the kit."""
        from serving.production.kit import write_production_kit

        files = write_production_kit(
            self.paths,
            self.output,
            model_name=self.model_name,
            versions=self.versions,
            labels=dict(map(_label, self.label)),
            replace=self.replace,
            options=self.options,
        )
        return Outcome("\n".join(map(str, files)))


class Rollout(Command):
    """Move the labels stable and canary to other versions.

    Serves two versions of a model under the labels stable and canary, or makes the canary stable:
      %(prog)s runs/x/export/digits --model-name digits --stable 3 --canary 4 --address 127.0.0.1:8500
      %(prog)s runs/x/export/digits --model-name digits --promote --address 127.0.0.1:8500
      %(prog)s runs/x/export/digits --model-name digits --stable 3      # back to the old version
    With --address, the server first loads the versions, and then moves the labels; models.config is written last. If
    loading the versions or moving the labels fails, the server gets its previous list again.

    Attributes:
      base_path: folder of the model's versions.
      model_name: model's name in requests.
      stable: version for the label stable, which most requests name.
      promote: give the label stable to the present canary.
      canary: version for the label canary, which a few requests name.
      config: file to change; default: models.config in the folder of versions.
      address: address of a running server's gRPC API.
      timeout: seconds that the server may take to load the versions.
    """

    base_path: Annotated[Path, Positional("BASE_PATH")]
    model_name: str
    stable: int | None = None
    promote: bool = False
    canary: int | None = None
    config: Annotated[Path | None, Option("FILE")] = None
    address: Annotated[str | None, Option("HOST:PORT")] = None
    timeout: Positive = 600.0

    exactly_one = (("stable", "promote"),)

    def run(self) -> Outcome:
        """Moves the labels."""
        from serving.production.rollout import roll_out
        from serving.tf_serving import CONFIG_FILE

        if self.promote and self.canary is not None:
            raise ServingError("--promote makes the canary stable: name a new --canary in another rollout.")
        config_file = self.config or self.base_path / CONFIG_FILE
        plan = roll_out(
            config_file,
            self.base_path,
            self.model_name,
            stable=self.stable,
            canary=self.canary,
            address=self.address,
            timeout_seconds=self.timeout,
        )
        labels = next(model.labels for model in plan.final if model.name == self.model_name)
        where = self.address or "the file only; restart the server, or give --address"
        moved = ", ".join(f"{label} {version}" for label, version in labels.items())
        return Outcome(f"{self.model_name}: {moved} ({where})\n{config_file}")


def _label(text: str) -> tuple[str, int]:
    label, separator, version = text.partition("=")
    if not (label and separator and version.isdecimal()):
        raise ServingError(f"{text!r} is not a label: write it as LABEL=VERSION, such as stable=3.")
    return label, int(version)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
