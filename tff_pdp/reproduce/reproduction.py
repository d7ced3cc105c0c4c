"""Runs the command `tff-pdp reproduce`: fills in options, runs all jobs, and writes a report and figures."""

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import Workers, workers_overrides
from tff_pdp.files import replace_text
from tff_pdp.reproduce import setting as settings
from tff_pdp.reproduce.inputs import INPUTS, digest_of_data, find_input
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.report import Reported, build_report, report_text
from tff_pdp.reproduce.sweep import FAILURES_FILE, Outcome, sweep

DEFAULT_OUTPUT = Path("runs") / "reproduce"


def build_job_runner(reproduction: Reproduction, num_threads: int) -> Callable[[Job], Outcome]:
    """Builds the function that runs a reproduction's jobs in a worker process."""
    # Not at the top: the command's own process needs no TensorFlow, which takes long to import.
    import tensorflow as tf

    # Workers share the cores; TensorFlow takes this before it computes anything.
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    from tff_pdp.reproduce.run import JobRunner

    return JobRunner(reproduction)


def reproduce(options: Any) -> tuple[dict[str, Any], str]:
    """Runs a reproduction.

    Args:
      options: options of the command line, by name as in `tff-pdp reproduce --help`.

    Returns:
      The result as plain data, for `--json`, and as text.

    Raises:
      ConfigError: an option is out of range.
      DataError: the data are missing, or another reproduction writes to the same folder.
    """
    reproduction = build_reproduction(options)
    num_cores = len(os.sched_getaffinity(0))
    num_workers = options.jobs or (1 if reproduction.workers else num_cores)
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs} must be at least 1")
    num_threads = max(1, num_cores // num_workers)
    store, failures = sweep(reproduction, functools.partial(build_job_runner, reproduction, num_threads), num_workers)
    report = build_report(reproduction, store, failures)
    return _write(reproduction, report, is_paper=options.paper)


def build_reproduction(options: Any) -> Reproduction:
    """Builds a reproduction; the setting and the scale give the values of absent options.

    Raises:
      ConfigError, DataError: as in `reproduce`.
    """
    setting = settings.read_setting(options.setting)
    scale_name = options.scale or setting.default_scale
    scale = setting.scales[scale_name]
    variants = setting.chosen_variants(_words(options.variants), scale, is_paper=options.paper)
    inputs = INPUTS[scale.inputs or setting.inputs]
    data_input = find_input(inputs, options.data)
    epsilons, budgets = tuple(map(_epsilon, _words(options.epsilons))), _words(options.budgets)
    if not epsilons and not budgets:
        epsilons, budgets = scale.epsilons, scale.budgets
    grid = () if options.grid is None else tuple(options.grid) or scale.lambdas
    return Reproduction(
        setting_name=setting.name,
        scale_name=scale_name,
        variant_names=tuple(variant.name for variant in variants),
        methods=_words(options.methods) or scale.methods or setting.methods,
        epsilons=epsilons,
        seeds=scale.seeds if options.seeds is None else options.seeds,
        lambdas=grid,
        data_input=data_input,
        data_digest=digest_of_data(inputs, data_input),
        output=Path(options.output) if options.output else DEFAULT_OUTPUT / setting.name,
        budgets=budgets,
        workers=_workers(options.workers),
    )


def _workers(option: str | None) -> Workers | None:
    given = {} if option is None else workers_overrides(option)
    number = given.get("training.workers.num_workers")
    return None if number is None else Workers(num_workers=number)


def _write(reproduction: Reproduction, report: Reported, *, is_paper: bool) -> tuple[dict[str, Any], str]:
    from tff_pdp.reproduce.figures import write_figures, write_image_figures

    output = reproduction.output
    table = output / ("table_paper.md" if is_paper else "table.md")
    figures = write_figures(report, output / "figures")
    images = write_image_figures(report, output)
    pictures = {
        name: [str(path.relative_to(output)) for path in files if path.suffix == ".png"]
        for name, files in images.items()
    }
    text = report_text(report, pictures)
    replace_text(table, text)
    results = {name: output / reproduction.variant(name).file_name("results") for name in reproduction.variant_names}
    content = {
        **report.as_dict(),
        "results": {name: str(path) for name, path in results.items()},
        "table": str(table),
        "figures": [str(path) for path in (*figures, *itertools.chain.from_iterable(images.values()))],
    }
    places = [f"results: {path}" for path in results.values()]
    places += [f"table:   {table}", f"figures: {output / 'figures'}"]
    if report.failures:
        places.append(f"{len(report.failures)} runs failed: {output / FAILURES_FILE}; the same command runs them again")
    return content, "\n".join([text, *places])


def _words(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the words of an option that may be repeated, and whose words may be separated by commas."""
    words = [word for value in values for word in value.split(",") if word]
    return tuple(dict.fromkeys(words))


def _epsilon(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"--epsilons {word!r} is not a number; inf trains without privacy")
    return value
