"""Workloads of known families and any size, made by arrays from fixed seeds.

Every amount (seconds, bytes, latency, bandwidth) is drawn anew, so that no two events fall on one instant and a
simulator has to update rates at each of them. The exception is `full_fidelity`: a deployment as the package builds it,
in lockstep. All of them come as the engine's arrays; `as_mapping` and `as_text` spell them out for other simulators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from deployments import costs_of
from nets import Net, fat_tree, star, torus
from numpy.typing import NDArray

from g5cp_vec.cost.rows import CostRows
from g5cp_vec.engine.arrays import COMPUTE, FLOW, Costs, Graph
from g5cp_vec.mapping.chain import chain_blocks
from g5cp_vec.mapping.graph import Block
from g5cp_vec.mapping.structure import Structure
from g5cp_vec.runner.template import Template

Array = NDArray[Any]

SEED = 20240229
SIZES = {"small": 1_000, "medium": 10_000, "big": 100_000, "huge": 1_000_000}
# Relative half-width of what amounts are drawn from.
SPREAD = 0.3


class Stream:
    """Random numbers that no release of numpy changes: only the raw bits of a generator are promised to stay."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def unit(self, n: int) -> Array:
        """Uniform in [0, 1)."""
        return (self._bits.random_raw(n) >> np.uint64(11)) * 2.0**-53

    def around(self, values: Array) -> Array:
        """Each value times a factor of its own in [1 - SPREAD, 1 + SPREAD)."""
        return values * (1 + SPREAD * (2 * self.unit(len(values)) - 1))

    def whole(self, low: int, high: int, n: int) -> Array:
        """Whole numbers in [low, high)."""
        return low + (self.unit(n) * (high - low)).astype(np.int64)

    def wide(self, low: float, octaves: float, n: int) -> Array:
        """Spread over ``octaves`` doublings of ``low``, without a library's ``exp``: straight between powers of two."""
        doublings = self.unit(n) * octaves
        whole = np.floor(doublings)
        return low * np.ldexp(1.0 + (doublings - whole), whole.astype(np.int64))


class Workload(NamedTuple):
    """A graph and one row of costs through it."""

    graph: Graph
    costs: Costs

    @property
    def n_ops(self) -> int:
        """Ops of the graph."""
        return len(self.graph.op_kind)


