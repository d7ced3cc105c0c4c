"""A made-up comparison of three methods, as large as a test wants it."""

import math

import numpy as np

from tff_pdp.reports import content, privacy_statement, summary

_METHODS = (("local_only", "Local only", 0.0), ("fed_avg", "FedAvg", 0.03), ("mr_mtl", "MR-MTL", 0.06))


def sample_silos(count: int, first_id: str = "silo-000") -> tuple[content.SiloResult, ...]:
    generator = np.random.default_rng(7)
    silos = []
    for index in range(count):
        base = float(np.clip(generator.normal(0.72, 0.08), 0, 0.9))
        target = (1.0, 2.0, 4.0)[index % 3]
        personal = {name: base + gain + float(generator.normal(0, 0.02)) for name, _, gain in _METHODS}
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
                accuracy=personal,
                global_accuracy={"local_only": None, "fed_avg": base + 0.01, "mr_mtl": base + 0.02},
            )
        )
    return tuple(silos)


def sample_algorithms(silos: tuple[content.SiloResult, ...]) -> tuple[content.AlgorithmResult, ...]:
    algorithms = []
    for name, title, gain in _METHODS:
        accuracies = summary.personal_accuracies(silos, name)
        algorithms.append(
            content.AlgorithmResult(
                name=name,
                title=title,
                mean_accuracy=float(np.mean(accuracies)),
                worst_decile_accuracy=summary.worst_decile(accuracies),
                spread=summary.spread(accuracies).standard_deviation,
                global_mean_accuracy=None if name == "local_only" else 0.73,
                history=tuple((r, 0.72 + gain - 0.5 * math.exp(-r / 15)) for r in range(0, 101, 5)),
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


def sample_report(count: int = 12, first_id: str = "silo-000", **overrides) -> content.Report:
    silos = sample_silos(count, first_id)
    return content.Report(
        title="Handwriting, personalised",
        created="2024-05-01 12:00 UTC",
        algorithms=sample_algorithms(silos),
        silos=silos,
        privacy=sample_statement(silos, **overrides),
        config={"dataset": {"name": "femnist", "silos": count}, "model": "mlp", "rounds": 100, "lambda": [0.1, 1.0]},
        notes=("Three silos were set aside because they had fewer than 20 records.",),
    )
