"""Runs a real Flink cluster for Beam jobs on this machine: `up`, `down`, `flags` (prints a job's flags), and `jars`.

A JobManager, two task managers and Beam's job server are JVMs of their own; a task manager starts a Python worker (a
process, `worker.py`) for every job. Jars, configuration, logs and pid files lie under `build/flink`. The servers use
five consecutive ports from the environment variable FLINK_PORT on (default 18081).

Flink listens on 127.0.0.1 only. Beam's servers (the job server's two ports, and the ports that a task manager opens for
its worker) take no address and listen on every interface.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
TASK_MANAGERS = 2
SECONDS_TO_START = 120
SECONDS_TO_STOP = 15

_SOURCE = Path(__file__).resolve().parent
_PROJECT = _SOURCE.parents[1]
_HOME = _PROJECT / "build" / "flink"
# Beam's job server would send every jar on its class path with every job (150 MB, 15 seconds), though the cluster has
# them. It leaves out only jars with "gradle/wrapper" in their paths (`PipelineResources.isStageable`).
_JARS = _HOME / "gradle" / "wrapper"


class ClusterError(Exception):
    """Error of the cluster; the message is one line for the user, with what to do."""


class Ports(NamedTuple):
    """Ports on which the cluster's servers listen."""

    rest: int
    rpc: int
    blobs: int
    jobs: int
    artifacts: int


