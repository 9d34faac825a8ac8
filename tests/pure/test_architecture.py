"""What import-linter and ruff cannot say: which modules speak to torch.distributed and to transformers, and
how large functions, classes and packages may be."""

from __future__ import annotations

import ast
import builtins
import functools
import io
import itertools
import keyword
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyreme

SOURCE = Path(polyreme.__file__).parent


@functools.cache
def sources() -> list[tuple[str, str, list[ast.AST]]]:
    """Name, text and nodes of every module; the first node is the module itself."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text("utf-8")
        found.append((file.relative_to(SOURCE).as_posix(), text, [*ast.walk(ast.parse(text))]))
    return found


def importers(package: str) -> set[str]:
    """Modules of polyreme that import `package` or anything in it, at the top or inside a function."""
    found = set()
    for file, _, nodes in sources():
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            if any(name == package or name.startswith(package + ".") for name in names):
                found.add(file)
    return found


def test_only_distributed_and_the_launcher_speak_to_torch_distributed() -> None:
    outside = {
        file for file in importers("torch.distributed") if not file.startswith(("launch/", "distributed/"))
    }
    outside -= {file for file in outside if file.startswith("compat/")}  # whose users speak to it
    assert outside == {"checkpoint/formats/dcp.py"}  # for its file format alone


def test_one_file_knows_transformers_models() -> None:
    assert {file for file in importers("transformers") if not file.startswith("data/")} <= {
        "models/huggingface.py",
        "checkpoint/save.py",
        "integrations/trainer.py",
    }


def test_no_pickle_is_loaded() -> None:
    # whose unpickler imports nothing that a file names
    assert importers("pickle") == {"checkpoint/formats/dcp.py"}


def test_who_reads_which_rank_a_process_is() -> None:
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    found = {
        file.partition("/")[0]
        for file, _, nodes in sources()
        for node in nodes
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found <= {"distributed", "launch"}


Function = ast.FunctionDef | ast.AsyncFunctionDef
BUDGET = Path(__file__).parents[1] / "architecture_budget.toml"


def docstrings(nodes: Sequence[ast.AST]) -> set[int]:
    """The lines of docstrings, attributes' too."""
    return {
        line
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def lines_of(node: Function | ast.ClassDef, text: Sequence[str], docs: set[int]) -> int:
    """Without docstrings and empty lines."""
    return sum(
        bool(text[line - 1].strip()) and line not in docs
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    )


def depth(node: ast.AST) -> int:
    """How many statements are within each other."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        nests = isinstance(child, ast.If | ast.For | ast.While | ast.With | ast.Try) and not is_elif
        deepest = max(deepest, depth(child) + nests)
    return deepest


def test_functions_and_classes_are_small() -> None:
    """Beside what ruff holds (statements, branches)."""
    large = []
    for file, text, nodes in sources():
        lines, docs = text.split("\n"), docstrings(nodes)
        for node in nodes:
            if isinstance(node, Function):
                large += [f"{file}: {node.name} is long"] * (lines_of(node, lines, docs) > 60)
                large += [f"{file}: {node.name} is deep"] * (depth(node) > 4)
            elif isinstance(node, ast.ClassDef):
                large += [f"{file}: {node.name} is long"] * (lines_of(node, lines, docs) > 300)
    assert not large


OPTIONS = {"cli/main.py: inspect", "data/loader.py: __init__", "optim/lamb.py: __init__"}
"""Whose parameters are options with defaults, of a command or as torch's classes of this kind have them."""


def test_calls_have_eight_parameters_at_most() -> None:
    """Ruff counts `self`, too, and so allows functions one more."""
    many = set()
    for file, _, nodes in sources():
        for node in nodes:
            if isinstance(node, Function):
                taken = node.args
                names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
                if len({*names} - {"self", "cls"}) > 8:
                    many.add(f"{file}: {node.name}")
    of_others = ("compat/", "optim/compiled_kernels.py")  # as in pyproject.toml
    assert {name for name in many if not name.startswith(of_others)} == OPTIONS


def statements(text: str, nodes: Sequence[ast.AST]) -> int:
    """Lines of statements, however they are broken."""
    first, docs, count = 0, docstrings(nodes), 0
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            continue
        first = first or token.start[0]
        if token.type == tokenize.NEWLINE:
            count += first not in docs
            first = 0
    return count


def test_each_package_keeps_to_its_budget() -> None:
    budget = tomllib.loads(BUDGET.read_text("utf-8"))["statements"]
    found = dict.fromkeys(budget, 0)
    for file, text, nodes in sources():
        found[file.rpartition("/")[0].partition("/")[0] or "polyreme"] += statements(text, nodes)
    assert {name: size for name, size in found.items() if size > budget[name]} == {}


def git(*arguments: str) -> str:
    """Return what git prints, or nothing where this is no checkout."""
    asked = subprocess.run(["git", "-C", str(BUDGET.parent), *arguments], capture_output=True, text=True)
    return asked.stdout if asked.returncode == 0 else ""


def raised(before: str, after: str) -> set[str]:
    """Return the packages that may have more statements than before, and those that are new beside others."""
    old, new = (tomllib.loads(text).get("statements", {}) for text in (before, after))
    return {name for name, size in new.items() if old and size > old.get(name, 0)}


def test_a_package_that_is_new_or_larger_counts_as_raised() -> None:
    before, after = "[statements]\na = 3\nb = 3\n", "[statements]\na = 2\nb = 4\nc = 1\n"
    assert (raised(before, after), raised(after, after), raised("", after)) == ({"b", "c"}, set(), set())


def test_a_budget_is_raised_together_with_a_decision() -> None:
    """In each commit that git has, and in what is not committed yet."""
    name = "tests/architecture_budget.toml"
    alone = []
    for commit in git("log", "--no-merges", "--format=%H", "--", ":/" + name).split():
        if raised(git("show", f"{commit}^:{name}"), git("show", f"{commit}:{name}")):
            files = git("show", "--format=", "--name-only", commit)
            alone += [commit] * ("docs/decisions/" not in files)
    if raised(git("show", f"HEAD:{name}"), BUDGET.read_text("utf-8")):
        files = git("status", "--porcelain", "--untracked=all")
        alone += ["not committed"] * ("docs/decisions/" not in files)
    assert alone == [], f"{name} is raised without a file in docs/decisions that names feature and statements"


def test_axes_are_asked_for_by_what_they_are_for() -> None:
    """`mesh.dp` is a user's word, of configs and of other systems' doors."""
    apart = ("config/", "distributed/", "layout/", "cli/", "compat/", "integrations/")
    apart += ("checkpoint/formats/deepspeed.py",)
    assert [
        f"{file}:{node.lineno}"
        for file, _, nodes in sources()
        if not file.startswith(apart)
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr == "dp")
        or (isinstance(node, ast.Constant) and node.value == "dp")
    ] == []


