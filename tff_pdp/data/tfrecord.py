"""Frames and unframes TFRecords, which `beam_pipelines` writes and `ClientDataset` reads by byte range.

A record is `length (uint64) | masked crc32c of length | payload | masked crc32c of payload`, little-endian.
"""

import struct

import google_crc32c
import numpy as np

from tff_pdp.errors import DataError

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
HEADER_SIZE, FOOTER_SIZE = _HEADER.size, _FOOTER.size


def frame(payload: bytes) -> bytes:
    """Wraps one payload as a TFRecord."""
    length = struct.pack("<Q", len(payload))
    return length + _FOOTER.pack(_masked_crc32c(length)) + payload + _FOOTER.pack(_masked_crc32c(payload))


def unframe(buffer: bytes, file_name: str, file_offset: int = 0) -> list[bytes]:
    """Returns the payloads of a buffer of whole TFRecords, checking every checksum.

    Args:
      buffer: the bytes of zero or more records.
      file_name: source of the buffer, for error messages.
      file_offset: position of the buffer in that file, for error messages.

    Raises:
      DataError: a record is cut short or fails its checksum; the message names the file and the record's offset.
    """
    payloads = []
    position = 0
    while position < len(buffer):
        payload = _payload_at(buffer, position)
        if payload is None:
            raise DataError(
                f"{file_name}: corrupt TFRecord at byte {file_offset + position}; "
                "restore the file or prepare the data again"
            )
        payloads.append(payload)
        position += _HEADER.size + len(payload) + _FOOTER.size
    return payloads


def payload_checksums(buffer: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Computes the masked CRC-32C of each payload, uint32 `[n]`; record i is `buffer[starts[i]:stops[i]]`."""
    bounds = zip((starts + HEADER_SIZE).tolist(), (stops - FOOTER_SIZE).tolist(), strict=True)
    checksums = np.array([google_crc32c.value(buffer[start:stop]) for start, stop in bounds], np.uint32)
    return ((checksums >> 15) | (checksums << 17)) + np.uint32(0xA282EAD8)


def _payload_at(buffer: bytes, position: int) -> bytes | None:
    start = position + _HEADER.size
    if start > len(buffer):
        return None
    length, length_checksum = _HEADER.unpack_from(buffer, position)
    end = start + length
    if length_checksum != _masked_crc32c(buffer[position : position + 8]) or end + _FOOTER.size > len(buffer):
        return None
    payload = buffer[start:end]
    if _FOOTER.unpack_from(buffer, end)[0] != _masked_crc32c(payload):
        return None
    return payload


def _masked_crc32c(data: bytes) -> int:
    checksum = google_crc32c.value(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
