"""The tile of the TileLang kernels and their cluster: the rules for them, what a tuner may try, what they take.

Decode is bound by reading K and V, so a tile is chosen for bytes in flight, not for the tensor cores.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from impls.contract import Scalar
from impls.problem import DecodeProblem
from impls.space import Space
from impls.splitkv_plan import (
    COMBINE_BYTES,
    Splitting,
    alike,
    few_unlike,
    full_speed_ctas,
    leaves_splits,
    positive,
    share_exceeds,
    short_keys,
    work_of,
)
from impls.splits import Int64Array, common_count
from impls.tilelang_cluster import (
    CTA_BYTES,
    MAX_CLUSTER,
    STATIC_BYTES,
    cluster_size,
    ctas_per_sm,
    static_bytes,
)
from impls.tilelang_machines import Machine

TILE_TUNING: Mapping[str, Scalar] = {
    "block_n": None,
    "block_h": None,
    "num_stages": None,
    "threads": None,
    "cluster": None,
}
"""What a caller may choose about tiles; None means the rule in :func:`choose_tile` or :func:`choose_cluster`."""

PART_KEYS = 16
"""The fewest keys of a part: what one ``mma`` takes of them for the output."""

SPACE: Space = (
    # What the official example is tuned over: 64 rows, `wgmma`.
    {"block_h": (64,), "block_n": (64, 128), "num_stages": (1, 2, 3)},
    # The group's own rows, `mma.sync`; four parts of 32 keys would have less than the 16 that one takes.
    {"block_n": (64, 128), "num_stages": (2, 3, 4)},
    {"block_n": (128,), "num_stages": (2,), "threads": (64, 256)},
)
"""The tiles that a tuner tries; the official example's are in ``get_configs`` of ``example_gqa_decode.py``."""


@dataclass(frozen=True)
class Tile:
    """The shape of the split kernel: everything it is compiled for besides heads, head dim, dtype and cluster."""

    block_h: int
    block_n: int
    num_stages: int
    threads: int


