"""Open the doors that the variable POLYREME_DOORS names, as a Python process starts, and then run the
`sitecustomize` that this one hides, if there is one.

Python imports this module by itself if its folder, which has nothing else, is on PYTHONPATH."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _open_doors() -> None:
    names = [name for name in os.environ.get("POLYREME_DOORS", "").split(",") if name]
    if not names:
        return
    try:
        from polyreme.compat.finder import install
    except ModuleNotFoundError as error:
        if error.name != "polyreme":
            raise
        return  # another Python, which has no Polyreme
    for name in names:
        install(name)


def _run_the_next() -> None:
    # pathlib takes time to import
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    # only behind this one: another folder like it may be there, which looks for the next, too
    behind = sys.path[sys.path.index(here) + 1 :] if here in sys.path else sys.path
    spec = PathFinder.find_spec("sitecustomize", [path for path in behind if path != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_open_doors()
_run_the_next()
