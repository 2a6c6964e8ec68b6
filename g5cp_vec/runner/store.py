"""A sweep on disk: numbered Parquet parts and a manifest that says which grid they answer.

A part is written under a temporary name and renamed, so a file with a part's name is a whole part. The manifest is
written before the first part. What is found on disk is trusted only if the manifest's hash is that of the grid asked
for, the part has the rows the plan gives it, and its checksum is right. One process at a time writes into a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import polars as pl

from g5cp_vec import __version__
from g5cp_vec.config._files import describe
from g5cp_vec.config._text import MOST_TABLE_BYTES, read_json_text, read_text
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.parts import part_bytes, part_name, problem_of

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "sweep.json"
MISSING = "missing"
_SHOWN_DIFFERENCES = 3
_AFRESH = "choose another folder, or run the sweep again with --no-resume"
_SHOWN_CHARACTERS = 200


class Store:
    """The folder of one sweep, which it keeps for itself until it is left.

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
        The folder holds another sweep's results, is being written by another process, or cannot be written.
    """

    def __init__(self, folder: Path, contents: Mapping[str, Any], n_rows_of_part: list[int], *, resume: bool) -> None:
        _refuse_name(folder)
        self.folder = folder
        self.n_rows_of_part = n_rows_of_part
        text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
        self._asked = {"g5cp_version": __version__, **json.loads(text)}
        self.hash = hashlib.sha256(f"{__version__}\n{text}".encode()).hexdigest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
            try:
                self._begin(contents, resume=resume)
            except BaseException:
                _unlock(self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}; choose another -o") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        _unlock(self._lock)

    def _begin(self, contents: Mapping[str, Any], *, resume: bool) -> None:
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
            "n_rows": sum(self.n_rows_of_part),
            "n_parts": len(self.n_rows_of_part),
            **contents,
        }
        self._replace(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())

    def _refuse_other_sweep(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            self._refuse_foreign_files()
            return
        found = _read_manifest(path)
        if found.get("hash") != self.hash:
            raise ConfigError(
                f"{path}: results of another sweep are here: {_differences(found, self._asked)}; "
                "choose another -o, or --no-resume to overwrite them"
            )

    def _part_files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("part-*.parquet") if re.fullmatch(r"part-\d{5,}", path.stem))

    def _refuse_foreign_files(self) -> None:
        if (self.folder / MANIFEST).exists():
            return
        # Other programs name their files likewise, and nothing says that these are ours to keep or to delete.
        if any(self._part_files()):
            raise ConfigError(f"{self.folder}: holds parts but no {MANIFEST}; choose another -o, or delete them")
        # What an operating system or a process that was killed leaves is hidden.
        if any(path.is_dir() or path.name[0] != "." for path in self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder}: not empty, and holds no sweep (no {MANIFEST}); choose another -o: a new folder, or an "
                "empty one"
            )

    def _delete_parts(self) -> None:
        self._refuse_foreign_files()
        for path in self._part_files():
            path.unlink()

    def _replace(self, name: str, data: bytes) -> None:
        """Write a file that appears under its name only when it is whole."""
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_bytes(data)
            temporary.replace(self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def path(self, part: int) -> Path:
        """File of a part."""
        return self.folder / part_name(part)

    def problem(self, part: int) -> str | None:
        """Return why a part has to be computed: ``"missing"``, or what is wrong with its file; None if finished."""
        path = self.path(part)
        if not path.exists():
            return MISSING
        return problem_of(path, self.hash, self.n_rows_of_part[part])

    def write(self, part: int, frame: pl.DataFrame) -> None:
        """Write a part."""
        # By way of memory: what the file system refuses is then an OSError that says so.
        data = part_bytes(frame, self.hash, part)
        try:
            self._replace(self.path(part).name, data)
        except OSError as error:
            raise ConfigError(
                f"{self.path(part)}: cannot be written: {error.strerror or error}; finished parts are kept: "
                "make room and call again"
            ) from None


def _lock(folder: Path) -> int | None:
    """Return a descriptor of a folder that no other process has at the same time; None where folders have none."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder}: another sweep is writing here; wait for it, or choose another -o") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _refuse_name(folder: Path) -> None:
    """Refuse names that Parquet readers cannot open: they take UTF-8 only, file systems take any bytes."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{ascii(str(folder))}: a folder's name that is not UTF-8; choose another") from None


def count_finished(folder: Path) -> tuple[int, int]:
    """Return how many parts of the sweep in a folder are finished, and how many it has."""
    manifest = _read_manifest(folder / MANIFEST)
    return len(list(folder.glob("part-*.parquet"))), int(manifest["n_parts"])


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a sweep; refuse what is none."""
    try:
        found = read_json_text(path, read_text(path, "the manifest of a sweep", most_bytes=MOST_TABLE_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{error}; {_AFRESH}") from None
    counts = [found.get(name) for name in ("n_rows", "n_parts")] if isinstance(found, dict) else [None]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise ConfigError(f"{path}: expected the manifest of a sweep, with n_rows and n_parts; {_AFRESH}")
    return dict(found)


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return in which keys a manifest differs from what is asked for."""
    places = list(_differing("", found, asked, set(asked)))
    more = f" and {len(places) - _SHOWN_DIFFERENCES} more" if len(places) > _SHOWN_DIFFERENCES else ""
    return (", ".join(places[:_SHOWN_DIFFERENCES]) or "only the hash differs") + more


def _differing(place: str, found: Any, asked: Any, keys: Collection[str] | None = None) -> Iterator[str]:
    if isinstance(found, Mapping) and isinstance(asked, Mapping):
        for key in sorted(keys or {*found, *asked}):
            yield from _differing(f"{place}.{key}" if place else key, found.get(key), asked.get(key))
    elif found != asked:
        if place == "grid.axes":
            there, here = dict(found or []), dict(asked or [])
            if there != here:
                yield from _differing(place, there, here)
                return
        yield f"{place} is {_brief(found)} there, {_brief(asked)} here"


def _brief(value: Any) -> str:
    return "missing" if value is None else describe(value)


def scan_sweep(folder: str | Path) -> pl.LazyFrame:
    """Return the rows of a finished or unfinished sweep, lazily.

    Raises
    ------
    ConfigError
        The folder is not that of a sweep.
    """
    folder = Path(folder)
    _refuse_name(folder)
    if folder.is_file() and (folder.parent / MANIFEST).is_file():
        raise ConfigError(f"{folder}: one file of a sweep; expected the folder that it is in: {folder.parent}")
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder}: no {MANIFEST} here; expected the output folder of a sweep")
    manifest = _read_manifest(folder / MANIFEST)
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        raise ConfigError(f"{folder}: no part is finished yet; run the sweep first")
    names = {part_name(part) for part in range(manifest["n_parts"])}
    for path in parts:
        problem = problem_of(path, str(manifest.get("hash")))
        if path.name not in names:
            problem = f"the sweep has {len(names)} parts, from 0"
        if problem is not None:
            reason = " ".join(problem.split())
            raise ConfigError(f"{path}: not a readable part: {reason}; delete it and run the sweep again")
    return pl.scan_parquet(parts, glob=False)


def expected_rows(folder: str | Path) -> int:
    """Return how many rows the sweep in a folder has when it is finished."""
    return int(_read_manifest(Path(folder) / MANIFEST)["n_rows"])


def _is_damaged(part: Path) -> bool:
    try:
        pl.read_parquet(part, glob=False)
    except (pl.exceptions.PolarsError, OSError):
        return True
    return False


@contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Say in one line that rows cannot be read: parts are opened late, and their pages may be damaged."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        damaged = next(filter(_is_damaged, sorted(Path(folder).glob("part-*.parquet"))), folder)
        raise ConfigError(f"{damaged}: cannot be read: {reason}; delete it and run the sweep again") from None
