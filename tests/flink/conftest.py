"""A Flink cluster that runs already; `make test-flink` starts one and names it in TFF_PDP_FLINK."""

import json
import os
import shlex
import urllib.request

import pytest

from tests.beam_pipelines.conftest import options, write_leaf  # noqa: F401


class Cluster:
    """The cluster of some Beam flags, and what its REST interface says of it."""

    def __init__(self, flags):
        named = dict(flag.removeprefix("--").split("=", 1) for flag in shlex.split(flags))
        self.runner = named.pop("runner")
        self.flags = tuple(f"--{name}={value}" for name, value in named.items())
        self._address = named["flink_master"]

    def job_ids(self):
        return {job["jid"] for job in self._get("jobs/overview")["jobs"]}

    def records_read(self, job):
        """Per operator of a job that is over: how many records each task manager's part of it read."""
        records = {}
        for number, vertex in enumerate(self._get(f"jobs/{job}")["vertices"]):
            parts = self._get(f"jobs/{job}/vertices/{vertex['id']}/taskmanagers")["taskmanagers"]
            reads = {part["taskmanager-id"]: part["metrics"]["read-records"] for part in parts}
            records[f"{number} {vertex['name']}"] = reads
        return records

    def _get(self, path):
        with urllib.request.urlopen(f"http://{self._address}/{path}", timeout=30) as answer:
            return json.load(answer)


@pytest.fixture
def cluster():
    flags = os.environ.get("TFF_PDP_FLINK")
    if not flags:
        pytest.skip("TFF_PDP_FLINK is not set: no Flink cluster; make test-flink starts one")
    return Cluster(flags)
