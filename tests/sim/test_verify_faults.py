"""Faults that a parallel run may have, planted into the engine of every rank one after the other: `verify`
finds each, at the module, parameter or step where it is, and in the direction in which it is. Several are
faults that other systems' compositions really had."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import probe
import threads
from cover import ALL
from polyreme import Engine
from polyreme.distributed.work import DONE
from polyreme.optim import groups
from polyreme.pipeline.executor import Row
from polyreme.sequence import context, methods
from polyreme.step import step as step_module
from polyreme.step.loss.objective import Objective
from polyreme.step.totals import StepSums
from polyreme.tensor import ops, rng
from polyreme.tensor.vocab_parallel_loss import VocabParallelLogits
from polyreme.verify import Difference, Verdict, run
from polyreme.verify.report import HOW

SAMPLES = 8
DP, TP, PP, CP = {"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
SGD = {"name": "sgd", "lr": 1e-2}


class Normed(nn.Module):
    """Two layers around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(9, 12), nn.BatchNorm1d(12), nn.Linear(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def dropping() -> nn.Module:
    model: Any = models.gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    model.config.resid_pdrop = 0.1  # as tensor parallelism asks the config
    return model


def dropping_between() -> nn.Module:
    """Without the dropout of attention, which divided sequences do not have."""
    model: Any = dropping()
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "gpt2 with dropout": dropping,
    "gpt2 with dropout between": dropping_between,
    "batch norm": Normed,
    "packed": models.llama,
    "llama of 4 blocks": lambda: models.llama(num_hidden_layers=4),
}


def batch_of(family: str, step: int) -> Any:
    if family == "batch norm":
        return models.vectors(SAMPLES, seed=step)
    batch = models.tokens(SAMPLES, seed=step)
    batch["labels"][0, :5] = -100  # so that ranks and micro-batches differ in weight
    if family == "packed":
        batch["position_ids"] = torch.arange(12).remainder(7).expand(SAMPLES, -1).contiguous()
    return batch


@dataclass
class Fault:
    """A fault, and what is said of it. plant: changes an engine. patches: changes what all engines run.
    where: a pattern of the name, said: one of the note. share: what a rank is given of the global batch."""

    direction: str
    where: str
    mesh: Mapping[str, Any]
    plant: Callable[[Engine], object] = lambda engine: None
    patches: Callable[[], Any] = ExitStack
    family: str = "llama"
    said: str = ""
    step: int = 1
    sections: Mapping[str, Any] = field(default_factory=dict)
    share: Callable[[Any, int, int], Any] = models.share


FAULTS: dict[str, Fault] = {}


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Call `change(result, *args)` after each call of a method of `owner`."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        changed = change(result, *args)
        return result if changed is None else changed

    setattr(owner, name, wrapped)


def instead(function: Any, change: Callable[..., Any], owner: Any, name: str) -> Any:
    """A patch of an autograd function's forward or backward."""
    return patch.object(owner, name, staticmethod(lambda *args: change(function, *args)))


@contextmanager
def unsummed(axis: Any) -> Iterator[None]:
    """Sums over the axis are left out."""
    with patch.object(type(axis), "all_reduce", lambda self, tensor: DONE):
        yield


# ---- forwards


def row_without_sum(original: Any, ctx: Any, axis: Any, sequence: bool, *rest: Any) -> Any:
    with unsummed(axis):
        return original(ctx, axis, sequence, *rest)


FAULTS["the sum of a row layer is missing"] = Fault(
    "forward", r"model\.layers\.0\.self_attn\.o_proj", TP,
    patches=lambda: instead(ops._Row.forward, row_without_sum, ops._Row, "forward"),
)  # fmt: skip


def bias_on_each(
    original: Any, ctx: Any, axis: Any, sequence: bool, shape: Any, x: Any, weight: Any, bias: Any
) -> Any:
    out = original(ctx, axis, sequence, shape, x, weight, bias)
    return out if bias is None else out.add_((axis.size - 1) * bias)