class _Builder:
    """Collects ops by arrays; ids are handed out in order of creation, in the shape of the chips given."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.n_ops = 0
        self._columns: list[tuple[Array, ...]] = []
        self._edges: list[tuple[Array, Array]] = []

    def add(self, is_flow: Array, src: Array, dst: Array, amount: Array) -> Array:
        """Add ops: bytes from ``src`` to ``dst``, or seconds on ``src``."""
        columns = np.broadcast_arrays(is_flow, src, dst, amount)
        self._columns.append(tuple(column.ravel() for column in columns))
        shape = columns[0].shape
        ids = np.arange(self.n_ops, self.n_ops + columns[0].size).reshape(shape)
        self.n_ops += columns[0].size
        return ids

    def compute(self, chips: Array, seconds: float) -> Array:
        """Add a compute op per chip, next in its order."""
        return self.add(np.False_, chips, chips, np.float64(seconds))

    def flow(self, src: Array, dst: Array, n_bytes: float) -> Array:
        """Add a flow per pair of chips."""
        return self.add(np.True_, src, dst, np.float64(n_bytes))

    def after(self, preds: Array | None, succs: Array) -> None:
        """Let each of ``succs`` wait for its pendant in ``preds``; for nothing when there is none."""
        if preds is not None:
            preds, succs = np.broadcast_arrays(preds, succs)
            self._edges.append((preds.ravel(), succs.ravel()))

    def build(self, seed: int, latency_s: float = 2e-6) -> Workload:
        """Draw every amount around its value and return the workload."""
        stream = Stream(seed)
        is_flow, src, dst, amount = (np.concatenate(parts) for parts in zip(*self._columns, strict=True))
        amount = stream.around(amount)
        amount[is_flow] = np.floor(amount[is_flow])
        latency = stream.around(np.full(self.n_ops, latency_s))
        latency[~is_flow] = 0.0
        capacity = stream.around(self.net.capacity)
        # A chip in between has no link of its own, and neither has a chip to itself.
        table = self.net.route(src, dst)
        table[~is_flow | (src == dst)] = -1
        pred, succ = (np.concatenate(parts) for parts in zip(*self._edges, strict=True))
        return _assemble(is_flow, src, dst, table, pred, succ, Costs(amount, amount, latency, capacity), self.net)


def _assemble(
    is_flow: Array, src: Array, dst: Array, table: Array, pred: Array, succ: Array, costs: Costs, net: Net
) -> Workload:
    n_ops = len(src)
    ids, none = np.arange(n_ops, dtype=np.int32), np.zeros(0, np.int32)
    used = table >= 0
    block = Block(
        kind=np.where(is_flow, FLOW, COMPUTE).astype(np.int8),
        src=src.astype(np.int32),
        dst=dst.astype(np.int32),
        cost=ids,
        latency=ids,
        prio=ids,
        reason=np.zeros(n_ops, np.int8),
        step=np.zeros(n_ops, np.int32),
        route_length=used.sum(axis=1),
        route_links=table[used].astype(np.int32),
        route_count=np.ones(int(used.sum())),
        pred=pred.astype(np.int32),
        succ=succ.astype(np.int32),
        **{f"{name}_{end}": none for name in ("entry", "exit", "leave", "arrive") for end in ("chip", "op")},
        n_prio=n_ops,
    )
    links = np.arange(len(costs.capacity_bytes_per_s), dtype=np.int32)
    return Workload(chain_blocks([block], [-1], links, net.n_chips).graph, costs)


def _all_reduce(b: _Builder, chips: Array, before: Array, n_bytes: float) -> Array:
    """Ring all-reduce along the last axis: 2 (n - 1) steps, each forwarding what came in."""
    n = chips.shape[-1]
    following = np.roll(chips, -1, axis=-1)
    for _ in range(2 * (n - 1)):
        sent = b.flow(chips, following, n_bytes / n)
        b.after(before, sent)
        before = np.roll(sent, 1, axis=-1)
    return before


def _ring_layer(b: _Builder, chips: Array, before: Array | None) -> Array:
    """Ring attention over the first axis, all-reduce over the last, feed-forward, all-reduce."""
    cp = len(chips)
    following = np.roll(chips, -1, axis=0)
    arrived, waits = [], before
    for _ in range(cp - 1):
        sent = b.flow(chips, following, 3e6)
        b.after(waits, sent)
        waits = np.roll(sent, 1, axis=0)
        arrived.append(waits)
    step = b.compute(chips, 1e-4)
    b.after(before, step)
    for block in arrived:
        previous, step = step, b.compute(chips, 1e-4)
        b.after(previous, step)
        b.after(block, step)
    ffn = b.compute(chips, 2e-4)
    b.after(_all_reduce(b, chips, step, 4e6), ffn)
    return _all_reduce(b, chips, ffn, 4e6)


def ring_attention(net: Net, cp: int, tp: int, layers: int, seed: int = SEED) -> Workload:
    """Two micro-batches of ring attention whose rings compete with each other and with all-reduces.

    After every layer all chips meet. Left alone the rings are chaotic: rounding grows a thousandfold a layer, and after
    six layers no two simulators, however exact, agree on the third digit.
    """
    b = _Builder(net)
    chips = np.arange(cp * tp).reshape(cp, tp)
    met: Array | None = None
    for _ in range(layers):
        done = [_ring_layer(b, chips, met) for _ in range(2)]
        met = b.compute(np.array([0]), 1e-6)
        for last in done:
            b.after(last, met)
    return b.build(seed)


def random_dag(net: Net, n_ops: int, window: int = 600, stretch: int = 2000, seed: int = SEED) -> Workload:
    """Flows and computes, each after up to three of the ``window`` ops before it; all meet every ``stretch`` ops."""
    stream = Stream(seed + 1)
    b = _Builder(net)
    n_ops -= n_ops % stretch if n_ops > stretch else 0
    stretch = min(stretch, n_ops)
    meets = np.arange(n_ops) % stretch == stretch - 1
    is_flow = (stream.unit(n_ops) < 0.6) & ~meets
    src = stream.whole(0, net.n_chips, n_ops)
    dst = (src + stream.whole(1, net.n_chips, n_ops)) % net.n_chips
    amount = np.where(is_flow, stream.wide(1e4, 11, n_ops), stream.wide(1e-6, 7, n_ops))
    ops = b.add(is_flow, src, dst, amount)
    met = ops - ops % stretch - 1  # the meeting before, -1 for none
    pairs = []
    for share in (1.0, 0.6, 0.3):
        pred = np.maximum(ops - 1 - stream.whole(0, window, n_ops), met)
        chosen = (stream.unit(n_ops) < share) & (pred >= 0) & ~meets
        pairs.append(pred[chosen] * n_ops + ops[chosen])
    followed = np.zeros(n_ops, bool)
    followed[np.concatenate(pairs) // n_ops] = True
    last = ops[~followed & ~meets]
    pairs.append(last * n_ops + last - last % stretch + stretch - 1)
    distinct = np.unique(np.concatenate(pairs))
    b.after(distinct // n_ops, distinct % n_ops)
    return b.build(seed)


def all_to_all(net: Net, rounds: int, seed: int = SEED) -> Workload:
    """Every chip sends to every other, computes on what came in, and sends again."""
    b = _Builder(net)
    chips = np.arange(net.n_chips)
    src, dst = (index[~np.eye(net.n_chips, dtype=bool)] for index in np.indices((net.n_chips, net.n_chips)))
    before: Array | None = None
    for _ in range(rounds):
        sent = b.flow(src, dst, 5e6)
        b.after(None if before is None else before[src], sent)
        before = b.compute(chips, 1e-4)
        b.after(sent, before[dst])
    return b.build(seed)


def incast(net: Net, waves: int, seed: int = SEED) -> Workload:
    """Wave by wave all chips send twice to one, which computes and answers each of them."""
    b = _Builder(net)
    last: Array | None = None
    for wave in range(waves):
        root = np.array([wave % net.n_chips])
        others = np.delete(np.arange(net.n_chips), root)
        sent = b.flow(np.repeat(others, 2), root, 2e6)
        b.after(None if last is None else last[np.repeat(others, 2)], sent)
        merged = b.compute(root, 2e-5)
        b.after(sent, merged)
        answers = b.flow(root, others, 1e6)
        b.after(merged, answers)
        last = np.insert(answers, root, merged)
    return b.build(seed)


def pipeline(net: Net, n_micro: int, seed: int = SEED) -> Workload:
    """Micro-batches through a stage a chip, with a message beside each activation that nothing waits for."""
    b = _Builder(net)
    stages = np.arange(net.n_chips)
    following = (stages + 1) % net.n_chips
    aside = (stages + 3) % net.n_chips
    # Per micro-batch and stage: compute, activation, message aside.
    src = np.repeat(stages, 3)
    dst = np.stack([stages, following, aside], axis=1).ravel()
    kind = np.tile([False, True, True], net.n_chips)
    amount = np.tile([1e-4, 2e6, 5e5], net.n_chips)
    ops = b.add(kind, np.broadcast_to(src, (n_micro, len(src))), dst, amount).reshape(n_micro, net.n_chips, 3)
    b.after(ops[:, :, 0], ops[:, :, 1])
    b.after(ops[:, :, 0], ops[:, :, 2])
    b.after(ops[:, :-1, 1], ops[:, 1:, 0])
    return b.build(seed)


def full_fidelity(structure: Structure, costs: CostRows, row: int = 0) -> Workload:
    """Return every rank and every layer of a deployment, as the package builds them: in lockstep."""
    graph = Template(structure, reduced=False).chain(None).graph
    return Workload(graph, costs_of(costs, row))


def _ring(net: Callable[[bool], Net]) -> Callable[[int], Workload]:
    def make(n_ops: int) -> Workload:
        is_small = n_ops <= SIZES["small"]
        cp, tp = (4, 2) if is_small else (8, 4)
        per_layer = 2 * cp * tp * (2 * cp + 4 * (tp - 1)) + 1
        return ring_attention(net(is_small), cp, tp, max(1, round(n_ops / per_layer)))

    return make


# Family -> workload of about so many ops.
FAMILIES: dict[str, Callable[[int], Workload]] = {
    "ring_star": _ring(lambda small: star(8 if small else 32)),
    "ring_torus": _ring(lambda small: torus(2, 4) if small else torus(4, 8)),
    "ring_fat_tree": _ring(lambda small: fat_tree(2 if small else 8)),
    "random": lambda n_ops: random_dag(torus(4, 4), n_ops),
    "all_to_all": lambda n_ops: all_to_all(star(20), max(1, round(n_ops / 400))),
    "incast": lambda n_ops: incast(torus(4, 4), max(1, round(n_ops / 46))),
    "pipeline": lambda n_ops: pipeline(torus(2, 4), max(1, round(n_ops / 24))),
}


def make(family: str, size: str) -> Workload:
    """Return the workload of a family in one of `SIZES`."""
    return FAMILIES[family](SIZES[size])


def _edges(graph: Graph) -> tuple[Array, Array]:
    return np.repeat(np.arange(len(graph.op_kind)), np.diff(graph.succ_indptr)), graph.succ_indices


def _amounts(workload: Workload) -> tuple[Array, Array]:
    """Seconds or bytes of every op, and its latency."""
    g, c = workload
    is_flow = g.op_kind == FLOW
    amount, latency = np.zeros(len(g.op_kind)), np.zeros(len(g.op_kind))
    amount[is_flow] = c.bytes[g.op_cost[is_flow]]
    amount[~is_flow] = c.duration_s[g.op_cost[~is_flow]]
    latency[is_flow] = c.latency_s[g.op_latency[is_flow]]
    return amount, latency


def as_mapping(workload: Workload) -> dict[str, Any]:
    """Spell a workload out in the ``replay`` format; a flow's latency is that of its whole route."""
    g, c = workload
    amount, latency = _amounts(workload)
    assert (g.route_count == 1).all(), "classes of flows have no replay"
    ops: list[dict[str, Any]] = []
    for op in range(len(g.op_kind)):
        if g.op_kind[op] == COMPUTE:
            chip, prio = int(g.op_chip[op]), int(g.op_rank[op])
            ops.append({"kind": "compute", "chip": chip, "secs": float(amount[op]), "prio": prio})
        else:
            route = g.route_indices[g.route_indptr[op] : g.route_indptr[op + 1]].tolist()
            ops.append({"kind": "flow", "route": route, "bytes": float(amount[op]), "lat": float(latency[op])})
    return {
        "links": [{"bw": float(c.capacity_bytes_per_s[i])} for i in g.link_capacity],
        "chips": len(g.chip_indptr) - 1,
        "ops": ops,
        "deps": np.stack(_edges(g), axis=1).tolist(),
    }


