"""What differs between the machines that one TileLang kernel body runs on.

The bodies in :mod:`impls.tilelang_splitkv` are written once. A *machine* supplies the constructors of their
buffers and loops, the two reductions, and the hooks of their K/V ring:

=============  =========================  ==============================  =====================
hook           ``Hopper`` (sm_90a)        ``Ampere`` (sm_80 and up)       ``Cpu`` (C target)
=============  =========================  ==============================  =====================
ring buffer    ``[stages, rows, cols]``   ``[stages, rows, cols]``        ``[rows, cols]``, local
``load``       TMA, one mbarrier a stage  ``cp.async``, one group a copy  plain copy, at once
``skip``       nothing                    an empty group                  nothing
``wait``       mbarrier parity            ``cp.async.wait_group``         nothing
``release``    barrier among threads      barrier among threads           nothing
``trigger``    lets the next kernel       nothing                         nothing
               be scheduled (PDL)
``depend``     waits for the results of   nothing                         nothing
               earlier kernels (PDL)
``clear_part`` a warp its own rows of V   a warp its own rows of V        never: one part
``clusters``   2, 4, 8, 16                none                            none
``exchanges``  yes                        no                              no
=============  =========================  ==============================  =====================

Hopper alone can merge splits inside of the split kernel, in a thread block cluster or by exchange; its hooks for
that are those of :mod:`impls.tilelang_cluster` and :mod:`impls.tilelang_exchange`, and no other machine is ever
asked for them.

``T.tma_copy`` and mbarriers exist for CUDA only, ``T.Parallel`` and fragments mean nothing to the C target,
and its scalar GEMM wants two-dimensional operands: hence this file rather than one more branch in the body.
"""

import shutil
from collections.abc import Mapping
from typing import Any

import tilelang.language as T
import torch
from tilelang.contrib.cc import get_cplus_compiler

from impls import tilelang_cluster, tilelang_exchange
from impls.contract import DecodeInputs, InputError
from impls.splits import check_offsets

PRELUDE = r"""
static __device__ __forceinline__ void zero_16_bytes(void *p) { *static_cast<uint4 *>(p) = make_uint4(0, 0, 0, 0); }
"""


@T.macro
def _hopper_load(X, ring, full, stage, row, head, rows, cols):
    T.tma_copy(
        X[row : row + rows, head, 0:cols],
        ring[stage, 0:rows, 0:cols],
        barrier=full[stage],
        eviction_policy="evict_first",
    )
    T.mbarrier_arrive(full[stage])


@T.macro
def _hopper_trigger():
    T.pdl_trigger()


@T.macro
def _hopper_depend():
    T.pdl_sync()


@T.macro
def _hopper_wait(full, stage, parity, stages):
    T.mbarrier_wait_parity(full[stage], parity)


@T.macro
def _ampere_load(X, ring, full, stage, row, head, rows, cols):
    T.async_copy(X[row : row + rows, head, 0:cols], ring[stage, 0:rows, 0:cols])


@T.macro
def _ampere_skip():
    T.ptx_commit_group()


@T.macro
def _ampere_wait(full, stage, parity, stages):
    # Groups are committed in the order in which they are waited for, K and V of a tile in turn, filled or empty.
    # Whichever it is: 2 * stages are on their way, and the oldest must have landed.
    T.ptx_wait_group(2 * stages - 1)
    T.sync_threads()


@T.macro
def _cpu_load(X, ring, full, stage, row, head, rows, cols):
    T.copy(X[row : row + rows, head, 0:cols], ring)


@T.macro
def _cuda_release():
    T.sync_threads()


