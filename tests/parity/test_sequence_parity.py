"""With its sequences divided over ranks (`mesh.cp`), a run computes what plain transformers computes in one
process with each document by itself: float64, to 1e-10."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from test_engine_parity_mesh import GROUPED, causal
from torch import Tensor, nn

import models
import polyreme
import threads
from cover import ALL, cover, together
from examples import whole
from polyreme.errors import BatchError, ConfigError, ModelError
from polyreme.sequence.methods import Method
from polyreme.sequence.parts import Balance

STEPS = 5 if ALL in os.environ else 2
CLIP, LR, DECAY, IGNORED = 0.05, 1e-2, 0.1, -100
Sample = tuple[int, ...]

SAMPLES: dict[str, list[Sample]] = {
    "plain": [(13,)] * 4,
    "packed": [(5, 3, 5), (13,), (1, 12), (6, 7)],
    "padded": [(9,), (13,), (4,), (12,)],
    "left padded": [(9,), (13,), (4,), (12,)],
    "labels of a few": [(16,)] * 4,
}
"""The documents of each sample, by how they are put into batches."""

EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",
}
SMALL = {**GROUPED, "num_hidden_layers": 2}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: models.llama(num_hidden_layers=2),
    "gpt2": lambda: models.gpt2(blocks=2),
    "qwen3": lambda: causal("qwen3", **SMALL, head_dim=8),
    "mistral": lambda: causal("mistral", **SMALL, sliding_window=5),
    "gemma2": lambda: causal("gemma2", **SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: causal(
        "gemma3_text", **SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, pad_token_id=0
    ),
    "gpt_oss": lambda: causal("gpt_oss", **SMALL, **EXPERTS, head_dim=8, sliding_window=5, pad_token_id=0),
    "deepseek_v3": lambda: causal(
        "deepseek_v3",
        **{**SMALL, **EXPERTS, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        pad_token_id=0,
    ),
    "qwen3_next": lambda: causal(
        "qwen3_next",
        **SMALL,
        **EXPERTS,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
    ),
    "nemotron_h": lambda: causal(
        "nemotron_h",
        **{**SMALL, "num_hidden_layers": 3},
        layers_block_type=["linear_attention", "full_attention", "mlp"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=4,
    ),
    "llama4": lambda: causal(
        "llama4_text",
        **SMALL,
        **{name: EXPERTS[name] for name in ("num_local_experts", "num_experts_per_tok")},
        head_dim=8,
        intermediate_size_mlp=40,
        attention_chunk_size=4,
        no_rope_layers=[1, 0],
        floor_scale=3,
        pad_token_id=0,
    ),
}

DEFAULT = ("gemma3", "gpt_oss", "qwen3_next", "llama4")
"""Families that are always tried."""


class Wide(models.Wide):
    """Also where a cast names its type by `Tensor.type`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.type and args[1:] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().double().train()


def documents(kind: str, step: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each sample, the documents' tokens and labels."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for sample in SAMPLES[kind]:
        ids = [torch.randint(3, models.VOCABULARY, (length,), generator=generator) for length in sample]
        labels = [each.clone() for each in ids]
        if kind == "labels of a few":
            labels[0][3:] = IGNORED
        found.append([*zip(ids, labels, strict=True)])
    found[0][0][1][:2] = IGNORED
    return found


def batch_of(kind: str, step: int) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name in ("input_ids", "labels", "position_ids")}
    for sample in documents(kind, step):
        ids, labels = (torch.cat(each) for each in zip(*sample, strict=True))
        rows["input_ids"].append(ids)
        rows["labels"].append(labels)
        rows["position_ids"].append(torch.cat([torch.arange(len(each)) for each, _ in sample]))
    if "padded" not in kind:
        batch = {name: torch.stack(each) for name, each in rows.items()}
        return batch if kind == "packed" else {name: batch[name] for name in ("input_ids", "labels")}
    rows["attention_mask"] = [torch.ones_like(each) for each in rows["input_ids"]]
    longest = max(map(len, rows["input_ids"]))
    fill = {"input_ids": 0, "labels": IGNORED, "position_ids": 1, "attention_mask": 0}

    def padded(name: str, row: Tensor) -> Tensor:
        missing = longest - len(row)
        return F.pad(row, (missing, 0) if kind == "left padded" else (0, missing), value=fill[name])

    return {name: torch.stack([padded(name, row) for row in each]) for name, each in rows.items()}


Records = list[tuple[float, float]]


