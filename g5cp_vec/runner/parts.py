"""One part of a sweep's dataset: a Parquet file that names its sweep and its place, with a checksum against damage."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from g5cp_vec.config._text import MOST_TABLE_BYTES
from g5cp_vec.runner.schema import SCHEMA

_SWEEP, _PART, _SUM = b"g5cp_sweep", b"g5cp_part", b"g5cp_sha256"
# Stands in the file in place of its checksum while that is computed.
_NO_SUM = b"." * 64


def part_name(part: int) -> str:
    """Return the file name of a part, by its number."""
    return f"part-{part:05d}.parquet"


def part_bytes(frame: pl.DataFrame, sweep: str, part: int) -> bytes:
    """Return a part as it stands on disk.

    Parameters
    ----------
    frame : polars.DataFrame
    sweep : str
        Hash of the sweep that it belongs to.
    part : int
        Its number there.
    """
    buffer = io.BytesIO()
    labels = {_SWEEP: sweep.encode(), _PART: part_name(part).encode(), _SUM: _NO_SUM}
    frame.write_parquet(buffer, metadata={key.decode(): value.decode() for key, value in labels.items()})
    data = bytearray(buffer.getbuffer())
    begin = data.index(_NO_SUM, data.rindex(_SUM))
    data[begin : begin + len(_NO_SUM)] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def problem_of(path: Path, sweep: str, n_rows: int | None = None) -> str | None:
    """Return why a file is not a part of a sweep as it was written; None where it is.

    Parameters
    ----------
    path : Path
    sweep : str
    n_rows : int, optional
        Rows that the part must have, and have been written by this program: to be kept by a sweep that goes on. Without
        it a file that another program wrote anew, and which names no sweep, is taken for what it is.
    """
    if not path.is_file():  # to be read without an end, or not at all
        return "no regular file"
    try:
        if (size := path.stat().st_size) > MOST_TABLE_BYTES:
            return f"of {size} bytes, no part has more than {MOST_TABLE_BYTES}"
        data = path.read_bytes()
        found = pq.read_metadata(io.BytesIO(data))
        labels = found.metadata or {}
        if (n_rows is not None or _SWEEP in labels) and labels.get(_SWEEP) != sweep.encode():
            return "not of this sweep"
        if (n_rows is not None or _PART in labels) and labels.get(_PART) != path.name.encode():
            return f"a copy of {labels.get(_PART, b'another').decode()}"
        if (n_rows is not None or _SUM in labels) and not _is_whole(data, labels.get(_SUM, b"")):
            return "damaged: its bytes are not those that were written"
        if n_rows is not None and found.num_rows != n_rows:
            return f"{found.num_rows} rows, expected {n_rows}"
        schema = pl.read_parquet_schema(io.BytesIO(data))
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:  # pyarrow's ArrowInvalid is a ValueError
        return f"not Parquet that can be read: {error}"
    for name, dtype in SCHEMA.items():
        if name not in schema:
            return f"no column {name}, so not a part of this version"
        if schema[name] != dtype:
            return f"column {name} is {schema[name]}, expected {dtype()}"
    return None


def _is_whole(data: bytes, checksum: bytes) -> bool:
    begin = data.rfind(checksum) if len(checksum) == len(_NO_SUM) else -1
    if begin < 0:
        return False
    digest = hashlib.sha256(data[:begin])
    digest.update(_NO_SUM)
    digest.update(data[begin + len(_NO_SUM) :])
    return digest.hexdigest().encode() == checksum
