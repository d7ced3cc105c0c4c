"""Runs `tff-pdp account`: the epsilon of a training plan, or the noise that an epsilon needs, before training."""

import math
import typing
from typing import Annotated, Any, Literal

from msgspec import Meta

from tff_pdp.command_line import Outcome, Reporting, loading
from tff_pdp.settings import Delta, Positive

_OUTSIDE = "protected from everyone outside that silo"
_UNITS = {
    "silo_example": f"one record of one silo, added or removed (add/remove); other silos are unchanged; {_OUTSIDE}",
    "user": (
        "all records of one user, added or removed (add/remove); protected from everyone who sees the shared model, "
        "but not from the server, which adds the noise"
    ),
    "node": f"one person of a silo's contact graph, with all contacts; at most {{rows}} rows differ; {_OUTSIDE}",
    "edge": (
        "all contacts between two people of one silo, added or removed; at most {rows} rows differ; "
        f"{_OUTSIDE}; people's own features and states are not protected"
    ),
}

# Beyond these values the accountants overflow, or take minutes, and no training run comes near them.
_Rate = Annotated[float, Meta(ge=1e-9, le=1)]
_NoiseMultiplier = Annotated[float, Meta(ge=0, le=1e6)]
_Steps = Annotated[int, Meta(ge=1, le=10**8)]
_RowsOfUnit = Annotated[int, Meta(ge=1, le=10**5)]
_Rows = Annotated[int, Meta(ge=1, le=10**12)]


class Account(Reporting):
    """Compute an epsilon, or the noise that an epsilon needs.

    Computes the privacy cost of training with Poisson sampling, clipping and Gaussian noise. No data is read.

    A silo with 1,000 records, expected batch 32, 1,000 steps:
      tff-pdp account --unit silo_example --sampling-rate 0.032 --noise-multiplier 1.0 --steps 1000 --delta 1e-5
    gives epsilon 6.6. Conversely, the noise that keeps epsilon within 2:
      tff-pdp account --unit silo_example --sampling-rate 0.032 --epsilon 2 --steps 1000 --delta 1e-5

    Count every gradient: rounds x local steps x gradients per step (2 for Ditto and similar methods).
    Two bounds are computed, RDP and PLD; both hold, so the smaller one may be claimed. Both are for ideal Gaussian
    noise. In training, the ledger also charges the drawn noise's distance from ideal noise: below 1 % of epsilon in
    every shipped configuration. A noise multiplier below 0.001 counts as no noise: epsilon is infinite.

    Rows of a contact graph, where one person is in up to 20 rows, in Poisson batches:
      tff-pdp account --unit node --rows-per-unit 20 --sampling-rate 0.01 --epsilon 4 --steps 1000 --delta 1e-5
    or in batches of exactly 512 rows, drawn anew in each step:
      tff-pdp account --unit node --rows-per-unit 20 --num-rows 2609976 --batch-size 512 --noise-multiplier 4.5 \\
          --steps 10196 --delta 3.8e-7
    For batches of an exact size, RDP is the only bound. The manifest of a prepared data set has the number of rows
    under row_influence.

    Attributes:
      unit: the unit of privacy: the part of the data that the guarantee protects.
      sampling_rate: probability that one record (or user) takes part in one step, for instance batch size / records.
      batch_size: number of rows in each batch, drawn from `num_rows` without replacement; for node and edge.
      rows_per_unit: largest number of rows that one person, or one pair, is in; for node and edge.
      num_rows: number of rows in the silo; for node and edge.
      noise_multiplier: noise standard deviation / clip norm.
      epsilon: budget; prints the smallest noise multiplier that keeps epsilon within the budget.
      steps: number of noised sums of gradients, over all rounds.
      delta: delta of the guarantee, well below 1 / number of records.
    """

    unit: Literal["silo_example", "user", "node", "edge"]
    sampling_rate: _Rate | None = None
    batch_size: _Rows | None = None
    rows_per_unit: _RowsOfUnit | None = None
    num_rows: _Rows | None = None
    noise_multiplier: _NoiseMultiplier | None = None
    epsilon: Positive | None = None
    steps: _Steps
    delta: Delta

    exactly_one = (("sampling_rate", "batch_size"), ("noise_multiplier", "epsilon"))

    def __post_init__(self):
        for name in ("rows_per_unit", "num_rows", "batch_size"):
            if getattr(self, name) is not None and not self._is_of_rows:
                raise ValueError(f"--{name.replace('_', '-')} is for --unit node and edge, not for {self.unit}.")
        if self._is_of_rows and self.rows_per_unit is None:
            raise ValueError(
                f"--unit {self.unit} needs --rows-per-unit, the most rows that one {self.unit} can change."
            )
        if self.batch_size is not None and self.num_rows is None:
            raise ValueError("--batch-size needs --num-rows, the number of rows that batches are drawn from.")
        if self.batch_size is not None and self.num_rows is not None and self.batch_size > self.num_rows:
            raise ValueError(f"--batch-size is {self.batch_size}, but --num-rows is only {self.num_rows}.")

    def run(self) -> Outcome:
        """Computes the cost of the plan.

        Guarantee: the printed epsilon is an upper bound for the unit printed with it.
        Assumes: true Poisson sampling (or, with a batch size, fresh batches of that size), one clip norm for the whole
          gradient, division by a constant, and public parameters; for rows, at most `rows_per_unit` rows differ.

        Raises:
          BudgetError: no noise multiplier meets the budget.
        """
        # Loaded here: `tff-pdp --help` imports this module, and accounting takes a second to load.
        with loading():
            from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier, epsilon_bounds
            from tff_pdp.privacy.accounting.row_influence import calibrate_rows_noise

        noise_multiplier = self.noise_multiplier
        if self.epsilon is not None and self.sampling_rate is not None and not self._is_of_rows:
            noise_multiplier = calibrate_noise_multiplier(self.epsilon, self.delta, self.sampling_rate, self.steps)
        elif self.epsilon is not None:
            noise_multiplier = calibrate_rows_noise(self._event, self.epsilon, self.delta)
        assert noise_multiplier is not None
        bounds = epsilon_bounds(self._event(noise_multiplier), self.delta)
        rows = {"rows_per_unit": self.rows_per_unit, "num_rows": self.num_rows, "batch_size": self.batch_size}
        result = {
            "unit": self.unit,
            "adjacency": "at_most_rows_per_unit_rows_differ" if self._is_of_rows else "add_or_remove_one",
            **{key: value for key, value in rows.items() if value is not None},
            "sampling_rate": self.sampling_rate,
            "noise_multiplier": noise_multiplier,
            "steps": self.steps,
            "delta": self.delta,
            **({} if self.epsilon is None else {"epsilon_target": self.epsilon}),
            "epsilon_rdp": _finite(bounds.rdp),
            "epsilon_pld": _finite(bounds.pld),
            "epsilon": _finite(bounds.best),
        }
        return Outcome(_text(result), result)

    @property
    def _is_of_rows(self) -> bool:
        return self.unit in ("node", "edge")

    def _event(self, noise_multiplier: float) -> Any:
        from tff_pdp.privacy.accounting.accountants import poisson_gaussian_event
        from tff_pdp.privacy.accounting.row_influence import fixed_size_rows_event, poisson_rows_event

        rate, rows, changed = self.sampling_rate, self.num_rows, self.rows_per_unit
        if changed is None:
            return poisson_gaussian_event(typing.cast(float, rate), noise_multiplier, self.steps)
        if rate is None:
            num_rows, batch_size = typing.cast(int, rows), typing.cast(int, self.batch_size)
            return fixed_size_rows_event(num_rows, batch_size, noise_multiplier, changed, self.steps)
        # In a silo with fewer rows, all of them may differ.
        return poisson_rows_event(rate, noise_multiplier, min(changed, rows or changed), self.steps)


