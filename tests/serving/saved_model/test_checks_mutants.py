"""Hundreds of damaged exports, whose manifests agree with the damage: each is refused cleanly, or passes."""

import collections
import shutil

import pytest

from serving.saved_model.checks import check_export
from tests.serving.verify.mutants import make_graph_mutant, make_mutant
from tests.serving.verify.opened import watching
from tests.tiers import amount
from tff_pdp.errors import ServingError

MUTANTS = amount(test=30, all=150)


@pytest.mark.parametrize("make", [make_mutant, make_graph_mutant])
def test_damaged_exports_are_refused_or_pass(export_dir, tmp_path, make):
    _check_mutants(export_dir, tmp_path, make, range(MUTANTS))


@pytest.mark.hurt
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [make_mutant, make_graph_mutant])
def test_many_more_damaged_exports_are_refused_or_pass(export_dir, tmp_path, make):
    _check_mutants(export_dir, tmp_path, make, range(20_000, 24_000))


def _check_mutants(export_dir, tmp_path, make, seeds):
    canary = tmp_path / "secret.txt"
    canary.write_text("<global>\nalice\n")
    outcomes = collections.Counter()
    with watching(tmp_path / "secret.txt") as opened:
        for seed in seeds:
            mutant = tmp_path / make.__name__ / str(seed)
            done = make(export_dir, mutant, seed)
            try:
                check_export(mutant)
                outcomes["passed"] += 1
            except ServingError as error:
                assert str(mutant) in str(error), done
                outcomes["refused"] += 1
            # Any other exception fails the test.
            shutil.rmtree(mutant)
        assert opened() == []
    # Damage that the checks cannot see is for the process that loads the export; some they must see.
    assert outcomes["refused"] > len(seeds) / 10
    assert outcomes["passed"] > len(seeds) / 10
