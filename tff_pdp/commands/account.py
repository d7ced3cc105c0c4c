"""`tff-pdp account`: the epsilon of a training plan, or the noise that an epsilon needs, before anything is trained."""

import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any

from tff_pdp.errors import ConfigError

_UNITS = {
    "silo_example": (
        "one record of one silo, present or absent (add/remove), all other silos unchanged; "
        "protected from everyone outside that silo"
    ),
    "user": (
        "all records of one user, present or absent (add/remove); protected from everyone who sees the shared model, "
        "not from the server that adds the noise"
    ),
    "node": (
        "one person of a silo's contact graph, with all its contacts: whatever differs of it, at most {rows} rows do; "
        "protected from everyone outside that silo"
    ),
    "edge": (
        "all contacts of one pair of people of one silo, present or absent: at most {rows} rows differ; protected from "
        "everyone outside that silo; people's own features and states are not protected"
    ),
}
_OF_ROWS = ("node", "edge")

# Beyond these values the accountants overflow, or take minutes, and no training run comes near them.
_SMALLEST_SAMPLING_RATE = 1e-9
_LARGEST_NOISE_MULTIPLIER = 1e6
_MOST_STEPS = 10**8
_MOST_ROWS_PER_UNIT = 10**5
_MOST_ROWS = 10**12

_HELP = """\
Computes the privacy cost of training with Poisson sampling, clipping and Gaussian noise. No data is read.

A silo with 1,000 records, expected batch 32, 1,000 steps:
  tff-pdp account --unit silo_example --sampling-rate 0.032 --noise-multiplier 1.0 --steps 1000 --delta 1e-5
gives epsilon 6.6. To ask the other way round, which noise keeps epsilon within 2:
  tff-pdp account --unit silo_example --sampling-rate 0.032 --epsilon 2 --steps 1000 --delta 1e-5

Count every gradient: rounds x local steps x passes over the data per step (Ditto and similar methods make 2).
Two bounds are computed, RDP and PLD; each holds, so the smaller one may be claimed. They are for ideal Gaussian noise:
the ledger of a training adds the distance of drawn noise from it, below 1 % of epsilon in every shipped configuration.
A noise multiplier below 0.001 counts as no noise: epsilon is infinite.

Rows made of a contact graph, in up to 20 of which one person is, in Poisson batches:
  tff-pdp account --unit node --rows-per-unit 20 --sampling-rate 0.01 --epsilon 4 --steps 1000 --delta 1e-5
or in batches of exactly 512 rows, drawn anew in each step:
  tff-pdp account --unit node --rows-per-unit 20 --num-rows 2609976 --batch-size 512 --noise-multiplier 4.5 \\
      --steps 10196 --delta 3.8e-7
There RDP is the only bound. The manifest of a prepared data set has the number of rows under row_influence.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _HELP
    # argparse takes "-inf" and "-1e-3" for unknown options; as numbers they get a message that says what is wrong.
    parser._negative_number_matcher = re.compile(r"^-(\d|\.\d|inf|nan)", re.IGNORECASE)
    parser.add_argument("--unit", choices=sorted(_UNITS), required=True, help="whom the guarantee is about")
    sampling = parser.add_mutually_exclusive_group(required=True)
    sampling.add_argument(
        "--sampling-rate",
        type=float,
        metavar="Q",
        help="probability that one record (or user) takes part in one step, for instance batch size / records",
    )
    sampling.add_argument(
        "--batch-size",
        type=float,
        metavar="B",
        help="rows in each batch, of --num-rows, drawn without replacement; for node and edge",
    )
    parser.add_argument(
        "--rows-per-unit", type=float, metavar="S", help="the most rows that one person, or one pair, is in"
    )
    parser.add_argument("--num-rows", type=float, metavar="N", help="rows in the silo; for node and edge")
    noise_or_epsilon = parser.add_mutually_exclusive_group(required=True)
    noise_or_epsilon.add_argument(
        "--noise-multiplier", type=float, metavar="Z", help="noise standard deviation / clip norm"
    )
    noise_or_epsilon.add_argument(
        "--epsilon", type=float, metavar="E", help="budget: print the smallest noise multiplier that keeps it"
    )
    parser.add_argument("--steps", type=float, required=True, metavar="T", help="number of noisy sums, over all rounds")
    parser.add_argument("--delta", type=float, required=True, metavar="D", help="well below 1 / number of records")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the cost of the plan in `args`, and returns exit status 0.

    Guarantee: the printed epsilon is an upper bound for the unit printed with it.
    Assumes: true Poisson sampling (or, with a batch size, fresh batches of that size), one joint clip, division by a
    constant, and parameters that are public; of rows, that no more differ than were given.

    Raises:
      ConfigError: a value is out of range.
      BudgetError: no noise multiplier meets the budget.
    """
    result = _account(args)
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 0


