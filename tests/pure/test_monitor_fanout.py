"""Which monitors a config opens, and that none of them can end training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from polyreme.config import Config
from polyreme.errors import ConfigError
from polyreme.monitor import LOG_NAME, FanOut, Record, Run, open_monitors
from polyreme.monitor.console import Console

RUN = Run(model="Llama", parameters=10, ranks=2, stage=2, dtype="fp32", steps=10)
RECORD = Record(
    step=1, samples=4, tokens=64, loss=2.0, grad_norm=1.0, lr=0.1, tokens_per_second=5.0, seconds=1.0
)


class Recorder:
    """Remembers its calls; raises in those that are named."""

    def __init__(self, *broken: str) -> None:
        self.calls: list[str] = []
        self.texts: list[str] = []
        self.broken = broken

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise OSError(28, "No space left on device")

    def start(self, run: Run) -> None:
        self._called("start")

    def log(self, record: Record) -> None:
        self._called("log")

    def message(self, text: str) -> None:
        self.texts.append(text)
        self._called("message")

    def close(self, summary: Mapping[str, object]) -> None:
        self._called("close")


@pytest.mark.parametrize("method", ["start", "log", "message"])
def test_one_that_fails_is_dropped_with_one_message(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Recorder(method, "close"), Recorder()
    monitors = FanOut([bad, good])
    monitors.start(RUN)
    monitors.log(RECORD)
    monitors.message("hello")
    monitors.log(RECORD)
    monitors.close({})
    assert bad.calls.count(method) == 1
    assert bad.calls[-1] == "close"  # it may hold a file
    assert [call for call in good.calls if call != "message"] == ["start", "log", "log", "close"]
    notes = [text for text in good.texts if text != "hello"]
    assert notes == [
        "monitor Recorder stopped (OSError: [Errno 28] No space left on device); training goes on without it"
    ]
    # no console among the monitors, so it is told there as well
    assert capsys.readouterr().err.splitlines() == notes


def test_a_console_hears_of_it_instead_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    monitors = FanOut([Console(10), Recorder("log")])
    monitors.start(RUN)
    monitors.log(RECORD)
    monitors.close({})
    out, err = capsys.readouterr()
    assert out.count("monitor Recorder stopped") == 1 and err == ""


def test_all_may_fail_at_once() -> None:
    monitors = FanOut([Recorder("log", "message"), Recorder("log", "message"), Recorder("message")])
    monitors.log(RECORD)
    monitors.log(RECORD)
    monitors.close({})


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted(Recorder):
        def log(self, record: Record) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOut([Interrupted()]).log(RECORD)


def test_close_is_done_once() -> None:
    monitor = Recorder()
    monitors = FanOut([monitor])
    monitors.close({})
    monitors.close({})
    assert monitor.calls == ["close"]


def test_default_config_opens_console_and_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitors = open_monitors(Config.load({}).monitor, tmp_path / "run")
    monitors.start(RUN)
    monitors.log(RECORD)
    monitors.close({"checkpoint": "there"})
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOG_NAME]
    assert "1/10" in capsys.readouterr().out


def test_nothing_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitors = open_monitors(Config.load({"monitor": {"console": False, "jsonl": False}}).monitor, tmp_path)
    monitors.start(RUN)
    monitors.log(RECORD)
    monitors.close({})
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_missing_packages_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # makes its import fail
    section = Config.load({"monitor": {"wandb": True, "mlflow": True, "tensorboard": True}}).monitor
    with pytest.raises(ConfigError) as caught:
        open_monitors(section, tmp_path)
    assert [problem.key for problem in caught.value.problems] == [
        "monitor.tensorboard",
        "monitor.wandb",
        "monitor.mlflow",
    ]
    assert "pip install wandb, or set monitor.wandb = false" in str(caught.value)


def test_a_folder_that_cannot_be_written_costs_the_log_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    monitors = open_monitors(Config.load({}).monitor, tmp_path / "run")
    monitors.start(RUN)
    monitors.log(RECORD)
    monitors.close({})
    out = capsys.readouterr().out
    assert out.count("monitor JSONL stopped") == 1 and "1/10" in out
