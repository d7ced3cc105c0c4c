import shutil

import pytest


@pytest.fixture
def copy(export_dir, tmp_path):
    """An export of one test's own, to be changed."""
    return shutil.copytree(export_dir, tmp_path / "base" / "1")
