"""Every message on the page of troubleshooting is what Polyreme says: each problem is planted, and what is
said then is compared with the page, where `...` stands for anything. Other hosts, GPUs and libraries that are
missing are stand-ins."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
from polyreme.compat import finder
from polyreme.compat.deepspeed.json_config import translate
from polyreme.config import Config
from polyreme.data import Loader, documents, open_text
from polyreme.data.text import optional
from polyreme.distributed import mpi, process_group, rendezvous, shared_memory
from polyreme.distributed.environment import Environment, detect, refuse_several
from polyreme.distributed.rendezvous import listen
from polyreme.distributed.versions import refuse_unlike
from polyreme.engine import Engine
from polyreme.errors import CheckpointError
from polyreme.files.folder_lock import Claim
from polyreme.launch import hostfile, limits
from polyreme.launch.torchrun import launch
from pool import RanksFailed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PLANTED: dict[str, Callable[[], object]] = {}
"""What makes each problem happen, by the page's heading: it raises, or returns what is said."""
X, Y = torch.randn(8, 4), torch.randn(8, 1)
SMALL = {"batch": {"size": 8}}


def plant(heading: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Enter a function under the heading of the page that tells of its problem."""

    def enter(function: Callable[[], object]) -> Callable[[], object]:
        PLANTED[heading] = function
        return function

    return enter


def said(function: Callable[[], object]) -> str:
    """What it raises or returns, in the folder for files of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            return str(function())
        except RanksFailed as error:
            return str(next(iter(error.exceptions.values())))
        except Exception as error:
            return str(error)


def engine(config: Any = SMALL, model: nn.Module | None = None, **options: Any) -> Engine:
    options.setdefault("loss_fn", nn.functional.mse_loss)
    torch.manual_seed(0)
    return polyreme.initialize(model or nn.Linear(4, 1), config, **options)


def at_two(function: Callable[[], object]) -> object:
    """On two ranks that are threads."""
    return threads.run(2, lambda rank, world: function())


def launched(rest: str) -> object:
    """On two ranks that are processes, as one of them ends: an engine, and the rest of a script."""
    Path("train.py").write_text(
        "import torch, polyreme\n"
        "config = {'batch': {'size': 8}}\n"
        "engine = polyreme.initialize(torch.nn.Linear(4, 1), config, loss_fn=torch.nn.functional.mse_loss)\n"
        + rest
    )
    return launch(["train.py"], ranks=2)


def tokenizer() -> None:
    Path("text.txt").write_text("a few words " * 50)


# ---- installing


@plant("Python is too old")
def _() -> object:
    old = Path("old-python")
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command = ["make", "-C", ROOT, "setup", f"PYTHON={old.absolute()}", f"VENV={Path('v').absolute()}"]
    return subprocess.run(command, capture_output=True, text=True).stdout


@plant("A library of an extra is missing")
def _() -> object:
    with patch.dict(sys.modules, {"datasets": None}):
        return optional("datasets")


@plant("mpi4py is missing")
def _() -> object:
    with patch.dict(sys.modules, {"mpi4py": None}):
        sys.modules.pop("mpi4py.MPI", None)
        return mpi.library()


@plant("matplotlib is missing")
def _() -> object:
    with patch.dict(sys.modules, {"matplotlib": None, "matplotlib.ticker": None}):
        sys.modules.pop("polyreme.monitor.plot", None)
        return importlib.import_module("polyreme.monitor.plot")


@plant("Too few open files")
def _() -> object:
    with patch.object(resource, "getrlimit", lambda kind: (32, 32)):
        return limits.check()


# ---- starting ranks


@plant("The script is not there")
def _() -> object:
    return launch(["trian.py"], ranks=2)


@plant("RANK without WORLD_SIZE")
def _() -> object:
    return detect({"RANK": "0"})


@plant("MASTER_ADDR is not set")
def _() -> object:
    return detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})


