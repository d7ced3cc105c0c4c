import contextlib

import pytest

from tests.workers.runs import write_clients


@pytest.fixture(scope="session")
def clients(tmp_path_factory):
    """A prepared client dataset of twelve clients of digits."""
    return write_clients(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster of this machine, on which engines start their workers; ended with the tests."""
    from tff_pdp.engines.ray_workers.calls import PoolOptions
    from tff_pdp.engines.ray_workers.engine import set_up_ray

    set_up_ray(PoolOptions())
    import ray

    # Not a cluster that another process has started.
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=2**29)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def engines(cluster):
    """Started engines by number of workers and way of computing clients."""
    with contextlib.ExitStack() as stack:
        yield stack, {}


@pytest.fixture
def lent_workers(engines, monkeypatch):
    """Lends experiments with workers the engines of the whole run, whose workers take long to start."""
    from tff_pdp.engines.running import build_engine, running_engine
    from tff_pdp.experiment import build

    stack, kept = engines

    @contextlib.contextmanager
    def lent_engine(name, device, **options):
        if name != "ray":
            with running_engine(name, device, **options) as engine:
                yield engine
            return
        key = options["options"], options["client_parallelism"], options["clients_per_call"]
        if key not in kept:
            # Workers take most of a gigabyte each.
            for other in [*kept]:
                kept.pop(other).close()
            kept[key] = stack.enter_context(contextlib.closing(build_engine(name, device, **options)))
        kept[key].choices = options["choices"] if options["choices"] is not None else {}
        with kept[key].install():
            yield kept[key]

    monkeypatch.setattr(build, "running_engine", lent_engine)
