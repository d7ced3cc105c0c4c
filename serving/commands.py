"""Runs the commands on exports: serve, verify, hash clients' ids, write a kit for production, move labels.

TensorFlow is imported by the commands that need it, when they run, and by the process that verifies.
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
    """Serve an export on this machine, speaking TensorFlow Serving's protocols.

    For development, tests and demonstrations: no password, no encryption. It answers as TensorFlow Serving, which is
    for production; metrics for Prometheus are at /monitoring/prometheus/metrics of the REST port. Ctrl-C or SIGTERM
    ends it once running requests are answered.

    Attributes:
      model_base_path: folder with numbered version folders.
      model_config_file: several models: TensorFlow Serving's models.config, as text.
      model_name: name in requests; default: the folder's name.
      rest_port: 0 picks a free one.
      grpc_port: 0 picks a free one.
      host: address to listen on; the default is this machine only.
      poll_seconds: how often to look for new versions; 0: only at the start.
      batching_parameters_file: how waiting requests are merged; TensorFlow Serving's file.
      batching: waiting requests are merged, or else each is run on its own.
      max_bytes: largest request.
      max_elements: most elements of a tensor in a gRPC request.
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
        """Serves until interrupted or terminated."""
        from serving.server.embedded import EmbeddedServer
        from serving.server.options import BatchingOptions, Limits, read_batching_file
        from serving.tf_serving import ServedModel, read_model_config_file

        if self.model_base_path:
            models = [ServedModel(self.model_name or self.model_base_path.resolve().name, self.model_base_path)]
        elif self.model_name or not self.model_config_file:
            raise ServingError("--model-name goes with --model-base-path; --model-config-file names its models itself")
        else:
            models = read_model_config_file(self.model_config_file)
        batching = BatchingOptions() if self.batching else None
        if self.batching_parameters_file:
            batching = read_batching_file(self.batching_parameters_file)
        limits = Limits(self.max_bytes, self.max_elements)
        server = EmbeddedServer(models, self.rest_port, self.grpc_port, self.host, self.poll_seconds, batching, limits)
        if not _is_loopback(self.host):
            print(
                f"warning: --host {self.host} is not a loopback address: whoever reaches it can ask every model and "
                "change which are served, without a password",
                file=sys.stderr,
            )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            # Whoever reads the banner may end the server in the same moment, before it waits.
            with server, contextlib.suppress(KeyboardInterrupt):
                # What the start has made stays; looking through it took a tenth of the time of small requests.
                gc.collect()
                gc.freeze()
                print(server.banner, flush=True)
                server.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
        return Outcome(None)


class Verify(Reporting):
    """Check exports before they are served.

    Checks an export without trusting it, and exits with 0 if it is fine, 1 if it is refused:
      - plain files only, each as the manifest hashes it
      - a graph of allowed ops that reads its own variables and assets and writes nothing
      - in a process of its own: loading as TensorFlow Serving does, the stored warm-up requests, saved_model_cli
    A SavedModel is a program: the checks find damage and well-known abuse, and are no reason to serve a stranger's
    export.

    Attributes:
      directories: a version, or a folder of versions.
      latest: of a folder of versions only the highest.
      timeout: seconds for each export.
    """

    directories: Annotated[tuple[Path, ...], Positional("DIR")]
    latest: bool = False
    timeout: Positive = 120.0

    def run(self) -> Outcome:
        """Checks every export, and prints what was found of each."""
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
                    # TensorFlow's reasons go over many lines.
                    reason = " ".join(str(error).split())
                    result = {"export_dir": str(export_dir), "refused": reason}
                    text = f"{export_dir}: REFUSED: {reason}"
                results.append(result)
                if not self.json:
                    print(text, flush=True)
        return Outcome(None, results, int(any("refused" in result for result in results)))


class ClientId(Command):
    """Print the hashed ids that requests send.

    An export holds keyed hashes instead of clients' ids; this prints what requests must send for an id. Keep the key as
    secret as the ids: whoever has it can tell who is in an export.

    Attributes:
      ids: clients' ids as the clients' data have them.
      key: the key that export wrote.
    """

    ids: Annotated[tuple[str, ...], Positional("ID")]
    key: Annotated[Path, Option("FILE")]

    def run(self) -> Outcome:
        """Hashes the ids."""
        from serving.client_ids import ClientIdHash

        return Outcome("\n".join(map(ClientIdHash.load(self.key), self.ids)))


class Deploy(Command):
    """Write the files that TensorFlow Serving needs in production.

    These are models.config with every model that has a complete version, batching and monitoring parameters, a Compose
    file, Kubernetes manifests, and a README with the commands.

    Attributes:
      paths: folder of versions, or of such folders.
      output: where to write.
      replace: replace a kit that is there.
      model_name: of one model; by default the folder's name.
      versions: of one model; default: newest.
      label: of one model; may be repeated.
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
    With an address, the server loads the versions first and moves the labels then; models.config is written last, and
    where the server fails on the way it is sent the list of before again.

    Attributes:
      base_path: folder of the model's versions.
      model_name: name in requests.
      stable: the version most requests ask for.
      promote: make the canary stable.
      canary: the version to try.
      config: default: models.config in the folder of versions.
      address: gRPC API of a running server.
      timeout: seconds to load.
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
            raise ServingError("--promote makes the canary stable: name a new canary afterwards.")
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
