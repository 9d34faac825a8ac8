"""The door for imports: one module under two names, metadata of a distribution that is installed nowhere, and
clear errors where it cannot be opened. Each case runs in a Python of its own, as users have it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import polyreme.errors
from polyreme.compat import finder
from polyreme.compat.distribution import DoorDistribution, normalized

SOURCE = str(Path(polyreme.errors.__file__).parents[1])


def python(body: str, *words: str, variables: Mapping[str, str] | None = None) -> str:
    """What a script prints, in a Python that must end well."""
    own = {name: value for name, value in os.environ.items() if name != finder.DOORS}
    done = subprocess.run(
        [sys.executable, *words, "-c", textwrap.dedent(body)],
        env={**own, "PYTHONPATH": SOURCE, **(variables or {})},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def with_door(**inherited: str) -> dict[str, str]:
    """Variables of a Python that opens the door as it starts."""
    return {**inherited, **finder.variables("deepspeed", {"PYTHONPATH": SOURCE, **inherited})}


def installed_elsewhere(folder: Path, version: str = "0.1.0") -> str:
    """A folder with another deepspeed, as pip would have installed it; returns it for PYTHONPATH."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = folder / f"deepspeed-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text("deepspeed\n")
    return os.pathsep.join([str(folder), SOURCE])


def test_a_module_is_one_object_under_both_names() -> None:
    python("""
        import importlib, importlib.util, pickle, sys
        import polyreme.compat.deepspeed as own
        own.install()
        own.install()  # again is harmless
        assert sum(type(each).__name__ == "Door" for each in sys.meta_path) == 1

        assert importlib.util.find_spec("deepspeed.launcher.runner") is not None
        import deepspeed.launcher.resources
        import polyreme.compat.deepspeed.launcher.resources as resources
        from deepspeed.launcher.resources import ResourceError
        import deepspeed
        assert deepspeed is own and sys.modules["deepspeed"] is own
        assert deepspeed.launcher.resources is resources
        assert ResourceError is resources.ResourceError
        assert ResourceError.__module__ == "polyreme.launch.hostfile"
        assert pickle.loads(pickle.dumps(ResourceError)) is ResourceError
        for module in (deepspeed, deepspeed.launcher, resources):
            assert module.__name__ == module.__spec__.name and module.__name__.startswith("polyreme.")
            assert module.__spec__.loader is module.__loader__
        assert list(deepspeed.__path__) == list(own.__spec__.submodule_search_locations)

        kept = ResourceError
        assert importlib.reload(deepspeed) is own and importlib.import_module("deepspeed") is own
        from deepspeed.launcher.resources import ResourceError as again
        assert again is kept
    """)


def test_rows_of_the_table_are_modules() -> None:
    told = python("""
        import importlib, importlib.util, sys
        import polyreme.compat.deepspeed as own
        from polyreme.compat.deepspeed import names
        own.install()
        for path, module in names.SAME.items():  # second paths, in their order and by either name
            found = importlib.import_module(f"deepspeed.{path}")
            assert found is importlib.import_module(f"polyreme.compat.deepspeed.{path}")
            assert found is importlib.import_module(f"deepspeed.{module}"), path
            assert found.__name__ == found.__spec__.name == f"polyreme.compat.deepspeed.{module}"
        import deepspeed.ops.adam.cpu_adam
        from deepspeed.accelerator import real_accelerator
        assert real_accelerator.get_accelerator is deepspeed.get_accelerator

        assert importlib.util.find_spec("deepspeed.compression.compress") is not None
        assert "polyreme.compat.deepspeed.compression.compress" not in sys.modules
        import deepspeed.compression.compress as refused
        from deepspeed.compression.compress import init_compression
        import polyreme.compat.deepspeed.compression.compress as same
        assert refused is same is deepspeed.compression.compress and not hasattr(refused, "__all__")
        for use in (init_compression, deepspeed.moe.layer.MoE, deepspeed.runtime.hybrid_engine.X.y):
            try:
                use(1)
            except NotImplementedError as error:
                print(str(error).partition(" is not available")[0])
        try:
            import deepspeed.ops.adam.none
        except ModuleNotFoundError as error:
            assert "deepspeed.ops.adam has cpu_adam, fused_adam;" in str(error)
    """)
    assert told.split() == [
        "deepspeed.compression.compress.init_compression",
        "deepspeed.moe.layer.MoE",
        "deepspeed.runtime.hybrid_engine.X.y",
    ]


