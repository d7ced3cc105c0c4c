"""Files in a run's folder carry format versions and digests; those of earlier versions, which do not, are read."""

import json

import pytest

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import discard
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import ChargesWriter, Extension, RunIdentity
from tff_pdp.training.record.releases import surroundings_of
from tff_pdp.training.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    SELECTED_FILE,
    append_metrics,
    check_beside,
    check_engine,
    cut_metrics,
    other_settings,
    read_metrics,
    read_selected,
    read_started_with,
    settings_of_run,
    start_folder,
    write_selected,
)

SELECTED = {"silo_1": {"hparams": {"prox_weight": 0.1}, "noisy_score": 3.25}, "digest_of": {"noisy_score": None}}


def each_change(stored):
    """The bytes with one changed, for each place."""
    for place in range(len(stored)):
        yield stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :]


def assert_no_change_is_silent(path, read):
    """Each changed byte is refused under the file's name, or leaves what is read as it is."""
    stored = path.read_bytes()
    expected, refused = read(), 0
    for changed in each_change(stored):
        path.write_bytes(changed)
        try:
            assert read() == expected
        except DataError as error:
            assert path.name in str(error)
            refused += 1
    path.write_bytes(stored)
    assert refused > 0.5 * len(stored)
    assert read() == expected


def test_no_changed_byte_of_the_settings_is_silent(experiment):
    config = experiment()
    folder = config.algorithm_folder("mr_mtl")
    start_folder(config, folder, "cpu")
    check_engine(config, folder, "cpu")
    assert read_started_with(folder)["training"]["rounds"] == 6
    content = json.loads((folder / CONFIG_FILE).read_text())
    assert (content["format_version"], len(content["digest"])) == (1, 64)
    assert_no_change_is_silent(folder / CONFIG_FILE, lambda: read_started_with(folder))


def test_settings_of_an_earlier_version_are_read(experiment):
    config = experiment()
    folder = config.algorithm_folder("mr_mtl")
    start_folder(config, folder, "cpu")
    expected = read_started_with(folder)
    (folder / CONFIG_FILE).write_text(json.dumps(expected, indent=2))
    assert read_started_with(folder) == expected
    check_engine(config, folder, "cpu")
    for text in ("{}", "[]", "", '{"training": 3}'):
        (folder / CONFIG_FILE).write_text(text)
        with pytest.raises(DataError, match=CONFIG_FILE):
            check_engine(config, folder, "cpu")


def test_a_run_goes_on_with_the_use_of_xla_that_it_was_started_with(experiment):
    """Runs of earlier versions have no setting for XLA, and had no XLA."""
    automatic, always = experiment("run"), experiment("run", training__xla="always")
    plain = {"privacy__kind": "none"}
    assert (automatic.xla, always.xla, experiment("plain", **plain).xla) == ("never", "always", "auto")
    folder = automatic.algorithm_folder("mr_mtl")
    start_folder(automatic, folder, "cpu")
    content = read_started_with(folder)
    assert content["training"].pop("xla") == "never"
    (folder / CONFIG_FILE).write_text(json.dumps(content))
    check_engine(automatic, folder, "cpu")
    with pytest.raises(ConfigError, match=r"training.xla 'never', not 'always'"):
        check_engine(always, folder, "cpu")


def test_no_changed_byte_of_metrics_is_silent(tmp_path):
    for number in (2, 4):
        append_metrics(tmp_path, number, {"mean": 0.25 * number, "seconds": 0.5})
    assert [row["mean"] for row in read_metrics(tmp_path)] == [0.5, 1.0]

    def rows():
        # The end of the last line may be that of a process that was killed.
        return read_metrics(tmp_path)[:1]

    assert_no_change_is_silent(tmp_path / METRICS_FILE, rows)


def test_metrics_of_an_earlier_version_go_on_and_keep_their_bytes(tmp_path):
    path = tmp_path / METRICS_FILE
    old = {"round": 2, "split": "validation", "seconds": 0.5, "mean": 0.25}
    path.write_text(json.dumps(old) + "\n")
    kept = surroundings_of(tmp_path, (METRICS_FILE,)).files[METRICS_FILE]
    append_metrics(tmp_path, 4, {"mean": 0.5})
    stored = path.read_bytes()
    assert [row["round"] for row in read_metrics(tmp_path)] == [2, 4]
    cut_metrics(tmp_path, 4)
    assert path.read_bytes() == stored
    append_metrics(tmp_path, 6, {"mean": 0.75})
    cut_metrics(tmp_path, 4)
    assert path.read_bytes() == stored
    kept.check(path)
    cut_metrics(tmp_path, 2)
    assert read_metrics(tmp_path) == [old]