FAULTS["the bias of a row layer is added on every rank"] = Fault(
    "forward", r"transformer\.h\.0\.attn\.c_proj", TP, family="gpt2",
    patches=lambda: instead(ops._Row.forward, bias_on_each, ops._Row, "forward"),
)  # fmt: skip


def rounded_rotary(engine: Engine) -> None:
    rotary: Any = engine.module.get_submodule("model.rotary_emb")
    after(rotary, "forward", lambda out, *_: tuple(each.bfloat16().to(each.dtype) for each in out))


FAULTS["the rotary cache is in bf16"] = Fault("forward", r"model\.rotary_emb", DP, rounded_rotary)


def restarted_positions(engine: Engine) -> None:
    rotary: Any = engine.module.get_submodule("model.rotary_emb")
    forward, late = rotary.forward, 6 * engine.mesh.tp.rank
    rotary.forward = lambda x, position_ids: forward(x, (position_ids - late).clamp_(min=0))


FAULTS["positions begin anew in a part of the sequence"] = Fault(
    "forward", r"model\.rotary_emb", SEQUENCE, restarted_positions
)


def without_mask(engine: Engine) -> None:
    attention: Any = engine.module.get_submodule("model.layers.1.self_attn")
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})


FAULTS["documents of a packed sequence see each other"] = Fault(
    "input", r"model\.layers\.1\.self_attn\.o_proj", DP, without_mask, family="packed"
)


def shifted_rows(engine: Engine) -> None:
    embedding: Any = engine.module.get_submodule("model.embed_tokens")
    forward = embedding.forward
    embedding.forward = lambda ids: forward(torch.where(ids == 50, 49, ids))


FAULTS["a token's row is read beside its place"] = Fault("forward", r"model\.embed_tokens", TP, shifted_rows)


def swapped_microbatches() -> Any:
    """The second stage takes what it received for one micro-batch for another one."""
    kept: dict[int, Any] = {}
    forward = Row.forward

    def wrapped(self: Row, action: Any) -> None:
        if action.stage and action.microbatch == 1:
            here, other = self._pass(1, 1), kept.pop(id(self))
            with torch.no_grad():
                for mine, before in zip(here.received, other, strict=True):
                    mine.copy_(before)
        elif action.stage and action.microbatch == 0:
            kept[id(self)] = [each.detach().clone() for each in self._pass(1, 0).received]
        forward(self, action)

    return patch.object(Row, "forward", wrapped)


FAULTS["a stage is fed the micro-batch before"] = Fault(
    "input",
    r"model\.layers\.2",
    PP,
    patches=swapped_microbatches,
    sections={"pipeline": {"schedule": "1f1b"}},
)

# ---- parts of a sequence


def later_positions(engine: Engine) -> None:
    """A rank counts positions as the one after it."""
    after(probe.sequences(engine), "cut", lambda part, *_: {**part, "position_ids": part["position_ids"] + 6})


FAULTS["positions are off by one part"] = Fault("input", r"model\.rotary_emb", CP, later_positions)


def seen_neighbour() -> Any:
    """In the second block each document sees the one before it."""
    original = context.attention

    def wrapped(query: Any, key: Any, value: Any, sinks: Any, across: Any) -> Tensor:
        calls[threads.HERE.rank] += 1
        if calls[threads.HERE.rank] % 3 == 2:  # of the three blocks
            tokens = [replace(t, document=t.document * 0, key=t.key * 0) for t in across.tokens]
            across = replace(across, tokens=tokens)
        return original(query, key, value, sinks, across)

    calls: Counter[int] = Counter()
    return patch.object(context, "attention", wrapped)


FAULTS["a document of a divided sequence sees its neighbour"] = Fault(
    "input", r"model\.layers\.1\.self_attn\.o_proj", CP, patches=seen_neighbour, family="packed"
)


