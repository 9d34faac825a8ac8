"""A small training for ranks on hosts (hosts.py), of which each prints what became of its weights."""

from __future__ import annotations

import time
from pathlib import Path

from hosts import Host, Script

PORT = "29500"
DIFFERENT = "ranks have different versions of what can change numbers: "
"""What ranks say of hosts that differ."""

TRAIN = """
import hashlib, os, pathlib, sys
import torch
from torch import nn
import polyreme

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
engine = polyreme.initialize(
    model,
    {
        "batch": {"size": 8},
        "zero": {"stage": int(sys.argv[1])},
        "launch": {"meet_timeout": float(sys.argv[2])},
    },
    loss_fn=nn.functional.cross_entropy,
)
numbers = torch.Generator().manual_seed(1)
dp = engine.mesh.dp
for _ in range(2):
    x, y = torch.randn(8, 8, generator=numbers), torch.randint(4, (8,), generator=numbers)
    engine.train_step((x.chunk(dp.size)[dp.rank], y.chunk(dp.size)[dp.rank]))
weights = b"".join(each.numpy().tobytes() for each in engine.state_dict().values())
digest, interface = hashlib.sha256(weights).hexdigest(), os.environ["GLOO_SOCKET_IFNAME"]
line = f"rank {dp.rank} of {dp.size} {digest} {interface}\\n"
sys.stdout.write(line)
pathlib.Path(__file__).with_name(f"rank-{dp.rank}").write_text(line)  # mpirun mixes what ranks print
"""


def write(folder: Path) -> Path:
    """The script, which takes the ZeRO stage and the seconds to meet in."""
    path = folder / "train.py"
    path.write_text(TRAIN)
    return path


def by_hand(rank: int, size: int, address: str, local: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """The variables of torchrun."""
    told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local[0], "LOCAL_WORLD_SIZE": local[1]}
    return {**{name: str(value) for name, value in told.items()}, "MASTER_ADDR": address, "MASTER_PORT": PORT}


def trained(script: Path, where: list[Host], address: str, stage: int = 3) -> list[list[str]]:
    """What ranks on these hosts print, as `ended`; they meet at `address`."""
    places = [(where[:rank].count(host), where.count(host)) for rank, host in enumerate(where)]
    runs = [
        host.script(script, str(stage), "60", variables=by_hand(rank, len(where), address, places[rank]))
        for rank, host in enumerate(where)
    ]
    return ended(runs)


def ended(runs: list[Script]) -> list[list[str]]:
    """The words that each rank prints: rank R of N, a digest of the weights, the interface."""
    ends = [run.end() for run in runs]
    assert [status for status, _ in ends] == [0] * len(ends), "\n".join(text for _, text in ends)
    return [text.split() for _, text in ends]


def on_one_host(script: Path, host: Host, stage: int = 3) -> str:
    """The digest of a run of two ranks on one host."""
    (words, other) = trained(script, [host, host], "127.0.0.1", stage)
    assert words[4] == other[4]
    return words[4]


class StandIn:
    """A command for launchers (srun, mpirun) to start in the place of `python train.py`, which takes as long
    as to import torch: it leaves its variables, and ends as the script does that a test starts with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "stand-in"
        self._folder.mkdir()
        self.words = ["sh", "-c", f"cd {self._folder} && env -0 > v.$$ && mv v.$$ $(hostname).$$ && "
                      "until [ -e end ]; do sleep 0.05; done; exit $(cat end)"]  # fmt: skip

    def scripts(self, count: int, hosts: list[Host], script: Path, *arguments: str) -> list[Script]:
        """Start the script in the place of each of `count` processes, on its host, once they are there."""
        deadline = time.monotonic() + 60
        while len(left := [each for each in self._folder.iterdir() if each.name[0] != "v"]) < count:
            assert time.monotonic() < deadline, f"{len(left)} of {count} processes began"
            time.sleep(0.02)
        named = {host.name: host for host in hosts}
        return [
            named[each.name.partition(".")[0]].script(script, *arguments, variables=_variables(each))
            for each in left
        ]

    def end(self, status: int = 0) -> None:
        """Have the processes end."""
        (self._folder / "draft").write_text(str(status))
        (self._folder / "draft").rename(self._folder / "end")


def _variables(file: Path) -> dict[str, str]:
    return dict(each.split("=", 1) for each in file.read_text().split("\0") if each)  # type: ignore[misc]
