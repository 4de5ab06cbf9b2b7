"""Merging the splits of a sequence inside of the Triton split kernel: :mod:`impls.exchange` as device functions.

:func:`send` writes a program's partial to the mail, :func:`merge` waits for the words of the program's share and
merges them. Words travel by inline PTX: two of them, side by side, are one ``st.relaxed.gpu.v2.b64`` and one
``ld.relaxed.gpu.v2.b64`` of 16 bytes, each half of it single-copy atomic, and past the L1 cache. ``tl.load`` knows
volatile accesses, but waiting with it takes a condition of the whole program, a reduction through shared memory
whenever the words are asked for again. Here each thread waits for its own words, all of which it asks for before
it looks at the first.

Heads of a tile and pairs of columns are dealt out to the splits in ranges, one after another, so that a program
writes few stretches of the output. All splits of a pair are merged by one thread, in the order of the keys: no
reduction crosses threads, and the result is the same bits in every run.

There is no inline PTX in Triton's interpreter, which runs one program after another: there :func:`merge` reads a
mail that is complete, and words of another round are NaN.

Imported by :mod:`impls.triton_splitkv`, which says first whether Triton compiles or interprets.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from impls.exchange import STATS

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FEW = tl.constexpr(4)
MANY = tl.constexpr(16)
"""Splits whose words a thread asks for at a time: up to 4 of them, or more."""

LN_2 = tl.constexpr(math.log(2))
STAT_WORDS = tl.constexpr(STATS)

SEND = tl.constexpr("""{
.reg .pred on;
.reg .b64 a, b;
setp.ne.b32 on, $5, 0;
mov.b64 a, {$2, $4};
mov.b64 b, {$3, $4};
@on st.relaxed.gpu.global.v2.b64 [$1], {a, b};
mov.b32 $0, 0;
}""")
"""Operands: a result that means nothing, an address, two float32 values, the round, whether to write."""


def pairs_at_a_time(group: int, block_h: int, head_dim: int, num_warps: int) -> int:
    """Pairs of columns that a program merges at a time, of up to 4 splits: a power of two, 1 to 4 a thread.

    Enough for the half of a head tile, which is the share of one of two splits, where that is not too much. Next to
    32 rows of over 128 columns, the compiler has registers for 2 a thread.

    Args:
        group: query heads per KV head.
        block_h: of them in a head tile, at most.
        head_dim: elements per head, D, even.
        num_warps: of a program.
    """
    threads = 32 * num_warps
    half = min(group, block_h) * head_dim // 4
    most = 2 if block_h == 32 and head_dim > 128 else 4
    return max(threads, min(1 << (half - 1).bit_length(), most * threads))


@triton.constexpr_function
def receive_asm(splits, pairs):
    """The PTX that waits for the words of up to ``splits`` splits of ``pairs`` pairs of columns, all at once.

    Outputs: of each split, the two values, the maximum and the sum, each ``pairs`` times; 0 where there is no
    split. Inputs, each ``pairs`` times: the addresses of the first split's values and of its maximum, the bytes
    from split to split, how many there are, the round.
    """
    read = range(splits * pairs)  # split by split
    lines = [f".reg .pred again, gone, on<{len(read)}>;", f".reg .b64 p<{pairs}>, q<{pairs}>, w<{4 * len(read)}>;"]
    lines.append(f".reg .b32 r<{4 * len(read)}>, t, late, tries;")
    values, stats, step, count, rounds = (
        [f"${(4 * splits + argument) * pairs + i}" for i in range(pairs)] for argument in range(5)
    )
    for n in read:
        lines.append(f"setp.gt.s32 on{n}, {count[n % pairs]}, {n // pairs};")
        lines += [f"mov.b64 w{4 * n + j}, {{0, {rounds[n % pairs]}}};" for j in range(4)]
    lines += ["mov.b32 tries, 0;", "ASK:"]
    for i in range(pairs):
        lines += [f"mov.b64 p{i}, {values[i]};", f"mov.b64 q{i}, {stats[i]};"]
    for n in read:
        i = n % pairs
        lines.append(f"@on{n} ld.relaxed.gpu.global.v2.b64 {{w{4 * n}, w{4 * n + 1}}}, [p{i}];")
        lines.append(f"@on{n} ld.relaxed.gpu.global.v2.b64 {{w{4 * n + 2}, w{4 * n + 3}}}, [q{i}];")
        lines += [f"add.s64 p{i}, p{i}, {step[i]};", f"add.s64 q{i}, q{i}, {step[i]};"]
    lines.append("mov.b32 late, 0;")
    for n in read:
        for j in range(4):
            result = (4 * (n // pairs) + j) * pairs + n % pairs
            lines.append(f"mov.b64 {{${result}, r{4 * n + j}}}, w{4 * n + j};")
            lines += [f"xor.b32 t, r{4 * n + j}, {rounds[n % pairs]};", "or.b32 late, late, t;"]
    # Some tens of seconds, and whoever was waited for is not coming.
    lines += ["add.u32 tries, tries, 1;", "setp.eq.u32 gone, tries, 67108864;", "@gone trap;"]
    lines += ["setp.ne.b32 again, late, 0;", "@again bra ASK;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def receive_constraints(splits, pairs):
    """Of :func:`receive_asm`; ``&``, for outputs are written while inputs are still read."""
    return ",".join(["=&f"] * (4 * splits * pairs) + ["l"] * (3 * pairs) + ["r"] * (2 * pairs))


@triton.constexpr_function
def float32s(count):
    """So many times float32."""
    return (tl.float32,) * count


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Float32 to DTYPE, to nearest even; the interpreter would cut bfloat16 off."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300 (DTYPE is the variable)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _word(x, round):
    """A float32 value and the round as one int64."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (round.to(tl.int64) << 32)