def _account(args: argparse.Namespace) -> dict[str, Any]:
    # Loaded here: the command line imports this module for every command, and accounting takes a second to load.
    from tff_pdp.privacy.accounting.accountants import (
        calibrate_noise_multiplier,
        epsilon_bounds,
        poisson_gaussian_event,
    )
    from tff_pdp.privacy.accounting.row_influence import calibrate_rows_noise

    _check(args)
    steps, is_of_rows = int(args.steps), args.unit in _OF_ROWS
    if args.epsilon is None:
        noise_multiplier = args.noise_multiplier
    elif is_of_rows:
        noise_multiplier = calibrate_rows_noise(
            lambda noise_multiplier: _rows_event(args, noise_multiplier), args.epsilon, args.delta
        )
    else:
        noise_multiplier = calibrate_noise_multiplier(args.epsilon, args.delta, args.sampling_rate, steps)
    event = (
        _rows_event(args, noise_multiplier)
        if is_of_rows
        else poisson_gaussian_event(args.sampling_rate, noise_multiplier, steps)
    )
    bounds = epsilon_bounds(event, args.delta)
    target = {} if args.epsilon is None else {"epsilon_target": args.epsilon}
    given_rows = {"rows_per_unit": args.rows_per_unit, "num_rows": args.num_rows, "batch_size": args.batch_size}
    return {
        "unit": args.unit,
        "adjacency": "at_most_rows_per_unit_rows_differ" if is_of_rows else "add_or_remove_one",
        **{key: int(value) for key, value in given_rows.items() if value is not None},
        "sampling_rate": args.sampling_rate,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "delta": args.delta,
        **target,
        "epsilon_rdp": _finite(bounds.rdp),
        "epsilon_pld": _finite(bounds.pld),
        "epsilon": _finite(bounds.best),
    }


def _rows_event(args: argparse.Namespace, noise_multiplier: float) -> Any:
    from tff_pdp.privacy.accounting.row_influence import fixed_size_rows_event, poisson_rows_event

    steps, changed = int(args.steps), int(args.rows_per_unit)
    if args.batch_size is not None:
        return fixed_size_rows_event(int(args.num_rows), int(args.batch_size), noise_multiplier, changed, steps)
    # Of fewer rows all.
    changed = changed if args.num_rows is None else min(changed, int(args.num_rows))
    return poisson_rows_event(args.sampling_rate, noise_multiplier, changed, steps)


def _check(args: argparse.Namespace) -> None:
    def require(holds: bool, option: str, value: float, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{option} is {value:.12g}; it must be {wanted}.")

    # Every condition is written so that NaN fails it.
    require(0 < args.delta < 1, "--delta", args.delta, "strictly between 0 and 1")
    if args.sampling_rate is not None:
        require(
            _SMALLEST_SAMPLING_RATE <= args.sampling_rate <= 1,
            "--sampling-rate",
            args.sampling_rate,
            f"a probability from {_SMALLEST_SAMPLING_RATE:g} to 1",
        )
    require(
        1 <= args.steps <= _MOST_STEPS and args.steps == int(args.steps),
        "--steps",
        args.steps,
        f"a whole number from 1 to {_MOST_STEPS:,}",
    )
    if args.epsilon is not None:
        require(0 < args.epsilon < math.inf, "--epsilon", args.epsilon, "positive and finite")
    else:
        require(
            0 <= args.noise_multiplier <= _LARGEST_NOISE_MULTIPLIER,
            "--noise-multiplier",
            args.noise_multiplier,
            f"zero (no noise) or positive, at most {_LARGEST_NOISE_MULTIPLIER:,.0f}",
        )
    _check_rows(args, require)


def _check_rows(args: argparse.Namespace, require: Callable[[bool, str, float, str], None]) -> None:
    of_rows = {
        "--rows-per-unit": (args.rows_per_unit, _MOST_ROWS_PER_UNIT),
        "--num-rows": (args.num_rows, _MOST_ROWS),
        "--batch-size": (args.batch_size, _MOST_ROWS if args.num_rows is None else args.num_rows),
    }
    for option, (value, most) in of_rows.items():
        if value is not None and args.unit not in _OF_ROWS:
            raise ConfigError(f"{option} is for --unit node and edge, not for {args.unit}.")
        if value is not None:
            require(1 <= value <= most and value == int(value), option, value, f"a whole number from 1 to {most:,.0f}")
    if args.unit in _OF_ROWS and args.rows_per_unit is None:
        raise ConfigError(f"--unit {args.unit} needs --rows-per-unit, the most rows that differ with one {args.unit}.")
    if args.batch_size is not None and args.num_rows is None:
        raise ConfigError("--batch-size needs --num-rows, the number of rows that batches are drawn from.")


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; null there means "no bound", for instance without noise."""
    return value if value is not None and math.isfinite(value) else None


def _text(result: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        # Rounded up: a printed epsilon must not be smaller than the one proved, nor printed noise smaller than needed.
        value = result[name]
        return "none" if value is None else f"{math.ceil(value * 1e4) / 1e4:.4f}"

    lines = [
        f"epsilon <= {shown('epsilon')} at delta = {result['delta']:g}   "
        f"(RDP {shown('epsilon_rdp')}, PLD {shown('epsilon_pld')})",
        f"unit: {result['unit']}, that is {_UNITS[result['unit']].format(rows=result.get('rows_per_unit'))}",
        f"plan: {result['steps']} Gaussian sums, {_sampling_text(result)}, "
        f"noise multiplier {math.ceil(result['noise_multiplier'] * 1e5) / 1e5:.8g}",
    ]
    if result["epsilon"] is None:
        lines[0] = "epsilon is infinite: nothing is protected, because there is no noise, or next to none"
    if "epsilon_target" in result:
        lines.append(f"The noise multiplier is the smallest found that keeps epsilon <= {result['epsilon_target']:g}.")
    return "\n".join(lines)


def _sampling_text(result: dict[str, Any]) -> str:
    if result["sampling_rate"] is None:
        return f"batches of {result['batch_size']} of {result['num_rows']} rows"
    return f"Poisson sampling rate {result['sampling_rate']:g}"
