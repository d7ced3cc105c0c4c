import math

import pytest
from msgspec.structs import replace

from tests.reports import user_samples as samples
from tests.reports.report_samples import paragraph, text_of
from tff_pdp import errors
from tff_pdp.privacy.facts import RunsOnRecord, TuningFacts

UNPROTECTED = replace(samples.COSTS, epsilon_target=math.inf, epsilon_spent=math.inf, delta=0.0, noise_multiplier=0.0)
KEY_SENTENCES = [
    "Claim: formal-conditional",
    "It covers: MR-MTL. Reason: The number of users is treated as public.",
    "ε = 1.99 at δ = 0.0001 for the models of one method; one ε holds for all users.",
    "Unit: one user, with all training examples and in all rounds that the user takes part in.",
    "adding or removing one user, with all of that user's training examples. All other users are unchanged.",
    # (1 + e^1.9876) 1e-4 is 8.2981e-4.
    "For two users that is ε = 3.98 at δ = 0.00083.",
    "The server is trusted (central differential privacy)",
    "In each of 200 rounds, each user takes part independently with probability q = 0.05",
    "a round has 50 users in expectation",
    "clipped jointly to L2 norm C = 0.5",
    "standard deviation z·C once, with noise multiplier z = 1.5, and divides by the constant 50.",
    "A round in which nobody takes part is noised like any other.",
    "FedAvg 3 (d = 10,000), MR-MTL 3 (d = 10,000).",
    "ε spent by one method is 1.99 for every user, whether or not that user was ever drawn; the target is 2, δ is",
    "the report's table of methods has both. Local only: nothing leaves a user in training, which costs nothing.",
    "The guarantee is joint differential privacy",
    "A user's own examples are not protected in that user's own personal model.",
    "whoever holds it can learn about every user from that user's row",
    "the guarantee is ε = 5.97 at δ = 0.0003 for every user (the sum over runs, an upper bound)",
    "The number of users (N = 1,000) is treated as public",
    "the report names all users, the exported file, too, or it holds keyed hashes of their names",
    "results of single users with few test examples reveal most",
    "Sums and their Gaussian noise are rounded to one public grid",
    "None of that user; of every other user, the same ε and δ.",
    "None: the server is trusted, and adds the noise itself.",
]


def test_key_sentences():
    statement = samples.sample_user_statement()
    text = text_of(statement)
    assert statement.private
    assert [sentence for sentence in KEY_SENTENCES if sentence not in text] == []
    assert "silo" not in text


def test_a_known_seed_and_missing_noise_take_the_claim_away():
    seeded = samples.sample_user_statement(methods=samples.seeded_methods())
    assert (seeded.claim, seeded.private) == ("none", False)
    assert "test mode" in seeded.claim_reason
    assert "No finite ε holds for what one method spent; the ε that was asked for is 2" in text_of(seeded)
    costs = dict.fromkeys(("local_only", "fed_avg", "mr_mtl"), UNPROTECTED)
    bare = samples.sample_user_statement(methods=samples.sample_methods(**costs))
    assert (bare.claim, bare.claim_reason) == ("none", "No noise was added to what users release.")
    assert (bare.composed.claim, bare.composed.epsilon) == ("none", None)
    text = text_of(bare)
    assert "Nothing was clipped and no noise was added." in text
    assert "joint differential privacy" not in text and "Gaussian" not in text


def test_an_epsilon_without_noise_on_a_release_is_not_believed():
    silent = replace(samples.COSTS, noise_multiplier=0.0)
    assert samples.sample_user_statement(methods=samples.sample_methods(mr_mtl=silent)).claim == "none"
    # Where nothing is released none is needed.
    (local_only, *_) = samples.sample_methods()
    statement = samples.sample_user_statement(methods=(local_only,))
    assert statement.claim == "formal-conditional"
    assert paragraph(statement, "Mechanism").startswith("Nothing that is computed from a user's examples leaves")


def test_trees_hide_contributions_and_claim_no_amplification():
    statement = samples.sample_user_statement(sums=replace(samples.SUMS, rounds_per_tree=20))
    assert statement.adjacency == "one user's contributions replaced by zero"
    assert "that there is such a user is not hidden" in paragraph(statement, "Unit of protection")
    mechanism = paragraph(statement, "Mechanism")
    assert "each user once in an epoch of 20 rounds, in any order" in mechanism
    assert "noise of a binary tree" in mechanism and "no amplification by sampling is claimed" in mechanism
    assert "Poisson" not in mechanism
    assert "noise of one node of the tree" in paragraph(statement, "Noise and signal")


def test_an_adaptive_clip_is_said_to_release_a_count():
    # 1 / sqrt(1.5^-2 - (2 * 2.5)^-2) is 1.5724.
    adaptive = replace(samples.SUMS, quantile=0.5, count_stddev=2.5, sum_noise_multiplier=1.5724)
    mechanism = paragraph(samples.sample_user_statement(sums=adaptive), "Mechanism")
    assert "with noise multiplier z = 1.57," in mechanism
    assert "follows the 0.5 quantile of the norms" in mechanism
    assert "noise of standard deviation 2.5; sum and count together cost what a sum with z = 1.5 costs." in mechanism


def test_a_constant_number_of_users_takes_nothing_from_the_data():
    statement = samples.sample_user_statement(sums=replace(samples.SUMS, is_constant=True))
    public = paragraph(statement, "What is treated as public")
    assert "is a public constant; the number of users in the data is not used" in public
    assert "The report and exports tell that number, and whether there is a user of some id" in public


def test_what_else_is_public_or_unsound_is_named():
    sums = replace(samples.SUMS, is_constant=True, weight_cap=100, own_support=("DSU",))
    statement = samples.sample_user_statement(sums=sums)
    public, mechanism = paragraph(statement, "What is treated as public"), paragraph(statement, "Mechanism")
    assert "is a public constant. Public, too" in public
    assert "the number of training examples of every user, which sets how much the user counts" in public
    assert "number of its training examples over 100, at most one" in mechanism
    assert "Under DSU it is not the server that adds noise" in mechanism


def test_a_large_epsilon_promises_two_users_nothing():
    large = replace(samples.COSTS, epsilon_target=2000.0, epsilon_spent=2000.0)
    statement = samples.sample_user_statement(methods=samples.sample_methods(mr_mtl=large))
    assert paragraph(statement, "One person who is several users").endswith("not be below 1, which promises nothing.")


def test_tuning_and_recorded_runs_are_priced_for_every_user():
    tuning = TuningFacts(tuned=("rounds",), configurations_tried=3, charged_epsilon=4.321, charged_delta=1e-4)
    recorded = RunsOnRecord(epsilon=3.456, delta=1e-4, runs=5)
    statement = samples.sample_user_statement(tuning=tuning, on_record=recorded)
    assert "the ε of every user would be 4.33 at δ = 0.0001" in paragraph(statement, "Tuning")
    assert "ε = 3.46 at δ = 0.0001 for every user" in paragraph(statement, "If all compared methods are released")
    assert statement.composed.methods == 5
    mixed = replace(recorded, why_no_bound="runs on record protect different things")
    mixed = samples.sample_user_statement(on_record=mixed)
    assert "protect different things" in paragraph(mixed, "If all compared methods are released")


def test_methods_without_costs_are_refused():
    methods = tuple(replace(method, user_costs=None) for method in samples.sample_methods())
    with pytest.raises(errors.ConfigError, match="the cost of each silo, or of each method"):
        samples.sample_user_statement(methods=methods)