@plant("A launcher inside a launcher")
def _() -> object:
    inside = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    inside |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with patch.dict(os.environ, inside):
        return refuse_several("`polyreme launch`")


@plant("A rank failed")
def _() -> object:
    Path("train.py").write_text("1 / 0\n")
    return launch(["train.py"], ranks=2)


@plant("A rank was killed")
def _() -> object:
    Path("train.py").write_text("import os\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\n")
    return launch(["train.py"], ranks=2)


@plant("The port is taken")
def _() -> object:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return listen(Environment("torchrun", 0, 2, 0, 2, ("127.0.0.1", taken.getsockname()[1])))


@plant("Rank 0 has not come")
def _() -> object:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    there = Environment("torchrun", 1, 2, 1, 2, address)
    return rendezvous._reach(there, timedelta(seconds=0.1), time.monotonic() + 0.1)


@plant("Two processes are the same rank")
def _() -> object:
    store = torch.distributed.HashStore()
    there = Environment("torchrun", 1, 2, 1, 2, ("127.0.0.1", 29500))
    came = [rendezvous._outcome(store, there, {"host": "node1"}, timedelta(0), 0.0) for _ in range(2)]
    return came[1]


@plant("More ranks than GPUs")
def _() -> object:
    few = {"is_available": lambda: True, "device_count": lambda: 1}
    with patch.multiple(torch.cuda, **few), patch.dict(os.environ, {"LOCAL_RANK": "1"}):
        return process_group._device()


# ---- several hosts


@plant("An interface that does not lead there")
def _() -> object:
    there = Environment("torchrun", 1, 2, 0, 1, ("10.0.0.1", 29500))
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth7"}):
        return rendezvous._refuse_other_way(there, {"10.0.0.2": "eth0"}, "10.0.0.2")


@plant("A line of the hostfile is wrong")
def _() -> object:
    Path("hosts").write_text("node1 slots=4\nnode2 4\n")
    return hostfile.read(Path("hosts"))


@plant("A host that the hostfile does not have")
def _() -> object:
    return hostfile.parse_resource_filter({"node1": [0, 1]}, "node7")


@plant("ssh is missing")
def _() -> object:
    return hostfile.find_login(["node1"], ["no-such-ssh"])


@plant("Hosts have different versions")
def _() -> object:
    return refuse_unlike([("node1", {"torch": "2.13.0"}), ("node2", {"torch": "2.12.1"})])


# ---- the config


@plant("The config is not there")
def _() -> object:
    return Config.load("run.tml.toml")


@plant("The file is not valid")
def _() -> object:
    Path("run.toml").write_text("[batch]\nsize = \n")
    return Config.load("run.toml")


@plant("A key that there is not")
def _() -> object:
    return Config.load({"zero": {"stages": 3}})


@plant("A value of another type")
def _() -> object:
    return Config.load({"batch": {"size": "many"}})


@plant("The batch cannot be divided")
def _() -> object:
    return Config.load({"batch": {"size": 10}}).resolve(4)


@plant("The micro-batch does not divide a rank's share")
def _() -> object:
    return Config.load({"batch": {"size": 12, "micro": 4}}).resolve(2)


@plant("The mesh does not fit the ranks")
def _() -> object:
    return Config.load({"mesh": {"tp": 4}}).resolve(2)


@plant("Parameters off the device without stage 3")
def _() -> object:
    return Config.load({"zero": {"stage": 2}, "memory": {"params": "host"}}).resolve(2)


@plant("Ranks have different configs")
def _() -> object:
    def run(rank: int, world: int) -> None:
        engine({"batch": {"size": 8}, "optimizer": {"lr": 0.1 * (1 + rank)}})

    return threads.run(2, run)


# ---- memory


@plant("Out of memory")
def _() -> object:
    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    return engine(model=Large(4, 1)).train_step((X, Y))


@plant("The folder of a tier cannot be used")
def _() -> object:
    Path("nvme").write_text("a file")
    return engine({**SMALL, "memory": {"states": "./nvme"}})


