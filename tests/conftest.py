"""What several test folders share: started engines, and one small client dataset written through the real job."""

import collections
import contextlib
import gc
import hashlib
import os
import signal

import pytest

# First: test modules may import TensorFlow before anything of the package, which has settings for it.
import tff_pdp  # noqa: F401

# A shell that starts tests in the background lets them, and all they start, ignore Ctrl-C; some test what it does.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.budget", "tests.kept"]


def pytest_collection_finish():
    """Leaves what stays out of garbage collections, and makes them rarer: they took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _own_registry(scope):
    @pytest.fixture(scope=scope, autouse=True, name=f"registry_of_{scope}")
    def own_registry(tmp_path_factory):
        """What tests train is no part of what anybody's records have cost, nor do tests count each other's runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
            yield

    return own_registry


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What accountants worked out in earlier runs of tests is not asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


# Fixtures of modules train, too, before any test begins.
registry_of_session, registry_of_module, registry_of_function = map(_own_registry, ("session", "module", "function"))


@pytest.fixture(scope="session", autouse=True)
def keys_of_tests():
    """Derives runs' keys from the running test's name: noise, and what is learned under it, is the same each time.

    Gives what draws them outside tests.
    """
    from tff_pdp.experiment.run_key import KEY_BYTES, RunKey

    drawn = collections.Counter()

    def from_name(key_class):
        test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
        drawn[test] += 1
        return key_class(hashlib.blake2b(f"{test} {drawn[test]}".encode(), digest_size=KEY_BYTES).digest())

    shipped = RunKey.from_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunKey, "from_entropy", classmethod(from_name))
        yield shipped


@pytest.fixture(scope="session")
def native_engine():
    """A started engine; tests call computations inside `with native_engine.install():`."""
    from tff_pdp.engines.running import build_engine

    engine = build_engine("native")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def engines(native_engine):
    """Every way to compute, by name: natively, and in this process with clients one by one or as stacks."""
    from tff_pdp.engines.running import build_engine

    inprocess = {name: build_engine("inprocess", client_parallelism=name) for name in ("loop", "vectorized")}
    yield {"native": native_engine, **inprocess}
    for engine in inprocess.values():
        engine.close()


@pytest.fixture(params=["native", "loop", "vectorized"])
def engine(request, engines):
    """Each of the engines in turn; tests call computations inside `with engine.install():`."""
    return engines[request.param]


@pytest.fixture(scope="session")
def fresh_process():
    """What verifies exports; one for all, since each imports TensorFlow."""
    from serving.verify.fresh_process import FreshProcess

    with FreshProcess() as process:
        yield process


@pytest.fixture(scope="module")
def one_fresh_process(fresh_process):
    """Exports that would start a process of their own are verified by that one."""
    from tff_pdp.personal_models import export
    from tff_pdp.personal_models.new_clients import version

    with pytest.MonkeyPatch.context() as patch:
        for module in (export, version):
            patch.setattr(module, "FreshProcess", lambda: contextlib.nullcontext(fresh_process))
        yield


@pytest.fixture(scope="session")
def client_folder(tmp_path_factory):
    """A prepared client dataset of three silos of digits."""
    from beam_pipelines.sources.partition import write_digits_leaf
    from tff_pdp.experiment.prepare import prepare_clients

    folder = tmp_path_factory.mktemp("three_silos")
    write_digits_leaf(folder / "leaf", num_clients=3, concentration=1.0, seed=0)
    config = _load_demo({"output": str(folder), "data.input": str(folder / "leaf")})
    prepare_clients(config)
    return config.clients_folder


@pytest.fixture
def experiment(client_folder, tmp_path):
    """A function that builds a small experiment on those silos, under this test's own folder."""

    def build(name="run", **overrides):
        output = tmp_path / name
        output.mkdir(exist_ok=True)
        if not (output / "clients").exists():
            (output / "clients").symlink_to(client_folder)
        settings = {
            "output": str(output),
            "data.input": str(client_folder.parent / "leaf"),
            "training.rounds": 6,
            "training.checkpoint_every": 2,
            "training.evaluate_every": 3,
            "training.test_only_seed": 1,
            # What `auto` finds faster may change from run to run, and with it the last bits.
            "training.client_parallelism": "loop",
        }
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        if given.get("privacy.kind") == "none":
            settings |= {"privacy.unit": "silo", "privacy.clip_norm": None, "privacy.budgets": None}
        return _load_demo({**settings, **given})

    return build


def _load_demo(overrides):
    from tests.places import DEMO
    from tff_pdp.experiment.config import load_experiment

    return load_experiment(DEMO, overrides)
