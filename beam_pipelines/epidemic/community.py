"""Generates one community of a population: households, places that people go to, and contacts at home and at places.

A community is made in memory (about 100 bytes a contact). All proportions are round numbers of the right order for a
town, not estimates for any country.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_pipelines.contact_graph.tables import COLLEGE, FEMALE, HOME, MALE, OTHER, RELIGION, SCHOOL, SHOPPING, WORK

Columns = dict[str, NDArray[Any]]

_HOUSEHOLD_SIZES = np.array([0.28, 0.35, 0.15, 0.13, 0.06, 0.03])
_HOUR = 3600
_DAY = 24 * _HOUR


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Kind of places: typical size, and frequency, hours and durations of contacts there.

    Sizes follow a Pareto law of index `tail`: a smaller index means more places that are very large.
    """

    activity: int
    mean_size: int
    tail: float
    contacts: float
    earliest: int
    latest: int
    median_duration: int


_KINDS = (
    _Kind(WORK, 40, 1.3, 1.0, 8, 15, 1200),
    _Kind(SHOPPING, 150, 1.5, 0.15, 9, 19, 300),
    _Kind(OTHER, 60, 1.5, 0.5, 11, 20, 1800),
    _Kind(SCHOOL, 300, 2.5, 1.5, 8, 13, 1800),
    _Kind(COLLEGE, 800, 2.5, 1.2, 9, 15, 1800),
    _Kind(RELIGION, 120, 2.0, 0.3, 8, 11, 3600),
)


def _of_activity(field: str) -> NDArray[np.float64]:
    """Returns a field of all kinds as an array indexed by the number of the activity."""
    table = np.zeros(1 + max(kind.activity for kind in _KINDS))
    for kind in _KINDS:
        table[kind.activity] = getattr(kind, field)
    return table


@dataclasses.dataclass(frozen=True)
class Community:
    """People `first_pid`, `first_pid + 1`, ..., and the places that they visit.

    Attributes:
      person: columns pid, hid, person_number, age, sex. The hid of a household is the pid of its first person.
      places: columns place (0, 1, ...) and activity; each place has one activity.
      visits: columns member (0 for the first person), place and activity; a row for each place that a person goes to.
    """

    person: Columns
    places: Columns
    visits: Columns


def make_community(first_pid: int, num_people: int, generator: np.random.Generator) -> Community:
    """Makes people with households, and assigns each person to places."""
    person = _make_people(first_pid, num_people, generator)
    members, places, activities, num_places = [], [], [], 0
    place_activities = []
    for kind, goers in zip(_KINDS, _choose_goers(person["age"], generator), strict=True):
        # There is at least one place: a small community has small places.
        count = max(1, round(len(goers) / kind.mean_size))
        attraction = np.cumsum(generator.pareto(kind.tail, count) + 1.0)
        chosen = np.searchsorted(attraction, generator.random(len(goers)) * attraction[-1], side="right")
        members.append(goers)
        places.append(np.minimum(chosen, count - 1) + num_places)
        activities.append(np.full(len(goers), kind.activity))
        place_activities.append(np.full(count, kind.activity))
        num_places += count
    visits = {
        "member": np.concatenate(members),
        "place": np.concatenate(places),
        "activity": np.concatenate(activities),
    }
    return Community(person, {"place": np.arange(num_places), "activity": np.concatenate(place_activities)}, visits)


def meet_at_home(community: Community, generator: np.random.Generator) -> Columns:
    """Makes contacts between all pairs of people in a household.

    Returns:
      Columns member1, member2 (0 for the community's first person), place (-1: at home), start_time, duration,
      activity1 and activity2.
    """
    hid = community.person["hid"]
    firsts, seconds = [], []
    # Members of a household are consecutive: for distance d, each person is paired with the d-th person after.
    for distance in range(1, len(_HOUSEHOLD_SIZES)):
        pairs = np.flatnonzero(hid[distance:] == hid[:-distance])
        firsts.append(pairs)
        seconds.append(pairs + distance)
    first = np.concatenate(firsts)
    start = generator.integers(17 * _HOUR, 20 * _HOUR, len(first))
    home = np.full(len(first), HOME)
    return {
        "member1": first,
        "member2": np.concatenate(seconds),
        "place": np.full(len(first), -1),
        "start_time": start,
        "duration": generator.integers(1 * _HOUR, 4 * _HOUR, len(first)),
        "activity1": home,
        "activity2": home,
    }


