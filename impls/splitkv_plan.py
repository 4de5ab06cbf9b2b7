"""What the plans of our two kernels share: the split table on the device, the workspace, the launch order.

The kernels are ports of each other, so they use one split rule, one table layout and one workspace layout.
Those are decided and allocated here; a kernel file adds its tile and its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from impls.contract import DecodeInputs, DecodeOutput, PlanRefused, Scalar, empty_output
from impls.exchange import LONG_CTA_BYTES, PLACES, mail_bytes, mail_shape, may_exchange, pays_to_exchange
from impls.problem import DecodeProblem
from impls.splits import (
    Int32Array,
    Int64Array,
    SplitTable,
    about_equal,
    as_array,
    equal_counts,
    make_table,
    plan_splits,
    proportional_counts,
)

BUDGET = "workspace_budget_bytes"

SPLIT_TUNING: Mapping[str, Scalar] = {
    "num_splits": "auto",
    "waves": None,
    "merge": "auto",
    BUDGET: 2 << 30,
}
"""What a caller may choose about splits: an integer or ``"auto"``; the rounds of CTAs that ``auto`` plans for,
None for whichever ends first; how splits are merged, one of :data:`MERGES`; and the largest workspace allowed."""

AMPLE = 1 << 62
"""A workspace that no plan reaches: what plans are weighed against does not depend on the memory that is left."""

MERGES = ("auto", "combine", "exchange")
"""Ways to merge splits that a caller may ask for: a combine kernel, or an exchange inside of the split kernel
(:mod:`impls.exchange`). ``auto`` exchanges where that pays, unless splits merge in clusters."""

CPU_CTAS = 32
"""What stands in for the SM count on a CPU: enough to split."""

CTA_OVERHEAD_BYTES = 136 << 10
"""What starting and ending a CTA costs, as bytes that an SM could have read meanwhile: about 4 µs on an H200. Above
head dim 128, where hardly two CTAs share an SM and nothing hides it, twice that."""

MERGE_BYTES = 1 << 10
"""What one more split to merge costs its sequence, as bytes that an SM could have read meanwhile: about 0.03 µs on
an H200 (``reports/NOTES.md``)."""

TINY_KEYS = 256
"""Keys of a CTA up to which its start and end are most of its time."""

ALONE_BYTES = 114 << 10
"""K and V in the ring of a CTA above which no two CTAs fit an SM of sm_90."""

COMBINE_BYTES = 50 << 10
"""What a combine kernel costs in all, as bytes that an SM could have read meanwhile: about 1.5 µs on an H200."""

SHORT_BYTES = 1 << 20
"""K and V for each SM up to which a few sequences of different lengths are short work (:func:`few_unlike`)."""

WORK = ("long", "short", "few", "crowd", "packed", "even", "steady", "rounds", "spill")
"""Kinds of batches, which have tiles of their own (:func:`work_of`)."""

WHOLE = ("packed", "crowd")
"""Kinds of which nothing is split (:func:`stays_whole`)."""

TRITON_WHOLE = (*WHOLE, "spill")
"""The same for Triton's kernel, whose tiles share an SM where TileLang's do not."""

STEADY_BYTES = 2 << 20
"""K and V of a CTA over which it reads so long that its start hardly matters."""

SPILL_KEYS = 6 << 10
"""Keys of a sequence up to which somewhat more CTAs than SMs are a kind of their own (:func:`work_of`)."""

IN_FLIGHT_BYTES = 60 << 10
"""K and V on their way for each SM at which TMA reads at the memory's full speed: 8 MB on an H200, by 64 CTAs of
128 KiB or by 128 of 64 KiB (``reports/NOTES.md``)."""


def positive(choice: Mapping[str, Scalar], key: str, default: int | None = None) -> int:
    """The integer that was chosen for ``key``, or ``default`` where the choice is None.

    Raises:
        ValueError: if that is not an integer of at least 1.
    """
    value = choice[key] if choice[key] is not None else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected an integer >= 1, got {value!r}")
    return value


def choose_splits(
    problem: DecodeProblem,
    choice: Mapping[str, Scalar],
    *,
    sm_count: int,
    tiles_per_split: int,
    limits: Limits,
    at_once: int = 0,
) -> SplitTable:
    """The split table of a problem under a tuning of :data:`SPLIT_TUNING`; see :func:`decide_splitting`."""
    lens = as_array(problem.kv_lens)
    if choice["num_splits"] != "auto":
        return make_table(lens, equal_counts(lens, positive(choice, "num_splits")))
    if choice["waves"] is not None:
        slots = sm_count * positive(choice, "waves")
        counts = proportional_counts(lens, tiles_per_split=tiles_per_split, slots=slots, min_keys=limits.min_keys)
        return make_table(lens, counts)
    key_bytes = problem.key_bytes
    return plan_splits(
        lens,
        tiles_per_split=tiles_per_split,
        ctas=sm_count,
        overhead=CTA_OVERHEAD_BYTES * (2 if problem.head_dim > 128 else 1) // key_bytes,
        merging=MERGE_BYTES / key_bytes,
        combine=COMBINE_BYTES // key_bytes,
        exchanged=max(1, sm_count // PLACES),
        exchange_keys=LONG_CTA_BYTES // key_bytes,
        at_once=at_once if choice["merge"] == "auto" else 0,
        **limits._asdict(),
    )


def _merges_by_exchange(
    choice: Mapping[str, Scalar], problem: DecodeProblem, table: SplitTable, *, ctas: int, at_once: int, sms: int
) -> bool:
    """Whether the partials of a table merge by exchange, as :data:`MERGES` has it.

    Raises:
        ValueError: if what was asked cannot be.
    """
    asked, slots = choice["merge"], table.slots
    can = may_exchange(ctas, slots, at_once)
    if asked == "exchange" and not can:
        raise ValueError(
            f"merge: expected 'auto' or 'combine' (an exchange takes partials, here {slots}, of at most {at_once} "
            f"CTAs, here {ctas}), got 'exchange'"
        )
    if asked == "auto" and can:
        fits = mail_bytes(slots, problem.heads_q, problem.head_dim, ctas) <= positive(choice, BUDGET)
        keys = int(table.items[:, 2].max())
        return fits and pays_to_exchange(problem, keys=keys, splits=table.splits_max, sms=sms)
    return asked == "exchange"


class Limits(NamedTuple):
    """What :func:`impls.splits.balanced_counts` must know of a kernel; its arguments of these names."""

    min_keys: int
    enough: int | None = None
    together: int = 1
    one_round: bool = False
    whole_trips: bool = False


def full_speed_ctas(sms: int, problem: DecodeProblem, *, block_n: int, num_stages: int) -> int:
    """CTAs, at most one an SM, whose rings put :data:`IN_FLIGHT_BYTES` an SM on their way."""
    ring_bytes = block_n * num_stages * problem.key_bytes
    return min(sms, max(1, -(-sms * IN_FLIGHT_BYTES // ring_bytes)))


def split_limits(sms: int, problem: DecodeProblem, *, block_n: int, num_stages: int, tma: bool) -> Limits:
    """What limits the splits of a kernel of ours.

    A kernel that fills a ring of ``num_stages`` tiles by TMA before it does anything else waits as long for one key
    as for a full ring: no shorter split is worth a CTA. And so many CTAs read at the memory's full speed as have
    :data:`IN_FLIGHT_BYTES` an SM on their way; but for heads wider than 128, with more to compute for each byte.
    One that loads by ``cp.async`` splits down to a tile; up to head dim 64 its tiles are so small that two and more
    CTAs share an SM (Triton's on sm_90; TileLang's on an A100 too, but not where an SM has 100 KiB), which counts
    for long work and for more sequences than an SM each.

    Somewhat fewer CTAs that make one round are weighed where a second one cannot hide: where a CTA has an SM to
    itself (:data:`ALONE_BYTES`); for sequences about equally long; for a few unlike ones, from head dim 65 to 128;
    and for so little work that starting a CTA costs more than it reads.

    Args:
        sms: SMs of the device.
        problem: whose K and V are read.
        block_n: keys of a tile.
        num_stages: tiles of the ring.
        tma: whether the ring is filled by TMA.
    """
    ring_bytes = block_n * (num_stages if tma else num_stages - 1) * problem.key_bytes
    unlike = 64 < problem.head_dim <= 128 and few_unlike(problem, sms)
    tiny = not share_exceeds(problem, sms, TINY_KEYS)
    one_round = alike(problem) or ring_bytes > ALONE_BYTES or tiny or unlike
    if not tma:
        several = problem.batch * problem.heads_kv >= sms or work_of(problem, sms) == "long"
        together = 2 if problem.head_dim <= 64 and several else 1
        return Limits(block_n, together=together, one_round=one_round)
    if problem.head_dim > 128:
        return Limits(block_n * num_stages, one_round=one_round, whole_trips=True)
    enough = full_speed_ctas(sms, problem, block_n=block_n, num_stages=num_stages)
    return Limits(block_n * num_stages, enough, one_round=one_round, whole_trips=True)


def alike(problem: DecodeProblem) -> bool:
    """Whether no sequence is longer than the mean by over a quarter."""
    return about_equal(problem.batch, problem.max_kv, problem.total_kv)


def share_exceeds(problem: DecodeProblem, sms: int, keys: int) -> bool:
    """Whether an SM's share of all K and V is over so many keys."""
    return problem.total_kv * problem.heads_kv > keys * sms


