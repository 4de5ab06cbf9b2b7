"""The text of a report: sentences, tables and figures of a comparison, put together by a template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.record import STREAM_READ
from harness.render import split_costs, tables
from harness.render.captions import CAPTIONS, COUNTS
from harness.render.decisions import same_text
from harness.render.figures import FIGURES, Drawn
from harness.render.findings import DEEP, FEW_PEERS, faulty_note, headline, peers_of
from harness.render.frame import Comparison, impl_of
from harness.render.repeats import Repeat, repeat_section, within_rounds
from harness.render.template import Picture, fill
from harness.render.text import bytes_text, code, environment_text, escape, hosts_sentence, join
from harness.stats import CONFIDENCE

METHODS: Mapping[str, str] = {
    "graph": "Method `graph`: a CUDA graph holds one call for each of several input sets and is replayed as a"
    " whole; a sample is the replay's time by CUDA events, divided by the calls. The host's part of a"
    " launch, compilation and planning are not in it. Before each timed replay comes an untimed one.",
    "graph-warm": "Method `graph-warm`: as `graph`, with a single input set.",
    "events": "Method `events`: one launch at a time between two CUDA events, after 256 MB were written outside of"
    " them; 25 ms of warm-up, 100 ms measured; a sample is the median of its calls. Where the host cannot queue a"
    " launch in time, its delay counts.",
    "kernels": "Method `kernels`: the graph of `graph`, traced by CUPTI; a sample is the time in which at least one"
    " kernel of a call runs.",
    "wall": "Method `wall`: host time around a call, repeated. It shows that a kernel runs, not how fast it could.",
}
WHAT_TO_RUN = "decisions"
"""The anchor of the section that says what to run."""

OVERLAP_US = 0.5
"""A call that starts so long before the end of the one before overlaps with it; less may be the trace."""

CACHES: Mapping[str, str] = {
    "cold": "Cache `cold`: input sets rotate, so that between two uses of one set at least three times the"
    " device's L2 cache of other data is read.",
    "warm": "Cache `warm`: what of the inputs fits the L2 cache is there.",
    "flushed": "Cache `flushed`: the L2 cache holds what was written just before.",
}


def write_report(comparison: Comparison, said: Mapping[str, Any], drawn: Mapping[str, Drawn], folder: Path) -> Path:
    """Write the report's ``README.md`` into ``folder`` and return its path.

    ``said`` is :func:`context`, with what :func:`harness.render.checks.deep_check` has to say, if anything, as
    ``deep``, and what :func:`harness.render.tuning.tuning_section` has as ``tuned``.
    """
    figures = {
        "figures": {name: _picture(comparison, drawn.get(name)) for name in FIGURES},
        "absent": {name: _absent(comparison, name) for name in FIGURES if name not in drawn},
    }
    return fill("report.md.j2", {**said, **figures}, folder)


def context(comparison: Comparison, folder: Path, repeat: Repeat | None = None) -> dict[str, Any]:
    """What the template fills in, but for the figures; ``repeat`` is the study's second run, where it has one."""
    notes, marks = _notes(comparison)
    return {
        "title": f"{escape(comparison.name)}: split-KV decode attention compared",
        "headline": headline(comparison),
        "environment_line": _environment_line(comparison),
        "has_fixed": comparison.has_fixed,
        "decisions": tables.decisions(comparison),
        "decisions_note": tables.decisions_note(comparison),
        "within_rounds": within_rounds(comparison, repeat),
        "repeat": None if repeat is None else repeat_section(repeat),
        "runs": tables.runs(comparison),
        "summary": tables.summary(comparison),
        "summary_note": _summary_note(comparison),
        "latency_note": _latency_note(comparison),
        "latency": tables.latency(comparison, marks),
        "notes": notes,
        "against": tables.against(comparison),
        "splits": split_costs.splits(comparison),
        "split_parts": split_costs.split_parts(comparison),
        "parts": tables.parts(comparison),
        "counts_anchor": COUNTS,
        "waiting": tables.waiting_text(comparison),
        "hosts": hosts_sentence(comparison.runs),
        "support_counts": tables.support_counts(comparison),
        "support": tables.support(comparison),
        "support_note": tables.support_note(comparison),
        "deep_anchor": DEEP,
        "decisions_anchor": WHAT_TO_RUN,
        "reasons": tables.reasons(comparison),
        "cases": tables.cases(comparison),
        "method": _method(comparison),
        "words": {} if comparison.functional else WORDS,
        "command": _command(comparison),
        "variables": tables.variables(comparison),
        "confidence": round(100 * CONFIDENCE),
        "smallest": f"{100 * comparison.smallest_effect:g}",
        "measurements": tables.MEASUREMENTS,
        "timings": tables.timings(comparison, folder),
        "checks": tables.checks(comparison),
        "configs": tables.configs(comparison),
    }


