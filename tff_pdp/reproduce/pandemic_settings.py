"""Our own experiments with contact graphs: who falls ill next week, under node-level or edge-level DP in silos.

After Liu, "On Privacy and Personalization in Machine Learning", CMU-RI-TR-23-17, 2023, chapter 2, whose population is
not public. How many rows a person changes there is not bounded (popular people are in many others' rows), so its
figures have no counterpart here.
"""

import math
from collections.abc import Mapping
from typing import Any

from tff_pdp.models.metrics import AVERAGE_PRECISION
from tff_pdp.reproduce.setting import MADE_UP, Inputs, Overrides, Scale, Setting, Variant

_EPSILONS = (2.0, 8.0, math.inf)
_METHODS = ("local_only", "fed_avg", "mr_mtl")
_BOUND = "data.rows.degree_bound"
# Rows of people alone, with 21 and with 14 days of their own history.
_ALONE = {"data.rows.num_slots": 0, "data.input_shape": [62]}
_ALONE_FOR_TWO_WEEKS = {"data.rows.num_slots": 0, "data.input_shape": [48]}

_LONG_ROWS = {
    "local_only": {"learning_rate": 5},
    "fed_avg": {"learning_rate": 5},
    "finetune": {"learning_rate": 5},
    "mr_mtl": {"learning_rate": 5, "prox_weight": 0.18},
}

_SEEDS = (
    "seeds: each decides the outbreak, the windows in time and the split as well as the noise; they are test-only "
    "ones, so these figures are NOT private"
)
_SIMULATED = (
    "disease: simulated on the same contacts that rows are made of, which are the same every day; who could be told "
    "from contacts in the world is another question"
)
_STATES = (
    "what is protected: a person's own values and contacts, not what the person's disease did to others: neighbouring "
    "graphs have the same states of everybody else"
)

_PANDEMIC = Setting(
    name="pandemic",
    title="Who falls ill next week: a made-up population in eight regions",
    metric=AVERAGE_PRECISION,
    inputs=MADE_UP,
    seed_splits=True,
    methods=(*_METHODS, "finetune"),
    scales={
        "full": Scale(epsilons=_EPSILONS, seeds=3, methods=("local_only", "fed_avg", "finetune", "mr_mtl")),
        "small": Scale(
            epsilons=(8.0, math.inf),
            seeds=1,
            methods=_METHODS,
            overrides={
                "data.population.num_people": 4000,
                "data.population.num_regions": 2,
                "data.outbreak.initial_infections": 40,
                "data.num_shards": 1,
                "training.rounds": 5,
            },
            deviation="scale: 4,000 of 40,000 people, 2 of 8 regions, 5 of 20 rounds and 1 of 3 seeds",
        ),
    },
    default_scale="full",
    variants=(
        Variant(
            "default",
            "contacts, node-level DP: a person with all contacts",
            deviations=(
                "what a person is in: at most 11 rows, the own one and those of 10 people met, which is promised in "
                "public and kept by the population",
                _STATES,
            ),
        ),
        Variant(
            "no_contacts",
            "people alone, node-level DP",
            overrides={**_ALONE, "privacy.clip_norm": 2.0},
            deviations=(
                "what a person is in: the own row only, so that the same ε takes an eleventh of the noise",
                "rows: age, sex, household, activities and 21 days of the person's own states; longer, so that the "
                "clip norm is 2",
            ),
        ),
        Variant(
            "edge",
            "contacts, edge-level DP: all contacts of one pair",
            overrides={_BOUND: {"kind": "edge"}},
            deviations=("what a pair is in: two rows. People's own states are not protected at all",),
        ),
        Variant(
            "summary",
            "contacts as 154 numbers, node-level DP",
            is_optional=True,
            overrides={"data.rows.layout": "summary", "data.input_shape": [154], "privacy.clip_norm": 2.0},
            algorithm_settings=_LONG_ROWS,
            deviations=("rows: own features, the means of contacts' and daily hours with infectious people",),
        ),
        Variant(
            "slots",
            "contacts one by one as 772 numbers, node-level DP",
            is_optional=True,
            overrides={"data.rows.layout": "slots", "data.input_shape": [772], "privacy.clip_norm": 2.0},
            algorithm_settings=_LONG_ROWS,
            deviations=("rows: own features, and a block of numbers for each of ten contacts",),
        ),
    ),
    deviations=(
        "regions: all made by the same rules, so that one model suits them all",
        "ε: of each region's training with one method, of one person or pair; for all that is trained here it is more",
        _SIMULATED,
        _SEEDS,
    ),
)


