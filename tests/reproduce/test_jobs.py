import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml

from tests.reproduce.reproduce_support import build_reproduction
from tests.unrun import parse
from tff_pdp.cli import COMMANDS
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.accounting.budgets import Drawn, OneForAll
from tff_pdp.privacy.mechanisms.feature_scaling import PaperPrivateStandardisation
from tff_pdp.reproduce import setting as settings
from tff_pdp.reproduce.inputs import INPUTS, MADE_UP, digest_of, digest_of_data, find_input
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.methods import GRID_METHODS, METHODS, SILO_METHODS
from tff_pdp.reproduce.reproduction import build_reproduction as complete
from tff_pdp.reproduce.setting import NAMES, read_setting


def every_run():
    """One job of each method, variant and scale of each setting."""
    for name, setting in zip(NAMES, map(read_setting, NAMES), strict=True):
        for scale_name, scale in setting.scales.items():
            for variant in setting.variants:
                if scale.variants is None or variant.name in scale.variants:
                    yield name, scale_name, variant.name


@pytest.mark.parametrize(("name", "scale", "variant"), every_run())
def test_every_setting_has_a_configuration_that_every_method_can_run(tmp_path, name, scale, variant):
    setting = read_setting(name)
    # A population's settings depend on where it comes from.
    data_input = find_input(INPUTS[MADE_UP], None) if setting.inputs == MADE_UP else Path("data")
    reproduction = build_reproduction(
        tmp_path,
        data_input=data_input,
        setting_name=name,
        scale_name=scale,
        variant_names=(variant,),
        methods=setting.methods,
        lambdas=(0.5,) if set(GRID_METHODS) & set(setting.methods) else (),
        epsilons=setting.scales[scale].epsilons,
        budgets=setting.scales[scale].budgets,
    )
    setting_variant = reproduction.variant(variant)
    digests = set()
    for job in reproduction.jobs():
        config = reproduction.config(job)
        ((algorithm, settings),) = config.algorithms.items()
        assert algorithm == METHODS[job.method].algorithm
        is_private = job.budget != math.inf
        assert config.privacy.is_private == is_private
        if isinstance(job.budget, str):
            assert isinstance(config.privacy.budgets, Drawn)
            assert config.privacy.budgets.seed == job.seed
        elif is_private:
            assert config.privacy.budgets == OneForAll(epsilon=job.budget, delta=config.privacy.budgets.delta)
        else:
            assert config.privacy.budgets_of(["a"]) == {}
        assert config.training.test_only_seed == job.seed
        if job.prox_weight is not None:
            assert settings["prox_weight"] == job.prox_weight
        digests.add(reproduction.digest(job))
    # One for each method and number of rounds; those of the grid's two methods have another lambda.
    expected = len(setting.methods) + len(set(GRID_METHODS) & set(setting.methods))
    if setting_variant.is_paper and "mr_mtl_auto" in setting.methods:
        # The automatic lambda is not the paper's.
        expected -= 1
    # Named budgets are decisive themselves; an epsilon is the job's.
    expected *= len(setting.scales[scale].budgets) or 1
    if setting.scales[scale].takes_rounds:
        # The method with a budget; local training has none.
        expected += len({setting_variant.rounds_at(epsilon) for epsilon in setting.scales[scale].epsilons}) - 1
    assert len(digests) == expected


def test_the_papers_choices_are_those_of_its_text_and_code(tmp_path):
    reproduction = build_reproduction(tmp_path, variant_names=("paper",))
    config = reproduction.config(Job("paper", "mr_mtl", 6.0, 0))
    assert (config.privacy.batch_size, config.privacy.clip_norm, config.training.rounds) == (32, 1.0, 200)
    assert config.privacy.budgets == OneForAll(epsilon=6.0, delta=1e-3)
    assert config.privacy.sampler == "paper_shuffled"
    assert config.privacy.feature_scaling == PaperPrivateStandardisation()
    assert config.algorithms == {
        "mr_mtl": {"learning_rate": 0.01, "local_steps": "epoch", "prox_weight": 1.0, "prox_inside_clip": True}
    }
    # Scores from 1 to 70 become 0 to 1.
    shift, scale = config.data.label_shift, config.data.label_scale
    assert (1 + shift) * scale == 0
    assert (70 + shift) * scale == pytest.approx(1)


def test_a_seed_decides_the_split_of_tables_and_not_of_images(tmp_path):
    def folders(name):
        reproduction = build_reproduction(tmp_path, setting_name=name, scale_name="small")
        return [reproduction.config(Job("default", "mr_mtl", 1.0, seed)) for seed in (0, 1)]

    school, images = folders("school"), folders("rotated_mnist")
    assert school[0].data.seed != school[1].data.seed
    assert school[0].output != school[1].output
    assert images[0].output == images[1].output
    assert images[0].training.test_only_seed != images[1].training.test_only_seed


