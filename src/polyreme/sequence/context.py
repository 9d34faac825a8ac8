"""A model whose sequences are divided over the ranks of `mesh.cp`: cuts its batches, and computes its
attention, whose function is ours.

Invariant: outside of what mixes tokens a rank has its part of each sequence, and nothing of others. Where a
model sees images or sounds, every rank embeds the whole, and the part begins at its model of texts.
Communication: that of `methods` in each attention, and of `mixers` in each mixer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.config.schema import ContextSection
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import BatchError, ModelError, named
from polyreme.models.attention import (
    Temperature,
    chunk_of,
    counting_embeddings,
    facts_of,
    filler,
    first_position,
    mixers,
    mixes_none,
    replace_attention,
    rotary_by_length,
    takes,
    text_model,
)
from polyreme.models.huggingface import register_masks, shifts_labels
from polyreme.models.patches import Patches
from polyreme.sequence import documents as documents_of
from polyreme.sequence.batches import part_of, shifted, tokens_of, whole_of
from polyreme.sequence.choice import Choice, choose, neighbours, refuse, times_gathered
from polyreme.sequence.documents import DROPPED, Documents
from polyreme.sequence.kept import place, setting
from polyreme.sequence.layout import Layout, Sharing
from polyreme.sequence.methods import attention
from polyreme.sequence.parts import Work
from polyreme.sequence.visible import Mask, Rule

NAME = "polyreme_context"
"""The name of our function among transformers' attentions."""
MASKED = "polyreme_context_masked"
"""Its name in models of texts behind others, which may make masks of whole sequences."""

UNEVEN = 1.02
"""How much more the fullest rank may compute where that saves half of what is sent."""

CACHES = ("cache", "past_key_values", "cache_params")
"""Arguments of mixers with their states so far."""

CHECKPOINT = "_gradient_checkpointing_func"
"""What modules of transformers have where they are to recompute blocks (gradient checkpointing)."""

OF_KEYS = ("use_cache", "past_key_values", "output_attentions")
"""Arguments of models that give keys, or ask for what is of them."""

_owners: WeakKeyDictionary[nn.Module, ContextParallel] = WeakKeyDictionary()
_owners_of_configs: dict[int, ContextParallel] = {}
"""Of configs of models of texts behind others, which cannot be hashed, by their ids."""


@dataclass(frozen=True)
class Division:
    """How the sequences of a step were divided. method: how attention was computed (`context.method`).
    balance: which tokens ranks had; both by micro-batch where these differ. load: what the fullest rank
    computed, over the mean, counted in operations."""

    method: str
    balance: str
    load: float


