"""A made-up comparison of three methods, as large as a test wants it."""

import dataclasses
import math

import numpy as np
from msgspec.structs import replace

from tff_pdp.models.metrics import ACCURACY, Metric
from tff_pdp.privacy.facts import FIXED_SEED, MethodFacts, SiloCosts, SiloFacts
from tff_pdp.reports import content, summary
from tff_pdp.reports.statement import Statement, statement

_METHODS = (("local_only", "Local only", 0.0), ("fed_avg", "FedAvg", 0.03), ("mr_mtl", "MR-MTL", 0.06))


def sample_silos(count: int, first_id: str = "silo-000") -> tuple[SiloCosts, ...]:
    """What silos paid."""
    return tuple(costs for _, costs in _sample(count, first_id, ACCURACY))


def sample_clients(
    count: int, first_id: str = "silo-000", metric: Metric = ACCURACY
) -> tuple[content.ClientScores, ...]:
    """What the same silos got."""
    return tuple(scores for scores, _ in _sample(count, first_id, metric))


def _sample(count: int, first_id: str, metric: Metric) -> list[tuple[content.ClientScores, SiloCosts]]:
    generator = np.random.default_rng(7)
    silos = []
    for index in range(count):
        base = float(np.clip(generator.normal(0.72, 0.08), 0, 0.9))
        target = (1.0, 2.0, 4.0)[index % 3]
        personal = {name: _result(base + gain + float(generator.normal(0, 0.02)), metric) for name, _, gain in _METHODS}
        shared = {
            "local_only": None,
            "fed_avg": _result(base + 0.01, metric),
            "mr_mtl": _result(base + 0.02, metric),
        }
        costs = SiloCosts(
            id=first_id if index == 0 else f"silo-{index:03d}",
            num_train=int(generator.integers(80, 900)),
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
        )
        num_test = int(generator.integers(10, 90))
        silos.append((content.ClientScores(costs.id, num_test, personal, shared), costs))
    return silos


def sample_methods() -> tuple[MethodFacts, ...]:
    """Local training, FedAvg, and MR-MTL, which is exported."""
    return tuple(
        MethodFacts(
            name=name,
            title=title,
            claim="formal-conditional",
            claim_reason="Formal if the sizes of the silos are public.",
            exported=name == "mr_mtl",
            budget_exposure="none" if name == "local_only" else "inferable",
        )
        for name, title, _ in _METHODS
    )


def sample_algorithms(
    clients: tuple[content.ClientScores, ...], metric: Metric = ACCURACY, methods: tuple[MethodFacts, ...] = ()
) -> tuple[content.AlgorithmResult, ...]:
    algorithms = []
    for facts, (name, _, gain) in zip(methods or sample_methods(), _METHODS, strict=True):
        values = summary.personal_values(clients, name)
        algorithms.append(
            content.AlgorithmResult(
                facts=facts,
                mean=summary.mean_over_silos(values),
                mean_over_examples=summary.mean_over_examples(values, [client.num_test for client in clients]),
                worst_decile=summary.worst_decile(values, metric),
                spread=summary.spread(values),
                shared_mean=None if name == "local_only" else _result(0.73, metric),
                history=tuple((r, _result(0.72 + gain - 0.5 * math.exp(-r / 15), metric)) for r in range(0, 101, 5)),
                rounds=100,
                seconds_per_round=0.41,
            )
        )
    return tuple(algorithms)


def sample_statement(silos: tuple[SiloCosts, ...], **overrides) -> Statement:
    facts = {"methods": sample_methods(), "silos": silos, "clip_norm": 1.0, "steps": 400}
    return statement(SiloFacts(**{**facts, **overrides}))


def without_claim(facts):
    """A method, or a silo, of a run under a fixed test seed."""
    facts = replace(facts, claim="none", claim_reason=FIXED_SEED)
    if isinstance(facts, SiloCosts):
        return replace(facts, epsilon_spent=math.inf, epsilon_rdp=math.inf, epsilon_pld=math.inf)
    return facts


def seeded_statement(count: int, **overrides) -> Statement:
    """The statement of a run under a fixed test seed."""
    methods = tuple(map(without_claim, sample_methods()))
    return sample_statement(tuple(map(without_claim, sample_silos(count))), **{"methods": methods, **overrides})


def seeded_report(count: int) -> content.Report:
    """A report of a run under a fixed test seed."""
    statement, clients = seeded_statement(count), sample_clients(count)
    algorithms = sample_algorithms(clients, methods=statement.facts.methods)
    return dataclasses.replace(sample_report(count), algorithms=algorithms, privacy=statement)


def sample_report(
    count: int = 12, first_id: str = "silo-000", metric: Metric = ACCURACY, **overrides
) -> content.Report:
    clients = sample_clients(count, first_id, metric)
    return content.Report(
        title="Handwriting, personalised",
        created="2024-05-01 12:00 UTC",
        metric=metric,
        algorithms=sample_algorithms(clients, metric),
        clients=clients,
        privacy=sample_statement(sample_silos(count, first_id), **overrides),
        config={"dataset": {"name": "femnist", "silos": count}, "model": "mlp", "rounds": 100, "lambda": [0.1, 1.0]},
        notes=("Three silos were set aside because they had fewer than 20 records.",),
    )


def _result(accuracy: float, metric: Metric) -> float:
    """An accuracy, or an error that is as good."""
    return accuracy if metric.higher_is_better else (1 - accuracy) / 10


def text_of(statement: Statement) -> str:
    """All of a statement's sentences."""
    rows = [f"- {row.who}: {row.sees}. {row.guarantee}" for row in statement.who_sees]
    return "\n".join([*(f"{one.heading}\n{one.text}\n" for one in statement.paragraphs), *rows])


def paragraph(statement: Statement, heading: str) -> str:
    """The text of one paragraph."""
    (text,) = [one.text for one in statement.paragraphs if one.heading == heading]
    return text