def test_a_folder_that_an_older_version_left_hides_no_row(tmp_path: Path) -> None:
    (tmp_path / "gone" / "__pycache__").mkdir(parents=True)
    table = SimpleNamespace(SAME={}, has_below=lambda name: True)
    spec = finder.Names("polyreme", table).find_spec("polyreme.gone", [str(tmp_path)])
    assert isinstance(spec and spec.loader, finder._Refused)


def test_a_spec_is_found_without_an_import() -> None:
    python("""
        import importlib.util, sys
        import polyreme.compat.finder
        polyreme.compat.finder.install("deepspeed")
        spec = importlib.util.find_spec("deepspeed")
        assert spec.name == "deepspeed" and spec.origin.endswith("compat/deepspeed/__init__.py")
        assert spec.submodule_search_locations and spec.has_location
        assert "polyreme.compat.deepspeed" not in sys.modules and "deepspeed" not in sys.modules
        assert importlib.util.find_spec("deepspeeds") is None
    """)


def test_the_door_is_light() -> None:
    python(
        """
        import sys
        import deepspeed
        assert deepspeed.__version__ == deepspeed.version == "0.19.8"
        assert (deepspeed.__version_major__, deepspeed.__version_patch__) == (0, 8)
        assert deepspeed.git_version_info.git_hash == deepspeed.__git_hash__ == deepspeed.git_hash
        assert not any(deepspeed.git_version_info.installed_ops.values())
        assert not {"torch", "numpy", "pydantic", "importlib.metadata"} & set(sys.modules)
        """,
        variables=with_door(),
    )


def test_by_hand_without_the_door() -> None:
    python("""
        import sys
        import polyreme.compat.deepspeed as deepspeed
        assert deepspeed.__version__ == "0.19.8" and "deepspeed" not in sys.modules
        assert not hasattr(deepspeed, "none_such")
        try:
            import deepspeed
        except ModuleNotFoundError as error:
            assert type(error) is ModuleNotFoundError
        else:
            raise AssertionError("another deepspeed is installed here")
    """)


def test_metadata() -> None:
    python(
        """
        from importlib import metadata
        assert metadata.version("deepspeed") == metadata.version("DeepSpeed") == "0.19.8"
        assert metadata.metadata("deepspeed")["Name"] == "deepspeed"
        found = metadata.distribution("deepspeed")
        assert found.name == "deepspeed" and not found.requires and not found.files
        assert metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
        assert [each.version for each in metadata.distributions(name="deepspeed")] == ["0.19.8"]
        assert not list(metadata.distributions(name="deepspeed", path=["/"]))
        assert metadata.version("torch") and metadata.version("polyreme")
        try:
            metadata.version("deepspeed-kernels")
        except metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError
        """,
        variables=with_door(),
    )
    assert normalized("Deep_.Speed") == "deep-speed"
    assert DoorDistribution("deepspeed", "0.19.8").locate_file("x").name == "x"


@pytest.mark.parametrize("name", ["deepspeed.none", "deepspeed.launcher.none", "deepspeed.none.x"])
def test_a_module_that_is_not_there(name: str) -> None:
    told = python(
        f"""
        try:
            import {name}
        except ModuleNotFoundError as error:
            print(type(error).__name__, error.name, error, sep="|")
        """,
        variables=with_door(),
    )
    kind, missing, text = told.strip().split("|")
    assert kind == "MissingModuleError" and missing == name.removesuffix(".x")
    assert f"No module named '{missing}'" in text and "polyreme.compat.deepspeed" in text
    there = "runner" if "launcher" in name else "git_version_info"
    assert f"{missing.rpartition('.')[0]} has " in text and there in text


def test_an_import_error_of_its_own_passes_through() -> None:
    told = python("""
        import sys
        import polyreme.compat.deepspeed
        sys.modules["torch"] = None
        polyreme.compat.deepspeed.install()
        try:
            import deepspeed.launcher.launch
        except ModuleNotFoundError as error:
            print(type(error).__name__, error.name.partition(".")[0])
    """)
    assert told.split() == ["ModuleNotFoundError", "torch"]


