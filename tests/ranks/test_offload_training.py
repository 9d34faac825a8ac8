"""Where states and parameters live changes no bit of the losses, the gradient norms or the weights; and what
a tier says it moved is what must move."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import models
import polyreme
import probe
import threads
import training
from cover import cover, together
from examples import ALL, whole
from polyreme.errors import TierError
from polyreme.files.folder_lock import Claim
from polyreme.zero import offload_tiers
from pool import Ranks, RanksFailed

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "clip": 0.5},
    "lion": {"name": "lion", "lr": 1e-3, "clip": 0.5},
    "adagrad": {"name": "adagrad", "lr": 1e-2},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16", "initial_scale": 2.0**20},  # of the first four steps some overflow
}
FILES = "files"  # in a config here: the test's own folder
EVERY = 1 if ALL in os.environ else 2
"""Of homes that no cover is made of, every second one is compared with the device by default."""


def homes(stage: int, gradients: bool = True) -> list[dict[str, Any]]:
    """`memory` sections, first of all that of the device; `gradients`: of files for them, too."""
    found: list[dict[str, Any]] = [
        {},
        {"states": "host"},
        {"states": FILES},
        {"states": {"host": 0.5, "device": 0.5}},
    ]
    if stage == 3:
        found += [
            {"params": "host"},
            {"params": FILES},
            {"states": FILES, "params": FILES},
            {"states": "host", "params": FILES},
        ]
    if gradients:
        found += [
            {"states": states, "gradients": FILES} for states in ("host", FILES, {"host": 0.5, "device": 0.5})
        ]
    return found


def placed(value: Any, folder: Path) -> Any:
    """The config with folders for FILES: two, which are striped."""
    if isinstance(value, dict):
        return {key: placed(each, folder) for key, each in value.items()}
    return [str(folder / "a"), str(folder / "b")] if value == FILES else value


def assert_equal(
    ranks: Callable[..., list[Any]],
    world: int,
    case: str,
    settings: list[dict[str, Any]],
    folder: Path,
    steps: int = 2,
) -> training.Run:
    """All of `settings` make the same run."""
    runs = ranks(world, training.train, case, placed_all(settings, folder), steps)[0]
    found = {i: different for i, run in enumerate(runs) if (different := training.differences(runs[0], run))}
    assert not found, "\n".join(f"{settings[i]} differs from {settings[0]}: {found[i]}" for i in found)
    return runs[0]


def placed_all(settings: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    return [placed(each, folder) for each in settings]


class Case(NamedTuple):
    """What a run has besides the homes, which are all compared in each."""

    world: int
    stage: int
    optimizer: str
    precision: str
    accumulation: int
    reduce_every: str

    def settings(self) -> list[dict[str, Any]]:
        """A config for each home. (Several micro-batches that are added up before they are reduced are so in
        memory.)"""
        zero = {"stage": self.stage, "min_bucket": 0, "reduce_every": self.reduce_every}
        gradients = self.world == 1 or self.accumulation == 1 or self.reduce_every == "microbatch"
        return [
            training.config(
                self.world,
                self.accumulation,
                zero=zero,
                memory=memory,
                precision=PRECISIONS[self.precision],
                optimizer=OPTIMIZERS[self.optimizer],
            )
            for memory in homes(self.stage, gradients)
        ]


SUMS = ((1, "step"), (2, "step"), (2, "microbatch"))
ALL_CASES = [Case(*each, *sums) for *each, sums in product((1, 2, 4), range(4), OPTIMIZERS, PRECISIONS, SUMS)]
"""`bench/homes.py` runs them."""
CASES = cover(ALL_CASES, lambda case: together(case._asdict(), 2))
"""Every two values of two kinds are in one."""


def runs_of(cases: list[Case], every: bool) -> dict[Case, list[dict[str, Any]]]:
    """Of each case its first setting, and those others in which every home meets every value of each kind;
    with `every`, all."""
    settings = {case: case.settings() for case in cases}
    others = [(case, i) for case, each in settings.items() for i in range(1, len(each))]

    def has(run: tuple[Case, int]) -> list[Hashable]:
        case, home = run[0], str(settings[run[0]][run[1]]["memory"])
        return [case, *((home, *value) for value in case._asdict().items())]

    chosen = set(others if every else cover(others, has))
    return {
        case: [s for i, s in enumerate(each) if not i or (case, i) in chosen]
        for case, each in settings.items()
    }


@pytest.mark.parametrize("world", [1, *(pytest.param(each, marks=whole) for each in (2, 4))])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_home_makes_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, world: int, stage: int
) -> None:
    """fp16 begins with a scale that overflows."""
    runs = runs_of(CASES, request.config.getoption("all_cases"))
    cases = [case for case in CASES if (case.world, case.stage) == (world, stage)]
    assert cases
    for case in cases:
        assert len(runs[case]) > 1
        records, weights = assert_equal(threads.run, world, "llama", runs[case], tmp_path, steps=3)
        assert all(torch.isfinite(t).all() for t in weights.values())
        if case.precision == "fp16":
            finite = {math.isfinite(loss) and math.isfinite(norm) for loss, norm in records}
            assert len(finite) == 2, "some steps have to overflow, not all"


OF_PROCESSES = [
    pytest.param(Case(2, 1, "adamw", "fp32", 1, "step"), id="2 ranks, stage 1", marks=whole),
    pytest.param(Case(4, 3, "adamw", "bf16", 2, "microbatch"), id="4 ranks, stage 3"),
]


@pytest.mark.parametrize("case", OF_PROCESSES)
def test_every_home_makes_the_same_bits_on_processes(
    ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path, case: Case
) -> None:
    every = request.config.getoption("all_cases")
    for each in [other for other in CASES if other[:2] == case[:2]] if every else [case]:
        assert_equal(ranks, case.world, "llama", each.settings()[::EVERY], tmp_path)


MESHES: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "sequence_parallel": True, "pp": 2}]


@pytest.mark.parametrize("mesh", [*MESHES[:2], pytest.param(MESHES[2], marks=whole)], ids=str)
def test_with_a_divided_model(tmp_path: Path, mesh: dict[str, Any]) -> None:
    assert_equal_where_divided(threads.run, mesh, {1: homes(1)[::EVERY], 3: homes(3)[::3]}, tmp_path)


def test_with_a_divided_model_on_processes(
    ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    every = request.config.getoption("all_cases")
    for mesh in MESHES if every else MESHES[2:]:
        assert_equal_where_divided(
            ranks, mesh, {1: homes(1), 3: homes(3)[::3]} if every else {3: homes(3)[::4]}, tmp_path
        )


def assert_equal_where_divided(
    ranks: Callable[..., list[Any]],
    mesh: dict[str, Any],
    memory: dict[int, list[dict[str, Any]]],
    folder: Path,
) -> None:
    """`memory`: homes by stage."""
    for stage, places in memory.items():
        settings = [
            training.config(1, 2, zero={"stage": stage, "min_bucket": 0}, mesh=mesh, memory=each)
            for each in places
        ]
        runs = ranks(mesh.get("tp", 1) * mesh.get("pp", 1), whole_batch, placed_all(settings, folder))
        assert not any(training.differences(each[0], run) for each in runs for run in each)


def whole_batch(rank: int, world: int, settings: list[dict[str, Any]]) -> list[training.Run]:
    """As `training.train` where no rank has a share of its own."""
    runs = []
    for each in settings:
        torch.manual_seed(0)
        engine = polyreme.initialize(models.llama(num_hidden_layers=4), each, loss_fn=models.causal_loss)
        results = [engine.train_step(models.tokens(training.SAMPLES, seed=step)) for step in range(2)]
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict(master=True)))
    return runs


def without_gradients(rank: int, world: int, settings: list[dict[str, Any]]) -> list[training.Run]:
    runs = []
    for each in settings:
        engine = polyreme.initialize(models.build("dag", torch.float32), each, loss_fn=models.CASES["dag"][2])
        batch = models.share(models.batch_of("dag", training.SAMPLES, 0, torch.float32), rank, world)
        losses = [engine.eval_step(batch).loss]
        unused = [p for n, p in engine.module.named_parameters() if n.endswith("bias")][:2]
        for step in range(4):
            for parameter in unused:  # in the second step nobody has a gradient for them
                parameter.requires_grad_(step != 1)
            losses.append(engine.train_step(batch).loss)
        losses.append(engine.eval_step(batch).loss)
        runs.append(([(loss, 0.0) for loss in losses], engine.state_dict(master=True)))
    return runs


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_without_a_gradient_and_evaluation(tmp_path: Path, stage: int) -> None:
    settings = [
        training.config(2, zero={"stage": stage, "min_bucket": 0}, memory=memory)
        for memory in homes(stage)[::EVERY]
    ]
    runs = threads.run(2, without_gradients, placed_all(settings, tmp_path))[0]
    assert not [training.differences(runs[0], run) for run in runs[1:] if training.differences(runs[0], run)]


def narrow(rank: int, world: int, folder: Path) -> list[str]:
    """What is wrong with moments in fewer bits: in any home they go on from a checkpoint as they would have
    without it."""
    wrong = []
    batches = [
        models.share(models.batch_of("llama", training.SAMPLES, step, torch.float32), rank, world)
        for step in range(4)
    ]
    for i, (name, options) in enumerate(OPTIMIZERS.items()):
        states = ("bf16", "8bit")[i % 2]
        optimizer = (
            {"momentum": 0.9} | options | {"states": states}
            if name == "sgd"
            else {**options, "states": states}
        )
        made = [
            training.config(
                world,
                1,
                optimizer=optimizer,
                zero={"stage": 2, "min_bucket": 0},
                memory=placed(memory, folder),
            )
            for memory in homes(2)[::EVERY]
        ]
        first = polyreme.initialize(models.build("llama", torch.float32), made[0], loss_fn=models.causal_loss)
        for batch in batches[:2]:
            first.train_step(batch)
        path = first.save(folder / name)
        expected = [first.train_step(batch).loss for batch in batches[2:]]
        size = first.memory()["states"]
        for at, each in enumerate(made[1:]):
            if EVERY > 1 and at == i % 3:  # one of three; all meet both
                continue
            other = polyreme.initialize(
                models.build("llama", torch.float32, seed=1), each, loss_fn=models.causal_loss
            )
            other.load(path)
            if [other.train_step(batch).loss for batch in batches[2:]] != expected:
                wrong.append(f"{name} {states} in {each['memory']} goes on with other losses")
            if [n for n, t in first.state_dict().items() if not torch.equal(t, other.state_dict()[n])]:
                wrong.append(f"{name} {states} in {each['memory']} ends with other weights")
        wide = {**made[0], "optimizer": {**made[0]["optimizer"], "states": "fp32"}}
        whole = polyreme.initialize(models.build("llama", torch.float32), wide, loss_fn=models.causal_loss)
        whole.load(path)  # which widens them
        torch.testing.assert_close(
            [whole.train_step(batch).loss for batch in batches[2:]], expected, rtol=1e-2, atol=1e-2
        )
        bits = {"bf16": 0.51, "8bit": 0.28}[states]
        if size > bits * whole.memory()["states"]:
            wrong.append(f"{name} {states} takes {size} bytes of {whole.memory()['states']}")
    return wrong


def test_moments_in_fewer_bits(tmp_path: Path) -> None:
    assert not [problem for told in threads.run(2, narrow, tmp_path) for problem in told]


def moved(rank: int, world: int, folder: str, compute: str, accumulation: int) -> dict[str, Any]:
    sections = {"zero": {"stage": 3, "min_bucket": 0}, "precision": {"compute": compute}}
    made = training.config(world, accumulation, memory={"states": folder, "params": folder}, **sections)
    torch.manual_seed(0)
    engine = polyreme.initialize(models.llama(num_hidden_layers=4), made, loss_fn=models.causal_loss)
    batch = models.share(models.tokens(training.SAMPLES), rank, world)
    engine.train_step(batch)
    before = {name: dict(each) for name, each in engine.tiers().items()}
    engine.train_step(batch)
    shards = [bucket.layout.shard_size for bucket in probe.buckets(engine)]
    extents = probe.offloaded_states(engine)
    root, *_, last = probe.units(engine)
    after = engine.tiers()
    found = {
        name: (after[name]["read"] - before[name]["read"], after[name]["written"] - before[name]["written"])
        for name in after
    }
    return {
        "moved": found,
        "shards": shards,
        "records": [extent.nbytes for extent in extents],
        "elements": [extent.interval.size for extent in extents],
        "memory": engine.memory(),
        "root": [b.layout.shard_size for b in root],
        "last": [b.layout.shard_size for b in last],
    }


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_moves_is_what_must(tmp_path: Path, compute: str, accumulation: int) -> None:
    """States once each way; for each micro-batch parameters in twice (but the root and the last block, which
    stay from forward to backward) and its gradients in, to be added to others or updated from, and out;
    parameters out once."""

    def padded(nbytes: int) -> int:
        return -(-nbytes // 4096) * 4096

    size = {"fp32": 4, "bf16": 2}[compute]
    for told in threads.run(2, moved, str(tmp_path), compute, accumulation):
        states = sum(padded(nbytes) for nbytes in told["records"])
        assert told["moved"]["states"] == (states, states)
        shards = sum(padded(each * size) for each in told["shards"])
        stay = sum(padded(each * size) for each in told["root"] + told["last"])
        # which stays from one micro-batch to the next
        root = sum(padded(each * size) for each in told["root"])
        assert told["moved"]["params"] == (
            accumulation * (2 * shards - stay) - (accumulation - 1) * root,
            shards,
        )
        gradients = sum(padded(each * 4) for each in told["elements"])
        assert told["moved"]["gradients"] == (accumulation * gradients, accumulation * gradients)
        assert told["memory"]["states"] < 100, "step counts"
        assert not told["memory"]["parameters"], "between steps none is on the device"


def accumulate(rank: int, world: int, settings: list[dict[str, Any]]) -> list[list[int]]:
    """Bytes of reduced gradients in memory after each micro-batch."""
    found = []
    batch = models.share(models.tokens(training.SAMPLES // 2), rank, world)
    for each in settings:
        engine = polyreme.initialize(models.llama(), each, loss_fn=models.causal_loss)
        held = []
        for _ in range(2):
            engine.backward(engine(**batch).loss)
            held += [sum(g.nbytes for g in of(engine)) for of in (probe.reduced_gradients, probe.gradients)]
        found.append(held)
        engine.step()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_in_files_take_no_memory_between_micro_batches(tmp_path: Path, world: int) -> None:
    homes: list[dict[str, Any]] = [{"states": "host"}, {"states": "host", "gradients": FILES}]
    settings = [
        training.config(world, 2, zero={"stage": 2, "min_bucket": 0}, memory=memory) for memory in homes
    ]
    for held, spilled in threads.run(world, accumulate, placed_all(settings, tmp_path)):
        assert sum(held) and not any(spilled)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_in_files_of_an_optimizer_of_whole_tensors(tmp_path: Path, world: int) -> None:
    """Whose sizes are no multiples of a row of the norm, which clips."""
    optimizer = {"name": "Adafactor", "lr": 1e-2, "clip": 0.5}
    zero = {"stage": 1, "min_bucket": 0, "reduce_every": "microbatch"}
    settings = [
        training.config(world, 2, zero=zero, optimizer=optimizer, memory=memory)
        for memory in homes(1)
        if not memory or "gradients" in memory
    ]
    assert_equal(threads.run, world, "llama", settings, tmp_path, steps=3)


def test_gradients_go_to_files_after_the_others_have_read_them(ranks: Ranks, tmp_path: Path) -> None:
    """At stage 0 the ranks read each other's reduced gradients, in memory that is used again when they have
    left."""
    settings = Case(4, 0, "lion", "fp32", 1, "step").settings()
    assert_equal(ranks, 4, "llama", [settings[0], *settings[-3:]], tmp_path, steps=3)


def threaded(rank: int, world: int, settings: list[dict[str, Any]]) -> list[training.Run]:
    torch.set_num_threads(2)
    try:
        return training.train(rank, world, "llama", settings, 3)
    finally:
        torch.set_num_threads(1)


def test_gradients_in_files_with_several_threads(ranks: Ranks, tmp_path: Path) -> None:
    """Several pieces are updated at a time, where all that they need stays where it is."""
    settings = [training.config(1, 2, zero={"min_bucket": 0}, memory=memory) for memory in homes(1)[::EVERY]]
    runs = ranks(1, threaded, placed_all(settings, tmp_path))[0]
    assert not [training.differences(runs[0], run) for run in runs[1:] if training.differences(runs[0], run)]


def generated(rank: int, world: int, settings: list[dict[str, Any]]) -> list[tuple[list[list[int]], float]]:
    """Under each of `settings`: tokens that the model likes best, before and after an update, and the loss of
    the next step."""
    found = []
    batch = models.share(models.tokens(training.SAMPLES), rank, world)
    prompt = batch["input_ids"][:2, :5]
    for each in settings:
        torch.manual_seed(0)
        engine = polyreme.initialize(models.llama(num_hidden_layers=4), each, loss_fn=models.causal_loss)
        options = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": 8,
            "do_sample": False,
            "eos_token_id": None,
        }
        texts = []
        for _ in range(2):
            with torch.no_grad():
                texts += engine.module.generate(prompt, **options).tolist()
            loss = engine.train_step(batch).loss
        found.append((texts, loss))
        if rank == 0 and "params" in each["memory"]:
            assert not engine.memory()["parameters"], "none stays on the device"
    return found


def test_generating_text_with_parameters_away(tmp_path: Path) -> None:
    """A block comes for each token; the tokens, and the training around them, are those of parameters on the
    device."""
    places: list[dict[str, Any]] = [
        {},
        {"params": "host"},
        {"params": FILES},
        {"states": FILES, "params": FILES},
    ]
    settings = [training.config(2, zero={"stage": 3, "min_bucket": 0}, memory=memory) for memory in places]
    for told in threads.run(2, generated, placed_all(settings, tmp_path)):
        texts, _ = told[0]
        assert all(each == told[0] for each in told[1:])
        assert len(texts) == 4 and all(len(text) == 5 + 8 for text in texts) and texts[:2] != texts[2:], (
            "an update changes them"
        )


def opened(rank: int, world: int, folder: str) -> None:
    made = training.config(world, memory={"states": folder})
    for _ in range(2):  # one after the other
        polyreme.initialize(models.llama(), made, loss_fn=models.causal_loss).close()


def test_a_folder_is_one_run_s(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, opened, str(tmp_path))
    claim = Claim(tmp_path, "another run")
    with pytest.raises(
        RanksFailed, match=rf"{tmp_path} is in use by another run, which process {os.getpid()} on host"
    ):
        ranks(2, opened, str(tmp_path))
    claim.close()


def opened_for(world: int, folder: Path, **memory: str) -> polyreme.Engine:
    made = training.config(world, memory={"states": str(folder / "tier"), **memory})
    return polyreme.initialize(models.llama(), made, loss_fn=models.causal_loss)


def failing(rank: int, world: int, folder: Path, call: str, memory: dict[str, str]) -> None:
    engine = opened_for(world, folder, **memory)
    batch = models.share(models.tokens(training.SAMPLES), rank, world)
    engine.train_step(batch)
    engine.save(folder / "checkpoint")
    if rank == 1:

        def broken(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        setattr(os, call, broken)
    engine.train_step(batch)


def going_on(rank: int, world: int, folder: Path) -> int:
    engine = opened_for(world, folder)
    engine.load(folder / "checkpoint")
    return engine.train_step(models.share(models.tokens(training.SAMPLES), rank, world)).step


@pytest.mark.parametrize(
    ("call", "gradients"), [("preadv", False), ("pwritev", True)], ids=["states", "gradients"]
)
def test_an_error_of_the_disk_ends_all_ranks_with_its_path_and_the_last_checkpoint_is_whole(
    ranks: Ranks, tmp_path: Path, call: str, gradients: bool
) -> None:
    """That of gradients in the middle of a backward."""
    memory = {"states": "host", "gradients": str(tmp_path / "tier")} if gradients else {}
    with pytest.raises(RanksFailed, match=rf"{tmp_path}.*Input/output error") as failed:
        ranks(2, failing, tmp_path, call, memory)
    assert isinstance(failed.value.exceptions[1], TierError)
    assert ranks(2, going_on, tmp_path) == [2, 2]


def cramped(rank: int, world: int, folder: Path) -> None:
    if rank == 1:
        os.statvfs = lambda path: os.statvfs_result((4096, 4096, 10, 1, 1, 10, 10, 10, 0, 255))  # type: ignore[assignment]
    opened_for(world, folder)


def test_a_full_disk_ends_all_ranks_before_training(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=rf"{tmp_path}.* needed, .* free") as failed:
        ranks(2, cramped, tmp_path)
    assert isinstance(failed.value.exceptions[1], TierError)


def short_of_memory(rank: int, world: int) -> list[str]:
    """What each rank says where there is room for the states of one, 3 x 4 x 128 bytes, and of both."""
    said = []
    for free in (2000, 4000):
        with patch.object(offload_tiers, "pools", lambda free=free: {"this machine": free}):
            try:
                model = torch.nn.Linear(16, 16, bias=False)
                polyreme.initialize(
                    model, {"batch": {"size": 2}, "memory": {"states": "host", "gradients": "host"}}
                )
                said.append("")
            except TierError as error:
                said.append(str(error))
    return said


def test_ranks_of_one_host_together_need_no_more_than_it_has(ranks: Ranks) -> None:
    first, second = ranks(2, short_of_memory)
    assert first == second and first[1] == ""
    assert "needed by 2 ranks that share 2,000 free" in first[0]


@pytest.mark.parametrize("trains", [True, False])
def test_memory_tells_of_what_is_off_the_device(tmp_path: Path, trains: bool) -> None:
    for place, where in (("host", "host"), (str(tmp_path / "files"), "files")):
        model = models.llama().requires_grad_(trains)
        size = sum(parameter.nbytes for parameter in model.parameters())
        memory = {"params": place, "states": place} if trains else {"params": place}
        engine = polyreme.initialize(model, training.config(1, zero={"stage": 3}, memory=memory))
        found = engine.memory()
        assert found[f"parameters_{where}"] >= size and not found["parameters"]
        assert (found.get(f"states_{where}", 0) >= 3 * size) == trains
        engine.close()
