"""One compile policy for every kernel, and a cache that notices a change in any engine file.

numba invalidates a cached kernel when its own file changes but not when a callee in another file does, so the
cache folder carries a hash of all engine sources. No ``fastmath``: event ordering needs exact comparisons and inf.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba import config as _numba_config

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]


def _cache_root() -> Path:
    """Where compiled code lives: ``NUMBA_CACHE_DIR``, the user's cache folder, or one that only this process knows."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "g5cp_vec"
    try:
        root.mkdir(parents=True, exist_ok=True)
        usable = os.access(root, os.W_OK)
    except OSError:
        usable = False
    # Compiled code is loaded and run, so it may not lie where others could have put it.
    return root if usable else Path(tempfile.mkdtemp(prefix="g5cp_vec-"))


def _cache_dir() -> Path:
    # Compiled code is for one numba, one Python, one processor and, as numba files it, one place of its source.
    machine = f"{numba.__version__} {sys.version} {llvmlite.binding.get_host_cpu_name()} {Path(__file__).resolve()}"
    digest = hashlib.sha256(machine.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return _cache_root() / digest.hexdigest()[:16]


CACHE_DIR = _cache_dir()


_STALE_AFTER_S = 30 * 24 * 3600.0
# Written when every kernel of exactly these sources is on disk.
_COMPLETE = CACHE_DIR / "complete"


def is_compiled() -> bool:
    """Return whether there is nothing left to compile."""
    return bool(_numba_config.DISABLE_JIT) or _COMPLETE.exists()


@contextmanager
def compiling() -> Iterator[bool]:
    """Let one process at a time compile; yield whether it still has to.

    Several processes that write one numba cache at once have crashed (numba issues 4807 and 10128). A cache folder
    that cannot be written or locked is no error: the process compiles for itself.
    """
    try:
        CACHE_DIR.mkdir(parents=True, exist_ok=True)
        lock = (CACHE_DIR / "lock").open("w")
    except OSError:
        yield True
        return
    with lock:
        with suppress(OSError):
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
        if is_compiled():
            yield False
            return
        yield True
        with suppress(OSError):
            _COMPLETE.touch()
            _remove_stale(CACHE_DIR)


def mark_used() -> None:
    """Note that the compiled kernels are in use, so that another installation does not remove them."""
    with suppress(OSError):
        os.utime(_COMPLETE)


def _remove_stale(keep: Path) -> None:
    """Remove kernels of other versions that nobody has used for a month: every change of the sources makes a folder."""
    before_s = time.time() - _STALE_AFTER_S
    for folder in keep.parent.iterdir():
        used = folder / _COMPLETE.name
        if folder == keep or not re.fullmatch("[0-9a-f]{16}", folder.name) or not used.exists():
            continue
        if used.stat().st_mtime < before_s:
            shutil.rmtree(folder, ignore_errors=True)


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    allocates: bool = False,
    entry: bool = False,
    inlines: bool = True,
) -> Any:
    """Compile ``function`` under the policy of this package (lazy, cached, GIL released, numpy errors).

    Parameters
    ----------
    function : callable
    allocates : bool
        Whether the function makes arrays. One that does not is compiled without numba's reference counting: the
        workspace holds dozens of arrays, and counting them at every inner call costs a hundred times the work.
    entry : bool
        Whether Python calls the function. The others get no wrappers for that and are inlined: a call would copy
        the descriptors of all arrays, which costs more than most inner functions do.
    inlines : bool
        False for what is long, called from several places, and takes few arrays or is hardly ever reached.
    """
    if function is None:
        return lambda f: kernel(f, allocates=allocates, entry=entry, inlines=inlines)
    # numba reads its cache folder when a function is decorated; the setting is given back so that other
    # libraries in the process keep theirs.
    previous = _numba_config.CACHE_DIR
    _numba_config.CACHE_DIR = str(CACHE_DIR)
    options: dict[str, Any] = {"no_cfunc_wrapper": True}
    if not allocates:
        options["_nrt"] = False
    if not entry:
        options |= {"no_cpython_wrapper": True, "forceinline": inlines}
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=False, **options)(function)
    finally:
        _numba_config.CACHE_DIR = previous
