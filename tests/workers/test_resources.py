"""Workers ask Ray for the cores and GPUs of the experiment's settings, and are started again for good reasons only."""

import itertools
import time
import types

import pytest

from tff_pdp.engines.ray_workers.calls import PoolOptions
from tff_pdp.engines.ray_workers.engine import set_up_ray
from tff_pdp.errors import EngineError
from tff_pdp.experiment.build import experiment_engine


class Actor:
    """A worker without a process, which starts or fails to start."""

    def __init__(self):
        self.describe = types.SimpleNamespace(remote=lambda facts: (1, "here", None))
        self.end = types.SimpleNamespace(remote=lambda: None)


@pytest.fixture(autouse=True, scope="module")
def ray_settings():
    """Ray reads these when it is first imported."""
    set_up_ray(PoolOptions())


@pytest.fixture
def asked(monkeypatch):
    """What Ray is asked for, by worker: options of the actor, and its arguments. Ray itself does not start."""
    from tff_pdp.engines.ray_workers import pool

    found = []

    def remote(_):
        def options(**given):
            def start(*arguments):
                found.append((given, arguments))
                return Actor()

            return types.SimpleNamespace(remote=start)

        return types.SimpleNamespace(options=options)

    fake = types.SimpleNamespace(
        remote=remote,
        is_initialized=lambda: True,
        wait=lambda references, **_: (references, []),
        get=lambda reference, timeout=None: reference,
        kill=lambda actor: None,
        nodes=lambda: [{"NodeID": "one", "Alive": True}],
        exceptions=pool.ray.exceptions,
    )
    monkeypatch.setattr(pool, "ray", fake)
    return found


@pytest.mark.parametrize(
    ("settings", "resources", "device", "of_engine"),
    [
        ({"num_workers": 2}, {"num_cpus": 1, "num_gpus": 0.0}, "cpu", "cpu"),
        (
            {"num_workers": 3, "cpus_per_worker": 2, "gpus_per_worker": 0.5},
            {"num_cpus": 2, "num_gpus": 0.5},
            "gpu",
            "gpu:0",
        ),
    ],
)
def test_each_worker_asks_for_its_own(experiment, asked, settings, resources, device, of_engine):
    config = experiment(training__workers=settings, training__deterministic_operations=False)
    with experiment_engine(config) as engine:
        assert len(asked) == settings["num_workers"]
        assert engine.device == of_engine
    for options, (_, given_device, cores, *_) in asked:
        # Ray itself starts no worker again and sends no request again: the pool does both.
        assert options == {**resources, "max_restarts": 0, "max_task_retries": 0}
        assert (given_device, cores) == (device, resources["num_cpus"])


@pytest.mark.parametrize("is_with_nodes", [True, False])
def test_workers_that_fail_to_start_are_given_up_unless_their_nodes_have_died(asked, monkeypatch, is_with_nodes):
    """The first five workers fail. Each time Ray is asked for its nodes, there is another node, or the same one."""
    from tff_pdp.engines.ray_workers import pool

    def get(reference, timeout=None):
        if len(asked) <= 5:
            raise pool.ray.exceptions.ActorDiedError
        return reference

    numbers = itertools.count()
    monkeypatch.setattr(pool.ray, "get", get)
    if is_with_nodes:
        monkeypatch.setattr(pool.ray, "nodes", lambda: [{"NodeID": f"{next(numbers)}", "Alive": True}])
    if is_with_nodes:
        assert pool.Pool(dict, PoolOptions()).pids() == [1]
        assert len(asked) == 6
    else:
        with pytest.raises(EngineError, match="3 workers did not start"):
            pool.Pool(dict, PoolOptions())


def test_a_late_worker_is_not_replaced_while_another_one_starts(asked, monkeypatch):
    from tff_pdp.engines.ray_workers import pool

    workers = pool.Pool(dict, PoolOptions(num_workers=2))
    late, other = workers._members
    monkeypatch.setattr(pool.ray, "wait", lambda references, **_: ([], references))
    late.busy = other.busy = "no answer yet"
    running = {"no answer yet": pool._Errand(late, range(1), time.monotonic() - 60)}
    for name, num_asked in (("", 2), ("started", 3)):
        other.name = name
        workers._late("kind", running, [], slowest=0.1)
        assert len(asked) == num_asked


@pytest.mark.all
@pytest.mark.timeout(300)
def test_a_cluster_without_gpus_is_refused_by_name(experiment, cluster, monkeypatch):
    from tff_pdp.engines.ray_workers import pool

    monkeypatch.setattr(pool, "_SECONDS_TO_START", 1.0)
    config = experiment(training__workers={"gpus_per_worker": 0.5}, training__deterministic_operations=False)
    refused = pytest.raises(EngineError, match=r"No worker has started.* a worker needs 1 CPUs and 0\.5 GPUs")
    with refused, experiment_engine(config):
        raise AssertionError
