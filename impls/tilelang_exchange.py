"""The words of an exchange in TileLang's kernels: how they are written and read; see :mod:`impls.exchange`.

TileLang 0.1.15 has no relaxed accesses of 8 bytes, hence the inline PTX of :data:`PRELUDE` (PTX ISA 8.1, ``ld``,
``st``, memory consistency model). Two words travel together, as 16 bytes that need not arrive as one.
"""

import tilelang.language as T

from impls.exchange import STATS

SPLITS_AT_ONCE = 8
"""Splits whose words a thread asks for before it looks at the first answer."""

PRELUDE = r"""
// Write two values, each as one word with the round.
static __device__ __forceinline__ void mail_post(float *mail, long long at, float a, float b, int round) {
  asm volatile("{\n.reg .b64 x, y;\nmov.b64 x, {%1, %3};\nmov.b64 y, {%2, %3};\n"
               "st.relaxed.gpu.global.v2.b64 [%0], {x, y};\n}"
               ::"l"(mail + at), "f"(a), "f"(b), "r"(round) : "memory");
}
// Read two words: a value and the round that it is of, twice.
static __device__ __forceinline__ void mail_ask(const float *at, float *pair) {
  asm volatile("{\n.reg .b64 x, y;\nld.relaxed.gpu.global.v2.b64 {x, y}, [%4];\n"
               "mov.b64 {%0, %1}, x;\nmov.b64 {%2, %3}, y;\n}"
               : "=f"(pair[0]), "=f"(pair[1]), "=f"(pair[2]), "=f"(pair[3]) : "l"(at) : "memory");
}
// Of each of `splits` slots, `step` apart, two columns and the maximum and the sum, once all are of this round.
template <int SPLITS>
static __device__ __forceinline__ void mail_collect(const float *mail, long long columns, long long stats,
                                                    int step, int splits, int round,
                                                    float *values, float *maxima, float *sums) {
  float pair[SPLITS][4], stat[SPLITS][4];
  int late;
  unsigned tries = 0;
  do {  // all are asked for before one is looked at, and again if one is late: a trip, not a trip for each
#pragma unroll
    for (int s = 0; s < SPLITS; ++s)
      if (s < splits) {
        mail_ask(mail + stats + static_cast<long long>(s) * step, stat[s]);
        mail_ask(mail + columns + static_cast<long long>(s) * step, pair[s]);
      }
    if (++tries == 1u << 26) __trap();  // some tens of seconds: whoever was waited for is not coming
    late = 0;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s)
      if (s < splits)
        late |= (__float_as_int(stat[s][1]) ^ round) | (__float_as_int(stat[s][3]) ^ round) |
                (__float_as_int(pair[s][1]) ^ round) | (__float_as_int(pair[s][3]) ^ round);
  } while (late);
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) {
    maxima[s] = s < splits ? stat[s][0] : 0;
    sums[s] = s < splits ? stat[s][2] : 0;
    values[2 * s] = s < splits ? pair[s][0] : 0;
    values[2 * s + 1] = s < splits ? pair[s][2] : 0;
  }
}
"""


def _offset(mail, slot, head, word):
    """Of a word, in float32 elements: formed here, for TileLang would guard every index that it cannot prove."""
    return ((T.cast(slot, "int64") * mail.shape[1] + head) * mail.shape[2] + word) * 2


@T.macro
def mail_post(mail, slot, head, word, a, b, current):
    """Write two values as words ``word`` and ``word + 1`` of a head, with the current round."""
    T.call_extern(
        "void", "mail_post", T.address_of(mail[0, 0, 0, 0]), _offset(mail, slot, head, word), a, b, current
    )


@T.macro
def mail_collect(mail, slot, head, word, splits, current, values, maxima, sums):
    """Wait for words ``word`` and ``word + 1`` of a head, its maximum and its sum, in ``splits`` slots from here.

    At most :data:`SPLITS_AT_ONCE` of them; what is past ``splits`` gets the sum 0.
    """
    T.call_extern(
        "void",
        f"mail_collect<{SPLITS_AT_ONCE}>",
        T.address_of(mail[0, 0, 0, 0]),
        _offset(mail, slot, head, word),
        _offset(mail, slot, head, mail.shape[2] - STATS),
        mail.shape[1] * mail.shape[2] * 2,
        splits,
        current,
        T.address_of(values[0, 0]),
        T.address_of(maxima[0]),
        T.address_of(sums[0]),
    )
