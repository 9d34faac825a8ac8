"""zero.shard_over: shards within a host, copies between hosts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import models
import polyreme
import probe
import threads
import training
from conformance import own_collectives
from polyreme.errors import ConfigError
from pool import Ranks

WORLD = 4
STAGES = (0, 1, 2, 3)


def over(who: str | int, stage: int, micro: int = 2, **sections: Any) -> dict[str, Any]:
    zero = {"stage": stage, "shard_over": who, "reduce_every": "microbatch"}
    return training.config(WORLD, training.SAMPLES // WORLD // micro, zero=zero, **sections)


def test_stages_and_homes_make_the_same_bits(tmp_path: Path) -> None:
    files = str(tmp_path)
    settings = [over("host", stage, micro=1) for stage in STAGES]
    for memory in ({"states": "host", "params": "host"}, {"states": files, "params": files}):
        settings.append(over(2, 3, micro=1, memory=memory))
    with patch.object(socket, "gethostname", lambda: f"host{threads.HERE.rank // 2}"):
        runs = threads.run(WORLD, training.train, "llama", settings)[0]
    found = {i: different for i, run in enumerate(runs) if (different := training.differences(runs[0], run))}
    assert not found


def test_it_trains_as_one_process_does(ranks: Ranks) -> None:
    case = "dag"
    wide: dict[str, Any] = {"precision": {"compute": "fp64"}}
    one = training.config(1, batch={"size": training.SAMPLES, "micro": training.SAMPLES}, **wide)
    alone = ranks(1, wide_run, case, [one])[0][0]
    settings = [over(2, stage, **wide) for stage in (1, 3)]
    for run in (*ranks(WORLD, wide_run, case, settings)[0], *ranks(WORLD, own, case, settings[1:])[0]):
        assert run[0] == pytest.approx(alone[0], rel=1e-12)
        for name, tensor in run[1].items():
            torch.testing.assert_close(tensor, alone[1][name], rtol=1e-11, atol=1e-12)


def wide_run(
    rank: int, world: int, case: str, settings: Sequence[Mapping[str, Any]]
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and norms of three steps, and the weights, in float64."""
    found = []
    for each in settings:
        model = models.build(case, torch.float64)
        with polyreme.initialize(model, each, loss_fn=models.CASES[case][2]) as engine, models.Wide():
            records: list[float] = []
            for step in range(3):
                batch = models.batch_of(case, training.SAMPLES, step, torch.float64)
                result = engine.train_step(models.share(batch, rank, world))
                records += [result.loss, result.grad_norm]
            found.append((records, engine.state_dict(rank0_only=True, master=True)))
    return found


def own(rank: int, world: int, case: str, settings: Sequence[Mapping[str, Any]]) -> Any:
    """`wide_run`, over the process group's own collectives."""
    with own_collectives():
        return wide_run(rank, world, case, settings)


