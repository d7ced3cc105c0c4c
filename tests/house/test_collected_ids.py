import pytest

from tools.collected_ids import find_lost, ids_of, moved

MOVES = {"tests/a/test_b.py": "tests/c/test_d.py", "tff_pdp/a/b.py": "tff_pdp/c/__init__.py"}


def test_a_moved_file_takes_its_tests_along():
    assert moved("tests/a/test_b.py::test_x[1::2]", MOVES) == "tests/c/test_d.py::test_x[1::2]"
    assert moved("tff_pdp/a/b.py::tff_pdp.a.b.f", MOVES) == "tff_pdp/c/__init__.py::tff_pdp.c.f"
    assert moved("tff_pdp/e.py::tff_pdp.e.f", MOVES) == "tff_pdp/e.py::tff_pdp.e.f"


@pytest.mark.parametrize(
    ("replaced", "is_lost"),
    [
        ({}, True),
        ({"tests/a/test_b.py::test_x": "t.py::y | t.py::z"}, False),
        ({"tests/a/test_b.py::test_x": "t.py::y | t.py::gone"}, True),
        ({"tests/a/test_b.py::*": "t.py::y"}, False),
        ({"tests/a/test_b.py::test_x": "- its subject is gone"}, False),
        ({"tests/a/test_b.py::test_x": "-"}, True),
    ],
)
def test_an_id_is_lost_unless_something_stands_for_it(replaced, is_lost):
    lost = find_lost(["tests/a/test_b.py::test_x"], ["t.py::y", "t.py::z"], MOVES, replaced)
    assert bool(lost) == is_lost


def test_lists_have_other_lines_too(tmp_path):
    (tmp_path / "ids").write_text("tests/a.py::b[x y]\n\n1 test collected in 1s\n")
    assert ids_of(tmp_path / "ids") == ["tests/a.py::b[x y]"]