def short_keys(problem: DecodeProblem) -> int:
    """Keys in :data:`SHORT_BYTES`; above head dim 128, where a shorter tile gains less, in five eighths of it."""
    short = SHORT_BYTES * 5 // 8 if problem.head_dim > 128 else SHORT_BYTES
    return short // problem.key_bytes


def few_unlike(problem: DecodeProblem, sms: int) -> bool:
    """Whether a few sequences of different lengths are short work.

    Fewer CTAs than SMs, and up to :data:`SHORT_BYTES` an SM; up to head dim 64 also fewer than twice as many, with
    up to half as much an SM. No round of CTAs holds their splits evenly; of shorter tiles, several CTAs share an SM
    and even that out.
    """
    ctas, short = problem.batch * problem.heads_kv, short_keys(problem)
    few = ctas < sms and not share_exceeds(problem, sms, short)
    small = problem.head_dim <= 64 and ctas < 2 * sms and not share_exceeds(problem, sms, short // 2)
    return not alike(problem) and (few or small)


def crowd(problem: DecodeProblem, sms: int) -> bool:
    """Whether many short sequences are read whole by three CTAs an SM and more, or by four if they are alike, none
    of which outlasts the others.

    Up to 2048 keys a CTA; the longest has at most three fifths of what an SM reads in all, or up to head dim 64,
    where CTAs are more and each slower, half of it. Several CTAs share an SM then, and hide each other's start and
    end; tiles half as long waste less at the ends of sequences.
    """
    ctas = problem.batch * problem.heads_kv
    keys = problem.total_kv * problem.heads_kv
    many = ctas >= (4 if alike(problem) else 3) * sms and keys <= 2048 * ctas
    tenths = 5 if problem.head_dim <= 64 else 6
    return many and 10 * problem.max_kv * sms <= tenths * keys


def work_of(problem: DecodeProblem, sms: int) -> str:
    """What kind of work a batch is, for tiles: one of :data:`WORK`.

    Crowd: see :func:`crowd`. Packed: sequences of about one length, of up to 2048 keys, that make one to four CTAs
    an SM; up to head dim 128 all of them fit the device at once in short tiles, while a round of longer ones would
    be left over.

    Short: fewer than :data:`TINY_KEYS` a CTA; or a few of different lengths, cut into splits that no round holds
    evenly (:func:`few_unlike`). Few: the same of so few sequences that a CTA for each would leave 15 of 16 SMs
    without. Long: the rest of what differs in length; several long CTAs may meet on one SM, so each gets an SM of
    its own.

    The rest is of about one length. Even: one round of CTAs reads it, each on an SM of its own. Steady: even, with
    over :data:`STEADY_BYTES` a CTA. Rounds: more CTAs than SMs. Spill, for head dims from 65 to 128: at most half
    as many more, of up to :data:`SPILL_KEYS`.
    """
    ctas = problem.batch * problem.heads_kv
    keys = problem.total_kv * problem.heads_kv / max(ctas, sms)
    if crowd(problem, sms):
        return "crowd"
    left_over = problem.head_dim > 128 and sms < 2 * ctas and 10 * ctas < 9 * sms
    if alike(problem) and (sms < ctas < 4 * sms or left_over) and keys <= 2048:
        return "packed"
    if keys < TINY_KEYS or few_unlike(problem, sms):
        return "few" if 16 * ctas <= sms else "short"
    if not alike(problem):
        return "long"
    if ctas > sms:
        little = 2 * ctas <= 3 * sms and keys <= SPILL_KEYS
        return "spill" if little and 64 < problem.head_dim <= 128 else "rounds"
    return "steady" if keys * problem.key_bytes > STEADY_BYTES else "even"


def leaves_splits(choice: Mapping[str, Scalar]) -> bool:
    """Whether the caller has left how many splits there are to our rule, in the tuning of either kernel."""
    return choice["num_splits"] == "auto" and choice["waves"] is None and choice.get("cluster") is None


def leaves_plan(choice: Mapping[str, Scalar]) -> bool:
    """Whether our rule may take another plan than that of the first tile, which may not be able to exchange."""
    return leaves_splits(choice) and choice["merge"] != "exchange"


def rounds_splits(
    problem: DecodeProblem, choice: Mapping[str, Scalar], *, sms: int, tiles_per_split: int
) -> int | None:
    """Splits of every sequence in rounds, up to head dim 64, or None for other work.

    Two, if that fills whole rounds of CTAs by over 8 % more than one does. More are not worth it: our tiles share
    an SM, so that no round waits for another. Who chooses ``block_n`` or ``num_stages`` gets what
    :func:`impls.splits.balanced_counts` says.

    Args:
        problem: what is to be computed.
        choice: the tuning; who chooses anything about splits has chosen.
        sms: SMs of the device.
        tiles_per_split: CTAs that one split launches.
    """
    ctas = problem.batch * tiles_per_split
    free = leaves_splits(choice) and choice["block_n"] is None and choice["num_stages"] is None
    if not free or problem.head_dim > 64 or work_of(problem, sms) != "rounds":
        return None
    rounds, twice = -(-ctas // sms), -(-2 * ctas // sms)
    return 2 if 2 * rounds > 1.08 * twice else 1


def stays_whole(
    problem: DecodeProblem,
    choice: Mapping[str, Scalar],
    *,
    sms: int,
    tiles_per_split: int,
    at_once: int,
    kinds: Collection[str] = WHOLE,
) -> bool:
    """Whether nothing is split: work of these kinds of over a CTA an SM that is all on the device at once, or
    whose rounds of CTAs are at least 70 % full.

    Args:
        problem: what is to be computed.
        choice: the tuning; who chooses anything about splits has chosen.
        sms: SMs of the device.
        tiles_per_split: CTAs that one split launches.
        at_once: CTAs of this kernel that are surely on the device at once; 0 where that is not known.
        kinds: of work (:func:`work_of`).
    """
    ctas = problem.batch * tiles_per_split
    full = ctas <= at_once or 10 * ctas >= 7 * sms * -(-ctas // sms)
    return leaves_splits(choice) and ctas > sms and full and work_of(problem, sms) in kinds


def upload(rows: Int32Array, device: torch.device) -> Tensor:
    """``rows`` on the device, without waiting for it; a GPU copies them before later work of the current stream.

    The copy is taken from pinned memory of torch's caching host allocator, which gives a block away again only
    when the copies from it are done; pageable memory would have to be copied while the host waits. On a CPU the
    tensor shares memory with ``rows``.
    """
    host = torch.from_numpy(rows)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Splitting:
    """How a plan splits its batch and merges the splits: all that is decided before it takes any memory.

    Args:
        table: the splits.
        cluster: CTAs that merge their splits by themselves, as one cluster.
        exchange: whether all CTAs do so, by :mod:`impls.exchange`.
        tiles_per_split: CTAs that one split launches.
        ctas: of the split kernel.
        slots: partials in the workspace.
        workspace_bytes: of partials, LSE and counters.
    """

    table: SplitTable
    cluster: int
    exchange: bool
    tiles_per_split: int
    ctas: int
    slots: int
    workspace_bytes: int

    @property
    def longest(self) -> int:
        """Keys of the longest split."""
        return int(self.table.items[:, 2].max()) if self.table.splits else 0


def stand_alone(problem: DecodeProblem, splitting: Splitting, sms: int) -> bool:
    """Whether the CTAs of a few unlike sequences hardly share SMs, as planned: then each wants the long tile.

    With under 1.6 CTAs an SM, most have an SM to themselves and the longest decides; no more of its K and V are on
    their way than it asks for by itself. From head dim 65 to 128 with a share of over 256 keys for an SM; up to
    head dim 64 with over 512, where nothing is split, some SMs hold two, and the longest is over 15 % longer than
    that share, which only TileLang's rule asks; not above head dim 128, where TileLang has no shorter tile
    (measured: ``reports/NOTES.md``).

    Args:
        problem: what is to be computed.
        splitting: what is planned with the short tile.
        sms: SMs of the device.
    """
    ctas = splitting.ctas
    if problem.head_dim > 128 or not few_unlike(problem, sms) or 5 * ctas >= 8 * sms:
        return False
    if problem.head_dim <= 64:
        whole = splitting.table.slots == 0 and ctas > sms and share_exceeds(problem, sms, 2 * TINY_KEYS)
        return whole and not share_exceeds(problem, sms, splitting.longest * 20 // 23)
    return share_exceeds(problem, sms, TINY_KEYS)


def decide_splitting(
    problem: DecodeProblem,
    choice: Mapping[str, Scalar],
    *,
    sm_count: int,
    tiles_per_split: int,
    limits: Limits,
    num_splits: int | None = None,
    choose_cluster: Callable[[Int64Array], int] | None = None,
    at_once: int = 0,
) -> Splitting:
    """What a tuning of :data:`SPLIT_TUNING` comes to for a kernel of ours; host values only.

    Args:
        problem: what is to be computed.
        choice: the tuning, complete.
        sm_count: SMs of the device, or what stands in for them.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        limits: of the splits that ``auto`` plans.
        num_splits: of every sequence, in place of what ``auto`` plans; None where the kernel wants nothing else.
        choose_cluster: from the splits of each sequence, ``[B]``, how many CTAs merge theirs by themselves, as one
            cluster; with more than 1 there are no partials and no merges. None where a kernel cannot do that.
        at_once: CTAs of this kernel that are surely on the device at once, for :func:`may_exchange`; 0 where it
            cannot exchange.

    Raises:
        PlanRefused: if the workspace would exceed ``workspace_budget_bytes``.
        ValueError: for a choice out of range.
    """
    table = choose_splits(
        problem,
        choice if num_splits is None else {**choice, "num_splits": num_splits},
        sm_count=sm_count,
        tiles_per_split=tiles_per_split,
        limits=limits,
        at_once=at_once,
    )
    if choice["merge"] not in MERGES:
        raise ValueError(f"merge: expected one of {', '.join(MERGES)}, got {choice['merge']!r}")
    cluster = choose_cluster(table.counts) if choose_cluster else 1
    ctas = table.splits * tiles_per_split
    slots = table.slots if cluster == 1 else 0
    exchange = slots > 0 and _merges_by_exchange(choice, problem, table, ctas=ctas, at_once=at_once, sms=sm_count)
    if exchange:
        workspace_bytes = mail_bytes(slots, problem.heads_q, problem.head_dim, ctas)
    else:
        workspace_bytes = table.workspace_bytes(problem.heads_q, problem.head_dim) if slots else 0
    budget = positive(choice, BUDGET)
    if workspace_bytes > budget:
        raise PlanRefused(f"workspace: expected <= {budget} bytes (workspace_budget_bytes), got {workspace_bytes}")
    return Splitting(
        table=table,
        cluster=cluster,
        exchange=exchange,
        tiles_per_split=tiles_per_split,
        ctas=ctas,
        slots=slots,
        workspace_bytes=workspace_bytes,
    )


class SplitKVPlan:
    """The part of a plan that does not depend on the kernel language; see :class:`impls.contract.DecodePlan`.

    Making one never waits for the device: it may be made while earlier work runs, and its kernels may be
    launched on the stream that was current when it was made, or on one that waits for that stream.

    Args:
        problem: what is to be computed.
        device: where.
        choice: the tuning, complete.
        splitting: what it comes to.
    """

    config: Mapping[str, Scalar]

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        choice: Mapping[str, Scalar],
        splitting: Splitting,
    ) -> None:
        table, slots = splitting.table, splitting.slots
        self._cluster, self._exchange = splitting.cluster, splitting.exchange
        self._problem = problem
        self._total_kv = problem.total_kv  # a sum over all lengths: not in every launch
        self._device = device
        self._counts = table.counts
        rows = upload(table.ctas(splitting.tiles_per_split) if self._exchange else table.rows, device)
        items = len(rows) if self._exchange else table.splits
        self._items = rows[:items]  # [splits, 4], or in an exchange [CTAs, 8]
        self._merges = rows[items:] if slots else rows[:0]  # [merged sequences, 4]
        f32 = torch.float32
        if self._exchange:
            mail = mail_shape(slots, problem.heads_q, problem.head_dim)
            self._partial = torch.zeros(mail, dtype=f32, device=device)
        else:
            self._partial = torch.empty((slots, problem.heads_q, problem.head_dim), dtype=f32, device=device)
        self._partial_lse = torch.empty((0 if self._exchange else slots, problem.heads_q), dtype=f32, device=device)
        self._rounds = torch.zeros(splitting.ctas if self._exchange else 0, dtype=torch.int32, device=device)
        self._split_config: Mapping[str, Scalar] = {
            "num_splits": choice["num_splits"],
            "splits_max": table.splits_max,
            "work_items": splitting.ctas,
            "merge": "exchange" if self._exchange else "combine" if slots else None,
            "workspace_bytes": splitting.workspace_bytes,
        }

    @property
    def split_counts(self) -> tuple[int, ...]:
        """``[B]`` splits of each sequence, from which a check knows where the edges are."""
        return tuple(self._counts.tolist())

    def new_output(self) -> DecodeOutput:
        """Fresh output tensors."""
        return empty_output(self._problem, self._device)

    def workspaces(self) -> tuple[Tensor, ...]:
        """The float32 partials ``[slots, Hq, D]`` and their LSE ``[slots, Hq]``; or the mail, which is float32, and
        its counters, which are int32 and to be kept from run to run (:mod:`impls.exchange`)."""
        return (self._partial, self._rounds) if self._exchange else (self._partial, self._partial_lse)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch the split kernel and, where partials are left to merge, the combine kernel."""
        out = out or self.new_output()
        assert out.lse is not None, "out.lse: expected a tensor, as new_output() makes it, got None"
        if not self._total_kv:  # nothing to read: no kernel is needed to say so
            out.out.zero_()
            out.lse.fill_(float("-inf"))
            return out
        self.launch_split(inputs, out.out, out.lse)
        if len(self._merges):
            self.launch_combine(out.out, out.lse)
        return out

    def launch_split(self, inputs: DecodeInputs, out: Tensor, lse: Tensor) -> None:
        """Launch the split kernel over every item; never called for a batch without keys."""
        raise NotImplementedError

    def launch_combine(self, out: Tensor, lse: Tensor) -> None:
        """Launch the combine kernel over every merge; called only if there is one."""
        raise NotImplementedError
