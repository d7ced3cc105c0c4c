"""`tff-pdp account`: the epsilon of a training plan, or the noise that an epsilon needs, before anything is trained."""

import argparse
import json
import math
import re
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
}

# Beyond these values the accountants overflow, or take minutes, and no training run comes near them.
_SMALLEST_SAMPLING_RATE = 1e-9
_LARGEST_NOISE_MULTIPLIER = 1e6
_MOST_STEPS = 10**8

_HELP = """\
Computes the privacy cost of training with Poisson sampling, clipping and Gaussian noise. No data is read.

A silo with 1,000 records, expected batch 32, 1,000 steps:
  tff-pdp account --unit silo_example --sampling-rate 0.032 --noise-multiplier 1.0 --steps 1000 --delta 1e-5
gives epsilon 6.6. To ask the other way round, which noise keeps epsilon within 2:
  tff-pdp account --unit silo_example --sampling-rate 0.032 --epsilon 2 --steps 1000 --delta 1e-5

Count every gradient: rounds x local steps x passes over the data per step (Ditto and similar methods make 2).
Two bounds are computed, RDP and PLD; each holds, so the smaller one may be claimed.
A noise multiplier below 0.001 counts as no noise: epsilon is infinite.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _HELP
    # argparse takes "-inf" and "-1e-3" for unknown options; as numbers they get a message that says what is wrong.
    parser._negative_number_matcher = re.compile(r"^-(\d|\.\d|inf|nan)", re.IGNORECASE)
    parser.add_argument("--unit", choices=sorted(_UNITS), required=True, help="whom the guarantee is about")
    parser.add_argument(
        "--sampling-rate",
        type=float,
        required=True,
        metavar="Q",
        help="probability that one record (or user) takes part in one step, for instance batch size / records",
    )
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
    Assumes: true Poisson sampling, one joint clip, division by a constant, and parameters that are public.

    Raises:
      ConfigError: a value is out of range.
      BudgetError: no noise multiplier meets the budget.
    """
    result = _account(args)
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 0


def _account(args: argparse.Namespace) -> dict[str, Any]:
    # Loaded here: the command line imports this module for every command, and accounting takes a second to load.
    from tff_pdp.privacy.accountants import calibrate_noise_multiplier, epsilon_bounds, poisson_gaussian_event

    _check(args)
    steps = int(args.steps)
    if args.epsilon is None:
        noise_multiplier = args.noise_multiplier
    else:
        noise_multiplier = calibrate_noise_multiplier(args.epsilon, args.delta, args.sampling_rate, steps)
    bounds = epsilon_bounds(poisson_gaussian_event(args.sampling_rate, noise_multiplier, steps), args.delta)
    target = {} if args.epsilon is None else {"epsilon_target": args.epsilon}
    return {
        "unit": args.unit,
        "adjacency": "add_or_remove_one",
        "sampling_rate": args.sampling_rate,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "delta": args.delta,
        **target,
        "epsilon_rdp": _finite(bounds.rdp),
        "epsilon_pld": _finite(bounds.pld),
        "epsilon": _finite(bounds.best),
    }


def _check(args: argparse.Namespace) -> None:
    def require(holds: bool, option: str, value: float, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{option} is {value:.12g}; it must be {wanted}.")

    # Every condition is written so that NaN fails it.
    require(0 < args.delta < 1, "--delta", args.delta, "strictly between 0 and 1")
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
        f"unit: {result['unit']}, that is {_UNITS[result['unit']]}",
        f"plan: {result['steps']} Gaussian sums, Poisson sampling rate {result['sampling_rate']:g}, "
        f"noise multiplier {math.ceil(result['noise_multiplier'] * 1e5) / 1e5:.8g}",
    ]
    if result["epsilon"] is None:
        lines[0] = "epsilon is infinite: nothing is protected, because there is no noise, or next to none"
    if "epsilon_target" in result:
        lines.append(f"The noise multiplier is the smallest found that keeps epsilon <= {result['epsilon_target']:g}.")
    return "\n".join(lines)
