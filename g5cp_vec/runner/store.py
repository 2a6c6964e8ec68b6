"""A sweep on disk: numbered Parquet parts and a manifest that says which grid they answer.

A part is written under a temporary name and renamed, so a file with a part's name is a whole part. The manifest is
written before the first part. What is found on disk is trusted only if the manifest's hash is that of the grid asked
for and the part has the rows the plan gives it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from g5cp_vec import __version__
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.schema import SCHEMA

MANIFEST = "sweep.json"


class Store:
    """The folder of one sweep.

    Parameters
    ----------
    folder : Path
        Made if absent.
    contents : mapping
        What the results follow from (the canonical grid and the options that change rows); hashed.
    n_rows_of_part : list of int
    resume : bool
        Keep finished parts of the same sweep; otherwise parts found there are deleted.

    Raises
    ------
    ConfigError
        The folder holds another sweep's results, or cannot be written.
    """

    def __init__(self, folder: Path, contents: Mapping[str, Any], n_rows_of_part: list[int], *, resume: bool) -> None:
        self.folder = folder
        self.n_rows_of_part = n_rows_of_part
        text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
        self.hash = hashlib.sha256(f"{__version__}\n{text}".encode()).hexdigest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume:
                self._refuse_other_sweep()
            else:
                self._delete_parts()
            for leftover in (*self.folder.glob(".part-*.tmp"), *self.folder.glob(f".{MANIFEST}.*.tmp")):
                leftover.unlink()  # of a process that was killed while it wrote
            manifest = {
                "hash": self.hash,
                "g5cp_version": __version__,
                "polars_version": pl.__version__,
                "n_rows": sum(n_rows_of_part),
                "n_parts": len(n_rows_of_part),
                **contents,
            }
            self._replace(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}; choose another -o") from None

    def _refuse_other_sweep(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            self._refuse_foreign_parts()
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = isinstance(found, dict) and found.get("hash") == self.hash
        except (json.JSONDecodeError, UnicodeDecodeError):
            known = False
        if not known:
            raise ConfigError(
                f"{path}: results of another grid, option or version are here; "
                "choose another -o, or --no-resume to overwrite them"
            )

    def _part_files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("part-*.parquet") if re.fullmatch(r"part-\d{5,}", path.stem))

    def _refuse_foreign_parts(self) -> None:
        # Other programs name their files likewise, and nothing says that these are ours to keep or to delete.
        if not (self.folder / MANIFEST).exists() and any(self._part_files()):
            raise ConfigError(f"{self.folder}: holds parts but no {MANIFEST}; choose another -o, or delete them")

    def _delete_parts(self) -> None:
        self._refuse_foreign_parts()
        for path in self._part_files():
            path.unlink()

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)

    def path(self, part: int) -> Path:
        """File of a part."""
        return self.folder / f"part-{part:05d}.parquet"

    def has(self, part: int) -> bool:
        """Whether a part is finished: its file is readable and has the rows it should."""
        path = self.path(part)
        if not path.exists():
            return False
        try:
            return bool(pq.read_metadata(path).num_rows == self.n_rows_of_part[part])
        except (OSError, ValueError):  # pyarrow's ArrowInvalid is a ValueError
            return False

    def write(self, part: int, frame: pl.DataFrame) -> None:
        """Write a part; it appears under its name only when it is whole."""
        temporary = self.folder / f".part-{part:05d}.{os.getpid()}.tmp"
        try:
            # By way of memory: what the file system refuses is then an OSError that says so.
            buffer = io.BytesIO()
            frame.write_parquet(buffer)
            temporary.write_bytes(buffer.getbuffer())
            temporary.replace(self.path(part))
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise ConfigError(
                f"{self.path(part)}: cannot be written: {error.strerror or error}; finished parts are kept: "
                "make room and call again"
            ) from None


def scan_sweep(folder: str | Path) -> pl.LazyFrame:
    """Return the rows of a finished or unfinished sweep, lazily.

    Raises
    ------
    ConfigError
        The folder is not that of a sweep.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder}: no {MANIFEST} here; expected the output folder of a sweep")
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        raise ConfigError(f"{folder}: no part is finished yet; run the sweep first")
    for path in parts:
        try:
            missing = [name for name in SCHEMA if name not in pq.read_schema(path).names]
            if missing:
                raise ValueError(f"no column {missing[0]}, so not a part of this version")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path}: not a readable part: {reason}; run the sweep again") from None
    return pl.scan_parquet(parts)
