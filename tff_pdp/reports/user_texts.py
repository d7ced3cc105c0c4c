"""The sentences of the privacy statement of users, each written so that it can be read alone."""

import math
from collections.abc import Mapping, Sequence

from tff_pdp.privacy.facts import UserCosts, UserSums
from tff_pdp.reports import content
from tff_pdp.reports import words as numbers
from tff_pdp.reports.privacy_texts import NO_GUARANTEE, PSEUDONYMS, bounds_text, not_private_text, simulation_row
from tff_pdp.reports.words import USERS

_JOINT_DP = (
    "The guarantee is joint differential privacy: it covers everything that others get of a user, and all that a "
    "user's personal model depends on of other users. A user's own examples are not protected in that user's own "
    "personal model."
)
_ROWS = (
    "The exported file holds the personal models of all users: whoever holds it can learn about every user from that "
    "user's row, and whoever can ask a server with a user's id learns about that user from the answers. Each row is to "
    f"be served to its own user alone. {PSEUDONYMS}"
)
NO_NOISE = "no noise was added to what users release"
NOT_COVERED = (
    "metrics of personal models, which depend on their users' own training examples without noise; validation and "
    "test examples; the choice of hyper-parameters"
)
# An export cannot keep it secret: there is a row for each user, and a server answers a user's id by that row.
MEMBERSHIP = (
    "how many users there are and whether an id is one of them: rows, manifest, model card and the answers' flag "
    "`personalized` tell both to whoever holds the export or can ask with the id"
)


def export_text(is_private: bool) -> str:
    """What the files beside a served model say of personal models."""
    if not is_private:
        return _ROWS
    return f"{_JOINT_DP} {_ROWS} What unknown clients get was computed from public and noised values only."


def guarantee_text(costs: UserCosts) -> str:
    """The guarantee in numbers."""
    return (
        "Every user is protected by (ε, δ)-differential privacy in all that the server releases, with "
        f"ε = {numbers.upper(costs.epsilon_spent)} at δ = {numbers.plain(costs.delta)} for the models of one method; "
        "one ε holds for all users."
    )


def unit_text(sums: UserSums) -> str:
    """What the guarantee is about, and when two data sets count as neighbours."""
    if sums.rounds_per_tree is None:
        neighbours = "they differ by adding or removing one user, with all of that user's training examples"
    else:
        neighbours = (
            "all that one user contributes is replaced by zero in one of them; that there is such a user is not hidden"
        )
    return (
        "Unit: one user, with all training examples and in all rounds that the user takes part in. Two data sets are "
        f"neighbours if {neighbours}. All other users are unchanged."
    )


def several_text(costs: UserCosts) -> str:
    """What a person gets who is more than one user."""
    text = (
        "The guarantee is for one user. A person who is k users, with several accounts or devices, gets less: in "
        "general, k times the ε, at (1 + e^ε + … + e^((k-1)ε)) times the δ."
    )
    epsilon = costs.epsilon_spent
    if not math.isfinite(epsilon):
        return text
    # Beyond this the delta is far above 1 anyway, and the exponential overflows.
    delta = (1 + math.exp(min(epsilon, 100.0))) * costs.delta
    if delta >= 1:
        return f"{text} For two users that δ would not be below 1, which promises nothing."
    return f"{text} For two users that is ε = {numbers.upper(2 * epsilon)} at δ = {numbers.upper(delta)}."


def trust_text() -> str:
    """Who must be trusted for the guarantee to hold."""
    return (
        "The server is trusted (central differential privacy): it sees who takes part in a round and every "
        "participant's clipped release, adds the noise itself, and must show neither to anyone."
    )