def test_one_file_below_the_engine_reads_the_config() -> None:
    """Others get sections of it, or records of their own."""
    apart = ("config/", "cli/", "job/", "compat/", "integrations/", "planner/", "verify/")  # above them
    assert {file for file in importers("polyreme.config.Config") if not file.startswith(apart)} == {
        "__init__.py",
        "engine.py",
        "initialization.py",
        "simulation.py",
        "step/settings.py",
    }


def test_every_module_says_what_is_in_it() -> None:
    assert [file for file, _, (module, *_) in sources() if not ast.get_docstring(module)] == []


def test_public_functions_and_classes_say_what_they_do() -> None:
    """Those at the top of modules, but for other systems' names over ours."""
    assert [
        f"{file}: {node.name}"
        for file, _, (module, *_) in sources()
        if not file.startswith("compat/")
        for node in module.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ] == []


PAGE = SOURCE.parents[1] / "docs" / "architecture.md"
QUOTED = re.compile(r"`([A-Za-z_.][\w.]*)(?:\(\))?`")
FOREIGN = {
    *("add_adapter", "skip_init", "get_state_dict", "broadcast_buffers"),  # PEFT's and torch's
    *(
        "ds_report",
        "zero_reduce_bucket_size",
        "model_01",
        "eos",
        "hf",
        "ulimit",
        "pyproject",
        "toml",
    ),  # others' and texts
}
"""Names in docstrings that are not of this package."""


