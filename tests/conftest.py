"""Fixtures of the whole suite, and a time limit for every test that sets none itself."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from pool import Ranks

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="whole products where tests run a cover of them (tests/cover.py)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT))


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
