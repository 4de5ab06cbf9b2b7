"""Merging the splits of a sequence inside of the split kernel, through global memory: the protocol, and when.

A combine kernel can only start when the last CTA of the split kernel has ended: a launch, a wait for all memory
and a read, 1.5 to 2 µs on an H200. Where all CTAs of a split kernel are on the device at once, they can merge their
splits by themselves instead. The ``S`` splits of one head tile deal its elements out among themselves: every CTA
writes its unnormalised float32 output, with the maximum and the sum of each head, to its slot in the *mail*, waits
for the others' words that belong to its own share, and merges those.

No flag, fence or barrier says that a word has been written: the word does. It is 8 bytes, a float32 value and the
number of the *round*, which every launch of a plan raises by one, written and read as one (PTX ISA, memory
consistency model: relaxed accesses of up to 64 bits are single-copy atomic). A reader asks again until the round is
its own. So the way from the last key to the output is one trip to the L2 cache and back. NCCL's "LL" protocol
does the same between GPUs.

Rounds are counted on the device, by each CTA for itself, for a CUDA graph replays the same arguments. The counters
begin at 0, and so does the mail, whose words are therefore of no round. Both are a plan's state between runs: the
mail may be overwritten with anything that holds no round to come, the counters may not.

Nobody may wait for a CTA that cannot start. All CTAs of a launch fit the device at once; and should other work hold
part of it for long, the splits of one head tile are neighbours in the grid
(:meth:`impls.splits.SplitTable.ctas`): whichever are started, only the last of them wait for CTAs that are not, and
those need no more than ``S`` places. Our rule takes no more splits than an eighth of the SMs, so that several
launches, each begun and not all on the device, leave places for each other's last group. What it cannot know: a
green context with fewer SMs than the device has, or other work that keeps all but a few places until it has seen
this output. There, ask for ``merge="combine"``. A wait that lasts some tens of seconds traps: a launch that fails
says so, one that hangs does not.

Runs of one plan must not overlap: two launches that count the same round wait for words of another.
"""

from __future__ import annotations

from impls.problem import DecodeProblem

LONG_CTA_BYTES = 2 << 20
"""K and V of the longest CTA up to which an exchange is faster than a combine kernel, on an H200."""

PLACES = 8
"""What part of the SMs the splits of one sequence may need to wait for each other, under our rule: an eighth."""

STATS = 2
"""Words of a head in a slot after its ``D`` columns: the maximum of its scores and the sum of their weights."""


def mail_shape(slots: int, heads_q: int, head_dim: int) -> tuple[int, int, int, int]:
    """``[slots, Hq, D + 2, 2]`` float32: words of a value and a round (an int32, bit for bit)."""
    return slots, heads_q, head_dim + STATS, 2


def mail_bytes(slots: int, heads_q: int, head_dim: int, ctas: int) -> int:
    """Bytes of the mail and of the counters of ``ctas`` CTAs."""
    words = slots * heads_q * (head_dim + STATS)
    return 8 * words + 4 * ctas


def may_exchange(ctas: int, slots: int, at_once: int) -> bool:
    """Whether the splits of a batch can merge by exchange.

    Args:
        ctas: of the split kernel.
        slots: partials; without any there is nothing to merge.
        at_once: CTAs of the split kernel that are surely on the device at once; 0 if it cannot exchange.
    """
    return slots > 0 and ctas <= at_once


def pays_to_exchange(problem: DecodeProblem, *, keys: int, splits: int, sms: int) -> bool:
    """Whether our rule takes an exchange where there may be one.

    Neighbours in the grid are then splits of one head and not heads of one split, which lie side by side in memory:
    what the exchange saves at the end, long CTAs lose on the way (measured: ``reports/NOTES.md``).

    Args:
        problem: whose K and V are read.
        keys: of the longest split.
        splits: the most of one sequence.
        sms: SMs of the device.
    """
    short = keys * problem.key_bytes <= LONG_CTA_BYTES
    return short and splits <= sms // PLACES