def test_infinite_epsilon_is_training_without_privacy(tmp_path):
    config = build_reproduction(tmp_path).config(Job("default", "fed_avg", math.inf, 0))
    assert config.privacy.kind == "none"


def test_the_digest_follows_what_decides_a_result_and_nothing_else(tmp_path):
    job = Job("default", "mr_mtl", 6.0, 0)
    base = build_reproduction(tmp_path)
    same = (
        build_reproduction(tmp_path / "elsewhere"),
        build_reproduction(tmp_path, seeds=4, epsilons=(1.0, 6.0), methods=("mr_mtl",)),
        build_reproduction(tmp_path, data_input=tmp_path / "moved.mat"),
    )
    assert {reproduction.digest(job) for reproduction in same} == {base.digest(job)}
    others = (
        build_reproduction(tmp_path, scale_name="small").digest(job),
        build_reproduction(tmp_path, data_digest="other").digest(job),
        base.digest(dataclasses.replace(job, variant="silo_scaling")),
        base.digest(dataclasses.replace(job, method="ditto")),
        base.digest(dataclasses.replace(job, prox_weight=0.5)),
    )
    assert len({base.digest(job), *others}) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("gossip",)}, "--methods 'gossip'"),
        ({"epsilons": (0.0,)}, "--epsilons 0"),
        ({"seeds": 0}, "--seeds 0"),
        ({"lambdas": (-1.0,)}, "--grid -1"),
        ({"lambdas": (1.0,), "methods": ("fed_avg",)}, "--grid needs at least one of the methods mr_mtl, ditto"),
        ({"methods": ("centaur",)}, "--methods 'centaur' is not a method of school"),
    ],
)
def test_wrong_options_are_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_reproduction(tmp_path, **change)


def options(*words):
    return parse(COMMANDS, ["reproduce", *words])


def test_the_command_line_is_completed_by_the_scale(tmp_path):
    (tmp_path / "school").mkdir()
    (tmp_path / "school" / "school.mat").write_bytes(b"cells")
    words = ("school", "--data", str(tmp_path))
    default = complete(options(*words))
    assert default.variant_names == ("default", "silo_scaling")
    assert default.methods == SILO_METHODS
    assert (default.seeds, default.lambdas) == (5, ())
    assert str(default.output) == "runs/reproduce/school"
    asked = complete(
        options(
            *words,
            "--paper",
            "--methods",
            "mr_mtl,fed_avg",
            "ditto",
            "--epsilons",
            "6",
            "inf",
            "--seeds",
            "2",
            "--grid",
        )
    )
    assert asked.variant_names == ("paper", "paper_common_scaling")
    assert asked.methods == ("mr_mtl", "fed_avg", "ditto")
    assert asked.epsilons == (6.0, math.inf)
    assert asked.seeds == 2
    assert asked.lambdas == read_setting("school").scales["full"].lambdas
    assert complete(options(*words, "--grid", "0.1", "1")).lambdas == (0.1, 1.0)
    assert complete(options(*words, "--variants", "silo_scaling")).variant_names == ("silo_scaling",)
    with pytest.raises(ConfigError, match="--variants 'paper'"):
        complete(options(*words, "--variants", "paper"))
    with pytest.raises(ConfigError, match="--epsilons 'six'"):
        complete(options(*words, "--epsilons", "six"))


def test_data_are_looked_for_where_they_are_said_to_be(tmp_path, monkeypatch):
    setting = read_setting("cifar10_heterogeneous")
    monkeypatch.delenv("TFF_PDP_DATA", raising=False)
    with pytest.raises(DataError, match="--data"):
        find_input(INPUTS["cifar10"], None)
    monkeypatch.setenv("TFF_PDP_DATA", str(tmp_path))
    with pytest.raises(DataError, match="cifar-10-python"):
        find_input(INPUTS["cifar10"], None)
    subset = tmp_path / "cifar10" / "cifar-10-python-subset.tar.gz"
    subset.parent.mkdir()
    subset.write_bytes(b"a part")
    assert find_input(INPUTS["cifar10"], None) == subset
    variant, scale = setting.variants[0], setting.scales["full"]
    assert any("a part of the images" in line for line in setting.deviations_of(scale, variant, subset))
    whole = subset.with_name("cifar-10-python.tar.gz")
    whole.write_bytes(b"all")
    assert find_input(INPUTS["cifar10"], None) == whole
    assert not any("a part of the images" in line for line in setting.deviations_of(scale, variant, whole))
    assert digest_of(whole) != digest_of(subset) != digest_of(subset.parent)


