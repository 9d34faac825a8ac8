"""The documentation tells the truth: every Python snippet of it runs, every config in it is valid, every
example does what it says, every link leads somewhere.

A Python block runs in its page's namespace, one after the other, on as many ranks as RANKS says; one inside
an HTML comment is set-up that readers need not see. A block whose first line is `# name.py` or `# name.toml`
is a file: one of examples/ must be in the page as it is; any other is put where the page's snippets run. One
whose first line is `# from examples/name.py` shows lines of that file in order, and `# ...` for others."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import polyreme
from examples import whole
from polyreme import Config, __version__
from pool import Ranks

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted(p for p in (ROOT / "examples").iterdir() if p.is_file())
RANKS = {
    "README.md": 2,
    "docs/zero.md": 2,
    "docs/mesh.md": 2,
    "docs/transport.md": 2,
    "docs/tensor.md": 2,
    "docs/verify.md": 2,
    "docs/checkpoint.md": 2,
    "docs/context.md": 2,
    "docs/from-pytorch.md": 2,
    "docs/from-fsdp.md": 2,
}
"""Ranks that a page's snippets run on, where it is more than one."""


class Block(NamedTuple):
    """A fenced block: its language, its text, and the file that it stands for or shows lines of."""

    language: str
    text: str
    file: str | None
    excerpt: bool = False

    @property
    def snippet(self) -> bool:
        """Whether it runs as it stands."""
        return self.language == "python" and not self.file


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    for language, text in re.findall(
        r"^```(\w+)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        file = re.match(r"# (from )?([\w/.-]+\.(?:py|toml))\b", text)
        yield Block(language, text, file[2], bool(file[1])) if file else Block(language, text, None)


def run_snippets(rank: int, world_size: int, snippets: list[tuple[str, str]], folder: Path) -> None:
    """On one rank: all snippets of a page, in the folder."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    with contextlib.chdir(folder):
        for where, snippet in snippets:
            exec(compile(snippet, where, "exec"), namespace)


def run_example(rank: int, world_size: int, example: Path, folder: Path) -> str:
    """On one rank: an example as it stands, and what it prints."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()


def run_config(rank: int, world_size: int, example: Path, overrides: list[str]) -> dict[str, Any]:
    """On one rank: what `polyreme train` runs there, from the root of the repository."""
    from polyreme.job import run

    with contextlib.chdir(ROOT):
        return dict(vars(run.run(Config.load(example, overrides))))


def tiny_model(rank: int, world_size: int, folder: Path) -> None:
    """A new model of a few thousand parameters, and a tokenizer trained on the documentation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from polyreme import data

    corpus = data.whole(data.documents(str(ROOT / "docs"), pattern=["*.md"]))
    tokenizer = data.open_tokenizer(corpus, folder=None, vocab_size=300, cache=folder / "cache")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def anchors(page: Path) -> list[str]:
    """The names by which headings are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def folders(folder: Path) -> list[str]:
    """Where a run of `polyreme train` writes."""
    return [f"checkpoint.folder={folder / 'run'}", f"data.cache={folder / 'cache'}"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.snippet for b in blocks(page))], ids=name_of
)
def test_snippets_run(page: Path, ranks: Ranks, tmp_path: Path) -> None:
    snippets = [(f"{name_of(page)}, snippet {i}", b.text) for i, b in enumerate(blocks(page)) if b.snippet]
    files = {b.file: b.text for b in blocks(page) if b.file and not (ROOT / b.file).exists()}
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    ranks(RANKS.get(name_of(page), 1), run_snippets, snippets, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_configs_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.excerpt:
            parts = block.text.partition("\n")[2].split("# ...\n")
            shown = ".*".join(re.escape(part.strip("\n")) for part in parts)
            assert re.search(shown, (ROOT / block.file).read_text("utf-8"), re.DOTALL), block.text
        elif block.file and (ROOT / block.file).exists():
            assert block.text == (ROOT / block.file).read_text("utf-8"), (
                f"{name_of(page)} shows another {block.file}"
            )
        if block.language == "toml":
            config = Config.load(tomllib.loads(block.text))
            assert config.problems(world_size=2) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), f"{name_of(page)} links to {target}"
            assert not anchor or anchor in anchors(file), f"{name_of(page)} links to {target}#{anchor}"


def test_readme_script_is_short() -> None:
    shown = {block.file: block.text for block in blocks(ROOT / "README.md")}
    for script in ("examples/plain_module.py", "examples/huggingface.py"):
        assert len(shown[script].splitlines()) < 25


def test_every_package_has_a_place_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    parts = {
        path.stem
        for path in (ROOT / "src" / "polyreme").iterdir()
        if not path.name.startswith("_") and path.suffix in ("", ".py")
    }
    assert [part for part in sorted(parts) if f"`{part}" not in page] == []


