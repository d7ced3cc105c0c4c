"""Data frames as raw data, as examples to predict, and as histories."""

import numpy as np
import pandas as pd
import pytest

import tff_pdp as tp
from tff_pdp.api import frames
from tff_pdp.errors import DataError

WARDS = ["east", "north", "west"]


def test_histories_are_flat_and_have_a_mean_in_any_case(trained, monkeypatch):
    rows = [
        {"format_version": 1, "round": 1, "seconds": 0.5, "nonprivate": {"metric": "accuracy", "mean": 0.25}},
        {"format_version": 1, "round": 2, "seconds": 0.5},
    ]
    monkeypatch.setattr(frames, "read_metrics", lambda folder: rows if folder.name == "mr_mtl" else [])
    found = frames.history_frame(trained.config, ["local_only", "mr_mtl"])
    assert found.index.to_list() == [("mr_mtl", 1), ("mr_mtl", 2)]
    assert found.columns.to_list() == ["mean", "seconds"]
    assert found["mean"].fillna(-1).to_list() == [0.25, -1]
    assert frames.history_frame(trained.config, ["local_only"]).empty


def patients(number=90):
    """Rows of three wards: an age, a sex, and a diagnosis that follows from both."""
    places = np.arange(number)
    age, sex = (places * 37 % 80).astype(float), np.where(places % 2, "f", "m")
    label = np.where(age + 10 * (sex == "f") > 45, "ill", "well")
    return pd.DataFrame({"client": np.array(WARDS)[places % 3], "age": age, "sex": sex, "label": label})


def of_frame(output, data):
    return tp.Experiment(
        title="Three wards",
        output=output,
        data=data,
        model={"kind": "linear"},
        privacy={
            "kind": "silo_example",
            "clip_norm": 1.0,
            "batch_size": 10,
            "budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-3},
        },
        training={"rounds": 1, "client_parallelism": "loop"},
        algorithms={"local_only": {"learning_rate": 0.1}},
        export={"algorithm": "local_only", "model_name": "wards"},
    )


def test_a_frame_becomes_clients_and_answers_have_the_names_of_classes(tmp_path):
    made = of_frame(tmp_path, patients())
    counts = made.prepare()
    assert counts.index.to_list() == WARDS and (counts.sum(axis=1) == 30).all()
    again = of_frame(tmp_path, patients())
    pd.testing.assert_frame_equal(again.prepare(), counts)
    again.train(progress=False)
    asked = pd.DataFrame({"note": ["-", "-"], "sex": ["f", "m"], "age": [20, 70.5]}, index=["ann", "bob"])
    shares = again.predict(asked, "north", probabilities=True)
    assert shares.columns.to_list() == ["ill", "well"] and shares.index.to_list() == ["ann", "bob"]
    answers = again.predict(asked, "north")
    assert answers["predicted"].to_list() == shares.idxmax(axis=1).to_list()
    # The same as numbers: the age, then a number for each sex.
    encoded = again.predict([[20, 1, 0], [70.5, 0, 1]], "north")
    assert encoded["predicted"].to_list() == answers["predicted"].to_list()
    np.testing.assert_array_equal(encoded["probability"], answers["probability"])


def test_columns_may_have_other_names(tmp_path):
    frame = patients().rename(columns={"client": "ward", "label": "diagnosis"})
    data = {"kind": "table", "input": frame, "client_column": "ward", "label_column": "diagnosis"}
    assert of_frame(tmp_path, data).prepare().index.to_list() == WARDS


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"age": [20]}, "x has no column 'sex'; the model takes the columns age, sex"),
        ({"age": ["old"], "sex": ["f"]}, "x, row 0, column 'age': 'old' must be a number"),
        ({"age": [20], "sex": ["other"]}, "x, row 0, column 'sex': 'other' must be one of f, m"),
        ({"age": [None], "sex": ["f"]}, "x, row 0, column 'age': '' must be a number"),
    ],
    ids=["missing column", "no number", "unknown category", "missing value"],
)
def test_a_value_that_no_example_may_have_is_named(prepared_wards, asked, message):
    with pytest.raises(DataError, match=f"^{message}"):
        prepared_wards.predict(pd.DataFrame(asked), "north")


@pytest.fixture(scope="module")
def prepared_wards(tmp_path_factory):
    made = of_frame(tmp_path_factory.mktemp("wards"), patients())
    made.prepare()
    made.train(progress=False)
    return made