def test_no_run_begins_or_goes_on_behind_a_link(tmp_path):
    real, link = tmp_path / "one" / "mr_mtl", tmp_path / "other" / "mr_mtl"
    link.parent.mkdir()
    link.symlink_to(real)
    refused = f"^{link} is a link to {real}: .*Name the real folder as output, or remove the link$"
    for make in (lambda: None, lambda: real.mkdir(parents=True)):
        make()
        for is_replaced in (False, True):
            with pytest.raises(ConfigError, match=refused):
                check_beside(link, is_replaced=is_replaced)
    check_beside(real, is_replaced=True)


def test_what_a_link_leads_to_is_not_discarded_with_it(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder.symlink_to(elsewhere)
    discard(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    # As earlier versions have left them.
    for name in (".folder.removed", ".round_000001.removed"):
        (tmp_path / name).symlink_to(elsewhere)
    folder.mkdir()
    discard(folder)
    checkpoint_files.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert (elsewhere / "file").exists()


@pytest.mark.parametrize("line", ['{"round": 2, "format_version": 1}', '{"round": 2, "digest": "0"}', "[2]", "{}"])
def test_rows_that_are_none_are_refused(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text(line + "\n")
    with pytest.raises(DataError, match=METRICS_FILE):
        read_metrics(tmp_path)


def test_no_changed_byte_of_a_selection_is_silent_and_an_earlier_one_is_read(tmp_path):
    write_selected(tmp_path, SELECTED)
    assert_no_change_is_silent(tmp_path / SELECTED_FILE, lambda: read_selected(tmp_path))
    (tmp_path / SELECTED_FILE).write_text(json.dumps(SELECTED, indent=2) + "\n")
    assert read_selected(tmp_path) == SELECTED


def test_a_refusal_names_the_setting_that_differs_with_both_values(experiment):
    config = experiment()
    folder = config.algorithm_folder("mr_mtl")
    start_folder(config, folder, "cpu")
    said = other_settings(experiment(privacy__clip_norm=2.0), "mr_mtl", folder, "460 rounds")
    assert "other settings: privacy.clip_norm was 1.0, and is 2.0 now. Restore the old value to go on" in said
    assert said.index("Restore") < said.index("another `output`") < said.index("--overwrite throws 460 rounds away")
    own = {**config.algorithms["mr_mtl"], "prox_weight": 0.77}
    several = experiment(training__rounds=3, algorithms={"mr_mtl": own})
    said = other_settings(several, "mr_mtl", folder, "460 rounds")
    assert "algorithms.mr_mtl.prox_weight was" in said
    assert "and is 0.77 now (training.rounds differs, too)" in said
    # Settings that decide nothing are not named.
    said = other_settings(experiment(training__checkpoint_every=3, title="Other"), "mr_mtl", folder, "6 rounds")
    assert "the same settings, but with other data" in said


def test_settings_that_an_extension_has_changed_are_the_runs(experiment):
    config = experiment()
    folder = config.algorithm_folder("mr_mtl")
    start_folder(config, folder, "cpu")
    assert settings_of_run(folder)["training"]["rounds"] == 6
    with ChargesWriter(folder) as writer:
        writer.open_run(RunIdentity("mr_mtl", None, "k", "h"), None)
        writer.close_run(6, None)
        budgets = config.to_dict()["privacy"]["budgets"]
        changed = {"training.rounds": 9, "privacy.budgets": budgets}
        writer.extend(None, Extension(6, changed, "new", "old", "salt", None))
        assert (writer.begun.attempt.number, writer.begun.attempt.first_round, writer.begun.is_closed) == (1, 7, False)
        with pytest.raises(DataError, match="has not ended"):
            writer.extend(None, Extension(9, {}, "newer", "new", "", None))
    found = settings_of_run(folder)
    assert (found["training"]["rounds"], found["privacy"]["budgets"]) == (9, budgets)
    assert found["training"]["checkpoint_every"] == 2
    assert "training.rounds was 9, and is 6 now" in other_settings(config, "mr_mtl", folder, "9 rounds")