@cache
def plain(family: str, kind: str) -> tuple[Records, dict[str, Tensor], float]:
    """Records, weights and an evaluation of plain transformers, which gets each document by itself."""
    model = model_of(family)
    parameters = [*model.parameters()]
    vectors = [each for each in parameters if each.dim() < 2]
    matrices = [each for each in parameters if each.dim() >= 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))

    def mean(step: int) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for ids, labels in itertools.chain(*documents(kind, step)):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
            count += int((labels[1:] != IGNORED).sum())
        return total / count

    records = []
    with Wide():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = mean(step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            records.append((loss.item(), norm.item()))
        model.eval()
        with torch.no_grad():
            evaluated = mean(STEPS).item()
    return records, {name: each.detach() for name, each in model.named_parameters()}, evaluated


def settings(mesh: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "precision": {"compute": "fp64"},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY, "clip": CLIP},
        "mesh": mesh,
        **sections,
        "zero": {"min_bucket": 0, **sections.get("zero", {})},
    }


def train(rank: int, world: int, family: str, kind: str, config: dict[str, Any]) -> tuple[Any, ...]:
    with polyreme.initialize(model_of(family), config) as engine, Wide():
        data, records = engine.mesh.dp, []
        for step in range(STEPS):
            result = engine.train_step(models.share(batch_of(kind, step), data.rank, data.size))
            records.append((result.loss, result.grad_norm))
            batch = batch_of(kind, step)
            assert result.samples == 4
            divided = result.context
            assert (divided is not None and divided.load >= 1) == engine.config.computes_attention
            assert result.tokens == int(
                batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()
            )
        evaluated = engine.eval_step(models.share(batch_of(kind, STEPS), data.rank, data.size))
        return records, engine.state_dict(), evaluated.loss


def check(family: str, kind: str, config: dict[str, Any]) -> None:
    size = 1
    for name in ("dp", "cp", "tp", "pp"):
        size *= config["mesh"].get(name, 1)
    expected, weights, evaluated = plain(family, kind)
    for records, found, loss in threads.run(size, train, family, kind, config):
        for one, other in zip(records, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-10, rel=0)
        assert loss == pytest.approx(evaluated, abs=1e-10, rel=0)
        assert {*weights} <= {*found}
        for name, whole_weight in weights.items():
            torch.testing.assert_close(found[name], whole_weight, rtol=0, atol=1e-10, msg=name)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "tp": ({"tp": 2}, {}),
    "sequence parallel": ({"tp": 2, "sequence_parallel": True}, {}),
    "pp": ({"pp": 2}, {}),
    "dp": ({"dp": 2}, {}),
    "recompute": ({}, {"memory": {"activations": "recompute"}}),
    "host": ({}, {"memory": {"states": "host", "activations": "host"}}),
    "one micro-batch": ({}, {"batch": {"size": 4, "micro": 4}}),
}


def way(method: Method, cp: int) -> str | dict[str, int]:
    """The value of `context.method`."""
    return {"ulysses": 2, "ring": cp // 2} if method == "mix" else method


Case = tuple[int, Method, Balance | str, str, int, str]


def cases(size: int) -> list[Case]:
    """Cases in which every `size` of the values are together."""
    every: list[Case] = [
        case
        for case in itertools.product(
            (2, 4), get_args(Method), ("auto", *get_args(Balance)), SAMPLES, range(4), OTHERS
        )
        if case[1] != "ulysses" or (case[2] == "auto" and (case[0] == 2 or "tp" not in case[5]))
        if case[0] == 2 or case[5] != "sequence parallel"
        if case[0] == 4 or case[1] != "mix"
    ]
    return cover(every, lambda case: together(dict(zip("abcdef", case, strict=True)), size))


@pytest.mark.parametrize("case", cases(2) if ALL in os.environ else cases(1)[::2], ids=str)
def test_a_divided_run_is_a_plain_one(case: Case) -> None:
    cp, method, balance, kind, stage, other = case
    mesh, sections = OTHERS[other]
    context = {"method": way(method, cp), "balance": balance}
    check("llama", kind, settings({"cp": cp, **mesh}, context=context, zero={"stage": stage}, **sections))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[] if family in DEFAULT and method == "ring" else whole)
        for family in FAMILIES
        for method in get_args(Method)
    ],
)
def test_each_family(family: str, method: Method) -> None:
    cp = 4 if method == "mix" else 2
    for kind in ("packed", "padded"):
        check(family, kind, settings({"cp": cp}, context={"method": way(method, cp)}))


