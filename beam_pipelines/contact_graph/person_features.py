"""What a person is like, as bytes of which each stands for a number between 0 and 1: no statistics of the population.

Ranges are public constants, beyond which values are cut off: they are the same whoever is in the data.
"""

import numpy as np

from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FEMALE, MALE

SECONDS_PER_DAY = 86_400
OLDEST = 100
LARGEST_HOUSEHOLD = 10
PERSON_FEATURES = (
    "age",
    "is_male",
    "is_female",
    "household_size",
    *(f"does_{name}" for name in ACTIVITY_NAMES),
    *(f"share_of_day_{name}" for name in ACTIVITY_NAMES),
)


def person_features(
    age: np.ndarray, sex: np.ndarray, household_size: np.ndarray, seconds_by_activity: np.ndarray
) -> np.ndarray:
    """Features of people: uint8 `[n, features]`, in the order of `PERSON_FEATURES`.

    Args:
      age: in years, `[n]`.
      sex: 1 male, 2 female, `[n]`.
      household_size: people, `[n]`; 0 where it is not known.
      seconds_by_activity: of a day, `[n, 7]`.
    """
    columns = (
        to_bytes(age / OLDEST),
        to_bytes(sex == MALE),
        to_bytes(sex == FEMALE),
        to_bytes(household_size / LARGEST_HOUSEHOLD),
    )
    return np.concatenate(
        [
            np.stack(columns, axis=1),
            to_bytes(seconds_by_activity > 0),
            to_bytes(seconds_by_activity / SECONDS_PER_DAY),
        ],
        axis=1,
    )


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Numbers, cut off at 0 and 1, as bytes: uint8 of the same shape, rounded to multiples of 1/255."""
    return np.rint(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