def shifted_in_parts(engine: Engine) -> None:
    """Labels are shifted after the cut, so that each part loses its last one."""
    sequences = probe.sequences(engine)
    sequences._shifts = False

    def shift(part: dict[str, Any], *_: Any) -> dict[str, Any]:
        shifted = F.pad(part["labels"][:, 1:], (0, 1), value=-100)
        return {**part, "labels": shifted, "shift_labels": shifted}

    after(sequences, "cut", shift)


FAULTS["labels are shifted in each part"] = Fault(
    "loss", "", CP, shifted_in_parts, sections={"context": {"balance": "contiguous"}}
)


def merged_twice() -> Any:
    """The first block of a ring is merged again."""
    original = methods.attend

    def wrapped(merged: Any, query: Any, key: Any, value: Any, queries: Any, keys: Any, rule: Any) -> None:
        original(merged, query, key, value, queries, keys, rule)
        if queries is keys:
            original(merged, query, key, value, queries, keys, rule)

    return patch.object(methods, "attend", wrapped)


FAULTS["a block of a ring is merged twice"] = Fault(
    "input", r"model\.layers\.0\.self_attn\.o_proj", CP, patches=merged_twice,
    sections={"context": {"method": "ring"}},
)  # fmt: skip


# ---- losses


def mean_of_means() -> Any:
    loss = Objective.loss

    def wrapped(self: Objective, output: Any, batch: Any, weight: float | None = None) -> Any:
        total, count = loss(self, output, batch, weight)
        return total / count, 1.0

    return patch.object(Objective, "loss", wrapped)


FAULTS["the loss is a mean of the micro-batches' means"] = Fault(
    "loss", "", DP, patches=mean_of_means, said="mean of the micro-batches' means"
)


def padded_logits(engine: Engine) -> None:
    head: Any = engine.module.get_submodule("lm_head")
    axis, cut = engine.mesh.tp, probe.cuts(engine)["lm_head.weight"]

    def forward(x: Tensor) -> Tensor:
        (out,) = ops.columns(axis, x, [head.weight], [None], [ops.Shape()])
        return VocabParallelLogits.of(out, axis, cut)

    head.forward = forward


FAULTS["the padding of an uneven vocabulary is in the loss"] = Fault("loss", "", TP, padded_logits)

# ---- weights


def stale(engine: Engine) -> None:
    bucket = next(b for b in probe.trainable(engine) if "layers.1" in b.layout.slots[0].name)
    bucket.publish = lambda: DONE  # type: ignore[method-assign]


FAULTS["gathered weights are those of the step before"] = Fault(
    "gathered weights", r"model\.layers\.1\..*", DP, stale, step=2
)


def swapped_shards(engine: Engine) -> None:
    bucket = next(b for b in probe.trainable(engine) if "layers.1" in b.layout.slots[0].name)

    def swap(*_: Any) -> None:
        half = bucket.full.numel() // 2
        bucket.full.data.copy_(bucket.full.data.roll(half))

    began = False

    def ensured(_: Any, *__: Any) -> None:
        nonlocal began
        if bucket._state == "full" and not began:
            swap()
        began = bucket._state == "full"

    after(bucket, "ensure", ensured)

    def released(*_: Any) -> None:
        nonlocal began
        began = bucket._state == "full"

    after(bucket, "release", released)


FAULTS["shards are swapped after a gather"] = Fault(
    "gathered weights", r"model\.layers\.1\..*", DP, swapped_shards, sections={"zero": {"stage": 3}}
)


def other_beginning(engine: Engine) -> None:
    with engine.full_parameters(write=True) as whole:
        whole.get_parameter("model.layers.2.mlp.up_proj.weight").data.mul_(1.5)


FAULTS["a rank initialised other weights"] = Fault(
    "initial weights", r"model\.layers\.2\.mlp\.up_proj\.weight", TP, other_beginning, step=0
)

# ---- backwards


def columns_without_sum(original: Any, ctx: Any, *grads: Any) -> Any:
    if ctx.saved_tensors[1].shape[0] == 20:  # of the MLP
        with unsummed(ctx.axis):
            return original(ctx, *grads)
    return original(ctx, *grads)


