"""The words of an exchange in TileLang's kernels: how they are written and read; see :mod:`impls.exchange`.

TileLang 0.1.15 has no relaxed accesses of 8 bytes, hence the inline PTX of :data:`PRELUDE` (PTX ISA 8.1, ``ld``,
``st``, memory consistency model). Two words travel together, as 16 bytes that need not arrive as one.
"""

import tilelang.language as T

SPLITS_AT_ONCE = 8
"""Splits whose words a thread asks for before it looks at the first answer."""

PRELUDE = r"""
// Write two values, each as one word with the round.
static __device__ __forceinline__ void mail_post(float *mail, long long at, float a, float b, int round) {
  asm volatile("{\n.reg .b64 x, y;\nmov.b64 x, {%1, %3};\nmov.b64 y, {%2, %3};\n"
               "st.relaxed.gpu.global.v2.b64 [%0], {x, y};\n}" ::"l"(mail + at), "f"(a), "f"(b), "r"(round) : "memory");
}
// Read two words: a value and the round that it is of, twice.
static __device__ __forceinline__ void mail_ask(const float *mail, long long at, float *pair) {
  asm volatile("{\n.reg .b64 x, y;\nld.relaxed.gpu.global.v2.b64 {x, y}, [%4];\n"
               "mov.b64 {%0, %1}, x;\nmov.b64 {%2, %3}, y;\n}"
               : "=f"(pair[0]), "=f"(pair[1]), "=f"(pair[2]), "=f"(pair[3]) : "l"(mail + at) : "memory");
}
// Ask again until both are of this round.
static __device__ __forceinline__ void mail_await(const float *mail, long long at, float *pair, int round) {
  while (__float_as_int(pair[1]) != round || __float_as_int(pair[3]) != round) mail_ask(mail, at, pair);
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
def mail_ask(mail, slot, head, word, pairs, index):
    """Read words ``word`` and ``word + 1`` of a head into ``pairs[index]``, whatever they hold."""
    T.call_extern(
        "void",
        "mail_ask",
        T.address_of(mail[0, 0, 0, 0]),
        _offset(mail, slot, head, word),
        T.address_of(pairs[index, 0]),
    )


@T.macro
def mail_await(mail, slot, head, word, pairs, index, current):
    """Read them again until both are of the current round."""
    T.call_extern(
        "void",
        "mail_await",
        T.address_of(mail[0, 0, 0, 0]),
        _offset(mail, slot, head, word),
        T.address_of(pairs[index, 0]),
        current,
    )
