import pytest

from tests.reproduce.reproduce_support import build_reproduction, fake_row
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reproduce.means import best_of_grid, holds, means_over_seeds
from tff_pdp.reproduce.report import build_report, report_text
from tff_pdp.reproduce.setting import Statement
from tff_pdp.reproduce.sweep import Outcome, ResultStore


def said(better, worse, epsilon=None):
    return Statement(better=better, worse=worse, source="figure", epsilon=epsilon)


def row(method, value, epsilon=6.0, **more):
    promise = {"claim": "none", "epsilon": None} if epsilon == "inf" else {"claim": "formal", "epsilon": epsilon}
    rest = {"with_secret_key": promise, "worst_decile": value / 2}
    return {"method": method, "epsilon": epsilon, "value": value, **rest, **more}


def test_means_and_sample_deviations_over_seeds():
    rows = [row("mr_mtl", value) for value in (0.02, 0.03, 0.04)] + [row("fed_avg", 0.5), row("mr_mtl", 0.1, "inf")]
    mr_mtl, fed_avg, without_privacy = means_over_seeds(rows)
    assert (mr_mtl.mean, mr_mtl.deviation, mr_mtl.seeds) == (pytest.approx(0.03), pytest.approx(0.01), 3)
    assert mr_mtl.worst_decile == pytest.approx(0.015)
    assert (fed_avg.mean, fed_avg.deviation, fed_avg.seeds) == (0.5, None, 1)
    assert without_privacy.budget == float("inf")


def test_the_best_lambda_follows_the_metrics_direction():
    rows = [row("mr_mtl", value, prox_weight=weight) for weight, value in ((0.1, 0.3), (1.0, 0.2), (10.0, 0.4))]
    means = means_over_seeds(rows, is_grid=True)
    assert [mean.prox_weight for mean in best_of_grid(means, MEAN_SQUARED_ERROR)] == [1.0]
    assert [mean.prox_weight for mean in best_of_grid(means, ACCURACY)] == [10.0]


def test_a_statement_holds_fails_or_was_not_run():
    means = means_over_seeds(
        [row("mr_mtl", 0.2), row("fed_avg", 0.3), row("mr_mtl", 0.4, 1.0), row("fed_avg", 0.3, 1.0)]
    )
    at_six = said("mr_mtl", "fed_avg", 6.0)
    assert holds(at_six, means, MEAN_SQUARED_ERROR) is True
    assert holds(at_six, means, ACCURACY) is False
    assert holds(said("mr_mtl", "fed_avg"), means, MEAN_SQUARED_ERROR) is False
    assert holds(said("mr_mtl", "ditto"), means, MEAN_SQUARED_ERROR) is None
    assert holds(said("mr_mtl", "fed_avg", 2.0), means, MEAN_SQUARED_ERROR) is None


def test_what_is_the_same_at_every_epsilon_is_compared_at_each():
    rows = [row("local_only", 0.5, "inf"), row("centaur", 0.4, 2.0), row("centaur", 0.6, 8.0)]
    means = means_over_seeds(rows, is_at_every_epsilon=lambda method: method == "local_only")
    assert [mean.is_at_every_epsilon for mean in means] == [True, False, False]
    assert holds(said("centaur", "local_only", 8.0), means, ACCURACY) is True
    assert holds(said("centaur", "local_only", 2.0), means, ACCURACY) is False
    assert holds(said("centaur", "local_only"), means_over_seeds(rows), ACCURACY) is None


@pytest.fixture
def report(tmp_path):
    """Made-up figures with a grid, one job that no budget allows, and one that failed."""
    reproduction = build_reproduction(
        tmp_path, methods=("local_only", "fed_avg", "mr_mtl", "ditto"), lambdas=(0.1, 1.0)
    )
    store = ResultStore(reproduction)
    *most, infeasible, failed = reproduction.jobs()
    for job in most:
        store.add(Outcome(job, fake_row(job)))
    store.add(Outcome(infeasible, None, "selection costs more"))
    return build_report(reproduction, store, {failed: "ValueError: no luck"})


def test_the_table_says_what_was_measured_what_the_paper_states_and_what_is_unlike_it(report):
    lines = report_text(report).splitlines()
    # 0.026 + 0.001 / 6 + 0.0001 * (0 + 1) / 2 over two seeds; stated: 0.02394.
    (row_text,) = [line for line in lines if line.startswith("| 6") and "MR-MTL" in line and "0.02394" in line]
    cells = [cell.strip() for cell in row_text.strip("|").split("|")]
    assert cells == ["6", "MR-MTL", "0.02622 ± 0.00007", "2", "6", "0.02394", "+0.00228"]
    text = "\n".join(lines)
    assert "* holds: MR-MTL is better than FedAvg at ε = 6" in text
    assert "* holds: FedAvg is better than Local" in text
    assert "ifca" not in text.lower().split("unlike the thesis")[0]
    assert "* sampler: Poisson batches" in text
    assert "selection costs more" in text
    assert "ValueError: no luck" in text
    # The best of the grid has its lambda in the table.
    assert any("MR-MTL" in line and "| 1 " in line for line in lines)


def test_the_report_is_plain_data_without_nulls_but_for_what_no_claim_covers(report):
    content = report.as_dict()
    assert content["metric"] == "mean_squared_error"
    (variant,) = content["variants"].values()
    assert {mean["method"] for mean in variant["means"]} == {"local_only", "fed_avg", "mr_mtl", "ditto"}
    means = variant["means"] + variant["grid"]
    assert {key for mean in means for key, value in mean.items() if value is None} == {"epsilon_spent"}
    assert {mean["claim"] for mean in means} == {"none"}
    assert {mean["with_secret_key"]["epsilon"] for mean in means} == {6.0}
    assert variant["deviations"]
    assert len(content["failures"]) == len(content["infeasible"]) == 1


def users_report(tmp_path, **changes):
    """Made-up figures of settings with users."""
    reproduction = build_reproduction(tmp_path, methods=("local_only", "centaur"), seeds=1, **changes)
    store = ResultStore(reproduction)
    for job in reproduction.jobs():
        store.add(Outcome(job, {**fake_row(job), "noise_to_signal": 12.5}))
    return report_text(build_report(reproduction, store, {}))


def test_tables_of_users_have_the_worst_decile_and_the_noise_and_name_their_own_paper(tmp_path):
    changes = {"setting_name": "pfed_dsu_cifar10", "epsilons": (0.5, 1.0)}
    (tmp_path / "small").mkdir()
    text = users_report(tmp_path, scale_name="full", **changes)
    lines = text.splitlines()
    (row_text,) = [line for line in lines if line.startswith("| 1 ") and "CENTAUR" in line]
    cells = [cell.strip() for cell in row_text.strip("|").split("|")]
    # 0.027 + 0.001, twice that, and 53.92 % as published.
    assert cells == ["1", "CENTAUR", "2.80 %", "5.60 %", "1", "1", "12.5", "53.92 %", "-0.51120"]
    assert [line.split("|")[1].strip() for line in lines if "| Local" in line] == ["∞"]
    assert "Local: nothing leaves a user; the row holds for every ε." in lines
    assert "Unlike the paper of DP-pFedDSU:" in lines
    assert "thesis" not in text and "silo" not in text
    small = users_report(tmp_path / "small", scale_name="small", **changes)
    assert "| paper, at its scale |" in small
    assert "difference" not in small


def test_an_experiment_of_our_own_is_held_against_no_paper(tmp_path):
    text = users_report(tmp_path, setting_name="mnist_writers", epsilons=(8.0,))
    assert "To know when reading this:" in text
    assert "thesis" not in text and "paper" not in text
