"""What was computed lately, as far as there is room for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Values by key; the ones asked for longest ago are forgotten first.

    Parameters
    ----------
    room : int
        Sum of the sizes of all values that are kept.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()  # one thread prepares a batch while another finishes one

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value of a size, unless it alone is larger than the room."""
        with self._lock:
            self._room += self._kept.pop(key, (value, 0))[1]
            self._kept[key] = value, size
            self._room -= size
            while self._room < 0:
                _, (_, freed) = self._kept.popitem(last=False)
                self._room += freed
