"""The checks of `polyreme doctor` for several hosts, from facts that ranks on them found
(`polyreme.launch.survey`).

Each that failed says what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from polyreme.cli.doctor import Check
from polyreme.launch.survey import Pair, Survey

MIB, GB = 2**20, 1e9
SHARED_MEMORY = 256 * MIB
APART = 0.5  # seconds between clocks
FILES, FILES_A_RANK = 1024, 16

Facts = Mapping[str, Any]


def examine(found: Survey) -> list[Check]:
    """Return all checks, in the order in which they are shown."""
    facts, first = found.facts, found.facts[0]["host"]
    names = ", ".join(each["host"] for each in facts)
    return [
        Check("hosts", True, f"{len(facts)}, with {found.ranks} ranks: {names}"),
        _versions(facts),
        _clocks(first, found.pairs),
        _every(
            "interfaces",
            facts,
            _interface,
            lambda each: each["interface"] != "lo" or len(facts) == 1,
            "this one leads to no other host; unset GLOO_SOCKET_IFNAME, or name the one that does",
        ),
        _folder(facts),
        _every(
            "shared memory",
            facts,
            lambda each: _size(each["shared memory"]),
            lambda each: each["shared memory"] is None or each["shared memory"] >= SHARED_MEMORY,
            "/dev/shm has too little room for ranks of one host: mount -o remount,size=50% /dev/shm, or give "
            "the container --shm-size=8g or --ipc=host",
        ),
        _every(
            "file limit",
            facts,
            lambda each: f"{each['files']} open files",
            lambda each: each["files"] < 0 or each["files"] >= max(FILES, FILES_A_RANK * found.ranks),
            "too few for connections to so many ranks: ulimit -n 65536 before the run, or LimitNOFILE of "
            "sshd or slurmd",
        ),
        _every(
            "GPUs",
            facts,
            _gpus,
            lambda each: each["gpus"] == facts[0]["gpus"],
            f"{first} has {facts[0]['gpus']}: look at nvidia-smi there, or give the hosts fitting slots",
        ),
        *_ways(found.pairs),
    ]


def _every(
    name: str, facts: Sequence[Facts], shown: Callable[[Facts], str], good: Callable[[Facts], Any], fix: str
) -> Check:
    """Check the hosts one by one. The text gives their common value, or each host's, and the fix for those
    that failed."""
    bad = [each["host"] for each in facts if not good(each)]
    said = {each["host"]: shown(each) for each in facts}
    if len(set(said.values())) == 1:
        text = f"{next(iter(said.values()))} on {'each' if len(said) > 1 else next(iter(said))}"
    else:
        text = "; ".join(f"{host}: {each}" for host, each in said.items())
    return Check(name, not bad, f"{text}; on {', '.join(bad)}: {fix}" if bad else text)


def _versions(facts: Sequence[Facts]) -> Check:
    mine = facts[0]["versions"]
    differing = [
        f"{each['host']} has {name} {each['versions'].get(name, 'not at all')}"
        for each in facts
        for name, version in mine.items()
        if each["versions"].get(name) != version
    ]
    text = f"{', '.join(f'{name} {version}' for name, version in mine.items())} on {facts[0]['host']}"
    if not differing:
        return Check("versions", True, text.rpartition(" on ")[0] + " on each")
    return Check("versions", False, f"{text}, but {'; '.join(differing)}: install the same there")


def _folder(facts: Sequence[Facts]) -> Check:
    first = facts[0]
    if first["sees folder"] is None:
        fix = "checkpoints need one in which they can be written: run in another one, or mend its rights"
        return Check("shared folder", False, f"{first['host']} cannot write in {first['folder']}: {fix}")
    return _every(
        "shared folder",
        facts,
        lambda each: f"{each['folder']} is {'seen' if each['sees folder'] else 'not seen'}",
        lambda each: each["sees folder"],
        f"a file that {first['host']} wrote in its folder is not there, and checkpoints need a folder that "
        "all hosts have: run in one that is mounted on all, at one path",
    )


def _clocks(first: str, pairs: Sequence[Pair]) -> Check:
    ahead = {pair.hosts[1]: pair.ahead for pair in pairs if pair.hosts[0] == first}
    worst = max(map(abs, ahead.values()), default=0.0)
    bad = [f"{host} is {seconds:+.1f} s" for host, seconds in ahead.items() if abs(seconds) > APART]
    if bad:
        return Check(
            "clocks", False, f"{', '.join(bad)} from {first}'s: start chrony or another NTP client there"
        )
    return Check("clocks", True, f"within {worst * 1e3:.1f} ms of {first}'s")


def _interface(facts: Facts) -> str:
    return f"{facts['interface'] or 'none told'} {', '.join(facts['addresses'])}".strip()


def _size(free: int | None) -> str:
    return "none here" if free is None else f"{free / MIB:,.0f} MiB free"


def _gpus(facts: Facts) -> str:
    links = ", ".join(f"{link} between {count} pairs" for link, count in facts["links"].items())
    return f"{facts['gpus']}{f' ({links})' if links else ''}" if facts["gpus"] else "none"


def _ways(pairs: Sequence[Pair]) -> Iterator[Check]:
    """Yield a check for each pair of hosts. A pair fails that has less than half of the median bandwidth; of
    three pairs or fewer, of the fastest one's, as one slow host slows two of three pairs."""
    found = [pair.bandwidth for pair in pairs] or [0.0]
    usual, whose = (median(found), "most have") if len(found) > 3 else (max(found), "the fastest has")
    for pair in pairs:
        text = f"{pair.latency * 1e6:,.0f} us, {pair.bandwidth / GB:.2f} GB/s"
        slow = pair.bandwidth < usual / 2
        why = (
            f", where {whose} {usual / GB:.2f}: look at the cable, the port of the switch and its speed "
            "(ethtool)"
        )
        yield Check(" - ".join(pair.hosts), not slow, text + (why if slow else ""))
