import asyncio
import gc
import shutil
import threading
import time
import weakref
from pathlib import Path

import grpc
import numpy as np
import pytest

from serving.errors import RequestError
from serving.server.manager import ModelManager, ModelSpec
from serving.server.metrics import Metrics
from serving.server.options import BatchingOptions
from serving.server.versions import VersionStatus
from serving.tf_serving import Latest, ServedModel, Specific
from tests.serving.server.fake_servable import MODEL_FILE, FakeServable, write_version
from tff_pdp.errors import ServingError

X = np.ones((1, 2), np.float32)


class Counted:
    """What `Metrics` is told."""

    def __init__(self):
        self.attempts = []
        self.batches = []

    def load_attempt(self, name, version, ok, seconds):
        assert seconds >= 0
        self.attempts.append((name, version, ok))

    def batch_ran(self, name, request_sizes, num_examples):
        self.batches.append((name, request_sizes, num_examples))


@pytest.fixture
def build():
    """Builds managers of fake servables, loaded unless told; stops them at the end."""
    managers = []

    def make(*models, load=True, allowed_roots=(), **options):
        options = {"poll_seconds": 0.01, "metrics": Metrics(), "load_export": FakeServable, **options}
        manager = ModelManager(models, **options)
        manager._allowed_roots += allowed_roots
        managers.append(manager)
        if load:
            manager.load()
        return manager

    yield make
    for manager in managers:
        manager.stop()


def versions(manager, name="m"):
    """Version numbers by state, as `statuses` reports them."""
    states = {}
    for status in manager.statuses.get(name):
        states.setdefault(status.state, []).append(status.version)
    return states


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def scale(manager, **spec):
    """What a request is multiplied by, to see who answers it."""

    async def ask():
        with manager.acquire(ModelSpec(spec.pop("name", "m"), **spec)) as version:
            return (await version.run("", {"x": X}))["y"][0, 0]

    return asyncio.run(ask())


def refusal(call):
    with pytest.raises(RequestError) as refused:
        call()
    return refused.value.code, refused.value.message


def acquire(manager, **spec):
    with manager.acquire(ModelSpec(**spec)):
        pass


@pytest.mark.parametrize(
    ("policy", "served"),
    [(Latest(1), [5]), (Latest(2), [5, 3]), (Latest(None), [5, 3, 1]), (Specific((1, 3, 4)), [3, 1])],
    ids=["latest", "latest two", "all", "specific"],
)
def test_the_policy_decides_what_is_served(build, tmp_path, policy, served):
    for number in (1, 3, 5):
        write_version(tmp_path, number, scale=number)
    counted = Counted()
    manager = build(ServedModel("m", tmp_path, policy), metrics=counted)
    assert versions(manager) == {"AVAILABLE": served}
    assert sorted(counted.attempts) == [("m", number, True) for number in sorted(served)]
    assert scale(manager) == max(served)
    assert [scale(manager, version=number) for number in served] == served
    missing = ({1, 3, 4, 5} - set(served)).pop()
    assert refusal(lambda: acquire(manager, name="m", version=missing)) == (
        grpc.StatusCode.NOT_FOUND,
        f"Servable not found for request: Specific(m, {missing})",
    )


def test_unknown_names_labels_and_versions_are_answered_as_by_tensorflow_serving(build, tmp_path):
    write_version(tmp_path, 1)
    manager = build(ServedModel("m", tmp_path))
    not_found, invalid = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
    cases = [
        (lambda: acquire(manager, name="n"), not_found, "Servable not found for request: Latest(n)"),
        (lambda: acquire(manager, name=""), invalid, "ModelSpec has no name specified."),
        (lambda: acquire(manager, name="m", label="l"), invalid, "Unrecognized servable version label: l"),
        (lambda: acquire(manager, name="n", label="l"), invalid, "Unrecognized servable version label: l"),
        (lambda: manager.statuses.get("n"), not_found, "Could not find any versions of model n"),
        (lambda: manager.statuses.get("m", 7), not_found, "Could not find version 7 of model m"),
    ]
    for call, code, message in cases:
        assert refusal(call) == (code, message)