def test_the_version_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"] == __version__


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [
        p.name
        for p in sorted((ROOT / "docs" / "decisions").glob("*.md"))
        if f"(decisions/{p.name})" not in index
    ] == []


def test_every_page_is_in_the_index_and_in_the_sites_navigation() -> None:
    index, site = ((ROOT / file).read_text("utf-8") for file in ("docs/README.md", "mkdocs.yml"))
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name}" not in index or f" docs/{name}\n" not in site] == []


def test_what_the_reference_names_is_there() -> None:
    """`make docs` reads the sources; this takes no installation."""
    names = re.findall(r"^::: (.*)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_example_is_run_by_a_test() -> None:
    names = "big_model from_ddp from_plain huggingface layouts long_context plain_module"
    scripts = [f"{name}.py" for name in names.split()]
    assert [example.name for example in EXAMPLES] == sorted([*scripts, "demo.toml", "finetune.toml"])


def test_plain_module(ranks: Ranks, tmp_path: Path) -> None:
    printed, silent = ranks(2, run_example, ROOT / "examples" / "plain_module.py", tmp_path)
    right = re.search(r"([\d.]+)% of the points", printed)
    assert right is not None and float(right[1]) > 90
    assert silent == ""
    assert (tmp_path / "run/plain_module/model.safetensors").is_file()


def test_huggingface(ranks: Ranks, tmp_path: Path) -> None:
    printed = ranks(2, run_example, ROOT / "examples" / "huggingface.py", tmp_path)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[0] < 4.5 and losses[-1] < losses[0] - 0.3  # an even guess at a byte is ln 256 = 5.5
    assert json.loads((tmp_path / "run/huggingface/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def run_with_ddp(rank: int, world_size: int, script: Path, folder: Path) -> str:
    """On one rank: a script of DDP, in the process group that is there."""
    with patch("torch.distributed.init_process_group"):
        return run_example(rank, world_size, script, folder)


def run_interrupted(rank: int, world_size: int, example: Path, folder: Path, at: int) -> tuple[str, str]:
    """On one rank: an example one of whose ranks gets SIGTERM in step `at`, and again."""
    step, handler = polyreme.Engine.train_step, signal.getsignal(signal.SIGTERM)

    def interrupted(engine: polyreme.Engine, batch: Any) -> Any:
        if rank == (at < 64) and engine.state.step == at - 1:
            signal.raise_signal(signal.SIGTERM)
        return step(engine, batch)

    try:
        with patch.object(polyreme.Engine, "train_step", interrupted):
            first = run_example(rank, world_size, example, folder)
        return first, run_example(rank, world_size, example, folder)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_from_plain(ranks: Ranks, tmp_path: Path) -> None:
    """The plain script that was moved has its losses and weights, on one rank and on two."""
    text = next(b.text for b in blocks(ROOT / "docs" / "from-pytorch.md") if b.file == "plain.py")
    (tmp_path / "plain.py").write_text(text, "utf-8")
    [printed] = ranks(1, run_example, tmp_path / "plain.py", tmp_path)
    wanted = losses_in(printed)
    assert len(wanted) == 4 and wanted[-1] < 0.8 * wanted[0]
    for world_size in (1, 2):
        moved, *silent = ranks(world_size, run_example, ROOT / "examples" / "from_plain.py", tmp_path)
        assert losses_in(moved) == pytest.approx(wanted, abs=1e-6)
        assert moved.splitlines()[-1] == printed.splitlines()[-1] and not any(silent)
        found = load_file(tmp_path / "run/from_plain/best/model.safetensors")
        for name, weight in torch.load(tmp_path / "best.pt").items():
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


def test_from_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """The script that was moved has DDP's losses and weights at every stage, also where it is
    interrupted: within an epoch, in an epoch's last step, and in the last of all."""
    text = next(b.text for b in blocks(ROOT / "docs" / "from-pytorch.md") if b.file == "ddp.py")
    (tmp_path / "ddp.py").write_text(text, "utf-8")
    wanted = losses_in(ranks(2, run_with_ddp, tmp_path / "ddp.py", tmp_path)[0])
    assert len(wanted) == 4 and wanted[-1] < 0.8 * wanted[0]
    moved = (ROOT / "examples" / "from_ddp.py").read_text("utf-8")
    for stage, at in ((0, 20), (2, 20), (3, 20), (2, 32), (2, 64)):
        folder = tmp_path / f"{stage}-{at}"
        folder.mkdir()
        script = folder / "from_ddp.py"
        script.write_text(moved.replace('"stage": 2', f'"stage": {stage}'), "utf-8")
        first, again = ranks(2, run_interrupted, script, folder, at)[0]
        assert len(losses_in(first)) == at // 16, f"it was not stopped in step {at}"
        assert losses_in(first + again) == pytest.approx(wanted, abs=1e-6)
        found = load_file(folder / "run/from_ddp/best/model.safetensors")
        for name, weight in torch.load(tmp_path / "best.pt").items():
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_big_model(ranks: Ranks, tmp_path: Path) -> None:
    printed = ranks(2, run_example, ROOT / "examples" / "big_model.py", tmp_path)[0]
    whole, share = (float(size) for size in re.findall(r"([\d.]+) MiB", printed.splitlines()[0]))
    assert share == pytest.approx(whole / 2, rel=0.02)
    sent = {name: float(size) for name, size in re.findall(r"(\w+): \d+ calls, ([\d.]+) MiB", printed)}
    assert sent["all_gather"] == pytest.approx(2 * sent["reduce_scatter"], rel=0.02)


@whole
def test_layouts(ranks: Ranks, tmp_path: Path) -> None:
    printed, *silent = ranks(4, run_example, ROOT / "examples" / "layouts.py", tmp_path)
    curves = json.loads((tmp_path / "run/layouts/losses.json").read_text())
    assert list(curves) == re.findall(r"^(.*): loss", printed, re.MULTILINE) and len(curves) == 3
    for step in zip(*curves.values(), strict=True):
        assert max(step) - min(step) < 1e-3
    first, last = (next(iter(curves.values()))[i] for i in (0, -1))
    assert last < first - 1
    parts = [float(size) for size in re.findall(r"([\d.]+) KiB of parameters", printed)]
    assert parts[0] > 1.8 * parts[1] > 3 * parts[2], "a half, then a quarter of the parameters"
    assert re.findall(r"over (\w+)", printed) == ["dp", "dp", "tp", "pp", "tp"]
    assert (tmp_path / "run/layouts/losses.png").read_bytes().startswith(b"\x89PNG")
    assert silent == [""] * 3


@whole
def test_long_context(ranks: Ranks, tmp_path: Path) -> None:
    printed, *silent = ranks(4, run_example, ROOT / "examples" / "long_context.py", tmp_path)
    losses = re.findall(r"loss ([\d.]+) to ([\d.]+)", printed)
    assert len(losses) == 3 and float(losses[0][1]) < float(losses[0][0])
    kept = [float(size) for size in re.findall(r"keeps ([\d.]+) MiB", printed)]
    assert kept[0] > 1.7 * kept[1] > 2.8 * kept[2], "about a half, then a quarter of the activations"
    apart = re.search(r"further apart than ([\d.e+-]+)", printed)
    assert apart is not None and float(apart[1]) < 1e-4
    assert silent == [""] * 3


def test_demo(ranks: Ranks, tmp_path: Path) -> None:
    """The demo, on less text and for a few steps."""
    smaller = "data.vocab_size=300 model.config.hidden_size=64 model.config.intermediate_size=128"
    shorter = (
        "train.length=4 train.validate_every=2 train.validate_batches=2 "
        "train.sample_tokens=4 lr_schedule.warmup=1"
    )
    overrides = [
        "data.path=docs",
        "data.pattern=*.md",
        *smaller.split(),
        *shorter.split(),
        *folders(tmp_path),
    ]
    summary = ranks(2, run_config, ROOT / "examples" / "demo.toml", overrides)[0]
    assert summary["steps"] == 4 and summary["bits_per_byte"] < summary["first_bits_per_byte"]
    assert Path(summary["checkpoint"], "model.safetensors").is_file() and Path(summary["plot"]).is_file()


def test_finetune(ranks: Ranks, tmp_path: Path) -> None:
    """The fine-tuning example, from a tiny model in place of the demo's."""
    ranks(1, tiny_model, tmp_path)
    model = [f"model.path={tmp_path / 'model'}", f"data.tokenizer={tmp_path / 'model'}"]
    overrides = [*model, "train.length=8", "train.sample_tokens=4", "optimizer.lr=0.01", *folders(tmp_path)]
    summary = ranks(2, run_config, ROOT / "examples" / "finetune.toml", overrides)[0]
    assert summary["steps"] == 8 and summary["bits_per_byte"] < summary["first_bits_per_byte"]


def test_finetune_begins_where_the_demo_ends() -> None:
    demo, finetune = (Config.load(ROOT / "examples" / f"{name}.toml") for name in ("demo", "finetune"))
    end = f"{demo.checkpoint.folder}/step-{int(demo.train.length.amount)}"
    assert (finetune.model.path, finetune.data.tokenizer) == (end, None)


@pytest.mark.skipif(os.name != "posix", reason="the pictures are made in a Unix terminal")
def test_the_picture_shows_what_a_terminal_shows(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "images" / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    live = "first\r\n1/2\r\n\x1b[1mloss 5\x1b[0m\r\x1b[2K\x1b[1A\x1b[2Ksaved\r\n2/2\r\n\x1b[1mloss 4\x1b[0m"
    assert make.screen(live) == ["first", "saved", "2/2", "\x1b[1mloss 4\x1b[0m"]
    make.draw(make.screen(live), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
