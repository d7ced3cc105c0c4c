import math

import pytest
from msgspec.structs import replace

from tests.reports import report_samples as samples
from tests.reports.statement_cases import CHARGED, GRID, SEARCH
from tff_pdp import errors
from tff_pdp.privacy.facts import RunsOnRecord, TuningFacts

KEY_SENTENCES = [
    "Unit: one example of one silo.",
    "adding or removing one record of one silo, all other silos unchanged",
    "Claim: formal-conditional",
    "Reason: Formal if the sizes of the silos are public.",
    "A person with records in several silos gets the sum of the ε and the sum of the δ over those silos",
    "that is ε = 7.88",
    "clipped to L2 norm 1 over all weights jointly",
    "(Poisson sampling). The accounting assumes exactly this.",
    "ε spent by one method is between 0.985 and 3.94 over silos, targets are between 1 and 4, δ is 1e-05.",
    "Rényi (RDP) and, where one is known, privacy loss distribution (PLD)",
    "the guarantee is ε = 11.9 at δ = 3e-05 for the silo that spent most (the sum over runs, an upper bound)",
    "Chosen by looking at results: lambda, among 4 configurations. This tuning is not in the ε.",
    "The number of training records of each silo (n_k) is treated as public",
    "Under zero-out adjacency, where all that one record adds to any sum is replaced by zero and n_k stays, the same ε",
    "computed on held-out examples without noise and is not private",
    "Held-out examples are not covered by the training guarantee",
    "Sums and their Gaussian noise are rounded to one public grid",
    "The noise is added inside the silo, so the server need not be trusted, where each silo keeps its own key.",
]


def test_key_sentences():
    statement = samples.sample_statement(
        samples.sample_silos(12), tuning=TuningFacts(tuned=("lambda",), configurations_tried=4)
    )
    text = samples.text_of(statement)
    assert statement.private
    assert "not private. Reason" not in text
    assert [sentence for sentence in KEY_SENTENCES if sentence not in text] == []


def test_test_seed_is_not_private():
    statement = samples.seeded_statement(3)
    text = samples.text_of(statement)
    assert (statement.claim, statement.private) == ("none", False)
    assert "This run is not private. Reason: test mode: all noise follows from a fixed seed" in text
    assert "need not be trusted" not in text
    assert "No finite ε holds for the models of all 3 runs together: nothing is proven of Local only" in text
    assert "No finite ε holds for what one method spent in a silo; the ε that was asked for is between 1 and 4" in text


def test_one_silo_without_noise_takes_the_claim_away():
    first, *others = samples.sample_silos(3)
    bare = replace(first, epsilon_target=math.inf, epsilon_spent=math.inf, noise_multiplier=0.0)
    statement = samples.sample_statement((bare, *others))
    assert statement.claim == "none"
    assert "1 of 3 silos trained without noise, for example silo-000" in statement.claim_reason


def test_no_noise_at_all_says_nothing_about_a_mechanism():
    silos = [replace(silo, epsilon_spent=math.inf, noise_multiplier=0.0) for silo in samples.sample_silos(2)]
    text = samples.text_of(samples.sample_statement(tuple(silos)))
    assert "No silo added noise." in text
    assert "DP-SGD" not in text


def test_the_claim_is_the_weakest_of_what_is_exported():
    silos = samples.sample_silos(2)
    weak, middle, strong = samples.sample_methods()
    weak = replace(weak, claim="none")
    strong = replace(strong, claim="formal", claim_reason="Everything is counted")
    exported = samples.sample_statement(silos, methods=(weak, middle, strong))
    assert (exported.claim, exported.claim_reason) == ("formal", "Everything is counted.")
    assert exported.composed.epsilon is None  # Releasing the unprotected method too would void everything.
    kept = replace(strong, exported=False)
    assert samples.sample_statement(silos, methods=(middle, kept)).claim == "formal-conditional"