@pytest.mark.parametrize(
    ("balance", "other"),
    [
        ("documents", ""),
        *(
            pytest.param(balance, other, marks=whole)
            for balance, other in zip(("auto", *get_args(Balance)), OTHERS, strict=False)
        ),
    ],
)
def test_heads_are_swapped_among_neighbours_and_keys_go_round_between_them(
    balance: Balance, other: str
) -> None:
    mesh, sections = OTHERS[other]
    context = {"method": {"ulysses": 2, "ring": 2}, "balance": balance}
    check("llama", "packed", settings({"cp": 4, **mesh}, context=context, **sections))


def over_hosts(rank: int, world: int) -> tuple[str, list[str]]:
    config = {"mesh": {"cp": world}, "batch": {"size": 4, "micro": 2}}
    with polyreme.initialize(tiny("qwen3", head_dim=8)(), config) as engine:
        result = engine.train_step(batch_of("packed", 0))
        assert result.context is not None
        return result.context.method, [name for name in engine.traffic() if name.startswith("cp")]


def test_over_hosts_heads_are_swapped_inside_of_each() -> None:
    with patch("socket.gethostname", lambda: f"host {threads.HERE.rank // 2}"):
        found = threads.run(4, over_hosts)
    assert found == [("2 ulysses x 2 ring", ["cp", "cp_ulysses", "cp_ring"])] * 4  # cp: ZeRO's
    assert threads.run(4, over_hosts)[0] == ("ulysses", ["cp"])


def told(rank: int, world: int, lengths: Sequence[int], method: str) -> tuple[float, str, str, int]:
    """Of a step of documents of these lengths: its loss, method and balance, and the bytes for attention."""
    ids = models.tokens(4, sum(lengths))
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    config = settings({"cp": world}, context={"method": method}, zero={"stage": 0})
    with polyreme.initialize(model_of("llama"), config) as engine, Wide():
        result = engine.train_step({**ids, "document_ids": of.expand(4, -1)})
        assert result.context is not None
        sent = engine.traffic()["cp"].get("all_to_all", (0, 0))[1]
        return result.loss, result.context.method, result.context.balance, sent


def test_auto_gathers_where_documents_are_short() -> None:
    """Of two ranks with 30 tokens each: documents of 5, and one of 6 that both have, so that the first rank's
    3 tokens of it are sent, and once more in backward, where their gradients come back. Long documents are
    balanced, for a ring."""
    short, long = [5] * 5 + [2, 6, *[5] * 5, 2], [59, 1]
    (loss, *how, sent), (other, *_, back) = threads.run(2, told, short, "auto")
    assert how == ["gather", "contiguous"]
    (expected, _, _, of_ring), _ = threads.run(2, told, short, "ring")
    assert loss == other == pytest.approx(expected, abs=1e-12)
    keys = 2 * 2 * 4 * 6 * 8 * 2  # layers, key heads, samples, width, bytes; keys and values
    assert (sent, back) == (2 * 3 * keys, 3 * keys)
    assert of_ring > sent + back
    assert threads.run(2, told, long, "auto")[0][1:3] == ("ring", "zigzag")


def test_documents_of_a_rank_by_itself_where_transformers_does_not_separate_them() -> None:
    check("gpt_oss", "packed", settings({"cp": 1}, context={"method": "gather"}))
    check("gpt_oss", "packed", settings({"cp": 1}, data={"pack": True}))


@whole
def test_three_axes_on_eight_ranks() -> None:
    check("llama", "packed", settings({"tp": 2, "pp": 2, "cp": 2}, zero={"stage": 1}))


def flattened(rank: int, world: int, keys: Sequence[str]) -> list[float]:
    """The losses of one row of all documents, which each of the keys tells."""
    found = []
    for key in keys:
        ids, labels = (
            torch.cat(each) for each in zip(*itertools.chain(*documents("packed", 0)), strict=True)
        )
        lengths = torch.tensor([length for sample in SAMPLES["packed"] for length in sample])
        told = {
            "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0)),
            "document_ids": torch.arange(len(lengths)).repeat_interleave(lengths)[None],
        }
        config = settings({"cp": world}, batch={"size": 1})
        with polyreme.initialize(model_of("llama"), config) as engine, Wide():
            batch = {"input_ids": ids[None], "labels": labels[None], key: told[key]}
            found.append(engine.train_step([batch]).loss)
    return found


def test_documents_are_told_in_other_ways() -> None:
    expected = plain("llama", "packed")[0][0][0]
    for found in threads.run(2, flattened, ["cu_seq_lens_q", "document_ids"]):
        assert found == pytest.approx([expected] * 2, abs=1e-12)