def test_labels_stand_for_versions(build, tmp_path):
    for number in (1, 2):
        write_version(tmp_path, number, scale=number)
    manager = build(ServedModel("m", tmp_path, Latest(None), {"stable": 1, "canary": 2}))
    assert [scale(manager, label=label) for label in ("stable", "canary")] == [1, 2]


def test_a_label_on_a_version_that_is_not_served_stops_the_start(build, tmp_path):
    write_version(tmp_path, 1)
    manager = build(ServedModel("m", tmp_path, labels={"stable": 2}), load=False)
    with pytest.raises(ServingError, match="assign label to version 2 of model m, which is not currently available"):
        manager.load()


def test_nothing_to_serve_stops_the_start_and_frees_what_did_load(build, tmp_path):
    write_version(tmp_path / "good", 1)
    (tmp_path / "empty").mkdir()
    models = (ServedModel("good", tmp_path / "good"), ServedModel("empty", tmp_path / "empty"))
    manager = build(*models, load=False)
    with pytest.raises(ServingError, match=r"No version of 'empty' under .* Export a model there first"):
        manager.load()
    wait_until(lambda: versions(manager, "good") == {"END": [1]})
    write_version(tmp_path / "empty", 1).joinpath(MODEL_FILE).write_text("garbage")
    with pytest.raises(ServingError, match="1 does not load"):
        manager.load()


def test_at_the_start_the_newest_version_that_loads_is_served(build, tmp_path):
    write_version(tmp_path, 1, scale=1)
    write_version(tmp_path, 2).joinpath(MODEL_FILE).write_text("garbage")
    counted = Counted()
    manager = build(ServedModel("m", tmp_path), metrics=counted)
    assert versions(manager) == {"END": [2], "AVAILABLE": [1]}
    assert manager.statuses.get("m", 2)[0].error == f"{tmp_path / '2'} does not load"
    assert counted.attempts == [("m", 2, False), ("m", 1, True)]
    assert scale(manager) == 1


def test_a_version_that_failed_is_tried_again_when_its_files_change_and_not_before(build, tmp_path):
    write_version(tmp_path, 1, scale=1)
    counted = Counted()
    manager = build(ServedModel("m", tmp_path), metrics=counted)
    manager.start_watching()
    (tmp_path / "2").mkdir()
    wait_until(lambda: versions(manager) == {"END": [2], "AVAILABLE": [1]})
    time.sleep(0.05)
    assert counted.attempts == [("m", 1, True), ("m", 2, False)]
    assert scale(manager) == 1
    (tmp_path / "2" / MODEL_FILE).write_text("2")
    wait_until(lambda: versions(manager) == {"END": [1], "AVAILABLE": [2]})
    assert scale(manager) == 2


def test_a_copy_that_grows_is_tried_once_at_every_look(build, tmp_path):
    for number in (1, 2):
        write_version(tmp_path, number, scale=number)
    attempts = []

    def load_export(folder: Path) -> FakeServable:
        attempts.append(folder.name)
        assert len(attempts) < 10
        if folder.name == "2":
            (folder / f"shard-{len(attempts)}").touch()
            raise ServingError("incomplete")
        return FakeServable(folder)

    manager = build(ServedModel("m", tmp_path), load_export=load_export)
    assert attempts == ["2", "1"]
    assert versions(manager) == {"END": [2], "AVAILABLE": [1]}


def test_an_error_that_is_nobodys_fault_ends_the_version_and_not_the_server(build, tmp_path):
    write_version(tmp_path, 1, scale=1)

    def load_export(folder: Path) -> FakeServable:
        if folder.name == "2":
            raise FileNotFoundError("vanished")
        return FakeServable(folder)

    manager = build(ServedModel("m", tmp_path), load_export=load_export)
    manager.start_watching()
    write_version(tmp_path, 2)
    wait_until(lambda: versions(manager) == {"END": [2], "AVAILABLE": [1]})
    assert "2 does not load: vanished" in manager.statuses.get("m", 2)[0].error


