"""Thousands of hostile requests, then exports that must not be served, against the real command in its own process."""

import http.client
import json
import random
import time

import pytest

from tests.serving.fuzz.cases import GrpcCase
from tests.serving.fuzz.corrupted_exports import IGNORED_NAMES, REFUSED, publish
from tests.serving.fuzz.invariants import FileWatch, Prober, ProcessWatch, log_problems
from tests.serving.fuzz.run import attack, make_case
from tests.serving.fuzz.target import canaries, export_model, running_target
from tests.tiers import amount

# A minute on two cores; more where other tests run beside it.
pytestmark = pytest.mark.timeout(600)

_SEED = 20_240
_REQUESTS = amount(test=1_000, all=10_000)
_CASES = amount(test=40, all=400)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def served(root):
    return export_model(root)


@pytest.fixture(scope="module")
def target(root, served):
    with running_target(root) as running:
        yield running


def test_cases_follow_from_seed_and_number_alone(served, monkeypatch):
    cases = [make_case(5, number, served) for number in range(_CASES)]
    monkeypatch.setattr("time.time", lambda: 0.0)
    again = [make_case(5, number, served) for number in range(_CASES)]
    assert [_sent(case) for case in again] == [_sent(case) for case in cases]
    assert len({_sent(case) for case in cases}) > 0.875 * _CASES


def _sent(case):
    return case.message if isinstance(case, GrpcCase) else b"".join(case.parts)


def test_hostile_requests_are_refused_and_harm_nobody(target, served, root):
    _attack(target, served, root, _SEED, _REQUESTS)


@pytest.mark.hurt
@pytest.mark.timeout(3600)
def test_many_more_hostile_requests_are_refused_and_harm_nobody(target, served, root):
    _attack(target, served, root, _SEED + 1, 100_000)


def _attack(target, served, root, seed, requests):
    outcome = attack(target, served, root, seed, range(requests))
    if outcome.failures:
        pytest.fail("\n".join(outcome.failures.values()), pytrace=False)
    assert outcome.counts.total() >= requests
    assert outcome.probes > requests / 500


@pytest.mark.all
def test_corrupted_exports_are_refused_and_the_good_one_stays(target, served, root):
    base_path = root / "models" / served.name
    process, files = ProcessWatch(target.process), FileWatch(canaries(root))
    prober = Prober(served, target.rest_port, target.grpc_port)
    prober.start()
    rng = random.Random(_SEED)
    good = base_path / "1"
    names = dict(zip([*map(str, range(2, 2 + len(REFUSED) - 1)), str(2**63 - 1)], REFUSED, strict=True))
    for name, kind in names.items():
        publish(good, base_path, name, REFUSED[kind], rng)
    for name in IGNORED_NAMES:
        publish(good, base_path, name, REFUSED["emptied"], rng)
    (base_path / "500").symlink_to(good)
    (base_path / "501").write_bytes(b"")
    states = _wait_until_settled(target.rest_port, served.name, {"1", *names})
    prober.stop()
    assert states.pop("1") == ("AVAILABLE", "")
    assert states.keys() == names.keys()
    served_anyway = {
        names[version]: state for version, (state, message) in states.items() if state != "END" or not message
    }
    assert not served_anyway
    assert prober.found == []
    assert files.problems() + process.problems(idle=True) + log_problems(target.log) == []
    files.close()


def _wait_until_settled(port, model_name, versions):
    """Polls the status until every version is there and none is on its way; returns (state, message) of each."""
    deadline = time.monotonic() + 60
    states = {}
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", f"/v1/models/{model_name}")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        states = {
            entry["version"]: (entry["state"], entry["status"]["error_message"])
            for entry in answer["model_version_status"]
        }
        if states.keys() >= versions and all(state in ("AVAILABLE", "END") for state, _ in states.values()):
            return states
        time.sleep(0.2)
    raise AssertionError(f"after 60 s: {states}, without {sorted(versions - states.keys())}")
