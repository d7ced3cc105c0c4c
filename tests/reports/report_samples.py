"""A made-up comparison of three methods, as large as a test wants it."""

import dataclasses
import math

import numpy as np

from tff_pdp.models.metrics import ACCURACY, Metric
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.reports import content, summary
from tff_pdp.reports import statement as privacy_statement

_METHODS = (("local_only", "Local only", 0.0), ("fed_avg", "FedAvg", 0.03), ("mr_mtl", "MR-MTL", 0.06))


def sample_silos(count: int, first_id: str = "silo-000", metric: Metric = ACCURACY) -> tuple[content.SiloResult, ...]:
    generator = np.random.default_rng(7)
    silos = []
    for index in range(count):
        base = float(np.clip(generator.normal(0.72, 0.08), 0, 0.9))
        target = (1.0, 2.0, 4.0)[index % 3]
        personal = {name: _result(base + gain + float(generator.normal(0, 0.02)), metric) for name, _, gain in _METHODS}
        silos.append(
            content.SiloResult(
                id=first_id if index == 0 else f"silo-{index:03d}",
                num_train=int(generator.integers(80, 900)),
                num_test=int(generator.integers(10, 90)),
                epsilon_target=target,
                epsilon_spent=target * 0.985,
                epsilon_rdp=target * 1.06,
                epsilon_pld=target * 0.985,
                delta=1e-5,
                noise_multiplier=3.2 / target,
                sampling_rate=0.05,
                last_round=120,
                claim="formal-conditional",
                claim_reason="Formal if the sizes of the silos are public.",
                personal=personal,
                shared={
                    "local_only": None,
                    "fed_avg": _result(base + 0.01, metric),
                    "mr_mtl": _result(base + 0.02, metric),
                },
            )
        )
    return tuple(silos)


def sample_algorithms(
    silos: tuple[content.SiloResult, ...], metric: Metric = ACCURACY
) -> tuple[content.AlgorithmResult, ...]:
    algorithms = []
    for name, title, gain in _METHODS:
        values = summary.personal_values(silos, name)
        algorithms.append(
            content.AlgorithmResult(
                name=name,
                title=title,
                mean=summary.mean_over_silos(values),
                mean_over_examples=summary.mean_over_examples(values, [silo.num_test for silo in silos]),
                worst_decile=summary.worst_decile(values, metric),
                spread=summary.spread(values).standard_deviation,
                shared_mean=None if name == "local_only" else _result(0.73, metric),
                history=tuple((r, _result(0.72 + gain - 0.5 * math.exp(-r / 15), metric)) for r in range(0, 101, 5)),
                rounds=100,
                seconds_per_round=0.41,
                claim="formal-conditional",
                claim_reason="Formal if the sizes of the silos are public.",
                exported=name == "mr_mtl",
            )
        )
    return tuple(algorithms)


def sample_statement(silos: tuple[content.SiloResult, ...], **overrides) -> dict:
    arguments = {"algorithms": sample_algorithms(silos), "silos": silos, "clip": 1.0, "steps": 400}
    return privacy_statement.build_privacy_statement(**{**arguments, **overrides})


def without_claim(result):
    """A method, or a silo, of a run under a fixed test seed."""
    result = dataclasses.replace(result, claim="none", claim_reason=FIXED_SEED)
    if isinstance(result, content.SiloResult):
        return dataclasses.replace(result, epsilon_spent=math.inf, epsilon_rdp=math.inf, epsilon_pld=math.inf)
    return result


def seeded_report(count: int) -> content.Report:
    """A report of a run under a fixed test seed."""
    report = sample_report(count)
    silos, algorithms = (tuple(map(without_claim, results)) for results in (report.silos, report.algorithms))
    statement = sample_statement(silos, algorithms=algorithms)
    return dataclasses.replace(report, silos=silos, algorithms=algorithms, privacy=statement)


def sample_report(
    count: int = 12, first_id: str = "silo-000", metric: Metric = ACCURACY, **overrides
) -> content.Report:
    silos = sample_silos(count, first_id, metric)
    return content.Report(
        title="Handwriting, personalised",
        created="2024-05-01 12:00 UTC",
        metric=metric,
        algorithms=sample_algorithms(silos, metric),
        silos=silos,
        privacy=sample_statement(silos, **overrides),
        config={"dataset": {"name": "femnist", "silos": count}, "model": "mlp", "rounds": 100, "lambda": [0.1, 1.0]},
        notes=("Three silos were set aside because they had fewer than 20 records.",),
    )


def _result(accuracy: float, metric: Metric) -> float:
    """An accuracy, or an error that is as good."""
    return accuracy if metric.higher_is_better else (1 - accuracy) / 10