def _picture(comparison: Comparison, drawn: Drawn | None) -> Picture | None:
    if drawn is None:
        return None
    said = CAPTIONS[drawn.name]
    sentences = [said.finding(comparison), said.reading(comparison).strip()]
    if drawn.left_out:
        sentences.append(f"{drawn.left_out} of {len(comparison.cases)} cases are not drawn; the tables have all.")
    sentences.append(faulty_note(comparison, comparison.shown, cells=drawn.name == "support"))
    sentences.append(f"[The measurements behind it](#{tables.MEASUREMENTS}).")
    return Picture(drawn.name, said.alt, " ".join(filter(None, sentences)))


def _absent(comparison: Comparison, name: str) -> str:
    return f"No figure here: {CAPTIONS[name].absent(comparison)}."


def _environment_line(comparison: Comparison) -> str:
    return "<br>\n".join(environment_text(run, comparison.ceilings.get(run["run_id"])) for run in comparison.runs)


def _summary_note(comparison: Comparison) -> str:
    if comparison.functional:
        return ""
    names, fixed = peers_of(comparison), " Each chooses its splits by itself." if comparison.has_fixed else ""
    peers = f" (here {join([code(name) for name in names])})" if 0 < len(names) < FEW_PEERS else ""
    if comparison.has_fixed:
        peers += ", at its fastest split count"
    return (
        "Means are over the cases in which the row and what it is divided by are both `ok`, n of m as stated, with"
        f" {round(100 * CONFIDENCE)} % intervals. A peer is an implementation that this project did not write"
        f"{peers}; below 1 × ahead it is faster. Ratios are formed inside one run and case only, and paired by"
        " round. The first plan is the longest of any case: it compiles, unless a cache on disk or an earlier case"
        " has the kernel already, which no record tells; so these times are not to be compared from one"
        f" implementation to another.{fixed} Fastest or tied is meant as under [What to run](#{WHAT_TO_RUN})."
        f" {same_text(comparison)}".rstrip()
    )


def _notes(comparison: Comparison) -> tuple[list[str], dict[str, str]]:
    """Notes on splits, printed under the table of latencies, and the mark of each."""
    shown = comparison.impls[comparison.impls["label"].isin(comparison.shown)]
    texts = shown["splits_note"].dropna().unique()
    marks = {text: f"<sup>{i}</sup>" for i, text in enumerate(texts, start=1)}
    return [f"{mark} {escape(text)}" for text, mark in marks.items()], marks


def _latency_note(comparison: Comparison) -> str:
    keys = sorted({(m, c) for m, c in zip(comparison.impls["method"], comparison.impls["cache"], strict=True) if m})
    how = join([f"method `{method}`, cache `{cache}`" for method, cache in keys])
    best = "" if comparison.functional else " The fastest of a case is bold, and so is what ties with it."
    if comparison.has_fixed:
        best += " Each chooses its splits by itself; fixed split counts are in the table of all measurements."
    return f"Median µs by case and implementation ({how}).{best}" if keys else "Nothing was timed."