def test_removed_versions_end_as_in_tensorflow_serving(build, tmp_path):
    base = tmp_path / "m"
    for number in (1, 2):
        write_version(base, number, scale=number)
    manager = build(ServedModel("m", base, Latest(None)))
    manager.start_watching()
    shutil.rmtree(base / "2")
    wait_until(lambda: versions(manager) == {"END": [2], "AVAILABLE": [1]})
    # A folder that cannot be read says nothing about its versions.
    base.rename(tmp_path / "away")
    time.sleep(0.05)
    assert scale(manager) == 1
    (tmp_path / "away").rename(base)
    # One that is empty does.
    shutil.rmtree(base / "1")
    wait_until(lambda: versions(manager) == {"END": [2, 1]})
    assert refusal(lambda: acquire(manager, name="m"))[0] is grpc.StatusCode.NOT_FOUND
    # And it may come back.
    write_version(base, 1, scale=5)
    wait_until(lambda: versions(manager) == {"END": [2], "AVAILABLE": [1]})
    assert scale(manager) == 5


def test_the_last_good_version_stays_while_what_should_replace_it_does_not_load(build, tmp_path):
    for number in (1, 2):
        write_version(tmp_path, number, scale=number)
    manager = build(ServedModel("m", tmp_path, Latest(None)))
    manager.start_watching()
    (tmp_path / "3").mkdir()
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    wait_until(lambda: versions(manager) == {"END": [3, 1], "AVAILABLE": [2]})
    time.sleep(0.05)
    assert scale(manager) == 2


def test_one_unreadable_model_does_not_hold_up_another(build, tmp_path):
    for name in ("a", "b"):
        write_version(tmp_path / name, 1, scale=1)
    manager = build(*(ServedModel(name, tmp_path / name) for name in ("a", "b")))
    manager.start_watching()
    shutil.rmtree(tmp_path / "a")
    write_version(tmp_path / "b", 2, scale=2)
    wait_until(lambda: versions(manager, "b") == {"AVAILABLE": [2], "END": [1]})
    assert (scale(manager, name="a"), scale(manager, name="b")) == (1, 2)