def mechanism_text(sums: UserSums) -> str:
    """Sampling, clipping and noise."""
    total = numbers.plain(sums.noise_multiplier)
    noise = total if sums.sum_noise_multiplier is None else numbers.plain(sums.sum_noise_multiplier)
    means = f"divides by the constant {numbers.plain(sums.expected_cohort)}"
    text = (
        f"In each of {sums.rounds} rounds, {_cohort_text(sums)} All values that a participant releases in a round are "
        f"clipped jointly to L2 norm C = {numbers.plain(sums.clip_norm)}, and the clipped releases are summed. "
    )
    if sums.weight_cap is not None:
        text += (
            f"A user counts as the number of its training examples over {sums.weight_cap}, at most one: that "
            "multiplies the clipped release. "
        )
    if sums.rounds_per_tree is not None:
        return text + (
            "The server adds the noise of a binary tree to the running sum of an epoch, Gaussian of standard deviation "
            f"z·C at every node with noise multiplier z = {noise}, and {means}. Each epoch has a tree of its own, and "
            "is paid for anew; no amplification by sampling is claimed."
        )
    text += (
        f"The server adds Gaussian noise of standard deviation z·C once, with noise multiplier z = {noise}, and "
        f"{means}. A round in which nobody takes part is noised like any other. The accounting assumes exactly this."
    )
    if sums.quantile is not None:
        text += (
            f" C is that of the first round; then it follows the {numbers.plain(sums.quantile)} quantile of the norms. "
            "For that, the number of releases below C is released, too, with noise of standard deviation "
            f"{numbers.plain(sums.count_stddev)}; sum and count together cost what a sum with z = {total} costs."
        )
    if sums.own_support:
        text += (
            f" Under {', '.join(sums.own_support)} it is not the server that adds noise: users add shares of it, each "
            "only where the own release is not zero, which protects nobody."
        )
    return text


def noise_text(algorithms: Sequence[content.AlgorithmResult], sums: UserSums) -> str:
    """How the noise compares with what there is to learn."""
    text = (
        "Expected length of the noise on a round's mean over C, the length of the longest mean that a cohort of the "
        "expected size can have (z·√d/qN, where d is the number of values that a user releases and that noise "
        "changes): "
    )
    ratios = [
        f"{algorithm.title} {numbers.plain(costs.noise_to_signal)} (d = {costs.num_noised:,})"
        for algorithm, costs in _costs(algorithms)
        if costs.num_noised
    ]
    text += f"{', '.join(ratios)}."
    if sums.rounds_per_tree is not None:
        text += " Here it is the noise of one node of the tree; a running sum has that of several."
    return text


def cost_text(algorithms: Sequence[content.AlgorithmResult], costs: UserCosts) -> str:
    """Epsilon and delta, spent and targeted."""
    if not math.isfinite(costs.epsilon_spent):
        return (
            "No finite ε holds of what one method spent; the one that was asked for is "
            f"{numbers.plain(costs.epsilon_target)}, δ is {numbers.plain(costs.delta)}. Calibration set the noise for "
            "it, under conditions that are not met here."
        )
    text = (
        f"ε spent by one method is {numbers.upper(costs.epsilon_spent)} for every user, whether or not that user was "
        f"ever drawn; the target is {numbers.plain(costs.epsilon_target)}, δ is {numbers.plain(costs.delta)}. It is "
        f"{bounds_text('methods')}"
    )
    silent = [algorithm.title for algorithm, own in _costs(algorithms) if not own.num_noised]
    if silent:
        text += f" {', '.join(silent)}: nothing leaves a user in training, which costs nothing."
    over = [algorithm.title for algorithm, own in _costs(algorithms) if own.epsilon_spent > own.epsilon_target]
    if over:
        text += f" Over the target: {', '.join(over)}."
    return text


def personal_text() -> str:
    """What becomes of personal models, and of the file that holds them."""
    return (
        "A user's personal part, such as a head or weights of its own, is computed from what the server sends and from "
        "that user's own examples, without noise, and does not leave the user in training, unless the reason of the "
        f"claim says otherwise; a personal model that is the shared one has no such part. {export_text(True)}"
    )


