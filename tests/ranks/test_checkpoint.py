"""Checkpoints of real ranks: from any layout to any other, and on the same one to the last bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import models
import polyreme
import polyreme.step.state.engine_state
import probe
import training
from cover import cover, together
from examples import ALL
from polyreme.checkpoint import manifest, reader, save, writer
from polyreme.engine import Engine
from polyreme.errors import CheckpointError
from polyreme.offload import host
from pool import Ranks

GROUPED = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def tied() -> nn.Module:
    return models.llama(**GROUPED, tie_word_embeddings=True)


class Sometimes(nn.Module):
    """Of its layers, one is used in every second step, and one from step 4 on: the first number of a sample
    is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = int(x[0, 0])
        x = self.layers[1](self.layers[0](x[:, 1:]) if at % 2 else x[:, 1:])
        return self.layers[3](self.layers[2](x) if at >= 4 else x)


def numbered(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = models.vectors(samples, seed)
    return torch.cat([torch.full((samples, 1), float(seed)), x], 1), y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    **models.CASES,
    "llama": (lambda: models.llama(**GROUPED), models.tokens, models.causal_loss),
    "llama-tied": (tied, models.tokens, models.causal_loss),
    "gpt2": (lambda: models.gpt2(4), models.tokens, models.causal_loss),
    "sometimes": (Sometimes, numbered, F.mse_loss),
}


