"""A model whose sequences are divided over the ranks of `mesh.cp`: cuts its batches, and computes its
attention, whose function is ours.

Invariant: outside of attention a rank has its part of each sequence, and nothing of others.
Communication: that of `methods`, in each attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from polyreme.config.schema import ContextSection
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import BatchError, ModelError, named
from polyreme.models.attention import facts_of, replace_attention
from polyreme.models.huggingface import IGNORED_LABEL, shifts_labels
from polyreme.models.patches import Patches
from polyreme.sequence import documents as documents_of
from polyreme.sequence.choice import Choice, choose, neighbours, refuse
from polyreme.sequence.documents import DROPPED, Documents
from polyreme.sequence.methods import Across, attention
from polyreme.sequence.parts import Parts, Work, cut, padded_length
from polyreme.sequence.visible import Rule, Tokens

NAME = "polyreme_context"
"""The name of our function among transformers' attentions."""

_owners: WeakKeyDictionary[nn.Module, ContextParallel] = WeakKeyDictionary()


@dataclass
class Layout:
    """Where the tokens of a micro-batch lie: `length` of them on each rank. tokens: of each place of the
    ring. across: what its attentions need, by their rule."""

    parts: Parts
    tokens: list[Tokens]
    length: int
    across: dict[Rule, Across] = field(default_factory=dict)


@dataclass(frozen=True)
class Division:
    """How the sequences of a step were divided. method: how attention was computed (`context.method`).
    balance: which tokens ranks had, by micro-batch where these differ. load: what the fullest rank computed,
    over the mean, counted in operations."""

    method: str
    balance: str
    load: float


