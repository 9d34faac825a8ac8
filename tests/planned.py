"""What a dry run says of a rank, beside what a real rank does: cases, and both sides of the comparison.

The real side is measured by the recorder that dry runs use, on the CPU tensors of a real rank."""

from __future__ import annotations

import gc
import itertools
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
from polyreme.config import Config
from polyreme.layout.mesh_axes import AXES
from polyreme.observer import OBSERVER
from polyreme.planner.dry_run import STEPS, dry_run, recorded_step
from polyreme.planner.trace import CATEGORIES, RankTrace
from polyreme.sequence import context, documents
from polyreme.sequence.layout import Layout

VOCABULARY, LENGTH = 199, 32


def llama(scale: int = 1) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY * scale,
            hidden_size=64 * scale,
            intermediate_size=160 * scale,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    )


def qwen3() -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


def gpt2(scale: int = 1) -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY * scale,
            n_positions=64,
            n_embd=64 * scale,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.1,
            attn_pdrop=0.0,
        )
    )


def bert() -> nn.Module:
    import transformers

    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        )
    )


def t5() -> nn.Module:
    import transformers

    of_all: dict[str, Any] = {"decoder_start_token_id": 0}  # every config of transformers takes it
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            **of_all,
        )
    )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(F.gelu(self.first(image))))
        return self.head(F.relu(hidden).mean(dim=(2, 3)))


def perceptron(scale: int = 1) -> nn.Module:
    wide = 48 * scale
    layers = itertools.chain(*((nn.Linear(wide, wide), nn.Tanh()) for _ in range(5)))
    return nn.Sequential(nn.Linear(48, wide), *layers, nn.Linear(wide, 5))


def tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 12, 12), torch.zeros(samples, dtype=torch.long)


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 48), torch.zeros(samples, dtype=torch.long)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "llama": (llama, tokens, None),
    "gpt2": (gpt2, tokens, None),
    "qwen3": (qwen3, tokens, None),
    "bert": (bert, tokens, None),
    "t5": (t5, tokens, None),
    "cnn": (Convolutions, images, F.cross_entropy),
    "mlp": (perceptron, vectors, F.cross_entropy),
}
LARGE: dict[str, tuple[partial[nn.Module], Callable[[int], Any], Any]] = {
    "large llama": (partial(llama, 8), tokens, None),
    "large gpt2": (partial(gpt2, 10), tokens, None),
    "large mlp": (partial(perceptron, 30), vectors, F.cross_entropy),
}
"""Models beside whose tensors a process is small: 14 to 30 million parameters."""
BLOCKS = ("llama", "gpt2", "qwen3")
"""Families that tensor-parallel ranks divide."""
MESHES: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "virtual": 2},
    {"pp": 2, "schedule": "zb-h1"},
    {"pp": 2, "schedule": "zb-v"},
    {"tp": 2, "pp": 2, "virtual": 2, "sequence_parallel": True},
    {"cp": 2, "method": "ring"},
    {"tp": 2, "cp": 2, "method": "gather"},
    {"cp": 2, "method": "ulysses"},
)
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"states": "host"},
    "host, params too": {"states": "host", "params": "host"},
    "files": {"states": "files"},
}
ACTIVATIONS = ("keep", "recompute", "host")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    family: str
    mesh: tuple[tuple[str, Any], ...]
    stage: int
    tier: str
    activations: str
    compute: str
    count: int

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(size for axis, size in self.mesh if axis in AXES)

    @property
    def name(self) -> str:
        mesh = " ".join(f"{axis} {size}" for axis, size in self.mesh) or "1 rank"
        parts = (self.family, mesh, f"stage {self.stage}", self.tier, self.activations, self.compute)
        return ", ".join((*parts, f"{self.count} micro-batches"))

    def config(self, folder: str) -> Config:
        """The resolved config, with files in `folder`."""
        memory = {key: folder if value == "files" else value for key, value in TIERS[self.tier].items()}
        mesh = dict(self.mesh)
        virtual, method = mesh.pop("virtual", 0), mesh.pop("method", "auto")
        pipeline: dict[str, Any] = {"schedule": "interleaved", "virtual": virtual} if virtual else {}
        pipeline |= {"schedule": mesh.pop("schedule")} if "schedule" in mesh else {}
        micro = 4 * mesh.get("cp", 1)
        given: dict[str, Any] = {
            "mesh": mesh,
            "context": {"method": method},
            "pipeline": pipeline,
            "zero": {"stage": self.stage, "min_bucket": 0, "persistence_threshold": 32},
            "memory": {**memory, "activations": self.activations},
            "precision": {"compute": self.compute},
            # as many tokens on a rank whatever cp is, so that the peak is where it is without
            "batch": {"size": micro * self.count * mesh.get("dp", 1), "micro": micro},
        }
        return Config.load(given).resolve(self.world)


