"""From the turns of a case to its table: medians, spreads, ratios, and whether the losses agree.

Invariant: a ratio divides two turns of one round of one group; medians are taken of ratios, never the other
way round."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from systems import FLOOR, SUITES, TIERS

MIB = 2**20

# Largest relative difference of a loss from the reference: rounding in fp32, and in bf16 the different places
# of casts.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
# DeepSpeed's stage 0 in bf16 begins Adam's step count one too high.
# without its sums it computes something else
KNOWN_APART = {("deepspeed0", "bf16"): 1e-2, **{("polyreme-silent", dtype): math.inf for dtype in TOLERANCE}}

TITLES = {
    "step": "Time of a training step",
    "tensor": "Time of forward and backward of two blocks, tensor parallel",
    "pipeline": "Time of a training step in a pipeline",
}

# Whom each of ours is measured against, and the factor that the project aims at (rival's time over ours), if
# any.
RIVALS: dict[str, list[tuple[str, str, float | None]]] = {
    "tensor": [
        ("polyreme", "dtensor", 1.1),
        ("polyreme-sequence", "dtensor", None),
        ("polyreme", "polyreme-silent", None),
        ("dtensor", "polyreme-silent", None),
    ],
    "pipeline": [
        ("polyreme", "torch", 1.0),
        ("polyreme", "deepspeed", 1.1),
        *(
            (f"polyreme-{other}", rival, aim)
            for other in ("1f1b", "even", "time")
            for rival, aim in (("torch", 1.0), ("deepspeed", 1.1))
        ),
        *(
            (f"polyreme-{schedule}", "polyreme", None)
            for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
        ),
    ],
}
RIVALS["step"] = [
    *((f"polyreme{stage}", "ddp", 1.0) for stage in (0, 1, 2)),
    ("polyreme1", "zero1", 1.0),
    ("polyreme2", "fsdp2-keep", 1.0),
    ("polyreme3", "fsdp2", 1.15),
    *((f"polyreme{stage}", f"deepspeed{stage}", 1.15) for stage in range(4)),
    *((f"polyreme{stage}-sockets", "ddp", 1.0) for stage in (0, 1, 2)),
    ("polyreme3-sockets", "fsdp2", 1.15),
    *((f"polyreme{stage}+{home}", f"polyreme{stage}", None) for stage in (2, 3) for home in TIERS),
    *((f"polyreme3+{home}+params", "polyreme3", None) for home in TIERS),
    *((f"polyreme{stage}+host", f"deepspeed{stage}+cpu", 1.0) for stage in (2, 3)),
    ("polyreme3+host+params", "deepspeed3+cpu+params", 1.0),
    ("polyreme3+host+params", "fsdp2+cpu", 1.0),
    ("polyreme3+file", "deepspeed3+nvme", 1.0),
    ("polyreme3+file+params", "deepspeed3+nvme+params", 1.0),
    ("polyreme0-bf16", "ddp-bf16", 1.0),
    ("polyreme3-bf16", "fsdp2-bf16", 1.15),
]


def write(result: Mapping[str, Any], page: str, out: Path) -> None:
    """The JSON result to `out`, and the page beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("median", "low", "high"), values[0]) if values else {}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def turn_seconds(replies: Sequence[dict[str, Any]]) -> float:
    """The time of a step in one turn: the median over its steps of the mean over the ranks."""
    return statistics.median(
        statistics.fmean(step) for step in zip(*(r["seconds"] for r in replies), strict=True)
    )


def ratios(case: dict[str, Any], system: str, base: str = FLOOR) -> list[float]:
    """Time of `system` over that of `base`, one number per round that both took part in.

    Where the two were never in memory together, both are taken over the floor, round by round.
    """
    turns, base_turns = (case["systems"].get(name, {}).get("turns", {}) for name in (system, base))
    shared = [turn for turn in turns if turn in base_turns]
    if shared or base == FLOOR:
        return [turn_seconds(turns[turn]) / turn_seconds(base_turns[turn]) for turn in shared]
    pairs = zip(ratios(case, system), ratios(case, base), strict=False)
    return [mine / theirs for mine, theirs in pairs]


