"""Merging the splits of a sequence inside of one thread block cluster: when, and by which instructions.

The CTAs of a cluster can write into one another's shared memory (*distributed shared memory*, sm_90 and later).
Where the splits of a sequence are one cluster they need no workspace and no combine kernel: CTA ``rank`` owns the
columns ``[rank * W, (rank + 1) * W)`` of the output, with ``W`` of :func:`column_width`. After its keys every CTA
pushes its unnormalised float32 output, 16 bytes at a time, out of registers into its own slot at the owner, and
the maximum and the sum of each head to every owner; then every CTA merges its columns from its own shared memory.
A push is ``st.async``, whose bytes are counted by an mbarrier of the receiver: no CTA reads remotely, and each
leaves only after the last byte that was meant for it, so that no second barrier is needed.

TileLang 0.1.15 has neither remote loads nor remote stores out of registers (``T.copy_cluster`` wants shared memory
at both ends), hence the inline PTX of :data:`PRELUDE`. Instructions: PTX ISA 8.1, ``st.async``, ``mapa``,
``mbarrier`` and ``barrier.cluster``.
"""

import math
from collections.abc import Sequence

import tilelang.language as T

from impls.splits import Int64Array, common_count

CLUSTERS = (2, 4, 8, 16)
"""The cluster sizes that our rule takes: each is a compiled kernel, for TileLang launches with constant sizes."""

MAX_CLUSTER = 16
"""The most CTAs of a cluster on an H200; above 8, a kernel has to allow it, as those of TileLang do."""

GPCS = 8
"""The most GPCs (graphics processing clusters) of sm_90; NVIDIA H100 Tensor Core GPU Architecture, 2022."""

SM_SHARED_BYTES = 228 << 10
"""Shared memory of an sm_90 SM (CUDA C++ Programming Guide, compute capabilities)."""

CTA_RESERVED_BYTES = 1 << 10
"""What the system takes of it for each CTA (same table)."""

CTA_BYTES = SM_SHARED_BYTES - CTA_RESERVED_BYTES
"""The most shared memory that one CTA may have, dynamic and static."""

SM_REGISTERS, THREAD_REGISTERS = 64 << 10, 256
"""Registers of an SM, and the most that are set aside for one thread (same table, allocated in units of 8)."""

STATIC_BYTES = 48 << 10
"""The most shared memory that a CTA may allocate statically (same table)."""

PRELUDE = r"""
// The shared memory address that `p` of this CTA has in the CTA `rank` of the cluster.
static __device__ __forceinline__ unsigned dsm_at(const void *p, int rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(p))), "r"(rank));
  return remote;
}
// All threads: `arrived` shall count `bytes` that are sent here, and the other CTAs may know that this one runs.
static __device__ __forceinline__ void dsm_open(void *arrived, int bytes) {
  if (threadIdx.x == 0) {
    const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(arrived));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // what the relaxed arrival does not order
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// All threads: from here on every CTA of the cluster runs, and counts. (TileLang's own has no "memory" clobber.)
static __device__ __forceinline__ void dsm_wait_open() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Send four columns of a head to their owner, with the first ones the head's maximum and sum.
static __device__ __forceinline__ void dsm_push(float *slot, float *stat, void *arrived, int owner, bool first,
                                                const float *x, float top, float sum) {
  const unsigned bar = dsm_at(arrived, owner);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(dsm_at(slot, owner)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar) : "memory");
  if (first)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(dsm_at(stat, owner)), "f"(top), "f"(sum), "r"(bar) : "memory");
}
// All threads: every byte that is meant for this CTA has arrived and can be read.
static __device__ __forceinline__ void dsm_receive(void *arrived) {
  const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(arrived));
  unsigned done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar) : "memory");
}
"""


@T.macro
def cluster_open(arrived, size):
    """Start counting what is sent here, and say that this CTA runs: the first half of a cluster barrier."""
    T.call_extern("void", "dsm_open", T.address_of(arrived[0]), size)


@T.macro
def cluster_wait():
    """Wait until all CTAs of the cluster run: the other half, before the first push."""
    T.call_extern("void", "dsm_wait_open")