def sensible(case: Case) -> bool:
    """Whether a run would not be refused."""
    mesh = dict(case.mesh)
    # with less of activations the peak of these small models is in the update, where CPU ranks have more, and
    # where cp is 4 the places of tokens are much beside a width of 64, which they have on the CPU
    if "cp" in mesh and (case.family not in ("llama", "qwen3") or case.activations != "keep"):
        return False
    if "tp" in mesh and case.family not in BLOCKS:
        return False
    if "pp" in mesh and case.family not in (*BLOCKS, "mlp"):
        return False
    return case.tier != "host, params too" or case.stage == 3


def cases() -> list[Case]:
    """All that are sensible."""
    product = itertools.product(
        FAMILIES,
        [tuple(mesh.items()) for mesh in MESHES],
        range(4),
        TIERS,
        ACTIVATIONS,
        ("fp32", "bf16"),
        (1, 4),
    )
    return [case for case in itertools.starmap(Case, product) if sensible(case)]


def values(case: Case, size: int) -> frozenset[Any]:
    """What a cover of cases has of each: every `size` of its values together."""
    return frozenset(itertools.combinations(enumerate(map(str, vars(case).values())), size))


def predicted(case: Case, rank: int, folder: str) -> RankTrace:
    """What a dry run says."""
    model, batch, loss_fn = (FAMILIES | LARGE)[case.family]
    return dry_run(model, case.config(folder), rank, batch=batch, loss_fn=loss_fn)


def beside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function record nothing: what it makes is in the host's memory beside a device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder: Any = OBSERVER.get()
        with recorder.paused():
            return function(*args, **kwargs)

    return call


def measured(rank: int, world: int, case: Case, folder: str) -> tuple[RankTrace, dict[str, Any]]:
    """What a real rank does in its second step; with the traffic as its axes counted it. What lies in the
    host's memory where sequences are cut is left out, as it is no device's but a CPU's."""
    model, batch, loss_fn = (FAMILIES | LARGE)[case.family]
    config = case.config(folder)
    with polyreme.initialize(model, config, loss_fn=loss_fn) as engine, ExitStack() as stack:
        share = batch(config.share)
        for _ in range(STEPS - 1):
            engine.train_step(share)
        for owner, name in ((documents, "find"), (context, "shifted"), (Layout, "of")):
            stack.enter_context(patch.object(owner, name, beside(getattr(owner, name))))
        before = engine.mesh.traffic()
        trace = recorded_step(engine, share)
        after = engine.mesh.traffic()
    return trace, less(after, before)


RESIDENT = [
    Case("large llama", (), 0, "device", "keep", "fp32", 1),
    Case("large gpt2", (), 1, "device", "recompute", "bf16", 1),
    Case("large mlp", (), 0, "device", "keep", "fp32", 4),
    Case("large llama", (), 3, "host", "keep", "fp32", 1),
    Case("large llama", (("dp", 2),), 1, "device", "keep", "fp32", 1),
    Case("large gpt2", (("dp", 2),), 3, "device", "keep", "bf16", 4),
    Case("large llama", (("tp", 2),), 2, "device", "recompute", "fp32", 1),
    Case("large gpt2", (("pp", 2),), 0, "device", "keep", "fp32", 4),
]
"""Cases whose processes are measured."""


def resident(rank: int, world: int, case: Case, folder: str) -> tuple[int, int]:
    """The bytes of physical memory that a rank has before the model, and at their most in three steps. What
    several ranks have counts for each in equal parts."""
    model, batch, loss_fn = LARGE[case.family]
    config = case.config(folder)
    before = 0
    # first a smaller one, for which libraries load and compile all that they use
    for each in (partial(model.func, 3), model):
        with polyreme.initialize(each, config, loss_fn=loss_fn) as engine, Sampler() as sampler:
            for _ in range(3):
                engine.train_step(batch(config.share))
        del engine
        before = before or physical()
    return before, sampler.most