def build(case: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[case][0]().to(dtype).train()


def batch(case: str, step: int, dtype: torch.dtype = torch.float64) -> Any:
    made = MODELS[case][1](training.SAMPLES, seed=step)
    return (
        made if isinstance(made, dict) else tuple(t.to(dtype) if t.is_floating_point() else t for t in made)
    )


def engine_of(case: str, layout: Mapping[str, Any], seed: int = 0) -> Engine:
    """`layout`: sections of the config; its `micro` is the micro-batch. The weights are such that only
    loading makes them right."""
    sections = {key: value for key, value in layout.items() if key != "micro"}
    settings = {"precision": {"compute": "fp64"}, **training.config(1, **sections)}
    settings["batch"] = {"size": training.SAMPLES, "micro": layout.get("micro", 2)}
    model = build(case)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return polyreme.initialize(model, settings, loss_fn=MODELS[case][2])


def step(engine: Engine, case: str) -> float:
    """One step on the batch that comes next; its loss."""
    dp, whole = engine.mesh.dp, batch(case, engine.state.step)
    with models.Wide() if engine.config.precision.compute == "fp64" else nullcontext():
        return engine.train_step(models.share(whole, dp.rank, dp.size)).loss


def contents(path: Path) -> dict[str, bytes]:
    """The files of tensors."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.safetensors*")}


def chain(
    rank: int,
    world: int,
    case: str,
    sections: Mapping[str, Any],
    layouts: Sequence[Mapping[str, Any]],
    source: Path,
) -> Any:
    """Through the layouts, each of which loads what the one before it saved, saves it again, trains a step
    and saves that. The first one goes on from `source`. Returns the losses, and the last checkpoint."""
    losses, folder = [], source.parent
    for i, layout in enumerate(layouts):
        homes = {
            key: str(folder / f"tier-{world}") if home == FILES else home
            for key, home in layout.get("memory", {}).items()
        }
        layout = {**layout, "memory": homes}
        engine = engine_of(case, {**sections, **layout}, seed=1)
        engine.load(source)
        again = engine.save(folder / f"again-{world}-{i}")
        if rank == 0:
            before, after = contents(source), contents(again)
            assert sorted(before) == sorted(after), layout
            assert not (different := [name for name in before if before[name] != after[name]]), (
                layout,
                different,
            )
        losses.append(step(engine, case))
        source = engine.save(folder / f"{world}-{i}")
    return losses, source


def z(stage: int, **sections: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, "min_bucket": 0}, **sections}


def tp(stage: int, ways: int, **sections: Any) -> dict[str, Any]:
    return z(stage, mesh={"tp": ways}, **sections)


def pp(schedule: str, stage: int, tp: int = 1) -> dict[str, Any]:
    return z(stage, mesh={"pp": 2, "tp": tp}, pipeline={"schedule": schedule})


def homes(states: str, params: str = "device") -> dict[str, Any]:
    return {"memory": {"states": states, "params": params}}


FILES = "files"  # in a layout: a folder of the test's
MUON = {"optimizer": {"name": "muon", "lr": 1e-3, "matrix_lr": 1e-2}}
SGD = {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}
LION = {"optimizer": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1}}
ADAFACTOR = {"optimizer": {"name": "Adafactor", "lr": 1e-2}}
CHAINS: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "llama",
        {},
        [z(0), z(3), tp(1, 2), pp("1f1b", 2), pp("interleaved", 3)],
        [z(1, micro=1), tp(2, 2), tp(1, 4), pp("1f1b", 2, 2)],
    ),
    ("llama-tied", LION, [pp("1f1b", 3), tp(0, 2), pp("zb-v", 0)], [pp("interleaved", 1, 2), pp("1f1b", 3)]),
    ("gpt2", SGD, [z(2), tp(3, 2), pp("interleaved", 1)], [tp(2, 2), pp("zb-h1", 3)]),
    ("gpt2", MUON, [z(3), pp("1f1b", 1), z(0)], [z(2)]),
    ("llama", ADAFACTOR, [z(3), pp("zb-v", 1)], [z(1)]),
    ("dag", {}, [z(3), z(0), z(2, micro=1)], [z(3), z(1)]),
    ("convnet", LION, [z(3), z(1)], [z(2)]),
    ("sometimes", {}, [z(3), z(0), z(2)], [z(1)]),
    (
        "llama",
        {},
        [z(0, **homes(FILES)), z(3, **homes("device", FILES)), {**tp(1, 2), **homes("host")}],
        [{**pp("1f1b", 3, 2), **homes(FILES, FILES)}, z(3, **homes("host", "host"))],
    ),
    ("gpt2", MUON, [z(1, **homes(FILES)), z(3, **homes("host", FILES))], [z(2, **homes(FILES))]),
    ("sometimes", LION, [z(1, **homes(FILES)), z(3, **homes("host", FILES))], [z(0, **homes("host"))]),
    ("llama", ADAFACTOR, [z(3, **homes(FILES, FILES))], [z(1)]),
]


ALIKE = () if ALL in os.environ else (3, 4, 5, 6, 7, 10, 11)
"""Chains that have little which the others do not; with --all-cases."""


@pytest.mark.parametrize(
    ("case", "sections", "two", "four"),
    [chain for i, chain in enumerate(CHAINS) if i not in ALIKE],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_any_layout_goes_on_from_any_other(
    ranks: Ranks,
    tmp_path: Path,
    case: str,
    sections: dict[str, Any],
    two: list[dict[str, Any]],
    four: list[dict[str, Any]],
) -> None:
    engine = engine_of(case, {**sections, **z(0)})
    for _ in range(2):
        step(engine, case)
    start = engine.save(tmp_path / "start")
    expected = [step(engine, case) for _ in range(len(two) + len(four) + 1)]
    losses, middle = ranks(2, chain, case, sections, two, start)[0]
    more, end = ranks(4, chain, case, sections, four, middle)[1]
    alone = engine_of(case, {**sections, **z(2)}, seed=1)
    alone.load(end)
    if hasattr(alone.module, "config"):
        opened = transformers.AutoModelForCausalLM.from_pretrained(end, dtype=torch.float64).state_dict()
        torch.testing.assert_close(opened, dict(alone.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close([*losses, *more, step(alone, case)], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone.state_dict(), engine.state_dict(), rtol=1e-9, atol=1e-9)


def dropping() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=models.VOCABULARY, n_positions=32, n_embd=24, n_layer=4, n_head=4
    )
    return transformers.GPT2LMHeadModel(config)


MODELS["dropout"] = (dropping, models.tokens, models.causal_loss)
FP32, BF16 = {"precision": {"compute": "fp32"}}, {"precision": {"compute": "bf16"}}
FP16 = {"precision": {"compute": "fp16", "growth_interval": 3, "initial_scale": 256.0}}


def same_layout(rank: int, world: int, runs: Sequence[tuple[str, Mapping[str, Any]]], folder: Path) -> None:
    """A run that goes on from a checkpoint is that which was never stopped, to the last bit; and so is one
    that wrote it meanwhile."""
    for i, (case, layout) in enumerate(runs):
        engine = engine_of(case, layout)
        for _ in range(2):
            step(engine, case)
        saved = engine.save(folder / str(i), wait=i % 2 == 0, extra={"i": i})
        expected = [step(engine, case) for _ in range(2)]
        engine.wait()
        weights, state = engine.state_dict(master=True), asdict(engine.state)
        other = engine_of(case, layout, seed=1)
        assert other.load(saved).extra == {"i": i}
        assert [step(other, case) for _ in range(2)] == expected, (case, layout)
        different = [
            name
            for name, tensor in other.state_dict(master=True).items()
            if not torch.equal(tensor, weights[name])
        ]
        assert not different and asdict(other.state) == state, (case, layout, different)


def test_the_same_layout_goes_on_to_the_last_bit(ranks: Ranks, tmp_path: Path) -> None:
    two = [
        ("dropout", z(3, **BF16)),
        ("dropout", tp(1, 2, **FP32)),
        ("llama", tp(3, 2, **FP16)),
        ("dropout", {**pp("1f1b", 0), **FP16}),
        ("dag", z(2, **FP32)),
        ("dropout", z(0, **FP32, **MUON)),
        ("dag", z(1, **BF16, **ADAFACTOR)),
    ]
    ranks(2, same_layout, two, tmp_path)
    four = [("dropout", {**pp("interleaved", 3), **BF16}), ("dropout", tp(2, 2, **BF16, **LION))]
    ranks(4, same_layout, four if ALL in os.environ else four[:1], tmp_path)


@pytest.mark.parametrize("room", [0, 20_000, 1 << 40])
def test_states_are_those_that_were_saved_however_little_memory_there_is(tmp_path: Path, room: int) -> None:
    engine = engine_of("sometimes", z(2, **FP32))
    step(engine, "sometimes")
    saved = engine.save(tmp_path / "saved")
    for _ in range(2):
        step(engine, "sometimes")
    with patch.object(host, "available", lambda: room):
        engine.load(saved)
    assert contents(engine.save(tmp_path / "again")) == contents(saved)


def test_a_run_in_fp16_begins_with_its_loss_scale_after_one_without(tmp_path: Path) -> None:
    engine = engine_of("sometimes", z(2, **BF16))
    step(engine, "sometimes")
    other = engine_of("sometimes", z(2, **FP16))
    other.load(engine.save(tmp_path / "bf16"))
    assert (other.state.step, other.state.loss_scale) == (1, 256.0)
    step(other, "sometimes")
    half = other.save(tmp_path / "fp16")
    other.load(half)
    assert (other.state.step, other.state.loss_scale) == (2, 256.0)
    step(other, "sometimes")
    step(other, "sometimes")
    assert other.state.loss_scale == 512.0, "it grows after three good steps"


def shared_or_not(rank: int, world: int, folder: Path) -> None:
    saved, collected = [], []

    def collect(self: Any, *args: Any) -> Any:
        collected.append(self)
        return own(self, *args)

    own = writer.Writer.collect
    for shared, name in ((True, "one"), (False, "one"), (True, f"host {rank // 2}")):
        torch.manual_seed(0)
        with (
            patch.object(socket, "gethostname", lambda name=name: name),
            patch.object(writer.Writer, "collect", collect),
        ):
            engine = engine_of(
                "llama", tp(3, 2, **BF16, checkpoint={"file_size": "10 KiB", "shared_files": shared})
            )
            step(engine, "llama")
            saved.append(engine.save(folder / f"{shared} {name[:4]}"))
        assert len(collected) == len(saved) - 1, "ranks of one host alone share files"
    found = engine.state_dict()
    if rank:
        return
    one, *others = (manifest.read(path) for path in saved)
    assert one and all(other and other.files == one.files for other in others) and len(one.files) > 20
    index = json.loads((saved[1] / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(saved[1], dtype=torch.bfloat16)
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


def test_one_writer_for_each_file_writes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, shared_or_not, tmp_path)


def snapshot_of(engine: Engine) -> tuple[Any, ...]:
    """All that a load that fails must leave alone."""
    weights = [tensor.clone() for tensor in probe.weights(engine)]
    states = [value.clone() for state in probe.optimizer_states(engine) for value in state.values()]
    return asdict(engine.state), torch.get_rng_state(), weights, states


def refused(engine: Engine, path: Path, *expected: str, **options: Any) -> None:
    """Loading raises an error that says all that is expected, and nothing has changed."""
    before = snapshot_of(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load(path, **options)
    assert all(text in str(caught.value) for text in expected), (expected, str(caught.value))
    torch.testing.assert_close(snapshot_of(engine), before, rtol=0, atol=0)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def newer(file: Path) -> None:
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))


DAMAGES: list[tuple[str, Callable[[Path], Any], list[str]]] = [
    ("model.safetensors", flip, ["other bytes than were written", "model.safetensors ('"]),
    (
        "optimizer/exp_avg.safetensors",
        flip,
        ["other bytes than were written", "optimizer/exp_avg.safetensors ('"],
    ),
    (
        "model.safetensors",
        lambda file: os.truncate(file, file.stat().st_size - 8),
        ["model.safetensors was written with"],
    ),
    ("optimizer/exp_avg_sq.safetensors", Path.unlink, ["optimizer/exp_avg_sq.safetensors cannot be read"]),
    ("optimizer/extra.safetensors", Path.touch, ["optimizer/extra.safetensors' was not written with it"]),
    ("resume.json", newer, ["has version 2 of the format"]),
]


def damaged(rank: int, world: int, folder: Path, layout: Mapping[str, Any]) -> None:
    engine = engine_of("llama", layout)
    for i in range(2):
        step(engine, "llama")
        engine.save(folder / f"step-{i + 1}")
    step(engine, "llama")
    for i, (name, damage, expected) in enumerate(DAMAGES):
        copy = folder / f"damaged-{i}"
        if rank == 0:
            shutil.copytree(folder / "step-2", copy)
            damage(copy / name)
        probe.barrier(engine)
        refused(engine, copy, copy.name, *expected)
    # not one file system
    refused(engine, folder if rank == 0 else folder / "elsewhere", "elsewhere/step-2", "is not a folder")
    if rank == 0:
        flip(folder / "step-2/model.safetensors")
    probe.barrier(engine)
    found = engine.load(folder)
    assert found.path == folder / "step-1" and engine.state.step == 1
    assert "step-2 was passed over: " in found.notes[0] and "model.safetensors ('" in found.notes[0]

    other = engine_of("llama", z(1, **FP32, **SGD))
    refused(
        other, folder / "step-1", "has the optimizer states exp_avg", "this optimizer has momentum_buffer"
    )
    assert other.load(folder / "step-1", weights_only=True).state == {}
    lion = engine_of("llama", z(2, **FP32, **LION))
    refused(lion, folder / "step-1", "exp_avg_sq", "weights_only=True")
    refused(
        engine_of("gpt2", z(2, **FP32)), folder / "step-1", "not in the checkpoint: ", "not in the model: "
    )
    MODELS["wider"] = (
        lambda: models.llama(**{**GROUPED, "vocab_size": 101}),
        models.tokens,
        models.causal_loss,
    )
    wider = engine_of("wider", tp(1, 2, **FP32))
    refused(
        wider, folder / "step-1", "2 of another shape: ", "embed_tokens.weight 97x24, in the model 101x24"
    )
    assert "2 of another shape" in wider.load(folder / "step-1", strict=False).notes[0]
    found, expected = wider.state_dict(), engine.state_dict(master=True)
    assert torch.equal(found["model.norm.weight"], expected["model.norm.weight"])
    step(wider, "wider")  # the embedding, which has no states, too


@pytest.mark.parametrize("layout", [z(3, **FP32), z(2, **BF16), z(0, **FP32)], ids=["3", "2", "0"])
def test_what_cannot_be_loaded_changes_nothing(
    ranks: Ranks, tmp_path: Path, layout: Mapping[str, Any]
) -> None:
    ranks(2, damaged, tmp_path, layout)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_an_interrupt_while_files_are_compared_changes_nothing(
    tmp_path: Path, precision: dict[str, Any]
) -> None:
    engine = engine_of("llama", z(2, **precision))
    saved = engine.save(tmp_path / "saved")
    step(engine, "llama")
    before, read, blocks = snapshot_of(engine), reader._read, []

    def interrupted(*arguments: Any) -> int:
        blocks.append(arguments)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return read(*arguments)

    with patch.object(reader, "_read", interrupted), pytest.raises(KeyboardInterrupt):
        engine.load(saved)
    torch.testing.assert_close(snapshot_of(engine), before, rtol=0, atol=0)


def unread(rank: int, world: int, folder: Path) -> None:
    """Memory that nothing is read into, such as the padding of a vocabulary of 97 over two ranks, is zero."""
    engine = engine_of("llama", tp(1, 2))
    step(engine, "llama")
    path = engine.save(folder / "padded")
    again = engine_of("llama", tp(1, 2), seed=1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty gives is NaN then
    try:
        again.load(path)
    finally:
        torch.use_deterministic_algorithms(False)
    for state in probe.optimizer_states(again):
        assert all(value.isfinite().all() for value in state.values() if isinstance(value, torch.Tensor))
    assert step(again, "llama") == step(engine, "llama")


def test_what_nothing_is_read_into_is_zero(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, unread, tmp_path)


def background(rank: int, world: int, folder: Path) -> None:
    engine = engine_of("llama", z(2, **BF16, memory={"states": {"host": 0.5, "device": 0.5}}))
    go, written = threading.Event(), writer.Writer._put_segment

    def held_up(*args: Any) -> None:
        go.wait(30)
        written(*args)

    step(engine, "llama")
    first = engine.save(folder / "first")
    with patch.object(writer.Writer, "_put_segment", held_up):
        moment = engine.save(folder / "moment", wait=False)
        losses = [step(engine, "llama") for _ in range(2)]
        assert not moment.exists()
        go.set()
    second = engine.save(folder / "second")
    assert contents(moment) == contents(first) != contents(second)
    again = engine_of("llama", z(2, **BF16), seed=1)
    again.load(moment)
    assert [step(again, "llama") for _ in range(2)] == losses

    fill, taken, needed = writer.Writer._fill, save.Saver.wait_until_copied, threading.Event()

    def late(*args: Any) -> Any:
        needed.wait(30)
        return fill(*args)

    def need(saver: Any) -> None:
        needed.set()
        taken(saver)

    with patch.object(writer.Writer, "_fill", late), patch.object(save.Saver, "wait_until_copied", need):
        engine.save(folder / "late", wait=False)
        step(engine, "llama")
    engine.wait()
    assert contents(folder / "late") == contents(second)
    engine.load(second)
    if rank == 0:
        shutil.rmtree(folder / "late")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = []
    with patch.object(os, "pwritev", full) if rank == 1 else nullcontext():
        engine.save(second, wait=False)
        save.Saver.idle()
        for i in range(4):
            try:
                step(engine, "llama")
            except CheckpointError as error:
                told.append((i, str(error)))
    assert told == [(1, told[0][1])] and "rank 1: No space left" in told[0][1]
    assert sorted(path.name for path in folder.iterdir()) == ["first", "moment", "second"]
    for raising in (lambda: engine.save(folder / "third"), engine.wait, lambda: engine.load(first)):
        with patch.object(os, "pwritev", full) if rank == 1 else nullcontext():
            engine.save(second, wait=False)
            save.Saver.idle()
        with pytest.raises(CheckpointError, match="No space left"):
            raising()
    assert engine.load(second).path == second
    engine.save(folder / "third")


def test_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, background, tmp_path)


WRITTEN = [(world, stage, dtype) for world in (1, 2) for stage in (0, 2, 3) for dtype in ("fp64", "bf16")]
if ALL not in os.environ:
    WRITTEN = cover(WRITTEN, lambda case: together(dict(zip("wsd", case, strict=True)), 2))


def written_meanwhile(rank: int, world: int, folder: Path) -> None:
    """What a script writes to parameters after the call is not in the checkpoint."""
    for _, stage, dtype in (case for case in WRITTEN if case[0] == world):
        engine = engine_of("llama", z(stage, precision={"compute": dtype}))
        step(engine, "llama")
        name = f"{stage} {dtype}"
        first, go, fill = engine.save(folder / name), threading.Event(), writer.Writer._fill

        def late(*args: Any, go: Any = go, fill: Any = fill) -> Any:
            go.wait(30)
            return fill(*args)

        with patch.object(writer.Writer, "_fill", late):
            engine.save(folder / f"{name} again", wait=False)
            if stage < 3:
                for parameter in engine.module.parameters():
                    parameter.data.fill_(7.0)
            go.set()
            with engine.full_parameters(write=True) as module:
                for parameter in module.parameters():
                    parameter.data.fill_(8.0)
        engine.wait()
        assert contents(first) == contents(folder / f"{name} again")


def test_written_while_it_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks(world, written_meanwhile, tmp_path / str(world))


def eight(rank: int, world: int, path: Path) -> float:
    engine = engine_of("llama", {**z(3), "mesh": {"dp": 2, "tp": 2, "pp": 2}})
    step(engine, "llama")
    engine.save(path)
    with models.Wide():
        return engine.eval_step(models.share(batch("llama", 7), engine.mesh.dp.rank, 2)).loss


def test_transformers_opens_what_eight_ranks_wrote(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(8, eight, tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    inputs = batch("llama", 7)
    with models.Wide(), torch.no_grad():
        loss, weight = models.causal_loss(model(input_ids=inputs["input_ids"]), inputs)
    torch.testing.assert_close(found, [float(loss / weight)] * 8, rtol=1e-10, atol=1e-10)


def without_room(rank: int, world: int, folder: Path) -> list[bool]:
    """Whether a checkpoint is there when `save` returns that was to be written in the background: where
    memory has room for what is copied at once, and where it has not on one rank."""
    engine, found, write = engine_of("llama", z(2)), [], writer.Writer.write
    step(engine, "llama")
    for room in (1 << 40, 0):
        go_on = threading.Event()

        def late(*args: Any, go_on: threading.Event = go_on, **kwargs: Any) -> Any:
            go_on.wait(30)
            return write(*args, **kwargs)

        with (
            patch.object(writer.Writer, "write", late if room else write),
            patch.object(save, "share", lambda reports, room=room: room if rank else 1 << 40),
        ):
            engine.save(folder / f"room-{room}", wait=False)
            found.append((folder / f"room-{room}").exists())
            go_on.set()
            engine.wait()
    return found


def test_what_memory_has_no_room_for_is_written_at_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, without_room, tmp_path) == [[False, True]] * 2