def compare_losses(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Whether each system's loss is the reference's in every step, and the largest relative difference.

    The reference of the first steps is the floor, whose ranks then train the whole global batch. Afterwards
    the floor's ranks go their own ways, and the reference is the first other system."""
    dtype = case["job"]["dtype"]
    systems = {name: record for name, record in case["systems"].items() if "checked" in record}

    def mean(replies: Sequence[dict[str, Any]], key: str = "losses") -> list[float]:
        return [statistics.fmean(step) for step in zip(*(r[key] for r in replies), strict=True)]

    def later(record: dict[str, Any]) -> list[float]:
        return [loss for replies in record["turns"].values() for loss in mean(replies)]

    rival = next((name for name in systems if name != FLOOR and systems[name]["turns"]), None)
    verdicts = {}
    for name, record in systems.items():
        pairs: list[tuple[float, float]] = []
        if FLOOR in systems:
            pairs += zip(mean(record["checked"]), mean(systems[FLOOR]["checked"]), strict=True)
        if rival and name != FLOOR:
            pairs += zip(later(record), later(systems[rival]), strict=False)
        # not `<=`: a NaN must not pass for equal
        apart = [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]
        norms = []
        if FLOOR in systems and None not in record["checked"][0]["norms"]:
            reference = mean(systems[FLOOR]["checked"], "norms")
            norms = [abs(a - b) / b for a, b in zip(mean(record["checked"], "norms"), reference, strict=True)]
        tolerance = KNOWN_APART.get((name, dtype), TOLERANCE[dtype])
        verdicts[name] = {
            "largest": max(apart, default=0.0),
            "first": apart[0] if apart else 0.0,
            "largest_norm": max(norms, default=None),
            "tolerance": tolerance,
            "equal": all(a <= tolerance for a in apart),
        }
    return verdicts


def per_step(replies: Sequence[dict[str, Any]], counter: str) -> float:
    """The median over turns and ranks of what a step adds to a counter."""
    return float(statistics.median(reply["per_step"][counter] for reply in replies))


def foreign_cores(case: dict[str, Any]) -> float:
    """Cores that the rest of the machine kept busy during a turn, median over the turns."""
    turns = [turn for record in case["systems"].values() for turn in record["turns"].values()]
    return float(statistics.median([turn[0]["foreign_cores"] for turn in turns] or [0.0]))


def summarise(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row of the table for each system that ran."""
    rows = {}
    for name, record in case["systems"].items():
        replies = [reply for turn in record["turns"].values() for reply in turn]
        if not replies:
            continue
        checked = record["checked"][0]
        rows[name] = {
            "milliseconds": spread([turn_seconds(turn) * 1e3 for turn in record["turns"].values()]),
            "ratio": spread(ratios(case, name)),
            "peak_mib": (max(reply["peak_rss"] for reply in replies) - record["rss_imported"]) / MIB,
            "live_mib": max(reply["live_bytes"] for reply in record["checked"]) / MIB,
            "collectives": sum(checked["collectives"].values()),
            "payload_mib": sum(checked["collective_bytes"].values()) / MIB,
            "sent_mib": per_step(replies, "loopback_bytes") / case["job"]["world"] / MIB,
            "faults": per_step(replies, "faults"),
            "main_cpu_ms": per_step(replies, "main_cpu_seconds") * 1e3,
            "other_cpu_ms": per_step(replies, "other_cpu_seconds") * 1e3,
            "idle_share": sum(r["idle_cpu_seconds"] for r in replies)
            / sum(r["idle_seconds"] for r in replies),
        }
    return rows


def case_markdown(case: dict[str, Any]) -> list[str]:
    job = case["job"]
    columns = [
        *(
            "system",
            "ms a step",
            "quartiles",
            "over floor",
            "quartiles",
            "main cpu ms",
            "other cpu ms",
            "peak MiB",
        ),
        *("live MiB", "collectives", "payload MiB", "sent MiB", "page faults", "losses apart", "norms apart"),
    ]
    lines = [
        f"## {job['size']} {job['dtype']}",
        "",
        f"{job['world']} ranks x {job['threads']} thread, "
        f"{job['batch']} x {job['sequence']} tokens per rank and step"
        f"{f', {many} micro-batches of all' if (many := job.get('microbatches', 1)) > 1 else ''}. "
        f"In memory together: {'; '.join(', '.join(group) for group in case['groups'])}. "
        "Processes that were not of the benchmark used "
        f"{foreign_cores(case):.2f} cores (median of the turns).",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|" + "--:|" * (len(columns) - 1),
    ]
    for name in (name for name in SUITES[job["suite"]] if name in case["summary"]):
        row, verdict = case["summary"][name], case["losses"][name]
        ms, ratio = row["milliseconds"], row["ratio"]
        norm = verdict["largest_norm"]
        lines.append(
            f"| {name} | {ms['median']:.1f} | {ms['low']:.1f} "
            f"to {ms['high']:.1f} | **{ratio['median']:.3f}** "
            f"| {ratio['low']:.3f} to {ratio['high']:.3f} | "
            f"{row['main_cpu_ms']:.1f} | {row['other_cpu_ms']:.1f} "
            f"| {row['peak_mib']:.0f} | {row['live_mib']:.0f} "
            f"| {row['collectives']} | {row['payload_mib']:.1f} "
            f"| {row['sent_mib']:.1f} | {row['faults']:.0f} "
            f"| {verdict['largest']:.1e}{'' if verdict['equal'] else ' **DIFFER**'} "
            f"| {'' if norm is None else f'{norm:.1e}'} |"
        )
    for name, record in case["systems"].items():
        if "error" in record:
            reason = record["error"].strip().splitlines()
            lines += ["", f"**{name} failed**: {': '.join(dict.fromkeys((reason[0], reason[-1])))}"]
    busy = [name for name, row in case["summary"].items() if row["idle_share"] > 0.01]
    if busy:
        lines += ["", f"**Took processor time while waiting for their turn**: {', '.join(busy)}."]
    rivals = RIVALS[job["suite"]]
    if (job["suite"], job["size"], job["dtype"]) == ("step", "60m", "fp32"):
        rivals = [*rivals, *((f"polyreme{stage}", FLOOR, 1 / 1.05) for stage in range(4))]
    compared = [(ours, theirs, aim, ratios(case, theirs, ours)) for ours, theirs, aim in rivals]
    if any(values for *_, values in compared):
        lines += ["", "| | times faster than | median | quartiles | aim |", "|---|---|--:|--:|--:|"]
    for ours, theirs, aim, values in compared:
        if values:
            s = spread(values)
            met = "" if aim is None else f"{aim:.2f} {'met' if s['median'] >= aim else 'missed'}"
            lines.append(
                f"| {ours} | {theirs} | {s['median']:.3f} | {s['low']:.3f} to {s['high']:.3f} | {met} |"
            )
    return [*lines, ""]


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a page."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    lines = [
        f"# {TITLES[result['suite']]}",
        "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, {versions}; {env['libc']}, malloc "
        f"{result['malloc']}; {env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB.",
        "",
        f"    {env['command']}",
        "",
    ]
    for case in result["cases"]:
        lines += case_markdown(case)
    return "\n".join(lines)