def physical() -> int:
    """The proportional resident memory of this process, in bytes."""
    gc.collect()
    return _proportional()


def _proportional() -> int:
    text = Path("/proc/self/smaps_rollup").read_text("ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


class Sampler:
    """Measures the process' memory from a thread, again and again."""

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, _proportional())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def less(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counts since `before`, without those of nothing."""
    found: dict[str, Any] = {}
    for axis, verbs in after.items():
        for verb, (calls, nbytes) in verbs.items():
            was = before.get(axis, {}).get(verb, (0, 0))
            if calls > was[0]:
                found.setdefault(axis, {})[verb] = (calls - was[0], nbytes - was[1])
    return found


@dataclass(frozen=True)
class Difference:
    """A dry run beside the run. peak: by how much it is more, of 1. states: categories between steps whose
    bytes differ, each with both. traffic: both, where they differ. tiers: bytes of host memory and of files,
    where they differ."""

    peak: float
    measured: int
    states: dict[str, tuple[int, int]]
    traffic: tuple[Any, Any] | None
    tiers: tuple[Any, Any] | None


def compared(case: Case, ranks: Any, folder: str) -> list[Difference]:
    """Run a case on real ranks (a `pool.Ranks`; a single one in this process), and compare each with its dry
    run."""
    found = []
    runs = ranks(case.world, measured, case, folder) if case.world > 1 else [measured(0, 1, case, folder)]
    for rank, (real, traffic) in enumerate(runs):
        said, did = predicted(case, rank, folder), real.memory
        # of a cut batch the parts are on the device, and the whole is on the host
        peak = did.peak - did.resting["batch"] * ("cp" in dict(case.mesh))
        states: dict[str, tuple[int, int]] = {
            key: (value, did.resting[key])
            for key, value in said.memory.resting.items()
            if value != did.resting[key] and key != "batch"  # that of a CPU is there before the step
        }
        tiers = [(each.host, each.files) for each in (said.memory, did)]
        found.append(
            Difference(
                said.memory.peak / peak - 1,
                peak,
                states,
                None if said.traffic == traffic else (said.traffic, traffic),
                None if tiers[0] == tiers[1] else (tiers[0], tiers[1]),
            )
        )
    return found


KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"ph", "name", "pid", "ts", "args"},
}
"""What the Trace Event Format asks of metadata, of complete events and of counters, and no more."""
NAMED = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_trace(found: dict[str, Any], seconds: float) -> None:
    """Assert field by field what the format and its readers ask for: JSON of ASCII without NaN; microseconds
    within the step; a name for each process and thread before its first event, given once; complete events of
    a thread in order, which no reader has overlap (Perfetto goes on in whole nanoseconds, and takes slices
    that overlap without being within each other off their thread); and counters that only have numbers."""
    text = json.dumps(found, allow_nan=False)
    assert text.isascii() and json.loads(text) == found
    assert {*found} == {"traceEvents", "displayTimeUnit"} and found["displayTimeUnit"] == "ms"
    threads, named, processes = defaultdict(list), set(), set()
    for each in found["traceEvents"]:
        assert {*each} == KEYS[each["ph"]] and each["name"] and isinstance(each["name"], str)
        numbers = [each[key] for key in ("pid", "tid") if key in each]
        assert all(type(number) is int and 0 <= number < 1 << 32 for number in numbers)
        if each["ph"] == "M":
            key, kind = NAMED[each["name"]]
            assert type(each["args"][key]) is kind and {*each["args"]} == {key}
            once = (each["name"], *numbers)
            assert once not in named
            named.add(once)
            if each["name"] == "process_name":
                assert each["args"]["name"] not in processes
                processes.add(each["args"]["name"])
            continue
        assert ("process_name", each["pid"], 0) in named
        assert 0 <= each["ts"] <= seconds * 1e6 + 0.001
        if each["ph"] == "X":
            assert ("thread_name", *numbers) in named and each["dur"] > 0 and each["cat"]
            threads[each["pid"], each["tid"]].append(each)
        else:
            assert {*each["args"]} == {*CATEGORIES}
            assert all(type(size) is int and size >= 0 for size in each["args"].values())
    for its, nanoseconds in itertools.product(threads.values(), (int, round)):
        times = [(nanoseconds(1000 * each["ts"]), nanoseconds(1000 * each["dur"])) for each in its]
        assert all(ts + dur <= after for (ts, dur), (after, _) in itertools.pairwise(times))
    assert threads