@pytest.mark.parametrize("batching", [None, BatchingOptions()], ids=["one by one", "batched"])
def test_a_swap_under_load_fails_no_request_and_shows_both_versions(build, tmp_path, batching):
    write_version(tmp_path, 1, scale=1)
    manager = build(ServedModel("m", tmp_path), batching=batching)
    manager.start_watching()
    seen = []

    async def client():
        while seen.count(2) < 200:
            with manager.acquire(ModelSpec("m")) as version:
                seen.append((await version.run("", {"x": X}))["y"][0, 0])

    async def main():
        clients = [asyncio.create_task(client()) for _ in range(8)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(write_version, tmp_path, 2, 2)
        await asyncio.wait_for(asyncio.gather(*clients), 20)

    asyncio.run(main())
    assert set(seen) == {1, 2}
    wait_until(lambda: versions(manager) == {"AVAILABLE": [2], "END": [1]})


def test_a_replaced_version_is_freed_with_its_last_request(build, tmp_path):
    write_version(tmp_path, 1, scale=1)
    manager = build(ServedModel("m", tmp_path), batching=BatchingOptions())
    manager.start_watching()

    async def main():
        with manager.acquire(ModelSpec("m")) as version:
            servable = version.servable
            servable.gate.clear()
            running = asyncio.create_task(version.run("", {"x": X}))
            write_version(tmp_path, 2, scale=2)
            await asyncio.to_thread(wait_until, lambda: versions(manager) == {"AVAILABLE": [2], "UNLOADING": [1]})
            assert not servable.is_closed
            servable.gate.set()
            assert (await running)["y"][0, 0] == 1
        return weakref.ref(servable), weakref.ref(version)

    references = asyncio.run(main())
    wait_until(lambda: versions(manager) == {"AVAILABLE": [2], "END": [1]})

    def are_freed():
        gc.collect()
        return [reference() for reference in references] == [None, None]

    # The thread that unloads a version says END before it lets go of the version.
    wait_until(are_freed)


@pytest.mark.parametrize("batching", [None, BatchingOptions()], ids=["one by one", "batched"])
def test_a_version_is_not_freed_under_a_run_whose_caller_is_gone(build, tmp_path, batching):
    write_version(tmp_path, 1)
    counted = Counted()
    manager = build(ServedModel("m", tmp_path), batching=batching, metrics=counted)
    manager.start_watching()

    async def main():
        with manager.acquire(ModelSpec("m")) as version:
            servable = version.servable
            servable.gate.clear()
            running = asyncio.create_task(version.run("", {"x": X}))
            await asyncio.to_thread(wait_until, lambda: servable.sizes)
            running.cancel()
        write_version(tmp_path, 2)
        await asyncio.to_thread(wait_until, lambda: versions(manager) == {"AVAILABLE": [2], "UNLOADING": [1]})
        time.sleep(0.05)
        assert not servable.is_closed
        servable.gate.set()
        await asyncio.to_thread(wait_until, lambda: versions(manager) == {"AVAILABLE": [2], "END": [1]})
        assert servable.is_closed

    asyncio.run(main())
    assert counted.batches == ([("m", [1], 1)] if batching else [])


def test_a_reload_replaces_the_whole_list_and_returns_when_it_serves(build, tmp_path):
    for name in ("a", "b"):
        write_version(tmp_path / name, 1, scale=1)
        write_version(tmp_path / name, 2, scale=2)
    manager = build(ServedModel("a", tmp_path / "a", Latest(None)), allowed_roots=[tmp_path])
    with manager.acquire(ModelSpec("a", 1)) as version:
        kept = version.servable
    models = [
        ServedModel("a", tmp_path / "a", Specific((1,)), {"old": 1, "new": 2}),
        ServedModel("b", tmp_path / "b"),
    ]
    asyncio.run(manager.reload(models))
    with manager.acquire(ModelSpec("a", label="old")) as version:
        assert version.servable is kept
    assert scale(manager, name="b") == 2
    # Labels are compared with what served before, as in TensorFlow Serving, where version 2 was still there.
    assert refusal(lambda: acquire(manager, name="a", label="new"))[1].endswith("Specific(a, 2)")
    asyncio.run(manager.reload(models[1:]))
    wait_until(lambda: versions(manager, "a") == {"END": [2, 1]})
    assert refusal(lambda: acquire(manager, name="a"))[0] is grpc.StatusCode.NOT_FOUND
    assert versions(manager, "b") == {"AVAILABLE": [2]}


def test_a_model_that_moves_is_loaded_anew_under_the_same_number(build, tmp_path):
    for folder, factor in (("old", 3), ("new", 4)):
        write_version(tmp_path / folder, 1, scale=factor)
    manager = build(ServedModel("m", tmp_path / "old"), allowed_roots=[tmp_path])
    with manager.acquire(ModelSpec("m")) as version:
        old = version.servable
    asyncio.run(manager.reload([ServedModel("m", tmp_path / "new")]))
    assert scale(manager) == 4
    wait_until(lambda: old.is_closed)
    # The end of the old one must not be reported over the new one.
    time.sleep(0.05)
    assert versions(manager) == {"AVAILABLE": [1]}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda m: ServedModel("m", m, labels={"l": 2}), "FAILED_PRECONDITION", "assign label to version 2 of model m"),
        (lambda m: ServedModel("n", m.parent / "n"), "PERMISSION_DENIED", "outside the folders this server was"),
        (lambda m: ServedModel("n", m / ".." / "n"), "PERMISSION_DENIED", "outside the folders this server was"),
        (lambda m: ServedModel("n", m / "link"), "PERMISSION_DENIED", "outside the folders this server was"),
        (lambda m: ServedModel("n", m / "missing"), "INVALID_ARGUMENT", "Cannot read the export directory"),
        (lambda m: ServedModel("n", m / "empty"), "UNKNOWN", "1 model(s) did not become available: {{n: no version"),
        (lambda m: ServedModel("n", m / "broken"), "UNKNOWN", "{{n due to error: "),
        (lambda m: ServedModel("m", m, Specific((7,))), "UNKNOWN", "1 model(s) did not become available: {{m"),
    ],
    ids=["label", "folder", "dots", "link", "missing", "empty", "broken", "policy"],
)
def test_a_reload_that_fails_changes_nothing(build, tmp_path, change, code, message):
    base = tmp_path / "m"
    write_version(base, 1, scale=3)
    write_version(tmp_path / "n", 1)
    write_version(base / "good", 1)
    (base / "broken" / "1").mkdir(parents=True)
    (base / "empty").mkdir()
    (base / "link").symlink_to(tmp_path / "n")
    manager = build(ServedModel("m", base))
    # A model that would load comes first: it must not be left behind.
    models = [ServedModel("good", base / "good"), change(base)]
    found = refusal(lambda: asyncio.run(manager.reload(models)))
    assert found[0] is grpc.StatusCode[code]
    assert message in found[1]
    assert scale(manager) == 3
    assert versions(manager) == {"AVAILABLE": [1]}
    for name in ("good", "n"):
        assert refusal(lambda name=name: acquire(manager, name=name))[0] is grpc.StatusCode.NOT_FOUND
    if code == "UNKNOWN":
        wait_until(lambda: versions(manager, "good") == {"END": [1]})