@T.macro
def _cuda_clear_part(ring, stage, rest, first, rows, cols):
    for n in T.serial(T.ceildiv(rows * cols // 8, 32)):
        j = first + (n * 32 + T.get_thread_binding() % 32) // (cols // 8)
        d = (n * 32 + T.get_thread_binding() % 32) % (cols // 8) * 8
        if j >= rest:
            T.call_extern("void", "zero_16_bytes", T.address_of(ring[stage, j, d]))
    T.call_extern("void", "__syncwarp")


@T.macro
def _cuda_zero(ring, stage, row, col):
    ring[stage, row, col] = T.cast(0, ring.dtype)


@T.macro
def _cpu_zero(ring, stage, row, col):
    ring[row, col] = T.cast(0, ring.dtype)


@T.macro
def _cuda_max_into(src, dst, rows, cols):
    T.reduce_max(src, dst, dim=1, clear=False)


@T.macro
def _cuda_sum(src, dst, rows, cols):
    T.reduce_sum(src, dst, dim=1)


@T.macro
def _cpu_max_into(src, dst, rows, cols):
    for i, j in T.grid(rows, cols):
        dst[i] = T.max(dst[i], src[i, j])


@T.macro
def _cpu_sum(src, dst, rows, cols):
    for i in T.serial(rows):
        dst[i] = 0.0
    for i, j in T.grid(rows, cols):
        dst[i] += src[i, j]


@T.macro
def _nothing():
    T.evaluate(0)


@T.macro
def _no_wait(full, stage, parity, stages):
    T.evaluate(0)


class Machine:
    """Constructors and hooks; see the table above. Class attributes ending in a macro are called in kernels."""

    name: str
    target: str
    tma: bool
    ring_bytes: int
    shared: Any
    fragment: Any
    parallel: Any
    load: Any
    skip: Any
    wait: Any
    release: Any
    trigger: Any
    depend: Any
    clear_part: Any
    zero: Any
    max_into: Any
    sum: Any
    clusters: tuple[int, ...] = ()
    exchanges: bool = False
    cluster_open: Any
    cluster_wait: Any
    cluster_push: Any
    cluster_receive: Any
    mail_post: Any
    mail_collect: Any

    def kernel(self, *grid: Any, threads: int, cluster: int = 1, exchange: bool = False) -> Any:
        """The launch frame over a grid, in clusters of CTAs or for an exchange where the machine has them."""
        raise NotImplementedError

    def threads(self, count: int) -> Any:
        """What stands for the threads of a CTA in a loop whose body each runs by itself, up to where they meet."""
        return T.serial(count)

    def packed(self, shape: list[Any], strides: list[Any], dtype: str) -> Any:
        """The parameter type of packed K or V: strided where the copies can take any stride."""
        return T.StridedTensor(shape, strides, dtype)

    def padded(self, head_dim: int) -> int:
        """Columns of a GEMM tile that holds ``head_dim`` columns of data."""
        return head_dim

    def ring(self, stages: int, rows: int, cols: int, dtype: str) -> Any:
        """The buffer of a K or V ring."""
        raise NotImplementedError

    def tile(self, ring: Any, stage: Any, row: Any, rows: int) -> Any:
        """Rows of one stage of a ring as a GEMM operand, ``[rows, cols]``."""
        raise NotImplementedError

    def parts(self, block_h: int, threads: int) -> int:
        """Into how many parts a tile's keys are shared out, so that each warp has 16 rows of its own."""
        return 1

    def part(self, block_h: int, parts: int) -> Any:
        """The part of the calling thread."""
        return 0

    def barriers(self, stages: int, threads: int) -> Any:
        """What says that a stage is full; None where loads are synchronous or counted."""
        return None


class Ampere(Machine):
    """NVIDIA sm_80 and up: ``cp.async`` into shared memory, ``mma.sync``."""

    name = "sm_80"
    target = "cuda"
    tma = False
    ring_bytes = 64 << 10  # sm_86 and sm_89 have 99 KiB of shared memory a CTA
    shared = staticmethod(T.alloc_shared)
    fragment = staticmethod(T.alloc_fragment)
    parallel = staticmethod(T.Parallel)
    load = _ampere_load
    skip = _ampere_skip
    wait = _ampere_wait
    release = _cuda_release
    trigger = _nothing
    depend = _nothing
    clear_part = _cuda_clear_part
    zero = _cuda_zero
    max_into = _cuda_max_into
    sum = _cuda_sum

    def kernel(self, *grid: Any, threads: int, cluster: int = 1, exchange: bool = False) -> Any:
        """A grid of CTAs of ``threads`` threads."""
        return T.Kernel(*grid, threads=threads, prelude=PRELUDE)

    def threads(self, count: int) -> Any:
        """The calling thread alone: its body is no loop."""
        return (T.get_thread_binding(),)

    def packed(self, shape: list[Any], strides: list[Any], dtype: str) -> Any:
        """Contiguous: ``cp.async`` moves 16 bytes only where the compiler can prove them aligned."""
        return T.Tensor(shape, dtype)

    def padded(self, head_dim: int) -> int:
        """A multiple of 32; the rest is 0. Every warp has all columns of its rows: ``mma`` asks for 16 only."""
        return -(-head_dim // 32) * 32

    def ring(self, stages: int, rows: int, cols: int, dtype: str) -> Any:
        """``[stages, rows, cols]`` in shared memory."""
        return T.alloc_shared([stages, rows, cols], dtype)

    def tile(self, ring: Any, stage: Any, row: Any, rows: int) -> Any:
        """A region whose first row may differ from warp to warp: each reads its operand by itself."""
        return ring[stage, row : row + rows, :]

    def parts(self, block_h: int, threads: int) -> int:
        """As many as there are warps for every 16 heads of a tile."""
        return max(1, threads // 32 * 16 // block_h)

    def part(self, block_h: int, parts: int) -> Any:
        """Warps in a row have the heads of one part, 16 each."""
        return T.get_thread_binding() // 32 * 16 // block_h if parts > 1 else 0


class Hopper(Ampere):
    """NVIDIA sm_90a: TMA into shared memory, ``wgmma`` for tiles of 64 rows and more."""

    name = "sm_90a"
    tma = True
    ring_bytes = 144 << 10  # one CTA an SM with 128 KiB in flight beat two with 64 KiB each
    load = _hopper_load
    skip = _nothing
    wait = _hopper_wait
    trigger = _hopper_trigger
    depend = _hopper_depend
    clusters = tilelang_cluster.CLUSTERS
    cluster_open = tilelang_cluster.cluster_open
    cluster_wait = tilelang_cluster.cluster_wait
    cluster_push = tilelang_cluster.cluster_push
    cluster_receive = tilelang_cluster.cluster_receive
    exchanges = True
    mail_post = tilelang_exchange.mail_post
    mail_collect = tilelang_exchange.mail_collect

    def kernel(self, *grid: Any, threads: int, cluster: int = 1, exchange: bool = False) -> Any:
        """A grid of CTAs of ``threads`` threads, ``cluster`` neighbours of the first axis in a cluster."""
        prelude = PRELUDE
        if cluster > 1:
            return T.Kernel(
                *grid, threads=threads, cluster_dims=cluster, prelude=prelude + tilelang_cluster.PRELUDE
            )
        return T.Kernel(*grid, threads=threads, prelude=prelude + (tilelang_exchange.PRELUDE if exchange else ""))

    def packed(self, shape: list[Any], strides: list[Any], dtype: str) -> Any:
        """Any row and head stride: they go into the tensor map."""
        return T.StridedTensor(shape, strides, dtype)

    def barriers(self, stages: int, threads: int) -> Any:
        """One mbarrier a stage, at which every thread arrives."""
        return T.alloc_barrier([threads] * stages)


class Cpu(Machine):
    """Any CPU, through generated C: local arrays, serial loops, one stage."""

    name = "cpu"
    target = "c"
    tma = False
    ring_bytes = 0  # loads are synchronous: one stage
    shared = staticmethod(T.alloc_local)
    fragment = staticmethod(T.alloc_local)
    parallel = staticmethod(T.grid)
    load = _cpu_load
    skip = _nothing
    wait = _no_wait
    release = _nothing
    trigger = _nothing
    depend = _nothing
    zero = _cpu_zero
    max_into = _cpu_max_into
    sum = _cpu_sum

    def kernel(self, *grid: Any, threads: int, cluster: int = 1, exchange: bool = False) -> Any:
        """A loop nest; there are no threads."""
        return T.Kernel(*grid)

    def ring(self, stages: int, rows: int, cols: int, dtype: str) -> Any:
        """``[rows, cols]``: one stage, since loads are synchronous."""
        return T.alloc_local([rows, cols], dtype)

    def tile(self, ring: Any, stage: Any, row: Any, rows: int) -> Any:
        """The buffer itself: there is one stage, and one part."""
        return ring


MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in (Hopper(), Ampere(), Cpu())}
"""The machines, by the name that a plan's config states."""


def choose_machine(device: torch.device) -> Machine:
    """The machine whose kernels run on a device."""
    if device.type == "cpu":
        return MACHINES["cpu"]
    return MACHINES["sm_90a" if torch.cuda.get_device_capability(device) == (9, 0) else "sm_80"]


def compute_dtype(machine: Machine, dtype: str) -> str:
    """The dtype that a kernel computes a problem of ``dtype`` in; the C target has no bfloat16."""
    return "float32" if machine.target == "c" and dtype == "bfloat16" else dtype


def check_layout(machine: Machine, inputs: DecodeInputs) -> None:
    """Refuse by name the views that the machine's copies cannot read; host values only, nothing is copied.

    Raises:
        InputError: naming the tensor and the stride.
    """
    if not inputs.q.is_contiguous():
        raise InputError(f"q: expected contiguous, got strides {inputs.q.stride()}")
    for name, x in (("k", inputs.k), ("v", inputs.v)):
        if machine.tma:
            unit = 16 // x.element_size()
            if x.data_ptr() % 16 or any(stride % unit for stride in x.stride()[:2]):
                raise InputError(
                    f"{name}: expected a 16-byte aligned start and strides that are multiples of {unit} (TMA), "
                    f"got address {x.data_ptr():#x} and strides {x.stride()}"
                )
        elif machine.target == "cuda" and not x.is_contiguous():
            raise InputError(f"{name}: expected contiguous (cp.async), got strides {x.stride()}")
        if not machine.tma and (refusal := check_offsets(x.shape[0] * x.stride(0), name)):
            raise InputError(refusal)


def missing_compiler() -> str | None:
    """What the C target lacks to compile here, or None: it takes CXX, CC, g++, clang++ or c++."""
    try:
        compiler = get_cplus_compiler()
    except Exception as error:  # with what it looked for
        return f"C++ compiler (TileLang's C target): {error}"
    if compiler is None or shutil.which(compiler) is None:
        return f"C++ compiler (TileLang's C target): expected {compiler or 'one'} on PATH, found none"
    return None
