"""Defines the records that travel between the steps of a pipeline, and the reasons why a record may be left out."""

import dataclasses
import enum
import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

_RAW_LENGTH = 200


class Reason(enum.StrEnum):
    """Reason why a record was left out; manifests, dead letters and messages quote the reason's value."""

    # Records that cannot be used: kept as dead letters and counted against `max_bad_fraction`.
    MISSING_USER_DATA = "user_without_data"
    UNLISTED_USER = "user_not_in_users_list"
    MALFORMED_USER = "user_data_without_lists_x_and_y"
    REPEATED_KEY = "repeated_key_in_user_data"
    COLUMNS_MISSING = "file_without_needed_columns"
    LENGTH_MISMATCH = "x_and_y_differ_in_length"
    NUM_SAMPLES_MISMATCH = "num_samples_differs_from_data"
    CONFLICTING_USER = "copies_of_user_differ"
    PIXELS_NOT_NUMBERS = "pixels_not_a_list_of_numbers"
    PIXEL_COUNT = "wrong_pixel_count"
    PIXEL_NOT_FINITE = "pixel_not_finite"
    PIXEL_RANGE = "pixel_outside_0_1"
    UNREADABLE_IMAGE = "image_missing_or_damaged"
    IMAGE_WITHOUT_CLASS = "image_without_class"
    IMAGE_OF_SEVERAL_CLASSES = "image_in_several_classes"
    IMAGE_OF_SEVERAL_USERS = "image_of_several_users"
    FEATURES_NOT_NUMBERS = "features_not_a_list_of_numbers"
    FEATURE_COUNT = "wrong_feature_count"
    FEATURE_NOT_FINITE = "feature_not_finite"
    LABEL_NOT_INTEGER = "label_not_an_integer"
    LABEL_RANGE = "label_out_of_range"
    LABEL_NOT_FINITE = "label_not_a_finite_number"
    ROW_LENGTH = "row_of_another_length"
    VALUE_MISSING = "value_missing"
    VALUE_TYPE = "value_of_wrong_type"
    VALUE_RANGE = "value_outside_of_schema"
    ROW_VALUES = "row_with_missing_or_wrong_value"
    UNKNOWN_PERSON = "row_of_unknown_person"
    UNKNOWN_PLACE = "row_of_unknown_household_or_place"
    CONFLICTING_ROWS = "rows_of_same_id_differ"
    CONTRADICTORY_STATES = "states_of_disease_go_back"
    OWN_CONTACT = "contact_with_oneself"
    TIME_RANGE = "time_or_duration_out_of_range"
    AGE_OR_SEX_RANGE = "age_or_sex_out_of_range"
    # Valid records that a rule of the job leaves out: counted, but no sign of bad input.
    IDENTICAL_USER = "identical_copy_of_user"
    TOO_FEW_EXAMPLES = "client_below_min_examples"
    EMPTY_TRAIN_SPLIT = "client_without_train_examples"
    CLASS_NOT_CHOSEN = "class_not_chosen"
    IMAGE_WITHOUT_USER = "image_without_user"
    IDENTICAL_ROW = "identical_row_of_same_id"
    OUTSIDE_GROUP = "contact_between_silos_or_groups"

    @property
    def is_bad_input(self) -> bool:
        """Tells whether the reason is bad input, which counts against `max_bad_fraction`, and not a rule of the job."""
        return self not in _LEFT_OUT


_LEFT_OUT = (
    Reason.IDENTICAL_USER,
    Reason.TOO_FEW_EXAMPLES,
    Reason.EMPTY_TRAIN_SPLIT,
    Reason.CLASS_NOT_CHOSEN,
    Reason.IMAGE_WITHOUT_USER,
    Reason.IDENTICAL_ROW,
    Reason.OUTSIDE_GROUP,
)


# Reasons for which a user, or client, is left out as a whole.
OF_CLIENTS = frozenset(
    {
        Reason.MISSING_USER_DATA,
        Reason.UNLISTED_USER,
        Reason.MALFORMED_USER,
        Reason.REPEATED_KEY,
        Reason.COLUMNS_MISSING,
        Reason.LENGTH_MISMATCH,
        Reason.NUM_SAMPLES_MISMATCH,
        Reason.CONFLICTING_USER,
        Reason.TOO_FEW_EXAMPLES,
        Reason.EMPTY_TRAIN_SPLIT,
    }
)