WORDS: Mapping[str, str] = {
    "split": "one contiguous range of one sequence's keys, computed by itself; with more than one, *partial*"
    " results and their LSE (the logarithm of the sum of the softmax's exponentials) are *merged*",
    "CTA": "a block of threads, which an SM (a core of the GPU) runs: one for each split, KV head and tile of query"
    " heads; *work items* are the CTAs of the split kernel",
    "wave": "as many CTAs as there are SMs; `waves` asks for splits that make so many",
    "round": "each implementation timed once, in an order drawn by lot; n of a time is its rounds, and what is"
    " paired is formed within each",
    "merge": "how splits are merged: by a *combine* kernel after the split kernel, inside of it through global"
    " memory (*exchange*), or through the shared memory of neighbouring SMs (*cluster*)",
    "eager": "Triton's form that loads Q with every tile of keys, so that nothing waits for it",
    "peer": "an implementation that this project did not write; an *ablation* is ours with one thing taken away",
    "regret": "the time of an own choice over that of the fastest configuration tried",
}
"""What a reader has to know, in the order in which one word needs another."""


def _method(comparison: Comparison) -> list[str]:
    rows = comparison.impls
    paragraphs = [
        "Every output is checked against a float64 reference of the same rounded inputs before it is timed; only"
        " a result within its budget has a time."
    ]
    paragraphs += [METHODS[method] for method in sorted(set(rows["method"].dropna())) if method in METHODS]
    paragraphs += [CACHES[state] for state in sorted(set(rows["cache"].dropna())) if state in CACHES]
    sizes = sorted(set(rows["working_set_bytes"].dropna()))
    if sizes:
        ends = dict.fromkeys(map(bytes_text, (sizes[0], sizes[-1])))
        paragraphs.append(f"Working sets: {' to '.join(ends)}.")
    if len(comparison.bounds):
        ceilings = [f"{gbps:,.0f} GB/s (run `{run_id}`)" for run_id, gbps in comparison.ceilings.items()]
        paragraphs.append(
            f"The bound of a case, `{STREAM_READ}`, is a kernel that reads the case's K and V bytes and does"
            " nothing else, timed in the same rounds."
            + (f" The device's read ceiling, over a larger buffer: {join(ceilings)}." if ceilings else "")
        )
    if throttled := int(rows["n_throttled"].sum()):
        paragraphs.append(
            f"{throttled} samples were throttled. They are counted beside n, and left out of a median unless all"
            " of its samples were."
        )
    paragraphs += _from_call_to_call(comparison)
    units = "Units: µs per call"
    if not comparison.functional:
        units += "; GB/s with 1e9 bytes, of K, V, q and output (of K and V alone for the bound)"
        units += "; TFLOP/s of 4 · heads\\_q · keys · head\\_dim operations"
    paragraphs.append(f"{units}.")
    return paragraphs


def _from_call_to_call(comparison: Comparison) -> list[str]:
    """What a time per call is in a graph of many, and whose calls overlap with the one before, as far as traced."""
    if comparison.functional or not comparison.impls["method"].isin(["graph", "graph-warm"]).any():
        return []
    text = "µs per call is the time from call to call in a graph of such calls."
    rows, bounds = comparison.impls, comparison.bounds
    early = set(rows.loc[rows["between_us"] < -OVERLAP_US, "impl"])
    names = [code(impl) for impl in dict.fromkeys(map(impl_of, comparison.series)) if impl in early]
    if names:
        text += (
            f" Traces show calls of {join(names)} overlapping with the call before: the first kernel is put in"
            " place while that one still runs (programmatic dependent launch), so its start is hidden, all or in"
            " part, behind that call."
        )
        pauses = bounds["between_us"].dropna()
        if len(pauses) and pauses.min() >= 0:
            ends = dict.fromkeys(f"{us:.2f}" for us in (pauses.min(), pauses.max()))
            text += (
                f" The bound's kernel is launched the plain way: from the end of one to the start of the next,"
                f" {' to '.join(ends)} µs pass, and they are in its time."
            )
        elif len(pauses):
            text += " So may those of the bound's kernel."
    return [text]


def _command(comparison: Comparison) -> str:
    studies = comparison.rows["study"].unique()
    lines = [f"splitkv run reports/{study}" for study in studies]
    return "\n".join([*lines, "splitkv render " + " ".join(f"reports/{study}" for study in studies)])
