"""Facts of many kinds, enough to make every sentence of the privacy statements, and what readers get of them.

`python -m tests.reports.statement_cases` writes `statements.json` anew: a change of what is promised shows in it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tests.reports import report_samples as silo_samples
from tests.reports import user_samples
from tff_pdp.data.manifest import RowInfluence
from tff_pdp.privacy.facts import RunsOnRecord, SearchFacts, SyntheticFacts, TuningFacts
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.statement import Statement, export_text, not_covered, objects_content

STATEMENTS = Path(__file__).with_name("statements.json")

NODE = RowInfluence("node", "replace_one", 41, "nobody has more than 20 contacts")
ALONE = RowInfluence("node", "replace_special", 1, "nobody meets anybody.")
EDGE = RowInfluence("edge", "add_or_remove_one", 2, "a pair's contacts are in the two people's rows.")
SEARCH = SearchFacts(
    method="MR-MTL", searched=("prox_weight", "learning_rate"), candidates=6, runs="geometric", mean_runs=5.0
)
GRID = SearchFacts(method="FedAvg", searched=("learning_rate",), candidates=3, runs="fixed", mean_runs=None)
CHARGED = {"charged_epsilon": 7.3301, "charged_delta": 1e-5}
NOTES = ("It is not known whether the run in /old is about the same records; it was counted",)
SPENT = ("epsilon_spent", "epsilon_rdp", "epsilon_pld")


def tuned(*names: str, tried: int = 1, **others) -> dict[str, TuningFacts]:
    return {"tuning": TuningFacts(tuned=names, configurations_tried=tried, **others)}


def recorded(runs: int, epsilon: float = 9.87, delta: float = 2e-5, **others) -> dict[str, RunsOnRecord]:
    return {"on_record": RunsOnRecord(runs=runs, epsilon=epsilon, delta=delta, **others)}


def silo_cases() -> Iterator[tuple[str, dict]]:
    """Overrides of a sample of silos, by name."""
    silos, alike = silo_samples.sample_silos(12), silo_samples.sample_silos(1) * 2
    methods, seeded = silo_samples.sample_methods(), silo_samples.seeded_statement(3).facts
    unbounded = dict.fromkeys(SPENT, math.inf)
    bare = [replace(silo, noise_multiplier=0.0, epsilon_target=math.inf, **unbounded) for silo in silos]
    budgetless = [replace(silo, epsilon_target=math.inf, **unbounded) for silo in silos]
    over = replace(silos[0], epsilon_spent=1.2)
    early = [replace(silo, last_round=20 + place) for place, silo in enumerate(silos[:3])]
    large = replace(silos[0], epsilon_target=12345.0, epsilon_spent=12344.5)

    def claiming(claim: str, reason: str = "everything is counted", **others):
        return tuple(replace(method, claim=claim, claim_reason=reason, **others) for method in methods)

    yield "plain", {}
    yield "one silo", {"silos": silos[:1]}
    yield "silos alike", {"silos": alike}
    yield "large epsilon", {"silos": (large, *silos[:2])}
    yield "one method", {"methods": methods[:1]}
    yield "one method, with notes", {"methods": methods[:1], "on_record": RunsOnRecord(taken_for_granted=NOTES)}
    yield "one method, more drawn elsewhere", {"methods": methods[:1], **recorded(1)}
    yield "one method, no more drawn", {"methods": methods[:1], **recorded(1, epsilon=3.94)}
    yield "two runs of one method", {"methods": methods[:1], **recorded(2, elsewhere=1)}
    yield "runs on record", recorded(5, elsewhere=2, taken_for_granted=NOTES * 2)
    yield "formal, runs on record", {"methods": claiming("formal"), **recorded(5)}
    yield "no bound", recorded(4, elsewhere=1, why_no_bound="runs on record protect different things")
    yield "tuned", tuned("lambda", "rounds", tried=4)
    yield "tuned, one method", {**tuned("lambda", tried=4), "methods": methods[:1]}
    yield "charged", tuned("lambda", tried=4, **CHARGED)
    yield "search", tuned(search=SEARCH)
    yield "search and tuned", tuned("batch size", tried=2, search=SEARCH)
    yield "grid", {**tuned(search=GRID), "methods": methods[1:2]}
    yield "search over people", {**tuned(search=SEARCH), "row_influence": NODE}
    given = {"silos": seeded.silos, "methods": seeded.methods}
    yield "seeded", given
    yield "seeded, charged", {**given, **tuned(tried=4, **CHARGED)}
    yield "seeded people", {**given, "row_influence": ALONE}
    yield "one bare", {"silos": (bare[0], *silos[1:])}
    yield "one bare person", {"silos": (*silos[1:], bare[0]), "row_influence": NODE}
    yield "all bare", {"silos": bare, "clip_norm": math.inf, "methods": claiming("none", "privacy is switched off")}
    yield "one without budget", {"silos": (budgetless[0], *silos[1:]), "num_examples_are_noised": True}
    yield "none with budget", {"silos": budgetless}
    yield "bare and without budget", {"silos": (bare[0], *budgetless[1:])}
    yield (
        "weakest of all",
        {"methods": (*claiming("formal", exported=False), *claiming("empirical", exported=False))},
    )
    yield "exported alone", {"methods": (*claiming("none", exported=False)[:2], *claiming("formal")[2:])}
    yield "formal", {"methods": claiming("formal", "Is it? Yes!")}
    yield "empirical", {"methods": claiming("empirical", "attacks found nothing.")}
    yield "over target", {"silos": (over, *silos[1:])}
    yield "left early", {"silos": (*early, *silos[3:])}
    yield "left early and over target", {"silos": (over, *early[1:]), "other_releases": ("counts",)}
    labelled = tuple(replace(silo, noise_label=10.0 * silo.epsilon_target) for silo in silos)
    yield "noise for the least budget", {"level": "minimum"}
    yield "none with the least budget", {"silos": budgetless, "level": "minimum"}
    yield "labels", {"silos": labelled}
    yield "labels, noise for the least", {"silos": labelled, "level": "minimum"}
    yield "labels without a bound", {"silos": tuple(replace(silo, **unbounded) for silo in labelled)}
    yield "other releases", {"other_releases": ("number of records", "selections (20 times)")}
    yield "noised numbers", {"num_examples_are_noised": True}
    yield "noised numbers of people", {"num_examples_are_noised": True, "row_influence": NODE}
    for sampler in ("full", "paper_shuffled"):
        yield sampler, {"sampler": sampler, "clip_norm": 0.125}
    for name, influence in (("people", NODE), ("people alone", ALONE), ("pairs", EDGE)):
        yield name, {"row_influence": influence}
    yield "chacha20", {"generator": "chacha20"}
    yield "taken from records", {"taken_from_records": ("classes of 'activity' (6)", "categories of 'sport' (3)")}
    strange = replace(over, id="</p><b>& \"o' {{ 7 * 7 }}")
    yield "nameless", {"silos": [replace(silo, id="") for silo in (over, *early[1:])]}
    yield "nameless bare", {"silos": [replace(silo, id="") for silo in (bare[0], *early[1:])]}
    yield "nothing uploaded", {"methods": claiming("formal", budget_exposure="none")}
    yield "one method of three", {"methods": methods[2:], **tuned(methods_compared=3)}
    yield "strange name", {"silos": (strange, *silos[1:])}
    made = SyntheticFacts(
        generator="dp_gaussian",
        examples=2000,
        rounds=20,
        is_adapted_privately=True,
        epsilons=tuple(0.4 * silo.epsilon_spent for silo in silos),
        claim="formal",
        claim_reason="sums are exact",
        shared_epsilons=tuple(0.5 * silo.epsilon_spent for silo in silos),
        shared_claim="formal-conditional",
        shared_claim_reason="numbers of examples are treated as public",
    )
    nothing = (math.inf,) * len(silos)
    of_shared = {"shared_claim": "none", "shared_claim_reason": "a fixed seed", "shared_epsilons": nothing}
    seedless = replace(made, claim="none", claim_reason="a fixed seed", epsilons=nothing, **of_shared)
    yield "synthetic data", {"synthetic": made}
    yield "synthetic data of a fixed seed", {**given, "synthetic": seedless}
    yield "weights by budgets", {"synthetic": made, "methods": claiming("formal", budget_exposure="public")}
    yield (
        "synthetic data, then no noise",
        {
            "synthetic": replace(made, is_adapted_privately=False),
            "silos": [replace(silo, noise_multiplier=0.0, **unbounded) for silo in silos],
            "methods": claiming("none", "personal models are adapted without noise"),
        },
    )


def user_cases() -> Iterator[tuple[str, dict]]:
    """Overrides of a sample of users, by name."""
    costs, sums, methods = user_samples.COSTS, user_samples.SUMS, user_samples.sample_methods()
    unprotected = replace(
        costs, epsilon_target=math.inf, delta=0.0, noise_multiplier=0.0, **dict.fromkeys(SPENT, math.inf)
    )
    tree = replace(sums, rounds_per_tree=20)
    adaptive = replace(sums, quantile=0.5, count_stddev=2.5, sum_noise_multiplier=1.5724)
    constant = replace(sums, is_constant=True)
    capped = replace(sums, weight_cap=100)

    def costing(**changes):
        return user_samples.sample_methods(mr_mtl=replace(costs, **changes))

    def claiming(claim: str, reason: str = "everything is counted"):
        return tuple(replace(method, claim=claim, claim_reason=reason) for method in methods)

    yield "plain", {}
    yield "one method", {"methods": methods[1:2]}
    yield "nothing released", {"methods": methods[:1]}
    yield "seeded", {"methods": user_samples.seeded_methods()}
    yield "seeded, charged", {"methods": user_samples.seeded_methods(), **tuned(tried=2, **CHARGED)}
    names = ("local_only", "fed_avg", "mr_mtl")
    yield "all bare", {"methods": user_samples.sample_methods(**dict.fromkeys(names, unprotected))}
    yield "exported bare", {"methods": costing(noise_multiplier=0.0)}
    yield "another bare", {"methods": user_samples.sample_methods(fed_avg=unprotected)}
    yield "tree", {"sums": tree}
    yield "constant tree", {"sums": replace(tree, is_constant=True)}
    yield "adaptive", {"sums": adaptive}
    yield "constant", {"sums": constant}
    yield "taken from records", {"taken_from_records": ("classes of 'activity' (6)",)}
    yield "capped", {"sums": capped}
    yield "constant and capped", {"sums": replace(capped, is_constant=True)}
    yield "own support", {"sums": replace(sums, own_support=("DSU", "DSU 2"))}
    yield "many users", {"sums": replace(sums, num_users=1_234_567, expected_cohort=61728.35)}
    yield "large epsilon", {"methods": costing(epsilon_target=2000.0, epsilon_spent=2000.0)}
    yield "small epsilon", {"methods": costing(epsilon_target=0.1, epsilon_spent=0.0995, delta=1e-9)}
    yield "over target", {"methods": costing(epsilon_spent=2.5)}
    yield "formal", {"methods": claiming("formal")}
    yield "empirical", {"methods": claiming("empirical")}
    yield "tuned and charged", tuned("rounds", tried=3, **CHARGED)
    found = {"epsilon": 3.456, "delta": 1e-4}
    yield "runs on record", recorded(5, **found, elsewhere=1, taken_for_granted=NOTES)
    yield "no bound", recorded(5, **found, why_no_bound="a run on record has lost its ledger")
    yield "one method, more drawn elsewhere", {"methods": methods[1:2], **recorded(1, **found)}
    yield "chacha20", {"generator": "chacha20", "methods": claiming("formal")}


def statements() -> Iterator[tuple[str, Statement]]:
    """Statements by case."""
    for name, overrides in silo_cases():
        silos = overrides.get("silos", silo_samples.sample_silos(12))
        yield f"silos: {name}", silo_samples.sample_statement(**{**overrides, "silos": tuple(silos)})
    for name, overrides in user_cases():
        yield f"users: {name}", user_samples.sample_user_statement(**overrides)


def by_text() -> dict[str, dict[str, str]]:
    """Cases by all that readers get: by heading, or key, and text."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, statement in statements():
        found["unit"][statement.facts.unit].append(case)
        for key in ("adjacency", "protected", "claim", "claim_reason", "private"):
            found[key][str(getattr(statement, key))].append(case)
        composed = json_safe(msgspec.to_builtins(statement.composed))
        found["composed"][json.dumps(composed, sort_keys=True, ensure_ascii=False)].append(case)
        objects = objects_content(statement.facts)
        found["objects"][json.dumps(json_safe(objects), sort_keys=True, ensure_ascii=False)].append(case)
        found["headings"]["; ".join(one.heading for one in statement.paragraphs)].append(case)
        for paragraph in statement.paragraphs:
            found[paragraph.heading][paragraph.text].append(case)
        found["who"]["; ".join(row.who for row in statement.who_sees)].append(case)
        for row in statement.who_sees:
            found[row.who][f"sees {row.sees}. {row.guarantee}"].append(case)
    for is_private in (False, True):
        claim = "formal" if is_private else "empirical"
        for name, influence in (("records", None), ("people", NODE), ("pairs", EDGE)):
            text = export_text(claim, influence, are_users=False)
            found["personal models of an export"][text].append(f"{name}, private: {is_private}")
        text = export_text(claim, None, are_users=True)
        found["personal models of an export"][text].append(f"users, private: {is_private}")
    for name, given in (("users", (True, False)), ("silos", (False, False)), ("silos, searched", (False, True))):
        text = not_covered(are_users=given[0], is_searched=given[1])
        found["not covered of an export"][text].append(name)
    return {key: {text: "; ".join(cases) for text, cases in texts.items()} for key, texts in found.items()}


if __name__ == "__main__":
    STATEMENTS.write_text(json.dumps(by_text(), indent=1, ensure_ascii=False) + "\n")