def choose_tile(machine: Machine, problem: DecodeProblem, choice: Mapping[str, Scalar], *, share: int = 1) -> Tile:
    """The caller's tile where there is one, else the rule.

    ``block_h`` is the group of query heads that shares a KV head, padded to the 16 rows of an ``mma`` (over 64:
    several tiles); the C target has no such unit and takes the group as it is. ``block_n`` is the longest tile,
    up to 128 keys, of which two fit the machine's ring, and ``num_stages`` is how many of it fit; half and quarter
    of that, in fewer stages or shorter tiles, are for :func:`ring_share`. ``threads``: 128, or, where that
    would leave the parts of a short tile under :data:`PART_KEYS` keys each, as many as do not.

    Args:
        machine: whose ring there is.
        problem: what is to be computed.
        choice: the tuning, complete.
        share: 1 for the whole ring, 2 for half of it, 4 for a quarter.

    Raises:
        ValueError: for a choice out of range, or one that leaves a part fewer keys.
    """
    group = problem.group
    if machine.target == "c":
        block_h, block_n, stages = min(group, 64), 64, 1
    else:
        block_h = next((h for h in (16, 32) if group <= h), 64)
        key_bytes = 2 * machine.padded(problem.head_dim) * problem.element_bytes
        block_n = min(128, 1 << (machine.ring_bytes // (2 * key_bytes)).bit_length() - 1)
        stages = machine.ring_bytes // (block_n * key_bytes)
        for _ in range(share.bit_length() - 1):
            if stages > 2 or block_n <= 64:
                stages //= 2
            else:
                block_n //= 2
    block_h = positive(choice, "block_h", block_h)
    block_n = positive(choice, "block_n", block_n)
    threads = positive(choice, "threads", max(32, min(128, 2 * block_h * (block_n // PART_KEYS))))
    parts = machine.parts(block_h, threads)
    if machine.target == "cuda" and block_h not in (16, 32, 64, 128):
        raise ValueError(f"block_h: expected 16, 32, 64 or 128, got {block_h}")
    if machine.target == "cuda" and block_n < PART_KEYS * parts:
        raise ValueError(
            f"block_n: expected >= {PART_KEYS * parts} with {threads} threads and block_h {block_h} ({PART_KEYS} "
            f"keys for each of {parts} parts), got {block_n}"
        )
    return Tile(
        block_h=block_h,
        block_n=block_n,
        num_stages=positive(choice, "num_stages", stages),
        threads=threads,
    )


def ring_tiles(machine: Machine, problem: DecodeProblem, choice: Mapping[str, Scalar]) -> Mapping[int, Tile]:
    """The tiles that our rule may take, by their share of the ring: 1 for the whole, 2 for half, 4 for a quarter.

    Only the whole where the caller has chosen a tile. There is a half for TMA, and for the head dims that it was
    measured for; a quarter for the shortest of these.
    """
    free = all(choice[name] is None for name in ("block_n", "num_stages", "threads"))
    shares = {64: (1, 2, 4), 128: (1, 2), 256: (1, 2)} if machine.tma and free else {}
    of = shares.get(machine.padded(problem.head_dim), (1,))
    return {share: choose_tile(machine, problem, choice, share=share) for share in of}


def ring_share(problem: DecodeProblem, choice: Mapping[str, Scalar], half: Tile, sms: int) -> int:
    """Which of :func:`ring_tiles` our rule takes, where there are more than one (measured: ``reports/NOTES.md``).

    Less than the whole ring lets several CTAs share an SM, where they hide each other's start and end, and wastes
    less at the ends of short sequences. How many of the CTAs an SM holds also decides how evenly they are laid out,
    and nothing does so more where sequences are read whole and short: see :func:`_narrow_share` and
    :func:`_medium_share`. Above head dim 128, packed work takes half from one and a half CTAs an SM on.

    Args:
        problem: what is to be computed.
        choice: the tuning; who chooses the splits has chosen the whole ring.
        half: the tile for half of the ring.
        sms: SMs of the device.
    """
    if choice["waves"] is not None or choice["cluster"] is not None or choice["num_splits"] not in ("auto", 1):
        return 1
    ctas = problem.batch * problem.tiles_per_split(half.block_h)
    work = work_of(problem, sms)
    if problem.head_dim > 128:
        return 2 if work == "packed" and 2 * ctas >= 3 * sms else 1
    # No sequence is so long that one round of CTAs would split it; a few rounds may.
    whole = ctas > sms and 2 * problem.max_kv * sms < 3 * problem.total_kv * problem.heads_kv
    if problem.head_dim <= 64:
        return _narrow_share(problem, work, ctas, whole, sms)
    return _medium_share(problem, work, ctas, whole, half, sms)


def _narrow_share(problem: DecodeProblem, work: str, ctas: int, whole: bool, sms: int) -> int:
    """:func:`ring_share` up to head dim 64, where a byte comes with so much to compute that few CTAs are slow.

    Half wherever whole sequences make one round at most, or an SM's share of all is short. Of short sequences that
    no round would split, up to 3.4 CTAs an SM, a quarter from 1.5 to 2.6 of them, and for up to 256 keys where they
    are fewer; rounds, and crowds and packed work of more, take a quarter as well.
    """
    short = not share_exceeds(problem, sms, short_keys(problem))
    if work == "rounds":
        return 4
    if (whole and short) or work in ("packed", "crowd"):
        if 10 * ctas <= 34 * sms:
            few_long = 10 * ctas <= 15 * sms and problem.max_kv > 256
            return 2 if few_long or 10 * ctas > 26 * sms else 4
        if work in ("packed", "crowd"):
            return 4
    return 2 if ctas <= sms or short else 1


def _medium_share(problem: DecodeProblem, work: str, ctas: int, whole: bool, half: Tile, sms: int) -> int:
    """:func:`ring_share` from head dim 65 to 128.

    Crowds take half. So do sequences that no round would split, of no more than four rings each in the mean, if
    they have up to 320 keys, or from 1.5 to 2 CTAs an SM, or over 2.6; and of about one length, where they take
    over half of the SMs. A few sequences of different lengths take half, unless an SM's share of all fits the whole
    ring: then there is nothing to even out. So do sequences about equally long, so many that each CTA may read a
    whole one in the only round: if half of the ring in one CTA an SM is enough for the memory's full speed, the
    other half is longer on its way and ends in longer last tiles, which nothing hides.
    """
    ring = 2 * half.block_n * half.num_stages
    short = problem.total_kv <= 4 * ring * problem.batch
    if work == "crowd":
        return 2
    if short and (whole or work == "packed"):
        between = 15 * sms < 10 * ctas <= 20 * sms
        return 2 if problem.max_kv <= 320 or between or 10 * ctas > 26 * sms else 1
    if few_unlike(problem, sms):
        return 2 if share_exceeds(problem, sms, ring) else 1
    enough = full_speed_ctas(sms, problem, block_n=half.block_n, num_stages=half.num_stages)
    return 2 if alike(problem) and (sms // 2 if short else enough) < ctas <= sms else 1


def tile_bytes(machine: Machine, problem: DecodeProblem, tile: Tile) -> int:
    """Bytes of dynamic shared memory that the split kernel of a CUDA machine takes, known without compiling it.

    K, V and Q; at the end each row's float32 output, maximum and sum are laid over them, and may need more.
    """
    dim = machine.padded(problem.head_dim)
    rows = machine.parts(tile.block_h, tile.threads) * tile.block_h
    read = (2 * tile.num_stages * tile.block_n + rows) * dim * problem.element_bytes
    return max(read, 4 * rows * (dim + 8 + 2))


def head_rows(group: int, block_h: int) -> int:
    """Rows that hold the heads of a tile, once its parts are merged: a power of 2, but no more than ``block_h``."""
    return min(block_h, 1 << (min(group, block_h) - 1).bit_length())


def choose_cluster(
    machine: Machine, problem: DecodeProblem, tile: Tile, asked: Scalar, counts: Int64Array, *, sms: int
) -> int:
    """CTAs that merge their splits by themselves as one cluster; 1 means partials and a combine kernel.

    Clusters of more than two CTAs are put into few GPCs, whose way to the memory then limits them: our rule takes
    those only where all of a split's keys fit the ring and are on their way at once, so that latency decides.

    Args:
        machine: whose ``clusters`` our rule may take; without any, always 1.
        problem: what is to be computed.
        tile: of the split kernel.
        asked: the tuning ``cluster``: None for our rule (:func:`impls.tilelang_cluster.cluster_size`), 1 for never,
            or the number of splits of every sequence, up to 16, whether or not all clusters run at once.
        counts: ``[B]`` splits of each sequence.
        sms: SMs of the device.

    Raises:
        ValueError: if what was asked for is none of these, or there is no shared memory to receive it in.
    """
    cluster = positive({"cluster": asked}, "cluster", common_count(counts) or 1)
    if cluster == 1 or (asked is None and not machine.clusters):
        return 1
    if not machine.clusters:
        raise ValueError(f"cluster: expected 1 on {machine.name}, got {cluster}")
    rows = head_rows(problem.group, tile.block_h)
    static = static_bytes(rows, problem.head_dim, cluster, tile.num_stages)
    shared = tile_bytes(machine, problem, tile) + static
    if asked is None:
        if static > STATIC_BYTES or shared > CTA_BYTES:
            return 1
        tiles = problem.tiles_per_split(tile.block_h)
        keys = -(-problem.max_kv // cluster)
        sizes = [size for size in machine.clusters if size == 2 or keys <= tile.num_stages * tile.block_n]
        return cluster_size(counts, tiles, sms, ctas_per_sm(shared, tile.threads), sizes)
    if cluster > MAX_CLUSTER:
        raise ValueError(f"cluster: expected an integer <= {MAX_CLUSTER}, got {cluster}")
    if common_count(counts) != cluster:
        splits = f"{counts.min()} to {counts.max()}" if len(counts) else "none"
        raise ValueError(f"cluster: expected the number of splits of every sequence ({splits}), got {cluster}")
    for what, got, most in (("static shared memory", static, STATIC_BYTES), ("shared memory", shared, CTA_BYTES)):
        if got > most:
            raise ValueError(f"cluster: expected <= {most} bytes of {what} a CTA, got {got} with {cluster}")
    return cluster


def clustered_splits(
    machine: Machine, problem: DecodeProblem, choice: Mapping[str, Scalar], tile: Tile, *, sms: int
) -> int | None:
    """Splits of every sequence where all of them shall merge in clusters whatever their lengths, or None.

    That is for sequences of over a tile, where clusters of so many CTAs for each are surely on the device at once.
    All of K and V is on its way at once then, so that what differs in length ends together; a cluster merges sooner
    than an exchange does, and a second tile of a CTA costs more than twice as many splits (measured:
    ``reports/NOTES.md``). In this order:

    - four, where no split is longer than a tile then and each has an SM to itself; or eight on half of the SMs, if
      their tiles are not full;
    - two, where the whole sequence fits the ring and each has an SM to itself, but above head dim 64 only for
      groups of up to four query heads;
    - as many as it takes for no split to be longer than the ring, where the sequences do not fit it themselves, nor
      are all of one length, two splits of which read at full speed, and more than those rings hold; above head dim
      64 if each has an SM to itself.

    Args:
        machine: whose ``clusters`` there are.
        problem: what is to be computed.
        choice: the tuning; who chooses anything about splits or how they merge has chosen.
        tile: of the split kernel.
        sms: SMs of the device.
    """
    if not leaves_splits(choice) or choice["merge"] != "auto" or problem.max_kv <= tile.block_n:
        return None
    shortest = min(problem.kv_lens)
    ring = tile.num_stages * tile.block_n

    def clusters(size: int) -> bool:
        counts = np.full(problem.batch, size)
        return size <= shortest and choose_cluster(machine, problem, tile, None, counts, sms=sms) == size

    whole = problem.batch * problem.tiles_per_split(tile.block_h)
    if problem.max_kv <= 4 * tile.block_n and 4 * whole <= sms and clusters(4):
        return 4
    if 4 * tile.block_n < problem.max_kv <= 7.5 * tile.block_n and 16 * whole <= sms and clusters(8):
        return 8
    if problem.max_kv <= ring:
        pays = 2 * whole <= sms and (problem.head_dim <= 64 or problem.group <= 4)
        return 2 if pays and clusters(2) else None
    if shortest == problem.max_kv:
        enough = full_speed_ctas(sms, problem, block_n=tile.block_n, num_stages=tile.num_stages)
        if 2 * whole >= enough and share_exceeds(problem, enough, ring):
            return None
    size = next((size for size in machine.clusters if problem.max_kv <= size * ring), None)
    if size is None or (problem.head_dim > 64 and size * whole > sms):
        return None
    return size if clusters(size) else None


def pairs_end_sooner(problem: DecodeProblem, splitting: Splitting, tile: Tile, *, sms: int) -> bool:
    """Whether two splits of every sequence, merged in clusters of two, end before splits that merge by exchange.

    Either ends after the memory's share of an SM, or after its longest CTA, which reads so many times faster than
    that share as fewer CTAs than SMs read at the memory's full speed; with more of them, less so. Above head dim
    128 it takes half as many CTAs again to read at full speed. An exchange costs as much more than a cluster as a
    combine kernel costs, and above head dim 128 twice as much.

    Args:
        problem: what is to be computed.
        splitting: what is planned.
        tile: of the split kernel.
        sms: SMs of the device.
    """
    ctas = 2 * problem.batch * splitting.tiles_per_split
    if not splitting.exchange or ctas > sms or min(problem.kv_lens) < 2:
        return False
    wide = problem.head_dim > 128
    enough = full_speed_ctas(sms, problem, block_n=tile.block_n, num_stages=tile.num_stages)
    enough += enough // 2 if wide else 0
    share = problem.total_kv * splitting.tiles_per_split / sms
    saves = COMBINE_BYTES / problem.key_bytes * (2 if wide else 1)
    pairs = max(share, -(-problem.max_kv // 2) * max(enough, 0.9 * ctas) / sms)
    return pairs < max(share, splitting.longest * enough / sms) + saves


def at_once(machine: Machine, problem: DecodeProblem, tile: Tile, sms: int) -> int:
    """CTAs of the split kernel that are surely on the device at once, for an exchange; 0 on a machine without."""
    if not machine.exchanges:
        return 0
    shared = tile_bytes(machine, problem, tile) + static_bytes(0, problem.head_dim, 1, tile.num_stages)
    return sms * ctas_per_sm(shared, tile.threads)


def combine_threads(head_dim: int) -> int:
    """Threads of a combine CTA for few splits: up to 128, each with as many columns as the others."""
    return 128 if head_dim <= 128 else math.gcd(head_dim, 128)


def combine_columns(head_dim: int) -> int:
    """Columns of a combine CTA for many splits: 32, the 128 bytes of a cache line, or the 16 that divide 80."""
    return math.gcd(head_dim, 32)