@functools.cache
def names() -> set[str]:
    """Everything that has a name here: modules, what they define, their parameters, attributes and words."""
    known = {*dir(builtins), *keyword.kwlist, *dir(torch), *dir(Tensor), *dir(nn.Module), *dir(dist)}
    for file, _, nodes in sources():
        known.update(file.removesuffix(".py").split("/"))
        for node in nodes:
            for field in ("id", "attr", "name", "arg", "module"):
                value = getattr(node, field, None)
                known.update(value.split(".") if isinstance(value, str) else ())
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known.update(re.findall(r"\w+", node.value) if " " not in node.value else ())
    return known


def test_docstrings_and_the_page_of_the_architecture_name_what_there_is() -> None:
    texts = [
        (file, node.value.value)
        for file, _, nodes in sources()
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    page, known = PAGE.read_text("utf-8"), names() | FOREIGN
    unknown = [
        f"{file}: {name}"
        for file, text in [*texts, (PAGE.name, page)]
        for name in QUOTED.findall(text)
        if not {*filter(None, name.removesuffix(".py").split("."))} <= known
    ]
    assert not unknown
    files = {name for name in re.findall(r"`([\w/.]+/[\w/.]+)`", page) if name != "src/polyreme"}
    assert [name for name in files if not (SOURCE / name).exists()] == []


def test_no_private_language() -> None:
    """What is taken off the device, cut or recorded is called so, not by these words."""
    private = {"lane", "hollow", "gates", "tape", "twin", "loan", "ferry", "spill", "homes", "span"}
    used = [
        f"{file}: {name}"
        for file, _, nodes in sources()
        if not file.startswith("compat/")
        for node in nodes
        for field in ("id", "attr", "name", "arg")
        if isinstance(name := getattr(node, field, None), str)
        and {each.removesuffix("s") for each in name.lower().split("_")} & private
    ]
    assert not used


def test_range_arithmetic_is_in_one_file() -> None:
    rounded_up = re.compile(r"-\(-|\+ \w+ - 1\) // ")
    found = {file for file, text, _ in sources() if rounded_up.search(text)}
    assert {file for file in found if not file.startswith("compat/")} == {"layout/intervals.py"}


def test_one_file_of_tests_and_benchmarks_looks_inside_of_an_engine() -> None:
    """So that an engine whose inside changes changes that file alone."""
    [nodes] = [nodes for file, _, nodes in sources() if file == "engine.py"]
    private = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr[0] == "_"
    }
    assert {"_training", "_step", "_now"} <= private
    said = re.compile(rf"(?<!\bself)[.\"']({'|'.join(private)})\b")
    root = Path(__file__).parents[2]
    assert [
        f"{file.relative_to(root)}:{number}: {line.strip()}"
        for folder in ("tests", "bench")
        for file in sorted((root / folder).rglob("*.py"))
        if file not in (root / "tests/probe.py", Path(__file__))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if said.search(line)
    ] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    names = [file.name for file in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len({*names})


PAGES = {"docs", "docs_extending", "docs_limits", "docs_troubleshooting"}
OF_NO_PACKAGE = {"architecture", "gpu_bench", "pool", "recipes", "threads"} | PAGES
"""Files that test the tree, its pages, its examples and benchmarks, or the tests' own means."""


def test_files_of_tests_are_named_by_what_they_test() -> None:
    """By a package of src or a module, so that who changes it finds them."""
    parts = [
        file.removesuffix(".py").split("/") for file, _, _ in sources() if not file.startswith("compat/")
    ]
    tested = {"compat", "deepspeed", *itertools.chain(*parts)}
    names = {file.stem.removeprefix("test_") for file in Path(__file__).parents[1].rglob("test_*.py")}
    unlike = {name for name in names if not any(f"{name}_".startswith(f"{each}_") for each in tested)}
    assert unlike == OF_NO_PACKAGE