def _finite(value: float | None) -> float | None:
    """Returns the value; None, which JSON has in place of infinity, if there is no bound, as without noise."""
    return value if value is not None and math.isfinite(value) else None


def _text(result: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        # Rounded up: a printed epsilon must not be smaller than the one proved, nor printed noise smaller than needed.
        value = result[name]
        return "none" if value is None else f"{math.ceil(value * 1e4) / 1e4:.4f}"

    by_rows, by_rate = "batches of {batch_size} of {num_rows} rows", "Poisson sampling rate {sampling_rate:g}"
    sampling = (by_rows if result["sampling_rate"] is None else by_rate).format(**result)
    lines = [
        f"epsilon <= {shown('epsilon')} at delta = {result['delta']:g}   "
        f"(RDP {shown('epsilon_rdp')}, PLD {shown('epsilon_pld')})",
        f"unit: {result['unit']}, that is {_UNITS[result['unit']].format(rows=result.get('rows_per_unit'))}",
        f"plan: {result['steps']} Gaussian sums, {sampling}, "
        f"noise multiplier {math.ceil(result['noise_multiplier'] * 1e5) / 1e5:.8g}",
    ]
    if result["epsilon"] is None:
        lines[0] = "epsilon is infinite: nothing is protected, because there is no noise, or almost none"
    if "epsilon_target" in result:
        lines.append(f"The noise multiplier is the smallest found that keeps epsilon <= {result['epsilon_target']:g}.")
    return "\n".join(lines)