def main() -> int:
    """Runs one command.

    Returns:
      The exit status: 0, or 1 after one line on standard error.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down", "flags", "jars"])
    command = parser.parse_args().command
    try:
        {"up": up, "down": down, "flags": flags, "jars": jars}[command]()
    except ClusterError as error:
        print(f"flink: {error}", file=sys.stderr)
        return 1
    return 0


def up() -> None:
    """Starts the cluster, unless it is ready, and prints the flags for jobs; first ends the rest of an old cluster.

    Raises:
      ClusterError: Java or Maven is missing, a port is taken, or a process ended or was not ready in time.
    """
    ports = _ports()
    if not _is_ready(ports):
        down()
        _demand_programs()
        for port in ports:
            _demand_free(port)
        _download_jars()
        _configure(ports)
        _start_all(ports)
        _wait_until_ready(ports)
    flags()


def down() -> None:
    """Ends the cluster's processes, workers included; does nothing if there are none.

    Raises:
      ClusterError: a process is still there after being killed.
    """
    files = _pid_files()
    groups = {file: int(file.read_text().split()[0]) for file in files if _is_running(file)}
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal_number)
        _wait(lambda: not any(map(_group_exists, groups.values())), SECONDS_TO_STOP)
    for file, group in groups.items():
        if _group_exists(group):
            raise ClusterError(f"{file.stem} (process group {group}) cannot be ended")
    for file in files:
        file.unlink()


def flags() -> None:
    """Prints, in one line, the pipeline options that make a job run on the cluster.

    Raises:
      ClusterError: the cluster is not up.
    """
    ports = _ports()
    if not _is_ready(ports):
        raise ClusterError(f"no cluster is up on port {ports.rest}; start it with make flink-up")
    options = (
        "--runner=PortableRunner",
        f"--job_endpoint={HOST}:{ports.jobs}",
        f"--flink_master={HOST}:{ports.rest}",
        f"--parallelism={TASK_MANAGERS}",
        "--environment_type=PROCESS",
        f"--environment_options=process_command={_HOME / 'worker'}",
    )
    print(shlex.join(options))


def jars() -> None:
    """Fetches the cluster's jars, unless they exist.

    Raises:
      ClusterError: Java or Maven is missing, or Maven cannot fetch them.
    """
    _demand_programs()
    _download_jars()


def _ports() -> Ports:
    first = os.environ.get("FLINK_PORT", "18081")
    if not first.isdecimal() or not 1024 <= int(first) <= 65_531:
        raise ClusterError(f"FLINK_PORT is the first of five ports, 1024 to 65531; got {first!r}")
    return Ports(*range(int(first), int(first) + 5))


def _demand_programs() -> None:
    for program, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            raise ClusterError(f"{program} is missing; on Debian: apt-get install {package}")
    said = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) not in (11, 17, 21):
        raise ClusterError(f"Flink 1.19 needs Java 17 (11 and 21 may do); java -version says {said.splitlines()[:1]}")


def _demand_free(port: int) -> None:
    with socket.socket() as probe:
        # As the servers do: a port with only a lingering closed connection counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} is taken ({error.strerror}); name the first of five free ones: make flink-up FLINK_PORT=N"
            ) from None


def _download_jars() -> None:
    """Copies Flink's and Beam's jars into `_JARS`, unless the jars of this pom.xml are there."""
    stamp = _HOME / "jars.complete"
    wanted = hashlib.sha256((_SOURCE / "pom.xml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(_JARS, ignore_errors=True)
    _HOME.mkdir(parents=True, exist_ok=True)
    print("flink: fetching the jars (150 MB, once)", file=sys.stderr)
    log = _HOME / "maven.log"
    # Without --strict-checksums a damaged download is only a warning.
    command = ["mvn", "--batch-mode", "--strict-checksums", "--file", _SOURCE / "pom.xml"]
    command += ["org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={_JARS}"]
    with log.open("w") as output:
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    if finished.returncode:
        errors = [line for line in log.read_text().splitlines() if "[ERROR]" in line]
        raise ClusterError(f"Maven could not fetch the jars: {errors[0] if errors else 'no error line'} (log: {log})")
    stamp.write_text(wanted)


def _configure(ports: Ports) -> None:
    for name in ("conf", "logs", "tmp", "artifacts"):
        shutil.rmtree(_HOME / name, ignore_errors=True)
        (_HOME / name).mkdir(parents=True)
    places = {
        "rest.port": ports.rest,
        "jobmanager.rpc.port": ports.rpc,
        "blob.server.port": ports.blobs,
        **dict.fromkeys(("io.tmp.dirs", "web.tmpdir"), _HOME / "tmp"),
    }
    lines = [f"{key}: {value}\n" for key, value in places.items()]
    (_HOME / "conf" / "config.yaml").write_text((_SOURCE / "config.yaml").read_text() + "".join(lines))
    worker = _HOME / "worker"
    worker.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="{_PROJECT}"\n'
        f'exec "{sys.executable}" "{_SOURCE / "worker.py"}" "$@" >"{_HOME}/logs/worker-$$.log" 2>&1\n'
    )
    worker.chmod(0o755)


def _start_all(ports: Ports) -> None:
    conf = ["--configDir", _HOME / "conf"]
    runtime = "org.apache.flink.runtime"
    _start("jobmanager", 512, [f"{runtime}.entrypoint.StandaloneSessionClusterEntrypoint", *conf])
    for number in range(1, TASK_MANAGERS + 1):
        # Heap and direct memory are as in config.yaml.
        arguments = [f"{runtime}.taskexecutor.TaskManagerRunner", *conf, "-D", f"taskmanager.resource-id=tm-{number}"]
        _start(f"taskmanager-{number}", 384, arguments, "-XX:MaxDirectMemorySize=256m")
    driver = ["org.apache.beam.runners.flink.FlinkJobServerDriver", "--flink-master", f"{HOST}:{ports.rest}"]
    driver += ["--flink-conf-dir", _HOME / "conf", "--job-host", HOST, "--job-port", ports.jobs]
    # No expansion service (-1): the jobs have no transforms of other languages.
    driver += ["--artifact-port", ports.artifacts, "--expansion-port", -1, "--artifacts-dir", _HOME / "artifacts"]
    _start("jobserver", 512, driver)


def _start(name: str, heap_megabytes: int, arguments: list, *options: str) -> None:
    command = ["java", f"@{_SOURCE / 'java.options'}", f"-Xmx{heap_megabytes}m", *options]
    command += [f"-Djava.io.tmpdir={_HOME / 'tmp'}", f"-Dlog4j.configurationFile={_SOURCE / 'log4j2.properties'}"]
    command += ["-cp", f"{_JARS}/*", *map(str, arguments)]
    with (_HOME / "logs" / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=_HOME,
            # In its own process group, its workers end with it, and Ctrl-C in this terminal does not end it.
            start_new_session=True,
        )
    (_HOME / f"{name}.pid").write_text(f"{process.pid} {_start_time(process.pid)}")


def _wait_until_ready(ports: Ports) -> None:
    def ended() -> list[str]:
        return [file.stem for file in _pid_files() if not _is_running(file)]

    _wait(lambda: _is_ready(ports) or bool(ended()), SECONDS_TO_START)
    if _is_ready(ports):
        return
    problem = f"{ended()[0]} ended" if ended() else f"not ready after {SECONDS_TO_START} seconds"
    down()
    raise ClusterError(f"{problem}; see {_HOME / 'logs'}")


def _is_ready(ports: Ports) -> bool:
    """Tells whether the cluster of this folder, on these ports, has all its task managers and a job server."""
    files = _pid_files()
    if len(files) != TASK_MANAGERS + 2 or not all(map(_is_running, files)):
        return False
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ports.rest}/taskmanagers", timeout=5) as answer:
            registered = json.load(answer)["taskmanagers"]
        with socket.create_connection((HOST, ports.jobs), timeout=5):
            return len(registered) == TASK_MANAGERS
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return False


def _pid_files() -> list[Path]:
    return sorted(_HOME.glob("*.pid"))


def _is_running(pid_file: Path) -> bool:
    """Tells whether the process named in the file still runs; another process may have got its number since."""
    pid, start_time = pid_file.read_text().split()
    return _start_time(int(pid)) == start_time


def _start_time(pid: int) -> str | None:
    """Returns the start of a process, in ticks since the machine's start; None if there is no such running process."""
    try:
        # The name in parentheses may hold spaces; after it, state is the first field and the time the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _group_exists(group: int) -> bool:
    # A child of this process stays as a zombie until the parent waits for it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