def test_spending_over_the_target_and_a_ledger_composition_are_stated():
    first, second = samples.sample_silos(2)
    over = replace(first, epsilon_spent=1.2)
    statement = samples.sample_statement((over, second), on_record=RunsOnRecord(epsilon=5.001, delta=1e-5))
    text = samples.text_of(statement)
    assert "Over their target: 1 of 2 silos, for example silo-000." in text
    assert "ε = 5.01 at δ = 1e-05 for the silo that spent most (the ledger's bound)" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sampler": "shuffle"}, "no words for a fact: .*'shuffle'"),
        ({"methods": ()}, "at least one method"),
        ({"silos": ()}, "the cost of each silo, or of each method"),
        ({"methods": (replace(samples.sample_methods()[0], claim="certain"),)}, 'unknown privacy claim "certain"'),
    ],
)
def test_impossible_requests_are_named(overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        samples.sample_statement(**{"silos": samples.sample_silos(1), **overrides})


def test_an_empirical_claim_promises_no_protection():
    silos = samples.sample_silos(2)
    methods = tuple(replace(method, claim="empirical") for method in samples.sample_methods())
    statement = samples.sample_statement(silos, methods=methods)
    text = samples.text_of(statement)
    assert not statement.private
    assert "differential privacy, with ε" not in text
    assert "need not be trusted" not in text


def tuning(silos=(), methods=(), **facts):
    statement = samples.sample_statement(
        silos or samples.sample_silos(3), methods=methods or samples.sample_methods(), tuning=TuningFacts(**facts)
    )
    return samples.paragraph(statement, "Tuning"), samples.text_of(statement)


def test_a_private_search_is_in_the_epsilon_and_says_how_it_was_made():
    text, everything = tuning(search=SEARCH)
    assert "Searched privately: prox_weight and learning_rate of MR-MTL." in text
    assert "made a secret, random number of runs (geometric, 5 on average), each with one of 6 candidates" in text
    assert "The ε includes this search." in text
    assert (
        "No other setting was declared as tuned. Any other tuning that was done all the same is not in the ε." in text
    )
    assert "training records only and, as far as the models of MR-MTL go, validation examples." in everything


def test_a_fixed_grid_is_said_to_count_every_run():
    text, _ = tuning(search=GRID)
    assert "Each silo tried each of 3 candidates once" in text
    assert "The ε counts every one of these runs as if it had been released." in text
    assert "random" not in text


def test_what_was_tuned_besides_a_search_is_not_in_the_epsilon():
    text, _ = tuning(search=SEARCH, tuned=("batch size",), configurations_tried=4)
    assert "Chosen by looking at results: batch size, among 4 configurations. This tuning is not in the ε." in text


def test_configurations_that_were_tried_have_a_price():
    text, _ = tuning(tuned=("lambda",), configurations_tried=4, **CHARGED)
    assert "If each of the 4 configurations were charged as a release" in text
    assert "the ε of the silo that spent most would be 7.34 at δ = 1e-05." in text
    seeded = samples.seeded_statement(3).facts
    text, _ = tuning(seeded.silos, seeded.methods, configurations_tried=4, **CHARGED)
    assert "were charged" not in text
    text, everything = tuning()
    assert text.startswith("No setting was declared as tuned. Any tuning that was done all the same is not in the ε.")
    assert "it protects training records only. Preprocessing" in everything


@pytest.mark.parametrize(
    ("generator", "sentence"),
    [
        ("philox", "is no cryptographic generator: the guarantee takes for granted"),
        ("chacha20", "the guarantee is computational, against everyone who cannot tell ChaCha20 from random bits."),
    ],
)
def test_a_statement_says_what_makes_random_bits(generator, sentence):
    statement = samples.sample_statement(samples.sample_silos(2), generator=generator)
    assert sentence in samples.text_of(statement)


def test_a_figure_over_other_runs_on_record_may_hang_on_philox():
    silos = samples.sample_silos(2)
    formal = tuple(
        replace(method, claim="formal", claim_reason="Everything is counted") for method in samples.sample_methods()
    )

    def composed(**changes):
        return samples.sample_statement(silos, methods=formal, generator="chacha20", **changes).composed

    alone = composed()
    assert (alone.claim, alone.claim_reason) == ("formal", "Everything is counted")
    several = composed(on_record=RunsOnRecord(epsilon=9.0, delta=1e-5, runs=len(formal) + 1))
    assert several.claim == "formal-conditional"
    assert several.claim_reason == (
        "Everything is counted; random bits of other runs on record may be Philox's, which is no cryptographic "
        "generator"
    )