def test_where_another_one_is_imported_already(tmp_path: Path) -> None:
    told = python(
        """
        import deepspeed
        import polyreme.compat.deepspeed
        from polyreme.compat.finder import DoorError
        try:
            polyreme.compat.deepspeed.install()
        except DoorError as error:
            print(error)
        assert deepspeed.__version__ == "0.1.0"
        """,
        variables={"PYTHONPATH": installed_elsewhere(tmp_path)},
    )
    assert f"deepspeed is imported already ({tmp_path}/deepspeed/__init__.py)" in told
    assert "polyreme launch --deepspeed" in told


def test_where_another_one_is_installed_ours_answers(tmp_path: Path) -> None:
    python(
        """
        from importlib import metadata
        assert metadata.version("deepspeed") == "0.1.0"
        import polyreme.compat.deepspeed as own
        own.install()
        import deepspeed
        assert deepspeed is own
        assert metadata.version("deepspeed") == metadata.metadata("deepspeed")["Version"] == "0.19.8"
        """,
        variables={"PYTHONPATH": installed_elsewhere(tmp_path)},
    )


def test_where_libraries_have_looked_already(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("")
    told = python(
        """
        import accelerate
        import polyreme.compat.deepspeed
        try:
            polyreme.compat.deepspeed.install()
        except ImportError as error:
            print(error)
        """,
        variables={"PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE])},
    )
    assert told.startswith("accelerate is imported already, and has looked for deepspeed")


CHILD = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"


def test_processes_that_it_starts_have_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, subprocess, sys

        def tell(queue):
            import deepspeed
            queue.put(deepspeed.__name__)

        if __name__ == "__main__":
            subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
            spawning = multiprocessing.get_context("spawn")
            queue = spawning.Queue()
            process = spawning.Process(target=tell, args=(queue,))
            process.start()
            print(queue.get())
            process.join()
    """)
    )
    told = python(f"""
        import runpy
        import polyreme.compat.deepspeed
        polyreme.compat.deepspeed.install()
        import subprocess, sys
        subprocess.run([sys.executable, {str(script)!r}], check=True)
    """)
    assert told.splitlines() == ["0.19.8 0.19.8", "polyreme.compat.deepspeed"]


def test_python_m_runs_a_module_by_its_other_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.launch", "--help"],
        env={**os.environ, **with_door()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--world_info" in done.stdout, done.stderr


def test_the_next_sitecustomize_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import deepspeed\nprint('next', deepspeed.__version__)\n")
    inherited = with_door(PYTHONPATH=os.pathsep.join([str(tmp_path), SOURCE]))
    told = python("import sitecustomize; print(sitecustomize.__file__)", variables=inherited)
    assert told.splitlines() == ["next 0.19.8", str(tmp_path / "sitecustomize.py")]


def test_without_the_variable_the_folder_does_nothing() -> None:
    python(
        "import sys; assert not [each for each in sys.meta_path if type(each).__name__ == 'Door']",
        variables={**with_door(), finder.DOORS: ""},
    )


def test_a_python_without_polyreme_starts_as_ever() -> None:
    base: str = getattr(sys, "_base_executable", sys.executable)  # of this virtual environment
    done = subprocess.run(
        [base, "-c", "print('well')"],
        env={**os.environ, **with_door(), "PYTHONPATH": str(finder.SITE)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


def test_variables_take_nothing_off() -> None:
    site = str(finder.SITE)
    assert finder.variables("deepspeed", {}) == {finder.DOORS: "deepspeed", "PYTHONPATH": site}
    inherited = {finder.DOORS: "other,deepspeed", "PYTHONPATH": os.pathsep.join(["a", "", site, "b"])}
    once = finder.variables("deepspeed", inherited)
    assert once == {finder.DOORS: "other,deepspeed", "PYTHONPATH": os.pathsep.join([site, "a", "", "b"])}
    assert finder.variables("deepspeed", once) == once


def test_the_folders_of_two_polyremes_end(tmp_path: Path) -> None:
    """Each runs the next behind it, and none the first again."""
    (tmp_path / "sitecustomize.py").write_text((finder.SITE / "sitecustomize.py").read_text("utf-8"))
    inherited = with_door(PYTHONPATH=os.pathsep.join([str(tmp_path), SOURCE]))
    told = python("import deepspeed; print(deepspeed.__version__)", variables=inherited)
    assert told == "0.19.8\n"
