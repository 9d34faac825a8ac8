"""Finding out which rank this is."""

from __future__ import annotations

import pytest

from polyreme.errors import LaunchError
from polyreme.launch.environment import Environment, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, ("10.0.0.1", 29400))


def test_no_variables_are_a_single_process() -> None:
    assert detect({}) == Environment("single process", 0, 1, 0, 1, None)
    assert detect({"WORLD_SIZE": "8"}).world_size == 1  # a variable alone says nothing about this process


def test_ranks_started_by_hand_on_one_host() -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1234"})
    assert (found.local_rank, found.local_world_size, found.address) == (1, 2, ("127.0.0.1", 1234))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "8"}, "rank = 8 with world_size = 8"),
        ({"RANK": "-1"}, "rank = -1"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"LOCAL_RANK": "4"}, "local_rank = 4 with local_world_size = 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"WORLD_SIZE": "0"}, "world_size = 0"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        detect({**TORCHRUN, **change})


def test_a_missing_port_is_named() -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT is None"):
        detect({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})