# Days on which people wore sensors, as the studies were published (www.sociopatterns.org): public constants. Weekends
# between the ten working days of InVS13 are not among them.
_OBSERVED_DAYS = {"thiers13": 5, "PS09": 2, "SFHH09": 2, "hospital": 5, "InVS13": 10}


def _network(
    name: str, title: str, initial_infections: int, silos: str, arguments: Mapping[str, Any] | None = None
) -> tuple[Variant, Variant]:
    """A network with its contacts, and without any."""
    overrides: Overrides = {
        "data.network": name,
        "data.population.observed_days": _OBSERVED_DAYS[name],
        "data.outbreak.initial_infections": initial_infections,
        **(arguments or {}),
    }
    return (
        Variant(name, title, overrides=overrides, deviations=(silos,)),
        Variant(
            f"{name}_no_contacts",
            f"{title}, people alone",
            overrides={**overrides, **_ALONE_FOR_TWO_WEEKS, "privacy.clip_norm": 2.0},
            deviations=(silos, "ε: rows know of no contacts, so these are protected without noise, at ε = 0"),
        ),
    )


_ONE_SILO = "silos: one, in which all methods are local training"

_CONTACT_NETWORKS = Setting(
    name="contact_networks",
    title="Who falls ill next week: measured contacts in small places",
    metric=AVERAGE_PRECISION,
    inputs=Inputs(("contacts",), "a folder for each network with tij_*.dat.gz and metadata_*.dat of SocioPatterns"),
    seed_splits=True,
    methods=_METHODS,
    scales={
        "full": Scale(epsilons=_EPSILONS, seeds=10, methods=_METHODS),
        "small": Scale(
            epsilons=(8.0,),
            seeds=1,
            methods=("fed_avg",),
            overrides={"training.rounds": 3},
            deviation="scale: FedAvg alone, 3 of 20 rounds and 1 of 10 seeds",
        ),
    },
    default_scale="full",
    variants=(
        *_network("thiers13", "a high school, 329 people", 24, "silos: nine classes, which have 93 % of contact time"),
        *_network(
            "PS09",
            "a primary school, 242 people",
            16,
            "silos: ten classes and the teachers, which have 73 % of contact time; other contacts are left out",
        ),
        *_network(
            "SFHH09",
            "a conference, 403 people",
            20,
            _ONE_SILO,
        ),
        *_network(
            "hospital",
            "a hospital ward, 75 people",
            4,
            f"{_ONE_SILO}; 42 % of contact time is between roles",
            {"data.rows.silo_by": "person.person_number"},
        ),
        *_network(
            "InVS13",
            "an office, 92 people",
            8,
            f"{_ONE_SILO}; departments have 4 to 34 people",
            {"data.rows.silo_by": "person.person_number"},
        ),
    ),
    deviations=(
        "size: of 75 to 403 people, 2 to 40 fall ill in the week: a figure of one seed hangs on a few of them",
        "random rankings of so few are better than the prevalence, those of a class with one positive person by far: "
        "compare with people alone, and rather the figures of all together than means over silos",
        "ε: edge-level: which pairs met, and when and for how long, is protected; who was ill is not",
        _SIMULATED,
        _SEEDS,
    ),
)

PANDEMIC_SETTINGS = (_PANDEMIC, _CONTACT_NETWORKS)