def saved(rank: int, world: int, folder: str, mesh: dict[str, Any], load: bool) -> Any:
    with polyreme.initialize(model_of("llama"), settings(mesh)) as engine, Wide():
        if load:
            engine.load(folder)
        data = engine.mesh.dp
        result = engine.train_step(models.share(batch_of("plain", 3), data.rank, data.size))
        if not load:
            engine.save(folder)
        return result.loss, result.grad_norm


def test_a_checkpoint_has_no_trace_of_it(tmp_path: Path) -> None:
    one, other = str(tmp_path / "cut"), str(tmp_path / "whole")
    threads.run(2, saved, one, {"cp": 2}, False)
    threads.run(1, saved, other, {}, False)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()
    (first,), second = threads.run(1, saved, one, {}, True), threads.run(2, saved, other, {"cp": 2}, True)[0]
    assert first == pytest.approx(second, abs=1e-11)


def rounded(rank: int, world: int, computes: Sequence[str]) -> list[float]:
    found = []
    for compute in computes:
        torch.manual_seed(0)
        config = settings({"cp": world}, precision={"compute": compute})
        with polyreme.initialize(models.llama(num_hidden_layers=2), config) as engine:
            found += [engine.train_step(batch_of("plain", step)).loss for step in range(2)]
    return found


def test_numbers_of_fewer_bits() -> None:
    computes = ["bf16", "autocast-bf16", "fp16"]
    expected, found = threads.run(1, rounded, computes)[0], threads.run(2, rounded, computes)[0]
    assert found == pytest.approx(expected, rel=1e-3)


# ---- what is refused


def attempt(
    rank: int, world: int, make: Callable[[], nn.Module], config: dict[str, Any], **given: Any
) -> None:
    with polyreme.initialize(make(), config, **given) as engine:
        engine.train_step({name: value.clone() for name, value in batch_of("plain", 0).items()})


def refusal(
    kind: type[Exception], make: Callable[[], nn.Module], config: dict[str, Any], ranks: int = 2, **given: Any
) -> str:
    with pytest.raises(threads.RanksFailed) as failed:
        threads.run(ranks, partial(attempt, **given), make, config)
    errors = [error for error in failed.value.exceptions.values() if isinstance(error, kind)]
    assert errors, failed.value
    return str(errors[0])


def tiny(kind: str, **values: Any) -> Callable[[], Any]:
    return lambda: causal(kind, **{**SMALL, **values}).train()