class ContextParallel:
    """The division of one engine's sequences over `mesh.cp`. choice: how its attention is computed."""

    choice: Choice

    def __init__(
        self,
        model: nn.Module,
        section: ContextSection,
        mesh: Mesh,
        split: int,
        own_loss: bool,
        patches: Patches,
    ) -> None:
        """split: ranks that divide the sequences once more outside of attention. patches: undo what is done
        to the model. Raises ConfigError with all that stands against the division of this model."""
        self._axis, self._split, self._section, self._patches = mesh.cp, split, section, patches
        refuse(model, section, mesh.cp.size, mesh.tp.size, own_loss)
        facts, local = facts_of(model), neighbours(mesh.host_of, mesh.lines("cp"))
        self.choice = choice = choose(section, facts, mesh.cp.size, mesh.tp.size, local)
        self._heads, self._ring = Axis("cp"), mesh.cp
        if choice.ring == 1:
            self._heads, self._ring = self._ring, self._heads
        elif choice.ulysses > 1:
            self._heads, self._ring = mesh.split("cp", choice.ulysses, ("cp_ulysses", "cp_ring"))
        self._shifts = shifts_labels(model)
        self._work = Work(facts.pair, facts.token, facts.causal, facts.window)
        self._layouts: dict[int, Layout] = {}
        self._at: int | None = None
        self._uncalled: dict[nn.Module, str] = {}  # blocks whose attention was not called yet

    def attach(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Compute the attention of a model, of whose `blocks` each must have some."""
        self._uncalled = {block: name for name, block in blocks.items()}
        self._block_of = {module: block for block in blocks.values() for module in block.modules()}
        self._patches.call(replace_attention(model, NAME, _attention))
        self._patches.call(self._forget)
        for module in model.modules():
            _owners[module] = self

    def _forget(self) -> None:
        for module in [each for each, owner in _owners.items() if owner is self]:
            del _owners[module]

    # ---- batches

    def at(self, microbatch: int | None) -> None:
        """Go on with a micro-batch of the step; None: the step is over."""
        self._at = microbatch

    def cut(self, batch: Any, microbatch: int) -> dict[str, Any]:
        """Return this rank's part of a micro-batch, and remember where its tokens lie. Raises BatchError for
        a batch that cannot be cut."""
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"a batch that is a {type(batch).__name__} cannot be cut over mesh.cp: give a mapping with "
                "input_ids and labels, or set mesh.cp = 1"
            )
        main = next(
            (batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None
        )
        if not isinstance(main, Tensor) or main.dim() < 2:
            raise BatchError(
                "the batch has neither input_ids nor inputs_embeds of (samples, tokens), which mesh.cp cuts: "
                "add them, or set mesh.cp = 1"
            )
        samples, length = main.shape[:2]
        found = documents_of.find(batch, samples, length)
        values = self._shifted({**batch, "position_ids": found.positions.to(main.device)}, found, main)
        layout = self._layouts[microbatch] = self._layout(found)
        extra = layout.parts.padded - length
        return {
            name: self._part(name, value, (samples, length), extra, layout)
            for name, value in values.items()
            if name not in DROPPED
        }

    def division(self, microbatches: int) -> Division:
        """Return how so many micro-batches were divided, which were cut last."""
        parts = [self._layouts[each].parts for each in range(microbatches)]
        mean = sum(each.mean for each in parts)
        load = sum(each.most for each in parts) / mean if mean else 1.0
        names = dict.fromkeys(each.balance for each in parts)
        return Division(str(self.choice), ", ".join(names), load)

    def _shifted(self, values: dict[str, Any], found: Documents, main: Tensor) -> dict[str, Any]:
        """Return a batch whose labels are shifted, where the model's loss would do that; the token that
        begins a document is predicted from none."""
        labels, shifted = values.get("labels"), values.get("shift_labels")
        if labels is None and shifted is None:
            return values
        for name, given in (("labels", labels), ("shift_labels", shifted)):
            if given is not None and given.shape != main.shape[:2]:
                raise BatchError(
                    f"{name} of {list(given.shape)} are not one for each of the {list(main.shape[:2])} "
                    "tokens, as mesh.cp needs to cut them: set mesh.cp = 1"
                )
        if not self._shifts:
            return values
        if labels is not None and shifted is not None:
            raise BatchError(
                "the batch has labels and shift_labels: give labels, which are shifted by one before "
                "sequences are cut, or shift_labels alone, which are taken as they are"
            )
        if labels is not None:
            shifted = pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
            shifted = shifted.masked_fill(found.last.to(shifted.device), IGNORED_LABEL)
        return {**values, "labels": shifted, "shift_labels": shifted}

    def _layout(self, found: Documents) -> Layout:
        """Return where the tokens lie, those of padding in a document of their own."""
        count, length = found.of.shape
        padded = padded_length(length, self._axis.size, self._split)
        extra = padded - length
        of, seen = found.of, found.seen
        if extra:
            of = torch.cat([of, (of[:, -1:] + 1).expand(count, extra)], 1)
            seen = torch.cat([seen, torch.ones(count, extra, dtype=torch.bool)], 1)
        # ranks that swap heads share the tokens that a place of the ring has
        parts = cut(of, self._ring.size, self._section.balance, self._work)
        keys = of.masked_fill(~seen, -1)
        tokens = [
            Tokens(parts.order[:, place], parts.mine(of, place), parts.mine(keys, place))
            for place in range(self._ring.size)
        ]
        return Layout(parts.split(self._heads.size), tokens, padded // self._axis.size)

    def _part(self, name: str, value: Any, shape: tuple[int, int], extra: int, layout: Layout) -> Any:
        """Return this rank's part of one value of a batch, whose tokens are padded by `extra`."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.shape[:2] != shape:
            raise BatchError(
                f"{name} of {list(value.shape)} cannot be cut over mesh.cp, which takes tensors of "
                f"{list(shape)}, a value for each token: leave it out, or set mesh.cp = 1"
            )
        if extra:  # labels that are ignored, positions that go on from 0, and else the last token again
            more = value[:, -1:].expand(-1, extra, *value.shape[2:])
            if name in ("labels", "shift_labels"):
                more = torch.full_like(more, IGNORED_LABEL)
            elif name == "position_ids":
                more = torch.arange(extra, device=value.device).expand_as(more)
            value = torch.cat([value, more], 1)
        return layout.parts.mine(value, self._axis.rank)

    # ---- attention

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Return the attention of this rank's queries, (samples, tokens, heads, width). Raises ModelError for
        what only a part of the sequence would show wrongly."""
        what = type(module).__name__
        if self._at is None:
            raise ModelError(
                f"{what} was called outside of train_step and eval_step, which cut sequences over mesh.cp: "
                "use these, or load a checkpoint of the model with mesh.cp = 1"
            )
        layout, lengths = self._layouts[self._at], (query.shape[2], key.shape[2])
        if lengths != (layout.length, layout.length):
            raise ModelError(
                f"{what} has {lengths[0]} queries and {lengths[1]} keys, but this rank's part of the "
                f"sequence has {layout.length} tokens: it is not cut over mesh.cp; set mesh.cp = 1"
            )
        if mask is not None:
            raise ModelError(
                f"{what} has a mask of its own, of tokens that are on several ranks: set mesh.cp = 1"
            )
        if options.get("dropout") and module.training:
            raise ModelError(f"{what} has a dropout of {options['dropout']}: set it to 0, or mesh.cp = 1")
        if options.get("position_bias") is not None:
            raise ModelError(f"{what} adds a bias by position: set mesh.cp = 1")
        rule = _rule(module, query, options)
        if rule not in layout.across:
            gathers = self.choice.method == "gather"
            layout.across[rule] = Across(self._ring, layout.tokens, rule, self._heads, gathers)
        self._uncalled.pop(self._block_of.get(module, module), None)
        sinks, across = options.get("s_aux"), layout.across[rule]
        output = attention(query, key, value, sinks, across)
        # a copy, which a model may change: the output is kept for the backward
        return output.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def check(self) -> None:
        """Refuse blocks of which no attention was called in the first forwards. Call once each block was
        called."""
        if self._uncalled:
            missing = named([*self._uncalled.values()], 3)
            raise ModelError(
                f"no attention of {missing} was called as transformers calls attention, so that its tokens "
                "would see this rank's part of the sequence alone: set mesh.cp = 1"
            )


def _rule(module: nn.Module, query: Tensor, options: Mapping[str, Any]) -> Rule:
    scale, causal = options.get("scaling"), options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")
    if window is not None and not causal:
        raise ModelError(
            f"{type(module).__name__} sees a window on both sides, whose width transformers' attentions do "
            "not agree on: set mesh.cp = 1"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return Rule(scale, bool(causal), window, options.get("softcap"))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it."""
    if (owner := _owners.get(module)) is None:
        raise ModelError(
            f"{type(module).__name__} is none of the modules that the engine divides over mesh.cp: after "
            "replacing modules call engine.refresh()"
        )
    return owner.attend(module, query, key, value, attention_mask, options), None
