"""Fixtures of the whole suite, and a time limit for every test that sets none itself."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from examples import ALL
from pool import Ranks

DURATIONS = Path(__file__).with_name("durations.json")
LONG = Path(__file__).with_name("durations_all_cases.json")
TIME_LIMIT = 300  # seconds; it only matters where something hangs
# A busy machine is no failure.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# A suite in the background (`pytest &`, nohup) is told to ignore these. It still does, by a handler, which
# what it starts does not inherit.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)
# as on the ranks; beside anything else that runs, several that wait for each other take ten times as long
torch.set_num_threads(1)
# What is woken waits for its turn, here and in all that starts here. Otherwise it may push off its core what
# has the lock of a connection, for which gloo's threads spin: 40% of the processor time of ranks.
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="whole products where tests run a cover (tests/cover.py), and all examples of properties",
    )
    parser.addoption(
        "--fail-above", type=float, metavar="SECONDS", help="fail if the whole run takes longer than that"
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help=f"note the seconds of each file in {DURATIONS.name} ({LONG.name} with --all-cases)",
    )
    parser.addoption(
        "--part", type=_part, metavar="K/N", help="run part K of N of the files, about as long as each other"
    )


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("all_cases"):
        os.environ[ALL] = "1"
    if not hasattr(config, "workerinput"):  # else it is one of xdist's workers, whose reports come here
        config.pluginmanager.register(Times(config), "times")


def _durations(config: pytest.Config) -> Path:
    return LONG if config.getoption("all_cases") else DURATIONS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker ends long after the other."""
    known = _durations(config)
    seconds = json.loads(known.read_text()) if known.exists() else {}
    files = {file: -seconds.get(file, 0.0) for file in sorted({_file(item) for item in items})}
    if (chosen := config.getoption("part")) is not None:
        part, parts = chosen
        dealt = set(sorted(files, key=lambda file: files[file])[part - 1 :: parts])
        config.hook.pytest_deselected(items=[item for item in items if _file(item) not in dealt])
        items[:] = [item for item in items if _file(item) in dealt]
    items.sort(key=lambda item: files[_file(item)])
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Times:
    """Adds up how long each file took."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._began = config, time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        limit = self._config.getoption("fail_above")
        if limit is not None and time.monotonic() - self._began > limit and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._config.getoption("write_durations"):
            file = _durations(self._config)
            before = json.loads(file.read_text()) if self._config.getoption("part") and file.exists() else {}
            rounded = {name: round(each, 1) for name, each in self._seconds.items() if each >= 1}
            file.write_text(json.dumps(before | rounded, indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        took, limit = time.monotonic() - self._began, self._config.getoption("fail_above")
        slowest = sorted(self._seconds.items(), key=lambda each: -each[1])[:10]
        if len(self._seconds) > len(slowest):
            terminalreporter.section("slowest files")
            for file, seconds in slowest:
                terminalreporter.write_line(f"{seconds:6.1f} s  {file}")
        if self._config.getoption("part"):
            terminalreporter.section("files of this part")
            terminalreporter.write_line(" ".join(sorted(self._seconds)))
        terminalreporter.write_line(f"{took:.0f} s in all")
        if limit is not None and took > limit:
            terminalreporter.write_line(f"FAILED: that is more than {limit:g} s")


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What is alive between two modules stays so; never to visit it again makes each collection of the next
    one quick."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, function, *args)` runs a function on real gloo ranks; see pool.Ranks."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _no_group_stays_open() -> Iterator[None]:
    """Fail the test that leaves a process group open, which the next ones would take for theirs."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a process group was left open")