class Unusable(NamedTuple):
    """Reason why an example or a user cannot be used.

    Attributes:
      reason: the reason.
      found: text that the dead letter quotes.
      allowed: values that are allowed instead, in words; empty if the reason says enough.
    """

    reason: Reason
    found: str
    allowed: str = ""


@dataclasses.dataclass(frozen=True)
class UserRecord:
    """Copy of one user's data, as read from a file and not yet checked.

    Attributes:
      client: name of the user.
      source: name of the file.
      x: list of examples. Each is a float32 vector, an `Unusable`, or a JSON value that is not a flat list of numbers.
        None if the file lists the user without data. A value other than a list or None is malformed.
      y: list of labels as JSON values. None if the file lists the user without data. A value other than a list or None
        is malformed.
      num_samples: number of examples that the file states; None if the file's list of users lacks the user.
      repeated_key: whether a key occurs twice in the user's JSON object.
      is_test: for each example, whether the source reserves the example for test; None if the source does not say.
      is_validation: for each example, whether the source reserves the example for validation; None if the source does
        not say.
      problem: reason why the user cannot be used, found while the file was read; None if no reason was found.
    """

    client: str
    source: str
    x: Any
    y: Any
    num_samples: Any
    repeated_key: bool = False
    is_test: list[bool] | None = None
    is_validation: list[bool] | None = None
    problem: Unusable | None = None

    @property
    def num_examples(self) -> int:
        """Returns the number of examples in this copy; a malformed copy counts as at least one example."""
        if isinstance(self.x, list) and isinstance(self.y, list):
            return max(len(self.x), len(self.y))
        sizes = [len(value) for value in (self.x, self.y) if isinstance(value, list)]
        if self.x is None and self.y is None and type(self.num_samples) is int:
            sizes.append(self.num_samples)
        return max(1, *sizes) if sizes else 1

    def fingerprint(self) -> bytes:
        """Returns a SHA-256 hash of all fields except `client` and `source`, equal for copies of equal content."""
        stated = [self.num_samples, self.repeated_key, self.is_test, self.is_validation, self.problem, self.y]
        digest = hashlib.sha256(json.dumps(stated).encode())
        for x in self.x if isinstance(self.x, list) else [self.x]:
            packed = isinstance(x, np.ndarray)
            content = x.tobytes() if packed else json.dumps(x).encode()
            digest.update(b"%d:%d:" % (packed, len(content)) + content)
        return digest.digest()


@dataclasses.dataclass(frozen=True)
class DeadLetter:
    """Record that is left out.

    Attributes:
      source: name of the file.
      client: name of the user.
      example: position in the user's list, from 0; None for the user as a whole.
      reason: reason why the record is left out.
      raw: beginning of the value at fault, as JSON.
      num_examples: number of examples that are left out.
      allowed: values that are allowed, in words; empty if the reason says enough.
    """

    source: str
    client: str
    example: int | None
    reason: Reason
    raw: str
    num_examples: int = 1
    allowed: str = ""

    def text(self) -> str:
        """Describes the record in one line: client, file, value found and values allowed.

        >>> DeadLetter("a.npz", "ann", 4, Reason.LABEL_RANGE, "6", allowed="a whole number from 0 to 5").text()
        "client 'ann', example 4 of a.npz: found 6; allowed: a whole number from 0 to 5"
        """
        place = f"client {self.client!r}" + ("" if self.example is None else f", example {self.example}")
        source = f" {'in' if self.example is None else 'of'} {self.source}" if self.source else ""
        allowed = f"; allowed: {self.allowed}" if self.allowed else ""
        return f"{place}{source}: found {self.raw}{allowed}"


def raw_excerpt(value: Any) -> str:
    """Returns the beginning of a value's JSON text, which a dead letter quotes."""
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value)[:_RAW_LENGTH]