@plant("No memory that ranks can share")
def _() -> object:
    with shared_memory._limits("an exchange of 64 MiB"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- numbers, and the loop


@plant("NaN in the gradients")
def _() -> object:
    return engine().train_step((X * float("nan"), Y))


@plant("parameter.grad, and clip_grad_norm_")
def _() -> object:
    trained = engine()
    trained.backward(nn.functional.mse_loss(trained(X), Y))
    return nn.utils.clip_grad_norm_(trained.module.parameters(), 1.0)


@plant("step() before the last backward")
def _() -> object:
    trained = engine({"batch": {"size": 8, "micro": 4}})
    trained.backward(nn.functional.mse_loss(trained(X[:4]), Y[:4]))
    return trained.step()


@plant("A share of another size")
def _() -> object:
    return engine().train_step((X[:6], Y[:6]))


@plant("The module was called, and not the engine")
def _() -> object:
    trained = engine({**SMALL, "zero": {"stage": 3}})
    nn.functional.mse_loss(trained.module(X), Y).backward()
    return trained.step()


@plant("Every rank has the same batch")
def _() -> object:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at_two(lambda: engine().train_step((X[:4], Y[:4])))
    return "".join(str(each.message) for each in caught)


@plant("Ranks make different numbers of steps")
def _() -> object:
    step = "    engine.train_step((torch.randn(4, 4), torch.randn(4, 1)))\n"
    return launched("for _ in range(3 - engine.mesh.rank):\n" + step)


@plant("Only one rank calls")
def _() -> object:
    return launched("if engine.mesh.rank == 0:\n    engine.save('saved')\n")


@plant("A parameter was unfrozen")
def _() -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    trained = engine(model=model)
    model[0].requires_grad_(True)
    return trained.train_step((X, Y))


@plant("Ranks have different models")
def _() -> object:
    models = (nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1)))
    return threads.run(2, lambda rank, world: engine(model=models[rank]))


@plant("Every parameter is frozen")
def _() -> object:
    return engine(model=nn.Linear(4, 1).requires_grad_(False)).train_step((X, Y))


@plant("The loss function is missing")
def _() -> object:
    return engine(model=nn.Sequential(nn.Linear(4, 1)), loss_fn=None).train_step((X, Y))


@plant("Weights changed inside full_parameters()")
def _() -> object:
    def run() -> None:
        with engine({**SMALL, "zero": {"stage": 3}}).full_parameters() as whole, torch.no_grad():
            whole.weight.zero_()

    return at_two(run)


@plant("The optimizer is of another model")
def _() -> object:
    other = torch.optim.Adam(nn.Linear(4, 1).parameters())
    return polyreme.initialize(nn.Linear(4, 1), SMALL, optimizer=other, loss_fn=nn.functional.mse_loss)


@plant("scheduler.step() once an epoch")
def _() -> object:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {**SMALL, "optimizer": {"clip": "none"}}
    trained = engine(config, model, optimizer=optimizer, lr_scheduler=scheduler)
    for _ in range(3):
        trained.train_step((X, Y))
    return scheduler.step()


@plant("A GradScaler")
def _() -> object:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = engine(model=model, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.mse_loss(trained(X), Y)).backward()
    return scaler.step(optimizer)


@plant("The model has a part that tensor parallelism does not know")
def _() -> object:
    return at_two(
        lambda: engine({**SMALL, "mesh": {"tp": 2}}, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    )


@plant("The attention heads cannot be divided")
def _() -> object:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 3}

    def run() -> None:
        engine({**SMALL, "mesh": {"tp": 2}}, LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)))

    return at_two(run)


@plant("The whole model is called in a pipeline")
def _() -> object:
    def run() -> object:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        return engine({**SMALL, "mesh": {"pp": 2}}, model)(X)

    return at_two(run)


# ---- checkpoints


def saved() -> Path:
    trained = engine()
    trained.train_step((X, Y))
    return trained.save("saved")


