"""The software stack under a deployment: what it costs beyond the work itself, and how its library moves data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from g5cp_vec.config._files import describe, locate, read_record
from g5cp_vec.config._record import Count, NonNegative, Record, Size
from g5cp_vec.config.calibration import Kernels

IDEAL = "ideal"

Phase = Literal["prefill", "decode"]
# How an all-reduce over several nodes is done; see g5cp_vec.mapping.collectives.
AllReduce = Literal["flat", "rails", "hierarchical"]


def _phases(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError(f'expected a list of "prefill" and "decode", got {describe(value)}')


class Runtime(Record):
    """Costs of launching, synchronising and communicating that are not work.

    Attributes
    ----------
    source : str or None
        Where the numbers come from.
    prefill_op_overhead_s, decode_op_overhead_s : float
        Added to every compute operation of a prefill or of a decode step (s).
    launch_s : float
        Added to every compute operation of a phase that is not in ``graphs`` (s): the cost of a launch.
    kernel_floor_s : float
        Shortest time of an element-wise kernel (s), whatever little it moves; matters where a step has few tokens.
    host_launch_s : float
        What the host takes to launch a kernel outside of a graph while the device works (s). It hides behind the device
        unless there are more kernels than work; counts where a server's prefill is predicted (`g5cp-vec accuracy`),
        which lasts at least as long as the host takes to launch it.
    step_tokens : int
        Prompt tokens that a step of the engine takes at most.
    steps_ahead : int
        Steps that the engine prepares beyond the one under way; a request that arrives waits for them.
    frontend_request_s, frontend_token_s : float
        What a server takes per request and per token of its prompt before the engine has it (s): HTTP, and turning text
        into tokens. One request after another, while the engine works.
    fuses_elementwise : bool
        Whether element-wise passes that follow one another in an operation are one kernel (a norm and the quantisation
        of its result, an activation and its quantisation), so that the floor counts once.
    fuses_all_reduce : bool
        Whether a tensor-parallel all-reduce adds the residual and normalises, so that no kernel follows it for that.
    graphs : tuple of {"prefill", "decode"}
        Phases whose launches nobody waits for: replayed from a captured graph, or queued ahead of the device.
    prefill_layer_s, decode_layer_s : float
        Added once per layer (s).
    prefill_request_s, decode_request_s : float
        Added once per step (s).
    cached_prefill_request_s : float
        Added once per prefill that starts from a cached prefix (s).
    ring_step_sync_s : float
        A blocking host step of a pass-KV ring (s): before every ring step the host waits until the step before has
        ended and its block has arrived, works this long, and only then launches the attention and the next transfer.
    send_recv_latency_s, all_to_all_latency_s : float
        The library's share of the latency of a transfer round a context-parallel ring, and of an all-to-all of
        partial results (s); the route's latency comes on top.
    kernel_library : str
        Engine whose kernels count where several were measured on the chip; empty for the chip's defaults.
    routing : str
        Distribution of tokens over experts under which measured experts count, as a label of the tables of kernels;
        empty for an even one. Bytes and FLOPs are those of an even one.
    collective_library, all_reduce_library : str
        Libraries whose collectives count as measured on the chip, inside a switched domain: ``"nccl"``, and the engine
        whose own all-reduce takes calls of at most ``all_reduce_library_limit``. Empty for wires as they are.
    all_reduce_library_limit : int or None
        In bytes of the whole buffer; None where what was measured of the engine is all that it does, its own change to
        another library for large calls among it.
    prefill_all_reduce, decode_all_reduce : {"flat", "rails", "hierarchical"}
        All-reduce of a tensor-parallel group that spans nodes evenly: ``flat`` is what the key ``collective`` says.
    decode_serial : bool
        Whether a decode step runs on a single stream, so that a ring's transfers and computes take turns.
    split_kv_sequence_s : float
        What decode attention costs per sequence and layer whatever its context (s): splitting, and merging the splits.
    overlap_slowdown : float
        A ring step computes slower by this fraction while a block is on its way: both use memory and multiprocessors.
    """

    source: str | None = None
    prefill_op_overhead_s: NonNegative = 0.0
    decode_op_overhead_s: NonNegative = 0.0
    launch_s: NonNegative = 0.0
    kernel_floor_s: NonNegative = 0.0
    host_launch_s: NonNegative = 0.0
    step_tokens: Count = 8192
    steps_ahead: Size = 0
    frontend_request_s: NonNegative = 0.0
    frontend_token_s: NonNegative = 0.0
    fuses_elementwise: bool = False
    fuses_all_reduce: bool = False
    graphs: Annotated[tuple[Phase, ...], BeforeValidator(_phases)] = ()
    prefill_layer_s: NonNegative = 0.0
    decode_layer_s: NonNegative = 0.0
    prefill_request_s: NonNegative = 0.0
    decode_request_s: NonNegative = 0.0
    cached_prefill_request_s: NonNegative = 0.0
    ring_step_sync_s: NonNegative = 0.0
    send_recv_latency_s: NonNegative = 0.0
    all_to_all_latency_s: NonNegative = 0.0
    kernel_library: str = ""
    routing: str = ""
    collective_library: str = ""
    all_reduce_library: str = ""
    all_reduce_library_limit: Size | None = None
    prefill_all_reduce: AllReduce = "flat"
    decode_all_reduce: AllReduce = "flat"
    decode_serial: bool = False
    split_kv_sequence_s: NonNegative = 0.0
    overlap_slowdown: NonNegative = 0.0

    @property
    def has_library_latency(self) -> bool:
        """Whether some call or message of the collective library has a latency of its own."""
        is_measured = bool(self.collective_library or self.all_reduce_library)
        return is_measured or self.send_recv_latency_s > 0 or self.all_to_all_latency_s > 0

    @property
    def kernels(self) -> Kernels:
        """Which of several measured kernels count."""
        return Kernels(self.kernel_library, self.routing)

    def op_overhead_s(self, phase: str) -> float:
        """Return what every compute operation of a phase costs beyond its work (s)."""
        launch_s = 0.0 if phase in self.graphs else self.launch_s
        return launch_s + (self.prefill_op_overhead_s if phase == "prefill" else self.decode_op_overhead_s)

    def all_reduce(self, phase: str) -> str:
        """Return how tensor-parallel groups over several nodes reduce in a phase."""
        return self.prefill_all_reduce if phase == "prefill" else self.decode_all_reduce


def load_runtime(name_or_path: str, base: Path | None = None) -> Runtime:
    """Return a runtime by preset name or TOML path; see :func:`g5cp_vec.config.model.load_model`."""
    return read_record(Runtime, locate("runtimes", name_or_path, base))