def meet_at_places(community: Community, num_rows: int, generator: np.random.Generator) -> Columns:
    """Makes `num_rows` contacts at places, as columns like those of `meet_at_home`; none if no place has two people.

    People differ in how sociable they are, and meet more people at larger places: the numbers of contacts have a long
    tail. Two people who meet go to the same place. People who are close in a place's list, like members of one class,
    meet more often.
    """
    order = np.argsort(community.visits["place"], kind="stable")
    member, place, activity = (community.visits[name][order] for name in ("member", "place", "activity"))
    sizes = np.bincount(place, minlength=len(community.places["place"]))
    starts = np.cumsum(sizes) - sizes
    sociability = generator.lognormal(0.0, 0.6, len(community.person["pid"]))
    weights = _of_activity("contacts")[activity] * sociability[member] * sizes[place] ** 0.25 * (sizes[place] > 1)
    if not weights.any():
        num_rows, weights = 0, np.ones_like(weights)
    times = generator.multinomial(num_rows, weights / weights.sum())
    visit = np.repeat(np.arange(len(member)), times)
    place, activity = place[visit], activity[visit]
    start, size = starts[place], sizes[place]
    steps = 1 + ((size - 1) * generator.random(num_rows) ** 2).astype(np.int64)
    partner = start + (visit - start + steps) % np.maximum(size, 1)
    start_time, duration = draw_times(activity, generator)
    # Some of the people met in shops, restaurants and churches work there.
    works = (generator.random(num_rows) < 0.15) & np.isin(activity, (SHOPPING, OTHER, RELIGION))
    return {
        "member1": member[visit],
        "member2": member[partner],
        "place": place,
        "start_time": start_time,
        "duration": duration,
        "activity1": activity,
        "activity2": np.where(works, WORK, activity),
    }


def draw_times(activity: NDArray, generator: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Draws start times and durations, in seconds, of contacts with these activities; contacts end before midnight."""
    earliest, latest = _of_activity("earliest")[activity], _of_activity("latest")[activity]
    start = (_HOUR * (earliest + (latest - earliest) * generator.random(len(activity)))).astype(np.int64)
    spread = np.exp(0.8 * generator.standard_normal(len(activity), np.float32))
    duration = np.clip((_of_activity("median_duration")[activity] * spread).astype(np.int64), 60, 6 * _HOUR)
    return start, np.minimum(duration, _DAY - start)


def keep_within_bound(first: NDArray, second: NDArray, num_people: int, bound: int) -> NDArray:
    """Returns which contacts to keep, bool `[rows]`, so that nobody meets more than `bound` different people.

    All contacts of a pair of people are kept or dropped together. A pair is kept if it is among the first `bound` pairs
    of both people; pairs are ordered by their first contact. Some people may keep fewer pairs than `bound` allows.

    Args:
      first: one person of each contact, `[rows]`, from 0 to num_people - 1.
      second: the other person of each contact, `[rows]`.
      num_people: number of people.
      bound: largest number of different people that anybody may meet.
    """
    codes = np.minimum(first, second) * num_people + np.maximum(first, second)
    _, first_rows, pair_of_row = np.unique(codes, return_index=True, return_inverse=True)
    # Pairs are in the order of their first contact, each once for either person.
    order = np.argsort(first_rows)
    ends = np.stack([first[first_rows[order]], second[first_rows[order]]], axis=1).reshape(-1)
    by_person = np.argsort(ends, kind="stable")
    counts = np.bincount(ends, minlength=num_people)
    rank = np.empty(len(ends), np.int64)
    rank[by_person] = np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)
    keep = np.empty(len(order), bool)
    keep[order] = (rank.reshape(-1, 2) < bound).all(axis=1)
    return keep[pair_of_row]


def _make_people(first_pid: int, num_people: int, generator: np.random.Generator) -> Columns:
    sizes = 1 + generator.choice(len(_HOUSEHOLD_SIZES), num_people, p=_HOUSEHOLD_SIZES)
    ends = np.cumsum(sizes)
    num_households = int(np.searchsorted(ends, num_people)) + 1
    # The last household gets the remaining people.
    sizes = np.diff(np.minimum(ends[:num_households], num_people), prepend=0)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    number = np.arange(num_people) - starts
    # Adults who live with more than one other person are mostly parents.
    head_age = np.where(sizes < 3, generator.integers(20, 90, len(sizes)), generator.integers(25, 56, len(sizes)))
    head_age = np.repeat(head_age, sizes)
    partner_age = np.clip(head_age + generator.integers(-6, 7, num_people), 18, 95)
    child_age = np.minimum(generator.integers(0, 20, num_people), head_age - 18)
    return {
        "pid": first_pid + np.arange(num_people),
        "hid": first_pid + starts,
        "person_number": number + 1,
        "age": np.select([number == 0, number == 1], [head_age, partner_age], child_age),
        "sex": np.where(generator.random(num_people) < 0.5, MALE, FEMALE),
    }


def _choose_goers(age: NDArray, generator: np.random.Generator) -> list[NDArray]:
    """Chooses, for each of `_KINDS`, the people who go to its places."""
    is_pupil = (age >= 5) & (age < 18)
    is_student = (age >= 18) & (age < 23) & (generator.random(len(age)) < 0.4)
    is_working = (age >= 18) & (age < 67) & ~is_student & (generator.random(len(age)) < 0.75)
    shops = (age >= 12) & (generator.random(len(age)) < 0.6)
    goes_out = generator.random(len(age)) < 0.7
    prays = generator.random(len(age)) < 0.1
    return [np.flatnonzero(goers) for goers in (is_working, shops, goes_out, is_pupil, is_student, prays)]