@pytest.mark.parametrize(
    ("make", "sections", "said"),
    [
        (tiny("bloom", n_layer=2, n_head=4), {}, "out of reach"),
        (tiny("llama", attention_dropout=0.1), {}, "attention_dropout = 0.1"),
        (tiny("gpt2", n_layer=2, attn_pdrop=0.1), {}, "attn_pdrop = 0.1"),
        (tiny("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24),
         {"context": {"method": "ulysses"}}, 'context.method = "ring"'),
        (tiny("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24),
         {"context": {"method": {"ulysses": 2}}}, "2 does not divide the 3 of a rank"),
        (tiny("qwen3_moe", **EXPERTS, output_router_logits=True), {}, "output_router_logits = False"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_before_any_work(
    make: Callable[[], nn.Module], sections: dict[str, Any], said: str
) -> None:
    config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}, **sections}
    assert said in refusal(ConfigError, make, config)


def test_what_cannot_keep_documents_apart_is_refused_on_one_rank() -> None:
    said = refusal(ConfigError, tiny("bloom", n_layer=2, n_head=4), {"data": {"pack": True}}, ranks=1)
    assert "data.pack = True" in said
    assert "write data.pack = false" in said
    with pytest.raises(ConfigError, match=r"compile = false, or data\.pack = false"):
        polyreme.Config.load({"data": {"pack": True}, "compile": True}).resolve(1)


def test_a_loss_fn_and_calls_of_the_whole_model_are_refused() -> None:
    config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}}
    assert "loss_fn" in refusal(ConfigError, tiny("llama"), config, loss_fn=models.causal_loss)

    def call(rank: int, world: int) -> None:
        with polyreme.initialize(tiny("llama")(), config) as engine:
            with pytest.raises(BatchError, match=r"eval_outputs .*mesh\.cp > 1"):
                engine.eval_outputs([], print)
            engine.eval_step(batch_of("plain", 0))
            with pytest.raises(ModelError, match="was called outside of train_step, eval_step and engine"):
                engine.module(batch_of("plain", 0)["input_ids"][:, :7])

    threads.run(2, call)


class Aside(nn.Module):
    """A block that attends by itself."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden + self.linear(hidden)


def test_an_attention_that_is_never_called_is_an_error_in_the_first_step() -> None:
    def make() -> Any:
        model = tiny("llama")()
        model.model.layers[1] = Aside(model.model.layers[1])
        return model

    config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}}
    assert "no attention of model.layers.1 was called" in refusal(ModelError, make, config)


def test_an_attention_that_sees_the_whole_sequence_is_an_error() -> None:
    def make() -> Any:
        model = tiny("llama")()
        block = model.model.layers[0]
        block.register_forward_pre_hook(
            lambda module, args, kwargs: (
                (torch.cat([args[0]] * 2, 1),),
                {
                    **kwargs,
                    "position_embeddings": tuple(
                        torch.cat([e] * 2, 1) for e in kwargs["position_embeddings"]
                    ),
                },
            ),
            with_kwargs=True,
        )
        return model

    config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}}
    assert "LlamaAttention has 14 queries" in refusal(ModelError, make, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: {**batch, "shift_labels": batch["labels"]}, "labels and shift_labels"),
        (lambda batch: {**batch, "scores": torch.zeros(2, 3)}, "scores of [2, 3]"),
        (
            lambda batch: {**batch, "attention_mask": torch.ones(2, 1, 13, 13)},
            "attention_mask of [2, 1, 13, 13]",
        ),
        (lambda batch: {**batch, "labels": torch.zeros(2).long()}, "labels of [2]"),
        (lambda batch: {**batch, "labels": batch["labels"].tolist()}, "labels of list"),
        (lambda batch: {**batch, "position_ids": torch.arange(-5, 8).expand(2, 13)}, "position_ids have -5"),
        (lambda batch: {name: value[:, :0] for name, value in batch.items()}, "a token or more"),
        (lambda batch: tuple(batch.values()), "a batch that is a tuple"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(change: Callable[[dict[str, Tensor]], Any], said: str) -> None:
    def one(rank: int, world: int) -> None:
        config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}}
        with polyreme.initialize(tiny("llama")(), config) as engine:
            batch = {name: value[:2] for name, value in batch_of("plain", 0).items()}
            with pytest.raises(BatchError, match=said.replace("[", r"\[")):
                engine.train_step([change(batch), batch])

    threads.run(2, one)


def test_documents_that_transformers_does_not_read_are_refused_on_one_rank() -> None:
    def one(rank: int, world: int) -> None:
        batch = {**batch_of("plain", 0), "document_ids": torch.zeros(4, 13).long()}
        with polyreme.initialize(tiny("llama")(), {"batch": {"size": 4}}) as engine:
            for call in (engine.train_step, engine.eval_step, engine, lambda each: engine(**each)):
                with pytest.raises(BatchError, match=r'document_ids, .* write context\.method = "gather"'):
                    call(batch)
            del batch["document_ids"]
            assert engine.train_step(batch).loss > 0

    threads.run(1, one)


def test_the_model_is_plain_again_once_the_engine_is_closed() -> None:
    model, batch = tiny("llama")(), batch_of("plain", 0)
    before = model.config._attn_implementation

    def one(rank: int, world: int) -> None:
        mine = tiny("llama")()
        config = {"mesh": {"cp": 2}, "batch": {"size": 4, "micro": 2}, "zero": {"stage": 1}}
        with polyreme.initialize(mine, config) as engine:
            engine.train_step(batch)
            mine.lm_head.weight.requires_grad_(False)
            engine.refresh()
            engine.train_step(batch)
        assert mine.config._attn_implementation == before
        assert mine(**batch).loss.isfinite()

    threads.run(2, one)


def test_given_shift_labels_are_counted_as_they_are() -> None:
    batch = batch_of("plain", 0)
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    labels = {"labels": shifted, "shift_labels": shifted}

    def losses(rank: int, world: int, given: dict[str, Tensor]) -> float:
        with polyreme.initialize(model_of("llama"), settings({"cp": world})) as engine, Wide():
            return engine.train_step({"input_ids": batch["input_ids"], **given}).loss

    expected = threads.run(1, losses, {"labels": batch["labels"]})
    assert threads.run(1, losses, labels) == pytest.approx(expected, abs=1e-12)
    assert threads.run(2, losses, {"shift_labels": shifted}) == pytest.approx(expected * 2, abs=1e-12)