def test_a_model_that_cannot_move_stays_available_under_the_same_number(build, tmp_path):
    write_version(tmp_path / "old", 1, scale=3)
    write_version(tmp_path / "new", 1, scale=4)
    broken = write_version(tmp_path / "broken", 1)
    (broken / MODEL_FILE).write_text("garbage")
    manager = build(ServedModel("m", tmp_path / "old"), ServedModel("n", tmp_path / "old"), allowed_roots=[tmp_path])
    models = [ServedModel("m", tmp_path / "new"), ServedModel("n", tmp_path / "broken")]
    assert "{n due to error" in refusal(lambda: asyncio.run(manager.reload(models)))[1]
    time.sleep(0.05)
    for name in ("m", "n"):
        assert scale(manager, name=name) == 3
        assert manager.statuses.get(name) == [VersionStatus(1, "AVAILABLE")]


def test_signatures_of_fixed_sizes_are_never_merged(build, tmp_path):
    write_version(tmp_path, 1, scale=3)
    manager = build(ServedModel("m", tmp_path), batching=BatchingOptions())

    async def main(name):
        with manager.acquire(ModelSpec("m")) as version:
            version.servable.sizes.clear()
            await asyncio.gather(*(version.run(name, {"x": X}) for _ in range(6)))
            return sorted(version.servable.sizes)

    assert asyncio.run(main("")) == [6]
    assert asyncio.run(main("fixed")) == [1] * 6


def test_requests_are_answered_while_a_reload_loads(build, tmp_path):
    for name in ("m", "n"):
        write_version(tmp_path / name, 1, scale=2)
    loading, go_on = threading.Event(), threading.Event()

    def load_export(folder: Path) -> FakeServable:
        if folder.parent.name == "n":
            loading.set()
            assert go_on.wait(20)
        return FakeServable(folder)

    manager = build(ServedModel("m", tmp_path / "m"), allowed_roots=[tmp_path], load_export=load_export)

    async def main():
        reload = asyncio.create_task(manager.reload([ServedModel("n", tmp_path / "n")]))
        assert await asyncio.to_thread(loading.wait, 20)
        assert versions(manager, "n") == {"LOADING": [1]}
        with manager.acquire(ModelSpec("m")) as version:
            answer = (await version.run("", {"x": X}))["y"][0, 0]
        go_on.set()
        await reload
        return answer

    assert asyncio.run(main()) == 2
    assert versions(manager, "n") == {"AVAILABLE": [1]}


def test_nothing_is_left_after_a_stop(build, tmp_path):
    before = set(threading.enumerate())
    write_version(tmp_path, 1)
    manager = build(ServedModel("m", tmp_path))
    manager.start_watching()
    with manager.acquire(ModelSpec("m")) as version:
        servable = version.servable
    manager.stop()
    assert servable.is_closed
    assert versions(manager) == {"END": [1]}
    assert set(threading.enumerate()) <= before


def test_disk_is_looked_at_once_without_a_poll_interval(build, tmp_path):
    write_version(tmp_path, 1, scale=1)
    manager = build(ServedModel("m", tmp_path), poll_seconds=0)
    manager.start_watching()
    write_version(tmp_path, 2, scale=2)
    time.sleep(0.05)
    assert scale(manager) == 1