def public_text(sums: UserSums) -> str:
    """What an observer is assumed to know anyway."""
    number = f"The number of users (N = {sums.num_users:,})"
    text = (
        f"{number} is a public constant"
        + (
            ""
            if sums.weight_cap is not None
            else "; the number of users in the data is not used in training. This report and exports tell that number, "
            "and whether there is a user of some id: towards their readers, and those who can ask a server, the "
            "guarantee is about a user's examples, not about being there"
        )
        + ". Public, too, are"
        if sums.is_constant
        else f"{number} is treated as public: it sets sampling rate and divisor. So are"
    )
    text += (
        " the sampling rate, the noise multiplier, the first clip norm, the budget, the number of rounds, "
        "hyper-parameters, and the initial weights."
    )
    if sums.weight_cap is not None:
        text += " So is the number of training examples of every user, which sets how much the user counts."
    return text + (
        " Training does not release which users there are, nor who took part in which round; this report names all "
        "users, the exported file, too, or it holds keyed hashes of their names, and how long rounds took, which is on "
        "record too, tells how many took part."
    )


def nothing_released_text() -> str:
    """What stands in place of mechanism and noise where no method releases anything."""
    return "Nothing that is computed from a user's examples leaves that user in training, so no noise is needed."


def unprotected_text() -> str:
    """What stands in place of mechanism and cost where no noise was added."""
    return (
        "Nothing was clipped and no noise was added. Models, updates and metrics may reveal any user; keep them where "
        "the raw data may be kept."
    )


def held_out_text() -> str:
    """What carries no guarantee at all."""
    return not_private_text("training examples only", USERS) + (
        " Personal models are made of their users' own training examples without noise, and so are all metrics of "
        "personal models here: none of them is covered, for any example of the user."
    )


def who_sees(claim: str) -> list[dict[str, str]]:
    """Each observer, what reaches them, and what protects users from them."""
    unprotected = claim in ("empirical", "none")
    noised = NO_GUARANTEE if unprotected else "The same ε and δ for every user, by post-processing of noised sums."
    joint = NO_GUARANTEE if unprotected else "None of that user; of every other user, the same ε and δ."
    server = NO_GUARANTEE if unprotected else "None: the server is trusted, and adds the noise itself."
    rows: Sequence[Mapping[str, str]] = [
        {"who": "The server", "sees": "who takes part, and each participant's clipped release", "guarantee": server},
        {"who": "Other users", "sees": "what the server sends to participants", "guarantee": noised},
        {"who": "The user itself", "sees": "its own raw examples and its own model", "guarantee": "None needed."},
        {
            "who": "Who sees a user's personal model",
            "sees": "that model's weights, or answers to requests with the user's id",
            "guarantee": joint,
        },
        {
            "who": "Who holds the exported file",
            "sees": "the personal models of all users, under their names or keyed hashes of these",
            "guarantee": "None of any user whose model has a personal part.",
        },
        {"who": "Clients that are unknown to the export", "sees": "the global model's answers", "guarantee": noised},
        simulation_row(USERS),
        {
            "who": "Readers of this report",
            "sees": "names of users, and results of models made of their own training examples, on held-out ones",
            "guarantee": "Not private: these numbers carry no noise.",
        },
    ]
    return [dict(row) for row in rows]


def _cohort_text(sums: UserSums) -> str:
    """Who takes part in a round."""
    share, expected = numbers.plain(sums.sampling_rate), numbers.plain(sums.sampling_rate * sums.num_users)
    if sums.rounds_per_tree is not None:
        return (
            f"a share of {share} of the users takes part, some {expected}: each user once in an epoch of "
            f"{sums.rounds_per_tree} rounds, in any order."
        )
    return (
        f"each user takes part independently with probability q = {share}, drawn by the server and shown to nobody "
        f"(Poisson sampling); a round has {expected} users in expectation."
    )


def _costs(algorithms: Sequence[content.AlgorithmResult]) -> list[tuple[content.AlgorithmResult, UserCosts]]:
    return [(algorithm, algorithm.user_costs) for algorithm in algorithms if algorithm.user_costs is not None]
