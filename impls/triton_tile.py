"""The tile of the Triton kernels: the rule that chooses it, the tiles that a tuner may try, and what they take.

Decode is bound by reading K and V, so a tile is chosen for bytes in flight, not for the tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from impls.contract import Scalar
from impls.problem import DecodeProblem
from impls.space import Space
from impls.splitkv_plan import CPU_CTAS, positive

TILE_TUNING: Mapping[str, Scalar] = {
    "block_n": None,
    "block_h": None,
    "num_stages": None,
    "num_warps": 4,
    "eager": None,
}
"""What a caller may choose about tiles; None means the rule in :func:`choose_tile`."""

RESERVED_BYTES = 1 << 10
"""Shared memory that the system takes for each CTA (CUDA C++ Programming Guide, compute capability 8.0 and up)."""

SPACE: Space = (
    {"block_n": (32, 64, 128), "num_stages": (2, 3, 4)},
    {"block_n": (64, 128), "num_stages": (2, 3), "num_warps": (8,)},
    # 64 rows, for `wgmma`.
    {"block_h": (64,), "block_n": (64, 128), "num_stages": (2, 3)},
    {"eager": (False, True)},
)
"""The tiles that a tuner tries."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the rules know of a device, so that they can be asked about a GPU that is not here.

    Args:
        sms: its SMs; on a CPU, what stands in for them.
        shared_bytes: shared memory that one CTA may use.
        registers: of an SM.
        capability: its compute capability; None for a CPU, where kernels are interpreted.
    """

    sms: int
    shared_bytes: int = 0
    registers: int = 0
    capability: tuple[int, int] | None = None

    @property
    def interprets(self) -> bool:
        """Whether kernels run in the interpreter, one program after another."""
        return self.capability is None

    @property
    def pdl(self) -> bool:
        """Whether a kernel can be put in place while the one before it runs (PDL): from sm_90 on."""
        return self.capability is not None and self.capability >= (9, 0)


CPU = Machine(sms=CPU_CTAS)
"""What the rules know of a CPU."""


def sm_90(sms: int) -> Machine:
    """A GPU of compute capability 9.0 with so many SMs (CUDA C++ Programming Guide, compute capability 9.0)."""
    return Machine(sms=sms, shared_bytes=227 << 10, registers=64 << 10, capability=(9, 0))


@cache
def machine_of(device: torch.device) -> Machine:
    """What the rules know of a device that is here."""
    if device.type == "cpu":
        return CPU
    import triton  # not above: impls.triton_splitkv says first whether it compiles or interprets

    index = torch.cuda.current_device() if device.index is None else device.index
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return Machine(
        sms=properties["multiprocessor_count"],
        shared_bytes=properties["max_shared_mem"],
        registers=properties["max_num_regs"],
        capability=torch.cuda.get_device_capability(device),
    )


@dataclass(frozen=True)
class Tile:
    """The shape of the split kernel: everything it is compiled for besides head dim and dtype.

    With ``eager``, Q is loaded again with every tile of keys, as part of the pipeline, so that K and V are on their
    way before anything waits for Q.
    """

    block_n: int
    block_h: int
    num_stages: int
    num_warps: int
    eager: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_n", 16), ("block_h", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two >= {least}, got {value}")


def block_d(head_dim: int) -> int:
    """The head dim padded to what a Triton tile can hold: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_tile(problem: DecodeProblem, machine: Machine, choice: Mapping[str, Scalar], *, work: str) -> Tile:
    """The caller's tile where there is one, else the rule; of the problem's lengths it sees only what kind of work
    they are (:func:`impls.splitkv_plan.work_of`).

    ``block_h``: the group of query heads that shares a KV head, padded to the 16 rows of a tensor-core tile;
    over 64, several tiles. Float32 uses no tensor cores and holds its tiles in registers: always 16.

    ``block_n``: the most keys, up to 128 (float32: 64), whose K and V in all pipeline buffers fit 60 % of an
    SM's shared memory. Half as many for spills, crowds and short work, that of few sequences only up to head dim
    128, and up to head dim 64 for rounds, so that several CTAs share an SM, and a quarter of all that fit, at least
    32, for packed work, so that all do. Even and steady work take half as many too, but for head dims from 65 to
    128 alone: CTAs that start and end together, with nobody to fill the gap, end sooner after shorter last tiles. A
    crowd and, for those head dims, even and steady work have one stage more; up to head dim 64, short and even
    work. In the interpreter, the most keys whose products numpy leaves to one thread: 2^18 multiplications, over
    which OpenBLAS wakes a pool that costs more than it brings.

    ``eager``: where CTAs start often enough for their start to matter and no neighbour hides it, which is for all
    but crowds and steady work and, above head dim 64, packed work; only for 16 rows, and not for float32.

    All this is measured: ``reports/NOTES.md``.
    """
    block_h = 16 if problem.dtype == "float32" else min(64, max(16, 1 << (problem.group - 1).bit_length()))
    stages = 3
    if machine.interprets:
        block_n = max(16, 2**18 // (block_h * block_d(problem.head_dim)))
    else:
        buffers = 3 if block_h == 64 else 2  # Triton keeps one more where the product is a wgmma
        key_bytes = 2 * block_d(problem.head_dim) * problem.element_bytes
        fits = machine.shared_bytes * 6 // 10 // (buffers * key_bytes)
        block_n = min(64 if problem.dtype == "float32" else 128, 1 << (fits.bit_length() - 1))
        one_round = work in ("even", "steady") and block_d(problem.head_dim) == 128 and choice["block_n"] is None
        small = block_d(problem.head_dim) <= 64
        few = work == "few" and block_d(problem.head_dim) <= 128
        if work in ("short", "crowd", "spill") or one_round or few or (work == "rounds" and small):
            block_n = max(16, block_n // 2)
        elif work == "packed":
            block_n = min(block_n, max(32, 1 << (fits.bit_length() - 3)))
        if choice["block_n"] is None:
            stages += one_round or work == "crowd" or (small and work in ("short", "few", "even"))
    block_h = positive(choice, "block_h", block_h)
    can = block_h == 16 and problem.dtype != "float32"
    hidden = work in ("crowd", "steady") or (work == "packed" and block_d(problem.head_dim) > 64)
    eager = not hidden if choice["eager"] is None else choice["eager"]
    if not isinstance(eager, bool):
        raise ValueError(f"eager: expected true, false or none, got {eager!r}")
    return Tile(
        block_n=positive(choice, "block_n", block_n),
        block_h=block_h,
        num_stages=positive(choice, "num_stages", stages),
        num_warps=positive(choice, "num_warps"),
        eager=eager and can,
    )


def holds_v(problem: DecodeProblem, tile: Tile) -> bool:
    """Whether V goes to registers before the softmax, while its maximum is found: where registers suffice."""
    return tile.eager and block_d(problem.head_dim) <= 128


def parts(problem: DecodeProblem, tile: Tile) -> int:
    """Into how many parts a tile's keys are shared out: 4, one a warp, each with an accumulator of its own, or 1.

    Merging the parts at the end costs about 1 µs at head dim 128, more than the warps' waiting for each other; it
    pays up to head dim 64 (measured: ``reports/NOTES.md``).
    """
    fits = tile.num_warps == 4 and tile.block_h == 16 and tile.block_n >= 64
    return 4 if fits and block_d(problem.head_dim) <= 64 and problem.dtype != "float32" else 1


def tile_bytes(problem: DecodeProblem, tile: Tile, *, wgmma: bool) -> int:
    """Bytes of shared memory that the compiled split kernel takes, known without compiling it.

    The compiler keeps K and V in ``num_stages`` buffers for a wgmma (sm_90, 64 rows), in one fewer for other
    products. Q goes through shared memory too, with ``eager`` once a buffer, and P but for a wgmma; with parts, P
    does not, and Q only with ``eager``.
    """
    buffers = tile.num_stages if wgmma else max(1, tile.num_stages - 1)
    row = block_d(problem.head_dim) * problem.element_bytes
    ring = 2 * buffers * tile.block_n * row
    q = tile.block_h * row * (buffers if tile.eager else 1)
    if parts(problem, tile) > 1:
        return ring + q if tile.eager else ring
    return ring + q + (0 if wgmma else tile.block_h * tile.block_n * problem.element_bytes)


def uses_wgmma(tile: Tile, machine: Machine) -> bool:
    """Whether the compiler makes a wgmma of the tile's products: 64 rows, on sm_90."""
    return tile.block_h >= 64 and machine.capability == (9, 0)


def at_once(problem: DecodeProblem, tile: Tile, machine: Machine) -> int:
    """Programs of the split kernel that are surely on the device at once, at least one an SM.

    An SM has as much shared memory as one program may use and :data:`RESERVED_BYTES` more, which the system takes
    for every program; a thread has at most 256 registers.
    """
    shared = tile_bytes(problem, tile, wgmma=uses_wgmma(tile, machine))
    by_memory = (machine.shared_bytes + RESERVED_BYTES) // (shared + RESERVED_BYTES)
    by_registers = machine.registers // (256 * 32 * tile.num_warps)
    return machine.sms * max(1, min(by_memory, by_registers))


def can_exchange(problem: DecodeProblem) -> bool:
    """Whether the compiled kernel can merge by exchange.

    Words go in pairs. Next to float32 products, which fill the registers, the compiler spills.
    """
    return problem.head_dim % 2 == 0 and problem.dtype != "float32"