FAULTS["the sum in the backward of column layers is missing"] = Fault(
    "input gradient", r"model\.layers\.2\.mlp\.(gate|up)_proj", TP,
    patches=lambda: instead(ops._Columns.backward, columns_without_sum, ops._Columns, "backward"),
)  # fmt: skip


def unsummed_gradients(original: Any, ctx: Any, *grads: Any) -> Any:
    with unsummed(ctx.axis):
        return original(ctx, *grads)


FAULTS["gradients of norms on parts of the sequence are not summed"] = Fault(
    "weight gradient", r"model\.layers\.2\.(post_attention|input)_layernorm\.weight", SEQUENCE,
    patches=lambda: instead(ops._Summed.backward, unsummed_gradients, ops._Summed, "backward"),
    said=r"over them \(tp\) is missing",
)  # fmt: skip


def averaged_gradients(original: Any, ctx: Any, *grads: Any) -> Any:
    """As EleutherAI/gpt-neox 1259 found it."""
    found = original(ctx, *grads)
    return tuple(each / ctx.axis.size if isinstance(each, Tensor) else each for each in found)


FAULTS["gradients of norms on parts of the sequence are averaged"] = Fault(
    "weight gradient", r"model\.(layers\.2\..*_layer)?norm\.weight", SEQUENCE,
    patches=lambda: instead(ops._Summed.backward, averaged_gradients, ops._Summed, "backward"),
    said="divided by the 2 ranks of tp once too often",
)  # fmt: skip