def sent(rank: int, world: int, stage: int) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes that a rank sends in its second step, by axis and operation, and elements of the buckets."""
    model = models.build("llama", torch.float32)
    with polyreme.initialize(model, over(2, stage), loss_fn=models.causal_loss) as engine:
        batch = models.share(models.batch_of("llama", training.SAMPLES), rank, world)
        engine.train_step(batch)
        before = engine.traffic()
        engine.train_step(batch)
        now = engine.traffic()
        found = {
            axis: {op: count[1] - before[axis].get(op, (0, 0))[1] for op, count in counts.items()}
            for axis, counts in now.items()
        }
        return found, sum(bucket.layout.size for bucket in probe.buckets(engine))


@pytest.mark.parametrize("stage", STAGES)
def test_between_hosts_only_reduced_shards_are_sent(ranks: Ranks, stage: int) -> None:
    found, elements = ranks(WORLD, sent, stage)[0]
    half = elements * 4 // 2
    assert found["dp_replicate"] == {"broadcast": 0, "all_reduce": half}
    assert found["dp_shard"]["reduce_scatter"] == half
    assert found["dp_shard"]["all_gather"] >= half


def quantized_run(rank: int, world: int, zero: Mapping[str, Any]) -> Any:
    """Losses of twelve steps; the bytes sent in them; and weights as they are read in three ways."""
    model = models.build("llama", torch.float32)
    config = training.config(WORLD, zero=zero, optimizer={"lr": 1e-3})
    with polyreme.initialize(model, config, loss_fn=models.causal_loss) as engine:
        batch = models.share(models.batch_of("llama", training.SAMPLES), rank, world)
        losses = [engine.train_step(batch).loss for _ in range(12)]
        traffic = engine.traffic()
        engine.eval_step(batch)  # after which what it gathered may still be there
        whole = engine.state_dict(master=True)
        with engine.full_parameters():
            lent = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with engine.full_parameters(write=True):
            pass  # nothing is written, so that nothing changes
        again = engine.state_dict(master=True)
        return losses, traffic, whole, lent, again


def test_quantized_sums_and_gathers() -> None:
    plain = {"stage": 3, "shard_over": 2}
    exact, before, *_ = threads.run(WORLD, quantized_run, plain)[0]
    found = threads.run(
        WORLD, quantized_run, {**plain, "quantized_gradients": True, "quantized_weights": True}
    )
    losses, traffic, whole, lent, again = found[0]
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses[-1] < losses[0] - 0.1
    sent = traffic["dp_replicate"]["all_gather"][1]
    assert sent == pytest.approx(before["dp_replicate"]["all_reduce"][1] * (1 + 4 / 256) / 4, rel=0.01)
    gathered = traffic["dp_shard"]["all_gather"][1]
    assert gathered == pytest.approx(before["dp_shard"]["all_gather"][1] * (1 + 4 / 256) / 4, rel=0.05)
    for other in (lent, again, *(each[2] for each in found[1:])):
        assert all(torch.equal(whole[name], tensor) for name, tensor in other.items())


def saved(rank: int, world: int, folder: str, config: Mapping[str, Any]) -> Any:
    engine = polyreme.initialize(models.build("llama", torch.float32), config, loss_fn=models.causal_loss)
    engine.train_step(models.share(models.batch_of("llama", training.SAMPLES), rank, world))
    engine.save(folder)
    return engine.state_dict(rank0_only=True, master=True), after(engine)


def loaded(rank: int, world: int, folder: str, config: Mapping[str, Any]) -> Any:
    model = models.build("llama", torch.float32, seed=1)
    engine = polyreme.initialize(model, config, loss_fn=models.causal_loss)
    engine.load(folder)
    return engine.state_dict(rank0_only=True, master=True), after(engine)


def after(engine: polyreme.Engine) -> float:
    """The loss of the third step."""
    dp = engine.mesh.dp
    for step in (1, 2):
        batch = models.batch_of("llama", training.SAMPLES, step)
        loss = engine.train_step(models.share(batch, dp.rank, dp.size)).loss
    return loss


def test_checkpoints_open_in_any_other_layout(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    weights, loss = ranks(WORLD, saved, folder, over(2, 3))[0]
    for world, config in ((WORLD, over(2, 1)), (2, training.config(2, zero={"stage": 1}))):
        found, then = ranks(world, loaded, folder, config)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert then == pytest.approx(loss, rel=1e-5)
    back = str(tmp_path / "back")
    weights, loss = ranks(2, saved, back, training.config(2, zero={"stage": 3}))[0]
    found, then = ranks(WORLD, loaded, back, over(2, 2))[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def numbers(rank: int, world: int) -> list[torch.Tensor]:
    """Every rank sets its part of a master and of a state to numbers of its own; what each then has."""
    model = models.build("llama", torch.float32)
    engine = polyreme.initialize(model, over(2, 3), loss_fn=models.causal_loss)
    engine.train_step(models.share(models.batch_of("llama", training.SAMPLES), rank, world))
    found = []
    for parameter in (model.model.embed_tokens.weight, model.model.norm.weight):
        view = engine.numbers(parameter)
        for kind in ("master", "exp_avg"):
            part = view.local(kind)
            view.set_local(kind, torch.full_like(part, rank + 1.0))
            found += [view.local(kind), view.whole(kind)]
    return found


def test_copies_of_what_a_rank_sets_stay_equal() -> None:
    found = threads.run(WORLD, numbers)
    for rank in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(found[rank], found[rank - 2], strict=True))
    assert {1.0, 2.0} == {float(number) for tensor in found[3] for number in tensor.unique()}


def refused(rank: int, world: int, name: str, who: str | int) -> str:
    with patch.object(socket, "gethostname", lambda: name[rank]), pytest.raises(ConfigError) as caught:
        polyreme.initialize(models.build("llama", torch.float32), over(who, 2), loss_fn=models.causal_loss)
    return str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "who"), [("aaab", "host"), ("abab", "host"), ("abcd", "host"), ("aabb", 3)]
)
def test_what_cannot_be_shared_out_is_refused(ranks: Ranks, hosts: str, who: str | int) -> None:
    for error in ranks(WORLD, refused, hosts, who):
        assert f"zero.shard_over = {who!r}" in error and "fix: " in error


def test_sizes_that_divide_the_ranks_are_named_once() -> None:
    with pytest.raises(ConfigError, match=r"write zero.shard_over = 2 or 4$"):
        polyreme.Config.load(training.config(WORLD, zero={"shard_over": 3})).resolve(WORLD)


@pytest.mark.parametrize("who", ["all", WORLD])
def test_sums_between_copies_need_copies(who: str | int) -> None:
    zero = {"shard_over": who, "quantized_gradients": True}
    with pytest.raises(ConfigError, match=r"zero.quantized_gradients = True: .* makes one copy"):
        polyreme.Config.load(training.config(WORLD, zero=zero)).resolve(WORLD)
