"""Builds privacy statements from facts: what is protected, against whom, at what cost, and what is not protected.

The sentences are in `statement_silos.jinja`, `statement_users.jinja` and `statement_shared.jinja`. This module computes
the claim and the cost of all runs on record.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.facts import CLAIMS, GUARANTEES, MethodFacts, SiloFacts, UserFacts, claim_of_several
from tff_pdp.reports.words import SILOS, USERS, between, plain, upper


class Paragraph(NamedTuple):
    """A paragraph of a statement, on one subject; `text` can be read alone."""

    heading: str
    text: str


class Observer(NamedTuple):
    """A kind of observer.

    Attributes:
      who: words for the observer.
      sees: words for the data that the observer sees.
      guarantee: how others' records, or other users, are protected from the observer.
    """

    who: str
    sees: str
    guarantee: str


class ComposedCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The privacy cost of the models of all compared methods together.

    Attributes:
      methods: number of training runs that the cost includes.
      in_other_folders: number of these training runs that are stored in other folders.
      taken_for_granted: assumptions about runs that may or may not have used these records, one sentence each.
      claim: claim for all runs together; `none` if no finite epsilon holds.
      claim_reason: reason for the claim, in one line.
      beyond_these_models: whether a copy of the only run on record has released more than these models, on another
        computer.
      epsilon: epsilon against an observer who sees the models of all runs; None if no bound holds.
      delta: delta of the guarantee with `epsilon`.
      source: source of `epsilon`: `ledger`, or `sum over methods`, which is always an upper bound.
    """

    methods: int
    in_other_folders: int = 0
    taken_for_granted: tuple[str, ...] = ()
    claim: str
    claim_reason: str
    beyond_these_models: bool = False
    epsilon: float | None
    delta: float | None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Statement:
    """The privacy statement of an experiment.

    Attributes:
      claim: weakest claim of the exported methods (of all, if no method was exported); `none` if any of these
        methods was trained without noise.
      claim_reason: reason for the claim, as a sentence.
      facts: facts that the statement was built from.
      composed: privacy cost of all compared methods together.
      adjacency: difference between neighbouring data sets, in words.
      protected: unit that the guarantee protects, in words.
      paragraphs: paragraphs, in the order to show them.
      who_sees: all kinds of observers.
    """

    claim: str
    claim_reason: str
    facts: SiloFacts | UserFacts
    composed: ComposedCosts
    adjacency: str
    protected: str
    paragraphs: tuple[Paragraph, ...]
    who_sees: tuple[Observer, ...]

    @property
    def private(self) -> bool:
        """Whether the claim is a guarantee."""
        return self.claim in GUARANTEES


# Plain text: the page escapes it.
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.tests["finite"] = math.isfinite
_TEMPLATES.filters.update(
    plain=plain,
    upper=upper,
    between=lambda values: between(list(values)),
    between_upper=lambda values: between(list(values), upper),
)


def statement(facts: SiloFacts | UserFacts) -> Statement:
    """Builds the statement of an experiment.

    Raises:
      ConfigError: the templates have no words for a fact, or methods or costs are missing.
    """
    paid = len(facts.costs) == len(facts.methods) if isinstance(facts, UserFacts) else facts.silos
    if not (facts.methods and paid):
        raise ConfigError("a privacy statement needs at least one method, and the cost of each silo, or of each method")
    claim, reason = claim_of(facts)
    paragraphs: list[Paragraph] = []
    who_sees: list[Observer] = []

    def paragraph(heading: str, caller: Callable[[], str]) -> str:
        paragraphs.append(Paragraph(heading, _line(caller())))
        return ""

    def observer(who: str, sees: str, caller: Callable[[], str]) -> str:
        who_sees.append(Observer(who, sees, _line(caller())))
        return ""

    composed = composed_costs(facts)
    names = {"facts": facts, "claim": claim, "reason": reason, "private": claim in GUARANTEES, "composed": composed}
    template = _TEMPLATES.get_template("statement_users.jinja" if facts.are_users else "statement_silos.jinja")
    try:
        words: Any = template.make_module(
            {**names, "words": USERS if facts.are_users else SILOS, "paragraph": paragraph, "observer": observer}
        )
    except jinja2.UndefinedError as error:
        raise ConfigError(f"a privacy statement has no words for a fact: {error}") from error
    return Statement(
        claim, reason, facts, composed, words.adjacency, words.protected, tuple(paragraphs), tuple(who_sees)
    )