def test_small_scales_and_the_papers_variants_say_how_they_differ():
    for setting in map(read_setting, NAMES):
        for variant in setting.variants:
            told = setting.deviations_of(setting.scales["small"], variant, setting.config_file)
            assert any(line.startswith("scale:") for line in told)
            assert any("NOT private" in line for line in told)
            if setting.paper and setting.clients == "silos":
                assert any(line.startswith("sampler:") for line in told) != variant.is_paper
            assert ("thesis" in " ".join(told)) == (setting.paper == "the thesis")


def test_configurations_stand_alone():
    for setting in map(read_setting, NAMES):
        content = yaml.safe_load(setting.config_file.read_text())
        assert {METHODS[name].algorithm for name in setting.methods} == set(content["algorithms"])


def test_results_of_other_sources_are_not_reused(tmp_path, monkeypatch):
    reproduction, job = build_reproduction(tmp_path), Job("paper", "mr_mtl", 6.0, 0)
    before = reproduction.digest(job)
    assert reproduction.digest(job) == before
    monkeypatch.setattr("tff_pdp.reproduce.jobs.digest_of_sources", lambda: "other sources")
    assert reproduction.digest(job) != before


def test_a_digest_of_some_of_a_folders_files(tmp_path):
    (tmp_path / "module.py").write_text("one")
    before = digest_of(tmp_path, "*.py")
    (tmp_path / "module.pyc").write_text("compiled")
    assert digest_of(tmp_path, "*.py") == before
    (tmp_path / "module.py").write_text("two")
    assert digest_of(tmp_path, "*.py") != before


def test_a_method_of_users_that_releases_nothing_is_run_once(tmp_path):
    methods = ("local_only", "centaur")
    users = build_reproduction(tmp_path, setting_name="mnist_writers", methods=methods, epsilons=(2.0, 8.0), seeds=1)
    assert [(job.method, job.budget) for job in users.jobs()] == [
        ("local_only", math.inf),
        ("centaur", 2.0),
        ("centaur", 8.0),
    ]
    silos = build_reproduction(tmp_path, methods=("local_only",), epsilons=(2.0, 8.0), seeds=1)
    assert [job.budget for job in silos.jobs()] == [2.0, 8.0]


def test_published_rounds_go_with_their_epsilon_at_the_publications_scale(tmp_path):
    def config(scale, epsilon):
        reproduction = build_reproduction(
            tmp_path, setting_name="udp_cifar10", scale_name=scale, methods=("udp_hypernet",)
        )
        job = Job("default", "udp_hypernet", epsilon, 0)
        return reproduction.config(job).training.rounds, reproduction.digest(job)

    assert [config("full", epsilon)[0] for epsilon in (4.0, 10.0, math.inf, 7.0)] == [1801, 8692, 8692, 8692]
    assert [config("small", epsilon)[0] for epsilon in (4.0, 10.0)] == [400, 400]
    assert config("full", 4.0)[1] != config("full", 10.0)[1]
    # The same training under less noise: what differs is the job.
    assert config("small", 4.0)[1] == config("small", 10.0)[1]


def test_a_scale_may_have_data_of_its_own(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"images")
    small = complete(options("udp_femnist", "--data", str(tmp_path)))
    assert small.data_input == tmp_path / "mnist"
    assert small.config(small.jobs()[0]).data.kind == "mnist_writers"
    with pytest.raises(DataError, match=r"emnist_all\.sqlite"):
        complete(options("udp_femnist", "--scale", "full", "--data", str(tmp_path)))
    inputs = INPUTS["mnist_writers"]
    assert small.data_digest == digest_of_data(inputs, tmp_path / "mnist")
    # Who wrote them is part of what the data are.
    (tmp_path / "mnist_writers").mkdir()
    (tmp_path / "mnist_writers" / "table.gz").write_bytes(b"writers")
    assert small.data_digest != digest_of_data(inputs, tmp_path / "mnist")


def test_the_papers_mask_is_in_the_papers_variants_alone(tmp_path):
    for variant in read_setting("pfed_dsu_cifar10").variants:
        reproduction = build_reproduction(
            tmp_path, setting_name="pfed_dsu_cifar10", variant_names=(variant.name,), methods=("dp_pfed_dsu",)
        )
        config = reproduction.config(Job(variant.name, "dp_pfed_dsu", 1.0, 0))
        assert config.algorithms["dp_pfed_dsu"].get("mask_source") == (
            "paper_client_mask" if variant.is_paper else None
        )
        classes = variant.name.rpartition("classes_")[2]
        assert config.data.partition.classes_per_client == (int(classes) if classes.isdigit() else 5)