@plant("The folder is not a checkpoint's")
def _() -> object:
    Path("results").mkdir()
    Path("results/notes.txt").write_text("mine")
    return engine().save("results")


@plant("Nothing to load")
def _() -> object:
    Path("empty").mkdir()
    return engine().load("empty")


@plant("A checkpoint is damaged")
def _() -> object:
    file = saved() / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return engine().load("saved")


@plant("A checkpoint of another model")
def _() -> object:
    saved()
    return engine(model=nn.Sequential(nn.Linear(4, 1))).load("saved")


@plant("A checkpoint of other shapes")
def _() -> object:
    saved()
    return engine(model=nn.Linear(5, 1)).load("saved")


@plant("A checkpoint of another optimizer")
def _() -> object:
    saved()
    return engine({**SMALL, "optimizer": {"name": "sgd", "momentum": 0.9}}).load("saved")


@plant("The run's folder is in use")
def _() -> object:
    first = Claim(Path("run"), "one run", error=CheckpointError)
    try:
        return Claim(Path("run"), "another", patience=0.0, error=CheckpointError)
    finally:
        first.close()


# ---- data


@plant("The text is not there")
def _() -> object:
    return documents("corpsu/", pattern=["*.txt"])


@plant("No file matches")
def _() -> object:
    Path("corpus").mkdir()
    Path("corpus/a.md").write_text("text")
    return documents("corpus", pattern=["*.txt"])


@plant("The data is smaller than a batch")
def _() -> object:
    return engine().loader(torch.utils.data.TensorDataset(X[:5], Y[:5]))


@plant("Samples that do not stack")
def _() -> object:
    samples = [torch.zeros(1 + i) for i in range(8)]
    return next(iter(Loader(samples, batch_size=8, rank=0, world=1, seed=0)))


@plant("The text is too short")
def _() -> object:
    Path("a.txt").write_text("a few words")
    section = {"path": "a.txt", "sequence": 512, "vocab_size": 300, "validation": 0, "cache": "cache"}
    return len(open_text(Config.load({"data": section}).data, seed=0).train)


@plant("Another dataset than before")
def _() -> object:
    loaders = [Loader(list(X[:n]), batch_size=2, rank=0, world=1, seed=0) for n in (8, 6)]
    return loaders[1].load_state_dict(loaders[0].state_dict())


# ---- doors


@plant("A key of DeepSpeed's that is refused")
def _() -> object:
    return translate({"train_batch_size": 8, "sequence_parallel_size": 2}, world_size=2)


@plant("A key that DeepSpeed does not have")
def _() -> object:
    return translate({"train_batch_size": 8, "zero_optimisation": {"stage": 2}}, world_size=2)


@plant("Batch sizes that contradict each other")
def _() -> object:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    return translate(sizes, world_size=2)


@plant("DeepSpeed itself is imported already")
def _() -> object:
    other = ModuleType("deepspeed")
    other.__file__ = "/site-packages/deepspeed/__init__.py"
    with patch.dict(sys.modules, {"deepspeed": other}):
        return finder.install("deepspeed")


@plant("A module that the door does not have")
def _() -> object:
    return finder.Door("deepspeed", "0.19.8").find_spec("deepspeed.runtime.engine_v9")


def symptoms() -> dict[str, str]:
    """The messages on the page, by heading."""
    return dict(
        re.findall(r"^### ([^\n]*)\n\n```text\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )


@pytest.mark.parametrize("heading", PLANTED)
def test_the_message_is_as_on_the_page(heading: str) -> None:
    shown = symptoms()[heading].split()
    pattern = re.escape(" ".join(shown)).replace(re.escape("..."), ".*?")
    found = " ".join(said(PLANTED[heading]).split())
    assert re.search(pattern, found), found


def test_the_page_has_what_is_planted() -> None:
    headings = re.findall(r"^### (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == list(symptoms()) and sorted(headings) == sorted(PLANTED) and len(headings) > 50