class ContextParallel:
    """The division of one engine's sequences over `mesh.cp`. choice: how its attention is computed.
    in_text: the model of texts runs, on a part, behind one that sees images. whole: the micro-batch that was
    cut last, with its labels shifted."""

    choice: Choice
    in_text = False

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
        self._patches = patches
        refuse(model, section, mesh.cp.size, mesh.tp.size, own_loss)
        facts, local = facts_of(model), neighbours(mesh.host_of, mesh.lines("cp"))
        self.choice = choice = choose(section, facts, mesh.cp.size, mesh.tp.size, local)
        heads, ring = Axis("cp"), mesh.cp
        if choice.ring == 1:
            heads, ring = ring, heads
        elif choice.ulysses > 1:
            heads, ring = mesh.split("cp", choice.ulysses, ("cp_ulysses", "cp_ring"))
        self._sharing = Sharing(mesh.cp, ring, heads, choice.method == "gather", split, section.balance)
        self._gathering: Sharing | None = None  # of batches of short documents
        if choice.sent and facts.causal and section.balance in ("auto", "contiguous"):
            self._gathering = Sharing(mesh.cp, mesh.cp, Axis("cp"), True, split, "contiguous")
        self._shifts, self._text, self._first = shifts_labels(model), text_model(model), first_position(model)
        self._filler, self._takes_positions = filler(model), takes(model, "position_ids")
        self._work = Work(facts.pair, facts.token, facts.causal, facts.window)
        self._layouts: dict[int, Layout] = {}
        self._at: int | None = None
        self._uncalled: dict[nn.Module, str] = {}  # blocks whose attention was not called yet
        self._patched: set[nn.Module] = set()
        self._temperatures: dict[nn.Module, Temperature] = {}

    def attach(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Compute the attention of a model, of whose `blocks` each must have some."""
        text = self._text or model
        inside = {*text.modules()}
        blocks = {name: block for name, block in blocks.items() if block in inside}
        self._uncalled = {block: name for name, block in blocks.items() if not mixes_none(block)}
        self._block_of = {module: block for block in blocks.values() for module in block.modules()}
        self._patches.call(replace_attention(text, NAME if text is model else MASKED, _attention))
        self._patches.call(self._forget)
        for module in text.modules():
            _owners[module] = self
            if (checkpoint := getattr(module, CHECKPOINT, None)) is not None:
                self._patches.attribute(module, CHECKPOINT, partial(self._checkpointed, checkpoint))
        for mixer in mixers(blocks.values()):
            self._patch(mixer, self._mix)
        for rotary in rotary_by_length(text):
            self._patch(rotary, self._tables)
        for table in counting_embeddings(text):
            self._patch(table, self._embed)
        if self._text is not None:
            register_masks(MASKED, _makes_masks)
            _owners_of_configs[id(self._text.config)] = self
            self._patch(self._text, self._begin_part)
        for module in text.modules():
            if (temperature := Temperature.of(module)) is not None:
                self._temperatures[module] = temperature
                self._patches.attribute(module, "attn_temperature_tuning", False)

    def _patch(self, module: nn.Module, through: Callable[..., Any]) -> None:
        """Have calls of a module's forward go through a function of the module, its forward, and what it is
        given."""
        if module not in self._patched:
            self._patched.add(module)
            self._patches.forward(module, partial(through, module, module.forward))

    def _forget(self) -> None:
        for module in [each for each, owner in _owners.items() if owner is self]:
            del _owners[module]
        for key in [each for each, owner in _owners_of_configs.items() if owner is self]:
            del _owners_of_configs[key]

    # ---- batches

    def at(self, microbatch: int | None) -> None:
        """Go on with a micro-batch of the step; None: the step is over."""
        self._at = microbatch

    def free(self) -> None:
        """Drop what attentions keep of the micro-batch, whose last backward is over."""
        if self._at is not None:
            self._layouts[self._at].free()

    def cut(self, batch: Any, microbatch: int) -> dict[str, Any]:
        """Return this rank's part of a micro-batch, and remember where its tokens lie. Raises BatchError for
        a batch that cannot be cut."""
        main = tokens_of(batch)
        samples, length = main.shape[:2]
        found = documents_of.find(batch, samples, length, self._first)
        self.whole = values = shifted(batch, found, self._shifts)
        layout = self._layouts[microbatch] = self._layout(found)
        if self._text is None:
            if found.plain and self._takes_positions:
                values["position_ids"] = found.positions.to(main.device)
            return {
                name: part_of(name, value, found, layout)
                for name, value in values.items()
                if name not in DROPPED
            }
        if values.get("attention_mask") is None:  # which tells padding of ours from tokens
            values["attention_mask"] = torch.ones(found.of.shape, dtype=torch.long, device=main.device)
        return {
            name: whole_of(name, value, found, layout, self._filler)
            for name, value in values.items()
            if name not in DROPPED or name == "attention_mask"
        }

    def _layout(self, found: Documents) -> Layout:
        """Return where tokens lie: contiguous, for keys to be gathered, where that sends at most half."""
        layout, gathering = Layout.of(found, self._sharing, self._work), self._gathering
        if gathering is None or not found.several:
            return layout
        sent = times_gathered(layout.documents, gathering.ranks.size, self._work.window)
        if 2 * sent > self.choice.sent:
            return layout
        other = Layout.of(found, gathering, self._work)
        return other if other.parts.load <= UNEVEN * layout.parts.load else layout

    @contextmanager
    def forward(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of a micro-batch of the user's own loop, with which the model is called
        inside. Raises BatchError for a batch that cannot be cut, or that asks for more than a part has."""
        self.at(None)
        part = self.cut(batch, 0)
        if self._sharing.ranks.size > 1 and part.get("logits_to_keep"):
            raise BatchError(
                f"logits_to_keep = {part['logits_to_keep']} would be of this rank's part of each sequence: "
                "leave it out, and take what you need of logits, or set mesh.cp = 1"
            )
        if asked := [name for name in OF_KEYS if part.get(name)]:
            raise BatchError(
                f"{named(asked)} would be of the keys of whole sequences, which are divided here (mesh.cp > "
                "1, a context.method, or data.pack): leave it out, or load a checkpoint without these"
            )
        with setting(place, self._layouts[0]):
            yield part
        self.check()

    def division(self, microbatches: int) -> Division:
        """Return how so many micro-batches were divided, which were cut last."""
        layouts = [self._layouts[each] for each in range(microbatches)]
        parts = [each.parts for each in layouts]
        mean = sum(each.mean for each in parts)
        load = sum(each.most for each in parts) / mean if mean else 1.0
        methods = ["gather" if each.sharing.gathers else str(self.choice) for each in layouts]
        balances = dict.fromkeys(each.balance for each in parts)
        return Division(", ".join(dict.fromkeys(methods)), ", ".join(balances), load)

    # ---- what gets more than a part, or tells where it lies

    def _now(self, what: str) -> Layout:
        """Return where the tokens of the micro-batch are that a module, `what`, is called with."""
        layout = place.get()
        if layout is not None and any(layout.sharing is each for each in (self._sharing, self._gathering)):
            return layout
        if self._at is None:
            raise ModelError(
                f"{what} was called outside of train_step, eval_step and engine(...), which cut sequences "
                "over mesh.cp: use these, enable gradient checkpointing before initialize, or load a "
                "checkpoint of the model with mesh.cp = 1"
            )
        return self._layouts[self._at]

    def _mix(self, mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a mixer with whole documents."""
        layout, what = self._now(type(mixer).__name__), type(mixer).__name__
        kwargs |= dict.fromkeys({*CACHES} & {*kwargs})  # of a state that no document has at its beginning
        self._uncalled.pop(self._block_of[mixer], None)
        return layout.whole.run(what, forward, args, kwargs)

    def _checkpointed(
        self, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Have transformers recompute a forward in its backward, where its tokens lie as they do now."""
        layout = self._now("a block with gradient checkpointing")

        def here(*args: Any, **kwargs: Any) -> Any:
            with setting(place, layout):
                return forward(*args, **kwargs)

        return checkpoint(here, *args, **kwargs)

    def _tables(
        self, rotary: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, **kwargs: Any
    ) -> Any:
        """Call a module for rotary tables that depend on the longest position, with that of all ranks."""
        longest = self._now(type(rotary).__name__).longest.to(position_ids)
        positions = torch.cat([position_ids, longest.expand(*position_ids.shape[:-1], 1)], -1)
        return pytree.tree_map_only(Tensor, lambda each: each[..., :-1, :], forward(x, positions, **kwargs))

    def _embed(self, table: nn.Embedding, forward: Callable[..., Any], *_: Any, **__: Any) -> Tensor:
        """Call an embedding of positions, which it would count by itself, with those of this rank's part."""
        layout = self._now(type(table).__name__)
        positions = layout.part(layout.positions).to(table.weight.device) + getattr(table, "offset", 0)
        return nn.Embedding.forward(table, positions)

    def _begin_part(self, text: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model of texts behind others with this rank's part."""
        what = type(text).__name__
        layout, masks = self._now(what), kwargs.pop("attention_mask", None)
        given = kwargs.get("position_ids")
        if given is None or given.dim() < 3:  # else of images, by several numbers for each token
            given = layout.positions
        layout.longest = given.max()
        kwargs["position_ids"] = given.expand(*given.shape[:-2], *layout.documents.shape)
        if takes(text, "use_cache"):
            kwargs["use_cache"] = False  # of its own config, which may say otherwise
        args, kwargs = pytree.tree_map_only(Tensor, layout.part, (args, kwargs))
        # masks of padding are in the layout; an attention takes its part of others
        kwargs["attention_mask"] = pytree.tree_map_only(Tensor, lambda m: m if m.dim() > 2 else None, masks)
        self.in_text = True
        try:
            return forward(*args, **kwargs)
        finally:
            self.in_text = False

    # ---- attention

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Return the attention of this rank's queries, (samples, tokens, heads, width). Raises ModelError for
        what only a part of the sequence would show wrongly."""
        what = type(module).__name__
        layout, lengths = self._now(what), (query.shape[2], key.shape[2])
        if lengths != (layout.length, layout.length):
            raise ModelError(
                f"{what} has {lengths[0]} queries and {lengths[1]} keys, but this rank's part of the "
                f"sequence has {layout.length} tokens: it is not cut over mesh.cp; set mesh.cp = 1"
            )
        whole = (layout.parts.padded,) * 2
        if mask is not None and (mask.shape[1:] != (1, *whole) or mask.dtype != torch.bool):
            raise ModelError(
                f"{what} has a mask of its own, of tokens that are on several ranks: set mesh.cp = 1"
            )
        if options.get("dropout") and module.training:
            raise ModelError(f"{what} has a dropout of {options['dropout']}: set it to 0, or mesh.cp = 1")
        if options.get("position_bias") is not None:
            raise ModelError(f"{what} adds a bias by position: set mesh.cp = 1")
        rule, chunk = _rule(module, query, options), chunk_of(module)
        if mask is not None:
            if not rule.causal:  # transformers leaves some masks out, and then these tokens see all
                raise ModelError(
                    f"{what} says that it is not causal, but is given a mask: leave padding out, or set "
                    "mesh.cp = 1"
                )
            rule, chunk = replace(rule, causal=False, window=None, mask=Mask(mask)), None
        across = layout.of_rule(rule, chunk)
        self._uncalled.pop(self._block_of.get(module, module), None)
        if (temperature := self._temperatures.get(module)) is not None:
            query = temperature(query, layout.part(layout.place))
        sinks = options.get("s_aux")
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


def _makes_masks(config: object) -> bool:
    """Return whether a model makes masks of whole sequences, before its model of texts gets a part."""
    owner = _owners_of_configs.get(id(config))
    return owner is not None and not owner.in_text


def _rule(module: nn.Module, query: Tensor, options: Mapping[str, Any]) -> Rule:
    scale, causal = options.get("scaling"), options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")
    if getattr(module, "is_decoder", False) and not causal:
        raise ModelError(
            f"{type(module).__name__} is a decoder's, but says that it is not causal (is_causal = False), so "
            "that only masks would tell what its tokens see: set mesh.cp = 1"
        )
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