def test_an_experiment_of_our_own_has_no_papers_choices(tmp_path):
    (tmp_path / "mnist").mkdir()
    with pytest.raises(ConfigError, match="--paper: mnist_writers repeats no publication"):
        complete(options("mnist_writers", "--paper", "--data", str(tmp_path)))


def test_a_setting_with_an_unknown_name_is_refused_by_its_key(tmp_path, monkeypatch):
    content = (settings.PUBLISHED / "school.yaml").read_text()
    monkeypatch.setattr(settings, "PUBLISHED", tmp_path)
    for written, instead, message in (
        ("inputs: school", "inputs: schools", "inputs: unknown name 'schools'; did you mean school"),
        ("better: mr_mtl", "better: mr", "statements: unknown name 'mr'"),
        ("default_scale: full", "default_scale: huge", "default_scale: unknown name 'huge'; known: full, small"),
        ("clients: silos", "clients: people", "clients must be one of"),
    ):
        (tmp_path / "school.yaml").write_text(content.replace(written, instead))
        with pytest.raises(ConfigError, match=message):
            read_setting.__wrapped__("school")
    with pytest.raises(ConfigError, match="unknown experiment 'shool'; did you mean school"):
        read_setting("shool")


def test_pfa_is_run_under_budgets_of_silos_with_a_warm_start(tmp_path):
    def config(variant, method, scale="small", seed=0, budgets="mix_gauss_1"):
        reproduction = build_reproduction(
            tmp_path,
            setting_name="pfa_mnist",
            scale_name=scale,
            variant_names=(variant,),
            methods=(method,),
            epsilons=(),
            budgets=(budgets,),
        )
        return reproduction.config(Job(variant, method, budgets, seed))

    plain, plus = (config("seed10_iid", name) for name in ("fed_avg", "pfa_plus"))
    assert (plain.training.rounds, plus.training.rounds) == (20, 21)
    # The sketch's number of steps: whole batches of 64 in 6,000 images.
    assert plain.algorithms == {"fed_avg": {"learning_rate": 0.1, "local_steps": 6000 // 64}}
    assert plus.algorithms["pfa"] == {**plain.algorithms["fed_avg"], "partition": "by_norm", "plus": True}
    epsilons = sorted(
        one.epsilon for one in plain.privacy.budgets.assign([f"silo_{n:03d}" for n in range(10)]).values()
    )
    assert epsilons[8] < 0.2 and 9 < epsilons[9] < 11
    assert config("seed10_iid", "fed_avg", seed=1).privacy.budgets.seed == 1
    assert config("seed10_iid", "fed_avg", seed=1).data.seed != plain.data.seed == plus.data.seed
    assert config("seed10_iid", "minimum").privacy.budgets.level == "minimum"
    assert config("seed10_iid", "wei_avg").training.weighting == "budget"
    shards = config("seed10_shards", "pfa").data.partition
    assert (shards.num_clients, shards.shards_per_client) == (10, 2)
    small = config("small20_iid", "public_only")
    assert (small.data.partition.num_clients, small.data.images_per_client, small.training.rounds) == (20, 1200, 61)
    assert small.algorithms["public_only"]["local_steps"] == 1200 // 64
    paper = config("paper_small20_iid", "fed_avg")
    assert (paper.privacy.noise_calibration, paper.training.rounds) == ("paper_asymptotic", 60)
    full = config("silos_50", "pfa", "full")
    assert (full.model["kind"], full.training.rounds, full.privacy.batch_size) == ("tutorial_cnn", 101, 8)
    assert full.data.partition.num_clients * full.data.images_per_client == 60000
    clipped = config("seed10_iid", "fed_avg", budgets="no_noise").privacy
    assert {one.epsilon for one in clipped.budgets.assign(["a", "b"]).values()} == {math.inf}
    assert clipped.clip_norm == 1.0


def test_the_small_scale_of_pfa_has_fifty_four_runs(tmp_path):
    (tmp_path / "mnist").mkdir()
    small = complete(options("pfa_mnist", "--data", str(tmp_path)))
    assert small.variant_names == ("seed10_iid", "seed10_shards", "small20_iid")
    assert len(small.jobs()) == 3 * 6 * 3
    assert (small.budgets, small.epsilons) == (("mix_gauss_1",), ())
    paper = complete(options("pfa_mnist", "--paper", "--data", str(tmp_path)))
    assert paper.variant_names == ("paper_seed10_iid", "paper_seed10_shards", "paper_small20_iid")