@T.macro
def cluster_push(received, stats, arrived, rank, i, d, width, four, top, total):
    """Send columns ``d`` to ``d + 3`` of head ``i`` to their owner, with its first ones the head's max and sum."""
    T.call_extern(
        "void",
        "dsm_push",
        T.address_of(received[rank, i, d % width]),
        T.address_of(stats[rank, i, 0]),
        T.address_of(arrived[0]),
        d // width,
        d % width == 0,
        T.address_of(four[0]),
        top,
        total,
    )


@T.macro
def cluster_receive(arrived):
    """Wait for all that is sent here."""
    T.call_extern("void", "dsm_receive", T.address_of(arrived[0]))


def column_width(head_dim: int, cluster: int) -> int:
    """Columns that a CTA of a cluster owns, a multiple of 4, so that 16 bytes have one owner.

    The last CTAs may own fewer, or none: of 16 CTAs with 80 columns, ten own 8 each.
    """
    return -(-head_dim // (4 * cluster)) * 4


def static_bytes(rows: int, head_dim: int, cluster: int, num_stages: int) -> int:
    """Static shared memory of a split kernel, as dynamic memory lets it be: a multiple of 1024 bytes.

    The slots, a maximum and a sum for each of their rows and an mbarrier; of the ring, two mbarriers a stage.

    Args:
        rows: that hold the heads of a tile.
        head_dim: elements per head, D.
        cluster: CTAs of the cluster; 1 receives nothing.
        num_stages: of the ring.
    """
    received = 4 * cluster * rows * (column_width(head_dim, cluster) + 2) + 16 if cluster > 1 else 0
    return -(-(received + 16 * num_stages) // 1024) * 1024


def ctas_per_sm(shared_bytes: int, threads: int) -> int:
    """CTAs that an SM of sm_90 surely holds at once, at least one, whatever registers their kernel takes.

    Args:
        shared_bytes: of one CTA, dynamic and static.
        threads: of one CTA.
    """
    by_memory = SM_SHARED_BYTES // (shared_bytes + CTA_RESERVED_BYTES)
    return max(1, min(by_memory, SM_REGISTERS // (THREAD_REGISTERS * threads)))


def clusters_at_once(cluster: int, sms: int, ctas_per_sm: int) -> int:
    """Clusters of ``S`` CTAs that are surely on the device at once, however its SMs lie in GPCs.

    A cluster lies inside of one GPC. A GPC of ``n`` SMs holds ``k * n`` CTAs and so ``floor(k * n / S)`` clusters,
    which leaves ``r = k * n mod S`` places empty. SMs come in pairs (TPCs), so ``n`` is even and ``k * n`` is a
    multiple of ``2 * k``; then ``r`` is a multiple of ``g = gcd(2 * k, S)`` and less than ``S``: at most ``S - g``.
    That holds for a GPC too small for any cluster as well: all its places stay empty, ``r = k * n < S``. Over at
    most 8 GPCs, ``S * clusters = k * sms - sum(r) >= k * sms - 8 * (S - g)``, and clusters are whole: rounded up.

    On an H200 (132 SMs) with ``k = 1``, that is 66 clusters of 2, 29 of 4, 11 of 8 and 2 of 16.

    Args:
        cluster: CTAs of a cluster, S.
        sms: SMs of the device.
        ctas_per_sm: CTAs that an SM holds at once, k.
    """
    lost = GPCS * (cluster - math.gcd(2 * ctas_per_sm, cluster))
    return max(0, -((lost - ctas_per_sm * sms) // cluster))


def cluster_size(
    counts: Int64Array, tiles: int, sms: int, ctas_per_sm: int, sizes: Sequence[int] = CLUSTERS
) -> int:
    """The cluster in which the splits of every sequence merge, or 1: they write partials for a combine kernel.

    That is the number of splits, where it is the same for all sequences and one of ``sizes``, and all clusters are
    surely on the device at once (:func:`clusters_at_once`). The combine kernel that is saved costs about 2 µs; a
    second round of clusters, for want of one GPC with room, costs as much as the first.

    Args:
        counts: ``[B]`` splits of each sequence.
        tiles: CTAs that one split launches: KV heads times head tiles.
        sms: SMs of the device.
        ctas_per_sm: CTAs that an SM holds at once.
        sizes: what may be chosen.
    """
    size = common_count(counts)
    if size is None or size not in sizes:
        return 1
    return size if len(counts) * tiles <= clusters_at_once(size, sms, ctas_per_sm) else 1