def claim_of(facts: SiloFacts | UserFacts) -> tuple[str, str]:
    """Returns the weakest claim of the exported methods (of all, if no method was exported), and a reason for it.

    The claim is `none` if one of these methods, or one of the silos, has no noise.
    """
    weakest = _weakest(facts.covered)
    if facts.bare and weakest.claim != "none":
        return "none", _shared("without_noise", facts)
    reason = weakest.claim_reason.strip()
    return weakest.claim, reason if reason.endswith((".", "!", "?")) else f"{reason}."


def composed_costs(facts: SiloFacts | UserFacts) -> ComposedCosts:
    """Computes the cost of the models of all compared methods together: a claim, epsilon, and the source of epsilon."""
    methods, record = facts.methods, facts.on_record
    runs = record.runs or len(methods)
    about: dict[str, Any] = {
        "methods": runs,
        "in_other_folders": record.elsewhere,
        "taken_for_granted": record.taken_for_granted,
    }
    unproven = next((method for method in methods if method.claim not in GUARANTEES), None)
    if unproven is not None:
        why = f"nothing is proven of {unproven.title}: {unproven.claim_reason.strip().rstrip('.')}"
    elif record.why_no_bound or math.isfinite(facts.most_spent):
        why = record.why_no_bound
    else:
        why = f"there are {'users' if facts.are_users else 'silos'} without noise"
    if why:
        return ComposedCosts(**about, claim="none", claim_reason=why, epsilon=None, delta=None)
    weakest = _weakest(methods)
    claim, reason = weakest.claim, weakest.claim_reason
    if runs > len(methods):
        claim, reason = claim_of_several(claim, reason)
    about |= {"claim": claim, "claim_reason": reason}
    if record.epsilon is None or record.delta is None:
        epsilon, delta = len(methods) * facts.most_spent, len(methods) * facts.largest_delta
        return ComposedCosts(**about, epsilon=epsilon, delta=delta, source="sum over methods")
    # Of one run, too, another computer may have drawn more than is reported here.
    is_more = runs == len(methods) == 1 and record.epsilon > facts.most_spent * (1 + 1e-6)
    return ComposedCosts(
        **about, beyond_these_models=is_more, epsilon=record.epsilon, delta=record.delta, source="ledger"
    )


def objects_content(facts: SiloFacts | UserFacts) -> dict[str, Any]:
    """Returns `objects`, the claim of each object that a training on synthetic data makes, as plain data for JSON.

    Empty for trainings without synthetic data, whose objects all have the claim of the run.
    """
    synthetic = facts.synthetic if isinstance(facts, SiloFacts) else None
    if synthetic is None or not isinstance(facts, SiloFacts):
        return {}
    claim, reason = claim_of(facts)

    def entry(claim: str, reason: str, epsilon: float) -> dict[str, Any]:
        bound = epsilon if claim in GUARANTEES and math.isfinite(epsilon) else None
        return {
            "claim": claim,
            "claim_reason": reason,
            "epsilon": bound,
            "delta": None if bound is None else facts.largest_delta,
            "may_leave_the_silo": bound is not None,
        }

    return {
        "objects": {
            "synthetic data": entry(synthetic.claim, synthetic.claim_reason, max(synthetic.epsilons)),
            "shared model": entry(
                synthetic.shared_claim, synthetic.shared_claim_reason, max(synthetic.shared_epsilons)
            ),
            "personal models": entry(claim, reason, facts.most_spent),
        }
    }


def export_text(claim: str, row_influence: RowInfluence | None, *, are_users: bool) -> str:
    """Returns the statement's text on personal models, for the files of an export."""
    return _shared("personal_models", claim in GUARANTEES, row_influence, are_users)


def not_covered(*, are_users: bool, is_searched: bool = False) -> str:
    """Returns the statement's text on the limits of epsilon, for the files of an export."""
    return _shared("not_covered", are_users, is_searched)


def _weakest(methods: tuple[MethodFacts, ...]) -> MethodFacts:
    """Returns the first of the methods with the weakest claim.

    Raises:
      ConfigError: a claim is unknown.
    """
    unknown = [method.claim for method in methods if method.claim not in CLAIMS]
    if unknown:
        raise ConfigError(f'unknown privacy claim "{unknown[0]}"; known: {", ".join(CLAIMS)}')
    return max(methods, key=lambda method: CLAIMS.index(method.claim))


def _shared(macro: str, *values: Any) -> str:
    """Returns the text of a macro."""
    return _line(getattr(_TEMPLATES.get_template("statement_shared.jinja").module, macro)(*values))


def _line(text: str) -> str:
    return " ".join(text.split())
