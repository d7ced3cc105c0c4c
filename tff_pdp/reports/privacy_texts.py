"""The sentences that the privacy statements of all units share, each written so that it can be read alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp.privacy.facts import Generator
from tff_pdp.reports import content
from tff_pdp.reports import words as numbers
from tff_pdp.reports.words import ClientWords

# From the strongest claim to the weakest.
CLAIMS: dict[str, str] = {
    "formal": "every output of training that depends on training records is covered by the accounting",
    "formal-conditional": "the guarantee holds only under the condition named in the reason",
    "empirical": "no proof covers this method; at most attacks were tried against it",
    "none": "not private",
}

NO_GUARANTEE = "No guarantee in this run."
PSEUDONYMS = (
    "Ids that are keyed hashes are pseudonyms: without the key they do not tell whose a row is, but the row says the "
    "same."
)


def claim_text(claim: str, reason: str, covered: Sequence[content.AlgorithmResult], guarantee: str) -> str:
    """The headline: how strong the guarantee is, for which methods, why, and in numbers."""
    titles = ", ".join(algorithm.title for algorithm in covered)
    if claim == "none":
        return (
            f"This run is not private. Reason: {reason} Whatever follows describes the mechanism and its accounting; "
            "it is not a guarantee."
        )
    parts = [f"Claim: {claim} ({CLAIMS[claim]}). It covers: {titles}. Reason: {reason}"]
    if claim != "empirical":
        parts.append(guarantee)
    return " ".join(parts)


def bounds_text(table: str) -> str:
    """Which of several upper bounds an epsilon is, and which table has them."""
    return (
        "the smallest of the upper bounds there are: Rényi (RDP) and, where one is known, privacy loss distribution "
        f"(PLD); the table of {table} has both."
    )


def composed_text(composed: Mapping[str, Any], words: ClientWords) -> str:
    """What it costs to release the models of every compared method, not only one."""
    methods, epsilon = composed["methods"], composed["epsilon"]
    notes = "".join(f" {note}." for note in composed.get("taken_for_granted", ()))
    is_more = composed.get("beyond_these_models", False)
    if methods == 1 and not is_more:
        return f"Only one training run on these records is on record; nothing is added.{notes}"
    elsewhere = composed.get("in_other_folders", 0)
    where = f", {elsewhere} of them in other folders" if elsewhere else ""
    if epsilon is None:
        return (
            f"No finite ε holds for the models of all {methods} runs together{where}: "
            f"{composed['claim_reason']}.{notes}"
        )
    how = "the ledger's bound" if composed["source"] == "ledger" else "the sum over runs, an upper bound"
    delta = numbers.plain(composed["delta"])
    if is_more:
        return (
            "Only one training run on these records is on record. A copy of it has drawn rounds anew elsewhere. "
            f"Towards someone who sees all that both released, the guarantee is ε = {numbers.upper(epsilon)} at "
            f"δ = {delta} for {words.spender} ({how}).{notes}"
        )
    return (
        f"{methods} training runs on the same records are on record{where}, and each spends its own ε: budgets are "
        "per run. Towards someone who sees the models of all of them, the guarantee is "
        f"ε = {numbers.upper(epsilon)} at δ = {delta} for {words.spender} ({how}).{notes}"
    )


def tuning_text(
    tuned: Sequence[str],
    configurations_tried: int,
    methods: int,
    if_charged: Mapping[str, float] | None,
    words: ClientWords,
    search_text: str = "",
) -> str:
    """What was chosen by looking at results.

    Args:
      tuned: names of the settings that were.
      configurations_tried: for that.
      methods: how many were compared.
      if_charged: `epsilon` and `delta`, had every configuration been charged as a release.
      words: for the clients.
      search_text: what was searched privately, where anything was.
    """
    text = f"{search_text} " if search_text else ""
    other, any_other = ("other ", "Any other") if search_text else ("", "Any")
    if tuned:
        text += (
            f"Chosen by looking at results: {', '.join(tuned)}, among {configurations_tried} configurations. "
            "This tuning is not in the ε."
        )
    else:
        text += (
            f"No {other}setting was declared as tuned. {any_other} tuning that was done all the same is not in the ε."
        )
    if methods > 1:
        text += f" Nor is a choice among the {methods} compared methods by their results."
    if if_charged:
        text += (
            f" If each of the {configurations_tried} configurations were charged as a release that costs what one "
            f"method above does, the ε of {words.spender} would be {numbers.upper(if_charged['epsilon'])} at "
            f"δ = {numbers.plain(if_charged['delta'])}."
        )
    return text


def not_private_text(protected: str, words: ClientWords) -> str:
    """What carries no guarantee at all, and that the guarantee of training is about what is named."""
    return (
        "Every validation and test metric in this report is computed on held-out examples without noise and is not "
        f"private; results of single {words.many} with few test examples reveal most. Held-out examples are not "
        f"covered by the training guarantee: it protects {protected}. Preprocessing that looked at the data, and how "
        "long steps took, are not covered either."
    )


_OF_GENERATOR: dict[Generator, str] = {
    "philox": "Random bits of batches, noise and selections in training are Philox's, which passes statistical tests "
    "and is no cryptographic generator: the guarantee takes for granted that nobody can tell them from random ones.",
    "chacha20": "Random bits of batches, noise and selections in training are ChaCha20's: the guarantee is "
    "computational, against everyone who cannot tell ChaCha20 from random bits.",
}


def limits_text(generator: Generator) -> str:
    """Where the program departs from the mathematics."""
    return (
        "Sums and their Gaussian noise are rounded to one public grid, so that the last bits of floating-point numbers "
        "tell nothing more; how far the noise's law is from the ideal one is part of ε. "
        f"{_OF_GENERATOR[generator]} All of them follow from a key that the operating system draws: who obtains the "
        "run's key can subtract the noise."
    )


def simulation_row(words: ClientWords) -> dict[str, str]:
    """What whoever runs the program sees."""
    return {
        "who": f"Whoever runs all {words.many} in one program",
        "sees": "everything, the key of the noise included",
        "guarantee": "Not protected: there the guarantee is about what is passed on.",
    }
