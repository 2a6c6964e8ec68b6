"""What messages cost beyond their exact bytes: how much of a link they get, and how long they take to begin.

Bytes of messages are exact and stay so; only time is decided here. A message occupies its links as if it had *wire
bytes*: its bytes over the efficiency that the topology states for its size, or, where a collective library was measured
on the chip and all of the collective's groups lie behind one switch each, what makes the collective last as long as
measured when nothing else uses the links. With T(B) the measured duration of a call of B bytes and T0 that of the
smallest one measured, each of the n steps that follow one another begins after T0 / n and occupies its port for
(T - T0) / n at the rate of the links measured; a port that carries k messages in a step gives each 1 / k of it. So
contention, and links of another speed, act on the part that grows with the message, and start-up costs stay what they
are. A switch that reduces on the way makes wire bytes fewer than bytes.

Not priced by measurements: gathering tokens over the ranks that split an expert, transfers of rings, halos and pipeline
stages, anything that leaves a switched domain; a size of group that was not measured is interpolated like the size of
the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.calibration import Surface
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.calibration import surface_seconds
from g5cp_vec.cost.calls import Call, call_of, groups_of, is_collective, name_of
from g5cp_vec.mapping.keys import LIBRARY_CALLS, CostKeys, MessageKey
from g5cp_vec.mapping.network import Network

Real = NDArray[np.float64]


class Wire(NamedTuple):
    """What a message occupies (float bytes), and the start-up of its step (s); None for that of its route."""

    wire_bytes: Any
    start_s: Any


def surfaces_of(dep: Deployment, op: str, axis: str) -> list[tuple[Surface, float]]:
    """Return the measured libraries of an operation with the most bytes each takes, in the order of preference.

    An engine has an all-reduce of its own for tp groups (vLLM's communicators make none for others).
    """
    calibration, runtime = dep.chip.calibration, dep.runtime
    if calibration is None:
        return []
    wanted = [(runtime.collective_library, np.inf)]
    if op == "all_reduce" and axis == "tp":
        limit = runtime.all_reduce_library_limit
        wanted.insert(0, (runtime.all_reduce_library, np.inf if limit is None else float(limit)))
    found = ((calibration.collective(name, op), most) for name, most in wanted if name)
    return [(surface, most) for surface, most in found if surface is not None]


def _is_behind_switch(network: Network, groups: NDArray[np.int32]) -> bool:
    """Whether each group lies behind one switch."""
    domains = network.switch_of(groups)
    return domains is not None and bool((domains == domains[:, :1]).all())


def _measured(
    dep: Deployment, network: Network, key: MessageKey
) -> tuple[Call, list[tuple[Surface, float]], NDArray[np.int32]] | None:
    """Return a message's collective, what was measured of it, and its groups; None where no measurement counts."""
    call = call_of(dep, key)
    surfaces = [] if call is None or call.size < 2 else surfaces_of(dep, call.op, call.axis)
    if call is None or not surfaces:
        return None
    groups = groups_of(dep, call.axis)
    return (call, surfaces, groups) if _is_behind_switch(network, groups) else None


def unmeasured_collectives(dep: Deployment, network: Network, keys: Iterable[MessageKey]) -> list[str]:
    """Return the messages of collectives that no library's measurements price, though the runtime names one; sorted."""
    if not (dep.runtime.collective_library or dep.runtime.all_reduce_library):
        return []
    return sorted({name_of(key) for key in keys if is_collective(key) and _measured(dep, network, key) is None})


def wire(dep: Deployment, network: Network, key: MessageKey, n_bytes: Any) -> Wire:
    """Return what a message of exact size occupies, and its start-up.

    Parameters
    ----------
    dep : Deployment
    network : Network
    key : str or (str, int)
    n_bytes : int or ndarray
    """
    exact = np.asarray(n_bytes, float)
    measured = _measured(dep, network, key)
    if measured is None:
        return Wire(exact / dep.topology.payload_fraction(exact), None)
    call, surfaces, groups = measured
    # The tables count the whole buffer: what every member holds after a gather, or sends in an exchange.
    total = exact * call.size
    wire_bytes, start_s = np.zeros_like(exact), np.zeros_like(exact)
    undecided = np.ones(exact.shape, bool)
    for surface, most in surfaces:
        taken = undecided & (total <= most)
        undecided &= ~taken
        first_s = surface_seconds(dep.chip, surface, (surface.limits[0][0], call.size))
        seconds = surface_seconds(dep.chip, surface, (np.maximum(total, surface.limits[0][0]), call.size))
        rate = surface.numbers["link_gigabytes_per_second"] * 1e9
        # A fitted table may fall a little where sizes hardly matter.
        grown = np.maximum(seconds - first_s, 0.0) * rate / (call.n_steps * call.n_at_once)
        wire_bytes, start_s = np.where(taken, grown, wire_bytes), np.where(taken, first_s / call.n_steps, start_s)
    if undecided.any():  # no library for messages of this size
        found = network.routes(groups.ravel(), np.roll(groups, -1, axis=1).ravel()).latency
        (route_s,) = {network.latencies()[i] for i in found.tolist()}
        wire_bytes = np.where(undecided, exact / dep.topology.payload_fraction(exact), wire_bytes)
        start_s = np.where(undecided, route_s, start_s)
    return Wire(wire_bytes, start_s)


def transfer_latencies(
    dep: Deployment, network: Network, keys: CostKeys, starts_s: dict[MessageKey, Any], n_points: int
) -> Real:
    """Return the start-up of every latency id (s), shape (n_points, n_latency_ids).

    Those of the routes; where the library counts, these once more for each message and each of `LIBRARY_CALLS`, in the
    order of `latency_block`: what the message was measured to take, else that of the route and the call.
    """
    routes_s = np.asarray(network.latencies(), float)
    runtime = dep.runtime
    if not runtime.has_library_latency:
        return np.tile(routes_s, (n_points, 1))
    of_call = {None: 0.0, "send_recv": runtime.send_recv_latency_s, "all_to_all": runtime.all_to_all_latency_s}
    columns = [np.tile(routes_s, (n_points, 1))]
    for key in keys.bytes:
        for call in LIBRARY_CALLS:
            start_s = starts_s.get(key)
            if start_s is None:
                columns.append(np.tile(routes_s + of_call[call], (n_points, 1)))
            else:
                columns.append(np.broadcast_to(np.asarray(start_s, float)[..., None], (n_points, len(routes_s))))
    return np.concatenate(columns, axis=1)