def half_weight_gradient() -> Any:
    original = ops.Shape.weight_grad

    def wrapped(self: Any, grad: Tensor, x: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        return original(self, grad, torch.cat([x[: len(x) // 2], 0 * x[len(x) // 2 :]]), weight, into)

    return patch.object(ops.Shape, "weight_grad", wrapped)


FAULTS["half of the rows are left out of weight gradients"] = Fault(
    "weight gradient", r"lm_head\.weight|model\.layers\.2\..*", TP, patches=half_weight_gradient
)

# ---- reductions


def halve(gradients: Any) -> Callable[..., None]:
    def change(*_: Any) -> None:
        gradients.own_shard.div_(2)

    return change


def halved(engine: Engine) -> None:
    for bucket in probe.trainable(engine):
        after(bucket.gradients, "finish_reduce", halve(bucket.gradients))


FAULTS["gradients are averaged twice"] = Fault(
    "reduction",
    r".*",
    DP,
    halved,
    said="divided by the 2 ranks of dp once too often",
    sections={"zero": {"stage": 1}},
)


def rounded_sums(engine: Engine) -> None:
    """Megatron's FSDP adds micro-batches up in bf16 (ISEEKYAN/Megatron-LM 149)."""
    for bucket in probe.trainable(engine):

        def rounded(*_: Any, gradients: Any = bucket.gradients) -> None:
            gradients.own_shard.copy_(gradients.own_shard.bfloat16())

        after(bucket.gradients, "finish_reduce", rounded)


FAULTS["gradients are added up in bf16"] = Fault("reduction", r".*", DP, rounded_sums)


def added_to_old(engine: Engine) -> None:
    """What was reduced in the step before is reduced with the next (lodestone-rock/RamTorch 13)."""
    for bucket in probe.trainable(engine):
        kept: list[Tensor] = []

        def added(*_: Any, gradients: Any = bucket.gradients, kept: list[Tensor] = kept) -> None:
            own = gradients.own_shard.clone()
            if len(kept) == 2:  # micro-batches, of the step before
                gradients.own_shard.add_(kept[-1])
            kept.append(own)

        after(bucket.gradients, "finish_reduce", added)


FAULTS["the gradients of the step before are counted again"] = Fault(
    "reduction", r".*", DP, added_to_old, step=2
)


class Only:
    """An axis with another operation."""

    def __init__(self, axis: Any, **operations: Any) -> None:
        vars(self).update(operations)
        self._axis = axis

    def __getattr__(self, name: str) -> Any:
        return getattr(self._axis, name)


def own_alone(engine: Engine) -> None:
    for bucket in probe.trainable(engine):
        if "layers.1" not in bucket.layout.slots[0].name:
            continue

        def scatter(
            out: Tensor, full: Tensor, accumulate: bool = False, of: str = "", b: Any = bucket
        ) -> Any:
            part = full.chunk(b.axis.size)[b.axis.rank].to(out.dtype)
            out.add_(part) if accumulate else out.copy_(part)
            return DONE

        bucket.gradients._axis = Only(bucket.gradients._axis, reduce_scatter=scatter)


FAULTS["a bucket's gradients are not summed over dp"] = Fault(
    "reduction", r"model\.layers\.1\..*", DP, own_alone
)
FAULTS["a bucket's gradients are not summed over cp"] = Fault(
    "reduction", r"model\.layers\.1\..*", CP, own_alone
)


def last_alone(engine: Engine) -> None:
    for bucket in probe.trainable(engine):
        g = bucket.gradients
        reduce = g.reduce

        def wrapped(g: Any = g, reduce: Any = reduce) -> None:
            g._reduced = False
            reduce()

        g.reduce = wrapped


FAULTS["an accumulation step is dropped"] = Fault(
    "reduction", r".*", DP, last_alone, said=r"lacks micro-batch 1 of every rank"
)


def tied_once(engine: Engine) -> None:
    for bucket in probe.trainable(engine):
        if bucket.tie is not None:
            bucket.tie = Only(bucket.tie, all_reduce=lambda tensor: DONE)


FAULTS["the gradient of a tied weight is one stage's"] = Fault(
    "reduction", r"transformer\.wte\.weight", PP, tied_once, family="gpt2", said=r"sum of theirs \(pp\)"
)


def wrong_count() -> Any:
    to_mean = StepSums.to_mean
    return patch.object(StepSums, "to_mean", lambda self, scale: to_mean(self, scale) * 83 / 88)


FAULTS["gradients are divided by all tokens and not by the labels"] = Fault(
    "reduction", r".*", DP, patches=wrong_count, said=r"it is 0\.943182 times"
)


def counted_twice(engine: Engine) -> None:
    for bucket in probe.trainable(engine):
        bucket.gradients._counted = True


FAULTS["a norm counts what tensor-parallel ranks share for each"] = Fault(
    "norm", "", TP, counted_twice, said=r"counted once for each \(tp\)"
)


def left_out(engine: Engine) -> None:
    """As attention sinks, of which each rank has its heads' (NVIDIA/Megatron-LM 7452)."""
    for bucket in probe.trainable(engine):
        if engine.mesh.tp.rank and "layers.1" in bucket.layout.slots[0].name:
            bucket.gradients._counted = False


FAULTS["a norm leaves out what other tensor-parallel ranks have of a block"] = Fault("norm", "", TP, left_out)

# ---- updates


FAULTS["a norm decays"] = Fault(
    "update", r".*norm.*", DP, patches=lambda: patch.object(groups, "no_decay", lambda model: set()),
    said="it has weight decay, which it is not to have",
)  # fmt: skip

FAULTS["a matrix does not decay"] = Fault(
    "update", r".*(proj|embed_tokens|lm_head).*", DP, said="it lacks its weight decay",
    patches=lambda: patch.object(
        groups, "no_decay", lambda model: {name for name, _ in model.named_parameters()}
    ),
)  # fmt: skip


def later_count(engine: Engine) -> None:
    """DeepSpeed's ZeRO-0 in bf16 begins one step late."""
    updates = probe.optimizer(engine)
    step, done = updates.step, []

    def wrapped(*args: Any) -> None:
        step(*args)
        if not done:
            done.append(True)
            for update in updates:
                for state in update.on_device():
                    if state.dim() == 0:
                        state.add_(1)

    updates.step = wrapped  # type: ignore[method-assign]


FAULTS["bias correction counts a step too many"] = Fault("update", r".*", DP, later_count, step=2)


def other_rate(engine: Engine) -> None:
    engine.optimizer.param_groups[1]["lr"] *= 2


FAULTS["a group has another's learning rate"] = Fault(
    "update", r".*norm.*", DP, other_rate, said=r"2 times as long"
)


def local_clip() -> Any:
    def clipping(step: Any, norm: float) -> float:
        own = step_module._squares(step).sqrt().item() * step.to_mean
        return min(1.0, step._clip / own)

    return patch.object(step_module, "_clipping", clipping)


FAULTS["gradients are clipped by this rank's norm"] = Fault(
    "update", r".*", DP, patches=local_clip, sections={"optimizer": {**SGD, "clip": 0.05}}
)


def forgotten_momentum(engine: Engine) -> None:
    updates = probe.optimizer(engine)

    def forget(*_: Any) -> None:
        for update in updates:
            for state in update.on_device():
                state.zero_()

    after(updates, "step", forget)


FAULTS["momentum is lost between steps"] = Fault(
    "update", r".*", DP, forgotten_momentum, step=2, sections={"optimizer": {**SGD, "momentum": 0.9}}
)

# ---- buffers, data, random numbers


FAULTS["running statistics are not sent to other ranks"] = Fault(
    "buffer", r"norm\.running_(mean|var)", DP, probe.keep_buffers_apart, family="batch norm"
)

FAULTS["two ranks read the same samples"] = Fault(
    "data", "data-parallel rank 1", DP, share=lambda batch, rank, size: models.share(batch, 0, size)
)

FAULTS["data-parallel ranks drop the same"] = Fault(
    "random numbers", r"transformer\.(drop|h\.\d.*)", DP, family="gpt2 with dropout", step=2,
    said=r"other samples \(dp\)",
    plant=probe.draw_as_one,
)  # fmt: skip

FAULTS["tensor-parallel ranks drop the same of different parts"] = Fault(
    "random numbers", r"transformer\.h\.\d.*", SEQUENCE, family="gpt2 with dropout", step=2, said=r"\(tp\)",
    patches=lambda: patch.object(rng, "STRIDE", 0),
)  # fmt: skip


def verdict(rank: int, size: int, name: str, compute: str = "") -> Verdict:
    """compute: the dtype of the mode "numerics"."""
    fault = FAULTS.get(name) or HEALTHY[name]
    torch.manual_seed(0)
    model = FAMILIES[fault.family]().train()
    for parameter in model.parameters():  # biases that begin as zeros hide what becomes of them
        parameter.data += 0.02 * torch.randn_like(parameter)
    own_loss = None if "cp" in fault.mesh else models.causal_loss
    loss_fn = F.mse_loss if fault.family == "batch norm" else own_loss
    optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip": "none"}
    sections = {"zero": {"stage": 2, "min_bucket": 0}, "optimizer": optimizer, **fault.sections}
    sections["zero"] = {"min_bucket": 0, **sections["zero"]}
    if compute:
        sections["precision"] = {"compute": compute}
    mode: Any = "numerics" if compute else "structure"
    config = {**sections, "mesh": fault.mesh, "batch": {"size": SAMPLES, "micro": 2}}
    threads.HERE.plant = fault.plant

    def give(engine: Engine) -> Callable[[int], Any]:
        axis = engine.mesh.data
        return lambda step: fault.share(batch_of(fault.family, step), axis.rank, axis.size)

    whole = lambda step: batch_of(fault.family, step)  # noqa: E731
    return run.verified(model, config, give, whole, loss_fn=loss_fn, steps=2, mode=mode)


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    """Engines get the fault of their rank as soon as they are made."""
    make = run.initialize

    def initialize(*args: Any, **options: Any) -> Engine:
        engine = make(*args, **options)
        threads.HERE.plant(engine)
        return engine

    with patch.object(run, "initialize", initialize):
        yield


HEALTHY = {
    "dp": Fault("", "", DP),
    "dp, stage 3, recomputed": Fault(
        "", "", DP, sections={"zero": {"stage": 3}, "memory": {"activations": "recompute"}}
    ),
    "tp": Fault("", "", TP),
    "sequence": Fault("", "", SEQUENCE, family="gpt2 with dropout"),
    "pp": Fault("", "", PP, family="gpt2"),
    "zero bubble": Fault("", "", PP, sections={"pipeline": {"schedule": "zb-v"}}, family="llama of 4 blocks"),
    "packed": Fault("", "", DP, family="packed"),
    "batch norm": Fault("", "", DP, family="batch norm"),
    "batch norm over all": Fault("", "", DP, family="batch norm", sections={"batch_norm": "sync"}),
    "dropout": Fault("", "", DP, family="gpt2 with dropout"),
    "cp": Fault("", "", CP),
    "cp, packed": Fault("", "", CP, family="packed", sections={"context": {"method": "gather"}}),
    "cp, tp and sequence": Fault(
        "", "", {**SEQUENCE, "cp": 2}, sections={"context": {"method": "ulysses"}, "zero": {"stage": 3}}
    ),
    "cp and pp": Fault("", "", {**PP, "cp": 2}, family="llama of 4 blocks"),
    "cp, dropout": Fault("", "", CP, family="gpt2 with dropout between"),
    "dp and tp": Fault("", "", {"dp": 2, "tp": 2}, sections={"zero": {"stage": 1}}),
}


def ranks_of(mesh: Mapping[str, Any]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))


quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def some_of(names: Iterable[str]) -> list[str]:
    """Every fifth name; all of them with --all-cases."""
    return [*names][:: 1 if ALL in os.environ else 5]


@quiet
@pytest.mark.parametrize("name", some_of(FAULTS))
def test_a_fault_is_found_where_it_is(name: str) -> None:
    fault = FAULTS[name]
    with fault.patches():
        found, *others = threads.run(ranks_of(fault.mesh), verdict, name)
    first: Difference = found.first
    assert first is not None, str(found)
    assert (first.direction, first.step) == (fault.direction, fault.step), str(found)
    assert re.fullmatch(fault.where, first.name), str(found)
    assert re.search(fault.said, first.note), str(found)
    assert found.exit_status == 1 and found.line.startswith("different: ")
    assert all(other == found for other in others)


@quiet
@pytest.mark.parametrize("name", some_of(HEALTHY))
def test_a_run_without_a_fault_is_equal(name: str) -> None:
    found, *others = threads.run(ranks_of(HEALTHY[name].mesh), verdict, name)
    assert found.first is None and found.exit_status == 0, str(found)
    assert max(row.error for row in found.rows if row.what in ("gradients", "loss")) < 1e-9, str(found)
    assert all(other == found for other in others)
    assert Verdict.of_dict(found.to_dict()) == found


COMPUTES = ("bf16", "fp16", "fp32")
LARGER = (  # than rounding
    "the sum of a row layer is missing",
    "gradients are averaged twice",
    "a norm decays",
    "bias correction counts a step too many",
    "a group has another's learning rate",
    "a norm counts what tensor-parallel ranks share for each",
)


@quiet
@pytest.mark.parametrize(
    ("name", "compute"),
    [*(itertools.product(LARGER, COMPUTES) if ALL in os.environ else zip(LARGER, COMPUTES, strict=False))],
)
def test_a_fault_that_is_larger_than_rounding_is_found(name: str, compute: str) -> None:
    fault = FAULTS[name]
    with fault.patches():
        found = threads.run(ranks_of(fault.mesh), verdict, name, compute)[0]
    first = found.first
    assert first is not None, str(found)
    assert (first.direction, first.step) == (fault.direction, fault.step), str(found)
    assert re.fullmatch(fault.where, first.name), str(found)


def test_there_are_twenty_kinds_of_faults_in_all_directions() -> None:
    assert len(FAULTS) >= 20
    assert {fault.direction for fault in FAULTS.values()} == {*HOW}