def as_text(workload: Workload) -> str:
    """Spell a workload out as lines of numbers, which a program in C++ reads in no time.

    ``links chips ops deps``; a bandwidth per link; per op ``0 chip prio seconds`` or ``1 bytes latency n link…``; a
    ``pred succ`` per dependency. Floats are written so that they are read back to the last bit.
    """
    g, c = workload
    amount, latency = (column.tolist() for column in _amounts(workload))
    assert (g.route_count == 1).all(), "classes of flows have no replay"
    pred, succ = _edges(g)
    lines = [f"{len(g.link_capacity)} {len(g.chip_indptr) - 1} {len(g.op_kind)} {len(pred)}"]
    lines += [repr(bandwidth) for bandwidth in c.capacity_bytes_per_s[g.link_capacity].tolist()]
    kind, chip, rank = g.op_kind.tolist(), g.op_chip.tolist(), g.op_rank.tolist()
    indptr, links = g.route_indptr.tolist(), g.route_indices.tolist()
    for op in range(len(kind)):
        if kind[op] == COMPUTE:
            lines.append(f"0 {chip[op]} {rank[op]} {amount[op]!r}")
        else:
            route = links[indptr[op] : indptr[op + 1]]
            lines.append(f"1 {amount[op]!r} {latency[op]!r} {len(route)} {' '.join(map(str, route))}")
    lines += [f"{a} {b}" for a, b in zip(pred.tolist(), succ.tolist(), strict=True)]
    return "\n".join(lines) + "\n"
