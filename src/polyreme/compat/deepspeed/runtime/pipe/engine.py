"""DeepSpeed's engine of a PipelineModule, over Polyreme's pipeline.

Only the first and the last stage read data; stages between them are given the first one's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data.distributed import DistributedSampler

import polyreme
from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError, refused
from polyreme.compat.deepspeed.runtime.dataloader import RepeatingLoader
from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine
from polyreme.compat.deepspeed.runtime.pipe.module import PipelineError, PipelineModule
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.distributed.mesh import everyone
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten

__all__ = ["PipelineEngine", "PipelineError"]

AXES = {"pipe": "pp", "data": "dp", "model": "tp"}
"""Our names of a topology's axes."""


class PipelineEngine(DeepSpeedEngine):
    """Trains the PipelineModule `module` on whole batches: `deepspeed.initialize` returns one."""

    def __init__(
        self,
        engine: polyreme.Engine,
        translation: Translation,
        basic: Optimizer | type[Optimizer] | None,
        model: PipelineModule,
    ) -> None:
        super().__init__(engine, translation, basic, mpu=model.mpu())
        self.module: PipelineModule = model
        self.grid = model.mpu()
        self.num_stages, self.stage_id = model.num_stages, model.stage_id
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self.micro_batches = self.gradient_accumulation_steps()
        self.is_pipe_parallel = self.grid.pipe_parallel_size > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = False
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: Tensor | None = None
        if interval := translation.values["pipeline.activation_checkpoint_interval"]:
            model.set_checkpoint_interval(interval)

    # ---- training and evaluation

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Make one step on the next `gradient_accumulation_steps` micro-batches of `data_iter`, or of the
        training data. Returns the mean of their losses, over all ranks, on every rank. Raises StopIteration
        where the data ends."""
        self._refuse_inference("train_batch")
        if not torch.is_grad_enabled():
            raise PipelineError(
                "train_batch() where torch makes no gradients: leave torch.no_grad(), or call eval_batch()"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        result = self.polyreme.train_step(self._next(self.micro_batches))
        self.micro_steps += self.micro_batches
        self._took(result)
        self.agg_train_loss = torch.tensor(result.loss, device=self.device)
        every = self.translation.values["steps_per_print"]
        if every and self.global_steps % every == 0:
            log_dist(f"step={self.global_steps}, loss={result.loss:0.4f}", ranks=[0])
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean over micro-batches and data-parallel ranks of the losses, or without `compute_loss`
        or a loss_fn of the outputs; with `reduce_output` None, a list of them. Without `bcast_loss`, with a
        list and without `compute_loss` it is on the last stage's ranks, and None on others. With
        `return_logits` comes the last micro-batch's output, on the last stage."""
        if reduce_output is not None and reduce_output.lower() != "avg":
            raise refused(f"reduce_output={reduce_output!r}", "outputs are averaged", 'write "avg" or None')
        before, loss_fn = self.data_iterator, self.module.loss_fn
        self.set_dataiterator(data_iter)
        try:
            parts = self._next(num_micro_batches or self.micro_batches)
        finally:
            self.set_dataiterator(before)
        logits: list[Any] = [None]

        def value(output: Any, part: Any) -> Any:
            logits[0] = output if return_logits else None
            return loss_fn(output, part[1]) if compute_loss and loss_fn is not None else output

        found: Any = self.polyreme.eval_outputs(parts, value) or None
        if reduce_output is not None:
            found = self._mean(found)
            if compute_loss and bcast_loss:
                found = self._from_last_stage(found)
        return (found, logits[0]) if return_logits else found

    def _mean(self, found: list[Any] | None) -> Any:
        """Return the mean over micro-batches and data-parallel ranks; None where there are none."""
        if found is None:
            return None
        dp = self.polyreme.mesh.dp

        def mean(*tensors: Tensor) -> Tensor:
            total = torch.stack(tensors).sum(0)
            dp.all_reduce(total).wait()
            return total / (len(tensors) * dp.size)

        return pytree.tree_map(mean, *found)

    def _from_last_stage(self, value: Any) -> Any:
        """Return the last stage's value."""
        pp, last = self.polyreme.mesh.pp, self.num_stages - 1
        form, tensors = flatten(value)
        form = pp.gather_objects(form)[last]
        if not self.is_last_stage():
            tensors = buffers(form, self.device)
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in tensors:
            pp.broadcast(tensor, last)
        return unflatten(form, tensors)

    # ---- data

    @property
    def _reads(self) -> bool:
        """Whether this rank's stage reads data: inputs or labels."""
        return self.is_first_stage() or self.is_last_stage()

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Train on the micro-batches of `loader`."""
        self.set_dataiterator(iter(loader) if self._reads else None)
        self.training_dataloader = loader if self._reads else None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Train on the micro-batches of `iterator`, (inputs, labels) each."""
        self.data_iterator = iterator if self._reads else None
        self.training_dataloader = None

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Make each micro-batch by `fn`, of what the iterator gives (None without one)."""
        self.batch_fn = fn

    def _next(self, count: int) -> list[Any]:
        """Return the next micro-batches, as Polyreme's engine takes them."""
        found: list[Any] | None = None
        if self._reads:
            try:
                found = [self._micro_batch() for _ in range(count)]
            except StopIteration:
                if self.num_stages <= 2:
                    raise
        return self._with_middle(found) if self.num_stages > 2 else found or []

    def _micro_batch(self) -> Any:
        if self.data_iterator is None and self.batch_fn is None:
            raise OrderError(
                "there is no training data: give train_batch an iterator, or call set_dataloader"
            )
        batch = None if self.data_iterator is None else next(self.data_iterator)
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise ArgumentError(
                f"a micro-batch is a {type(batch).__name__}: give (inputs, labels), each a tensor or a tuple"
            )
        inputs, labels = (tuple(part) if isinstance(part, list) else part for part in batch[:2])
        return (inputs, labels) if self.module.loss_fn is not None else (inputs,)

    def _with_middle(self, found: list[Any] | None) -> list[Any]:
        """Return the micro-batches of the first stage, on those that read none. Raises StopIteration on all
        where the first or the last have no more."""
        pp = self.polyreme.mesh.pp
        form, tensors = flatten(pytree.tree_map_only(Tensor, lambda t: t.to(self.device), found))
        forms = pp.gather_objects(form)
        if forms[0] is None or forms[-1] is None:
            raise StopIteration
        given = [t.contiguous() for t in tensors] if self.is_first_stage() else buffers(forms[0], self.device)
        for tensor in given:
            pp.broadcast(tensor, 0)
        return unflatten(forms[0], given) if found is None else found

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Do nothing for the size that there is. Raises UnsupportedError for another."""
        if train_batch_size != self.train_batch_size():
            raise refused(
                f"set_train_batch_size({train_batch_size}) of a pipeline",
                f"its schedule is made for the {self.micro_batches} micro-batches of the config",
                f"write train_batch_size {train_batch_size} in the config, and go on from a checkpoint",
            )

    # ---- places

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last layers."""
        return self.stage_id == self.num_stages - 1

    # ---- what a pipeline does by itself

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return False, as between steps, in which the engine alone reduces."""
        return False

    def reset_activation_shape(self) -> None:
        """Nothing is left to do: stages agree on the shapes of each new shape of batch."""

    def get_additional_losses(self) -> None:
        """Return None: there are none."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises PipelineError."""
        raise PipelineError("a pipeline takes a step's batches as one: call train_batch() or eval_batch()")

    backward = step = no_sync = set_gradient_accumulation_boundary = forward

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return all stages' weights by "LAYER.NAME" (of shared modules "LAYER.module.NAME"), on every rank.
        All ranks must call."""
        if exclude_frozen_parameters:
            raise refused("module_state_dict(exclude_frozen_parameters=True)",
                          "a stage does not know what others freeze", "leave it out")  # fmt: skip
        return super().module_state_dict(prefix=prefix)

    def build_data_iter(self, dataset: Any) -> None:
        """Train on `dataset` in its order, again and again."""
        dp = self.polyreme.mesh.dp
        sampler: Any = DistributedSampler(dataset, dp.size, dp.rank, shuffle=False)
        self.set_dataloader(RepeatingLoader(self.deepspeed_io(dataset, data_sampler=sampler)))


# ---- for `deepspeed.initialize`


def placed(model: PipelineModule, translation: Translation) -> Translation:
    """Return the translation with the places of `model`'s ranks and layers. Raises OrderError at
    ZeRO 2 and 3, as DeepSpeed does."""
    if translation.stage >= 2:
        raise OrderError(
            f"zero_optimization.stage is {translation.stage}, which divides gradients that a pipeline's "
            "stages add up over micro-batches: write 0 or 1"
        )
    if type(model).get_additional_losses is not PipelineModule.get_additional_losses:
        raise refused("PipelineModule.get_additional_losses", "stages hand on no losses beside the one that "
                      "is trained", "leave it out")  # fmt: skip
    config = dict(translation.config)
    if model.num_stages > 1:
        order = [AXES[axis] for axis in model.topology().get_axis_names() if axis in AXES]
        order += [axis for axis in ("pp", "dp", "cp", "ep", "tp") if axis not in order]
        config["mesh"] = {**config.get("mesh", {}), "order": order}
        counts = [stop - start for start, stop in pairwise(model.parts)]
        config["pipeline"] = {**config.get("pipeline", {}), "blocks": counts}
    return replace(translation, config=config)


def complete(optimizer: Optimizer, model: PipelineModule) -> None:
    """Make an optimizer of this stage's parameters name those of all stages, each in the group in which its
    stage has it. All ranks must call. Raises ArgumentError on all where they have unlike numbers of groups,
    or parameters that the model does not have."""
    names = {id(p): name for name, p in model.sequence.named_parameters()}
    groups = optimizer.param_groups
    own = [[names.get(id(p)) for p in group["params"]] for group in groups]
    told = everyone().gather_objects(own)
    if any(name is None for groups_of_rank in told for group in groups_of_rank for name in group):
        raise ArgumentError(
            "the optimizer has parameters that are not the PipelineModule's: give it those alone"
        )
    if len({len(each) for each in told}) > 1:
        raise ArgumentError(
            f"stages' optimizers have {[len(each) for each in told]} groups, by rank, which are to be one "
            "optimizer's: make as many on every stage, also where one has no parameters"
        )
    parameters = dict(model.sequence.named_parameters())
    for index, group in enumerate(groups):
        group["params"] = [
            parameters[name] for name in dict.fromkeys(n for each in told for n in each[index])
        ]


def refuse_empty(model: PipelineModule) -> None:
    """Raise ArgumentError on all ranks where some stages train and others have nothing to train. All ranks
    must call."""
    told = everyone().gather_objects([model.stage_id, any(p.requires_grad for p in model.parameters())])
    idle = sorted({stage for stage, trains in told if not trains})
    if 0 < len(idle) < model.num_stages:
        raise ArgumentError(
            f"stage {idle[0]} has no parameters to train: choose another partition_method or fewer stages"
        )