@triton.jit
def _value(word, round):
    """The float32 value of an int64 word, NaN if it is of another round."""
    value = (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where((word >> 32).to(tl.int32) == round, value, float("nan"))


@triton.jit
def _send_two(ptrs, a, b, round, mask):
    """Words of two tensors, side by side: 16 bytes that begin at ``ptrs``."""
    if INTERPRETED:
        tl.store(ptrs, _word(a, round), mask=mask)
        tl.store(ptrs + 1, _word(b, round), mask=mask)
    else:
        tl.inline_asm_elementwise(
            SEND,
            "=r,l,f,f,r,r",
            [ptrs.to(tl.int64), a, b, round, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _receive(value_ptrs, stat_ptrs, step, count, round, SPLITS: tl.constexpr, PAIRS: tl.constexpr):
    """Values of two columns, maximum and sum of SPLITS splits, when all are of this round: SPLITS x 4 tensors.

    What lies past ``count`` splits is 0. ``step`` is in words; PAIRS is of one thread.
    """
    if INTERPRETED:
        got = ()
        for s in tl.static_range(SPLITS):
            for ptrs in (value_ptrs, value_ptrs + 1, stat_ptrs, stat_ptrs + 1):
                word = tl.load(ptrs + s * step, mask=s < count, other=0)
                got = got + (tl.where(s < count, _value(word, round), 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        got = tl.inline_asm_elementwise(
            receive_asm(SPLITS, PAIRS),
            receive_constraints(SPLITS, PAIRS),
            [value_ptrs.to(tl.int64), stat_ptrs.to(tl.int64), 8 * step, count, round],
            dtype=float32s(4 * SPLITS),
            is_pure=False,
            pack=PAIRS,
        )
    return got


@triton.jit
def send(
    mail_ptr,  # [slots, Hq, D + 2] int64
    rows,  # [BLOCK_H] int64, slot * Hq + head
    real,  # [BLOCK_H], whether there is such a head
    acc,  # [BLOCK_H, BLOCK_D] float32, not normalised
    top,  # [BLOCK_H] float32, the maximum of the scores, base 2
    total,  # [BLOCK_H] float32, the sum of their weights
    round,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the partial of one split and head tile to its slot."""
    ptrs = mail_ptr + rows * (HEAD_DIM + STAT_WORDS)
    pairs = tl.arange(0, BLOCK_D // 2)
    a, b = tl.split(tl.reshape(acc, [BLOCK_H, BLOCK_D // 2, 2]))
    mask = real[:, None] & (pairs < HEAD_DIM // 2)[None, :]
    _send_two(ptrs + HEAD_DIM, top, total, round, real)
    _send_two(ptrs[:, None] + 2 * pairs[None, :], a, b, round, mask)


@triton.jit
def merge(
    mail_ptr,  # [slots, Hq, D + 2] int64
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] float32
    mail_row,  # int64, first slot of the sequence * Hq + first head of the tile
    out_row,  # int64, sequence * Hq + first head of the tile
    heads_q,
    heads,  # of the tile
    rank,  # of this split
    splits,  # of the sequence
    round,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # pairs_at_a_time
    NUM_WARPS: tl.constexpr,
):
    """Merge the share of this split in the output and the LSE of one head tile."""
    if splits <= FEW:
        _merge(
            mail_ptr, out_ptr, lse_ptr, mail_row, out_row, heads_q, heads, rank, splits, round,
            HEAD_DIM, FEW, PAIRS, NUM_WARPS,
        )  # fmt: skip
    else:
        _merge(
            mail_ptr, out_ptr, lse_ptr, mail_row, out_row, heads_q, heads, rank, splits, round,
            HEAD_DIM, MANY, 32 * NUM_WARPS, NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _merge(
    mail_ptr,
    out_ptr,
    lse_ptr,
    mail_row,
    out_row,
    heads_q,
    heads,
    rank,
    splits,
    round,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # read at a time
    PAIRS: tl.constexpr,  # of columns at a time
    NUM_WARPS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = HEAD_DIM + STAT_WORDS
    pairs = heads * HALF
    share = (pairs + splits - 1) // splits
    end = tl.minimum(rank * share + share, pairs)
    for first in range(rank * share, end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        mine = pair < end
        head = pair // HALF
        column = pair % HALF * 2
        stat_ptrs = mail_ptr + (mail_row + head) * WIDTH + HEAD_DIM
        value_ptrs = stat_ptrs + (column - HEAD_DIM)
        step = (heads_q * WIDTH).to(tl.int64)
        top = tl.full([PAIRS], float("-inf"), tl.float32)
        total = tl.zeros([PAIRS], tl.float32)
        a = tl.zeros([PAIRS], tl.float32)
        b = tl.zeros([PAIRS], tl.float32)
        for start in range(0, FEW if SPLITS == FEW else splits, SPLITS):  # few are read at once
            count = tl.where(mine, splits - start, 0)
            got = _receive(value_ptrs, stat_ptrs, step, count, round, SPLITS, PAIRS // (32 * NUM_WARPS))
            # A split without keys is left out by its sum, which is 0; a sum of NaN is one like any other.
            new = top
            for s in tl.static_range(SPLITS):
                new = tl.maximum(new, tl.where(got[4 * s + 3] != 0, got[4 * s + 2], float("-inf")))
            ref = tl.where(new > float("-inf"), new, 0.0)
            alpha = tl.exp2(top - ref)
            top = new
            total *= alpha
            a *= alpha
            b *= alpha
            for s in tl.static_range(SPLITS):
                weight = tl.where(got[4 * s + 3] != 0, tl.exp2(got[4 * s + 2] - ref), 0.0)
                total += got[4 * s + 3] * weight
                a += got[4 * s] * weight
                b += got[4 * s + 1] * weight
            value_ptrs += SPLITS * step
            stat_ptrs += SPLITS * step
        safe = tl.where(total != 0, total, 1.0)
        tl.store(lse_ptr + out_row + head, (top + tl.log2(safe)) * LN_2, mask=mine & (column == 0))
        out = cast(tl.join(a / safe, b / safe), out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + (out_row + head) * HEAD_DIM + column
        tl.store(out_ptrs[:, None] + tl.arange(0, 2)[None, :], out, mask=mine[:, None])
