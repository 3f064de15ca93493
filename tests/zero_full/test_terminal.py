"""What a user waits for and sees in a terminal: imports, widths, bars, JSON, exit codes and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_full.__main__ import main
from zero_full.migrate.migrate_command import OPTIMIZERS
from zero_full.optim.build import optimizer_class
from zero_full.plan import Plan, plan, side_by_side
from zero_full.plan.bars import BLOCKS, LETTERS, Bars, Style, drawing, sizes_of
from zero_full.progress import StatusLine

Capture = pytest.CaptureFixture[str]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
MODELS = """
from torch import nn

def tiny():
    return nn.Linear(4, 4)

class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(3, 5, 7)

def wrong():
    return Wrong(4, 4)

def fails():
    raise ValueError("no size is given")
"""
# Each command line runs in a process of its own, which then prints whether these are imported.
IMPORTED = """
import sys
from zero_full.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print("\\n", code, *(name in sys.modules for name in ("torch", "torch._dynamo")))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "train.py").write_text('import deepspeed\nconfig = {"optimizer": {"type": "Adam"}}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(folder: Path, arguments: str) -> list[str]:
    """The exit code of a command in a new process, and whether it has imported torch and its compiler."""
    command = [sys.executable, "-c", IMPORTED, *arguments.split()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=True)
    return done.stdout.split()[-3:]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("check ds.json --quick", 0),
        ("check none.json", 2),
        ("migrate train.py ds.json", 0),
        ("plan --model models:tiny --config none.json --world 2", 2),
        ("plan --model none:tiny --config ds.json --world 2", 2),
        ("plan --model models:tiny --config ds.json --world 0", 2),
        ("plan --model models:tiny --config ds.json --world 2 --batch 4", 2),
        ("plan --model models:tiny --config ds.json --world 2 --batch 0x4:fp32", 2),
        ("fit --hf-config none.json --world 2 --memory 80GB", 2),
        ("fit --hf-config ds.json --world 2 --memory 80", 2),
        ("fit --hf-config ds.json --world 2 --memory 80GB --write .", 2),
        ("inspect none", 2),
        ("export none out", 2),
        ("replay none.json", 2),
        ("as-deepspeed none.py", 2),
    ],
)
def test_arguments_and_files_are_looked_at_before_torch_is_imported(
    arguments: str, code: int, folder: Path
) -> None:
    assert ended(folder, arguments) == [str(code), "False", "False"]


@pytest.mark.parametrize(
    "words",
    [
        ["check", "ds.json", "--fill", "zero_optimization.stage=1", "--write", ""],
        ["fit", "--hf-config", "config.json", "--world", "2", "--memory", "80GB", "--write", ""],
        ["doctor", "--measure", "--out", ""],
        ["doctor", "--measure", ""],
        ["inspect", ""],
    ],
)
def test_a_path_that_is_empty_is_an_error(words: list[str], folder: Path, capsys: Capture) -> None:
    """As "$FILE" is in a shell, without a value: nothing would be written, and nothing said."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "the path is empty" in capsys.readouterr().err


def test_the_main_names_do_not_import_the_compiler_of_torch() -> None:
    code = "import sys, zero_full; zero_full.initialize, zero_full.Engine, zero_full.Init, zero_full.Muon; "
    code += "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_batch_of_another_size_than_the_configurations_is_remarked(folder: Path, capsys: Capture) -> None:
    for micro, batch, is_said in ((1, "8x4:fp32", True), (8, "8x4:fp32", False), (3, "2x6x4:fp32", True)):
        (folder / "ds.json").write_text(json.dumps({**CONFIG, "train_micro_batch_size_per_gpu": micro}))
        words = ["plan", "--model", "models:tiny", "--config", "ds.json", "--world", "2", "--batch", batch]
        assert main(words) == 0
        assert (f"no size is {micro}, the micro-batch size" in capsys.readouterr().err) is is_said


def test_quick_says_what_it_leaves_out(folder: Path, capsys: Capture) -> None:
    assert main(["check", "ds.json", "--quick"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not checked with --quick: optimizer.type, optimizer.params.lr, a dry run"
    assert main(["check", "ds.json", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quick"] is True
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "nonsense": 1}))
    assert main(["check", "ds.json", "--quick"]) == 1


def test_migrate_looks_up_only_optimizers_that_it_does_not_know(folder: Path, capsys: Capture) -> None:
    assert all(optimizer_class(name) for name in OPTIMIZERS)
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "optimizer": {"type": "MuAdam"}}))
    assert main(["migrate", "ds.json", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["line"] == 1 and "does not have MuAdam" in finding["text"]


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("arguments", "message", "frames"),
    [
        ("--model models:fails", "models:fails failed with ValueError: no size is given", 1),
        ("--model models:wrong --batch 2x4:float32", "on 2x4:float32 with RuntimeError: shape", 1),
        ("--model models:tiny --batch 2x3:float32", "on 2x3:float32 with RuntimeError: a and b", 0),
        ("--model broken:tiny", "importing broken failed with ZeroDivisionError", 1),
    ],
)
def test_an_error_of_the_users_model_has_the_users_frames_only(
    arguments: str, message: str, frames: int, folder: Path
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    command = f"-m zero_full plan --config ds.json --world 2 {arguments}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 2 and message in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(lines) == frames and all(str(folder) in line for line in lines)
    assert "Traceback" not in done.stderr and "fake_tensor" not in done.stderr


# Bars and widths -------------------------------------------------------------------------------------


def planned(stage: int) -> Plan:
    from torch import nn

    zero = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return plan(nn.Linear(100, 100), {**CONFIG, **zero}, 4)


def test_bars_add_up_to_the_peak_and_mark_the_limit() -> None:
    each = planned(0)
    assert sum(sizes_of(each)) == each.peak
    assert len(Bars([each], 50, Style()).bar(each)) == 50
    for limit in (each.peak // 4, each.peak // 2, each.peak - 1, each.peak, 4 * each.peak):
        bars = Bars([each], 40, Style(), limit)
        line = bars.bar(each)
        assert len(line) <= 40 and line.count("|") == 1
        assert line.endswith(">") == (each.peak > 1.5 * limit)
        mark = line.index("|")
        assert (set(line[mark + 1 :]) - {" "} != set()) == (each.peak > limit) or each.peak == limit + 1


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_plans_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plans = [planned(stage) for stage in (0, 2)]
    drawn = drawing(plans, columns, Style())
    assert drawn.startswith("stage 0  █") and "▒ optimizer state" in drawn
    for text in (drawn, plans[0].table().replace(" + activations", ""), side_by_side(plans)):
        widest = max(map(len, text.replace(" + activations", "").splitlines()))
        assert widest <= columns


def stream(encoding: str, terminal: bool) -> Any:
    return SimpleNamespace(encoding=encoding, isatty=lambda: terminal)


def test_characters_and_colours_are_those_that_a_stream_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(stream("utf-8", False)) == Style(BLOCKS, False)
    assert Style.of(stream("ascii", True)) == Style(LETTERS, False)
    coloured = Style.of(stream("utf-8", True))
    assert coloured.draw("██|█") == "\x1b[34m██\x1b[0m|\x1b[34m█\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Style.of(stream("utf-8", True)).draw("██") == "██"


def test_a_status_line_is_for_terminals(capsys: Capture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for made, expected in ((io.StringIO(), ""), (Terminal(), "\rplanning\r        \r")):
        with StatusLine(made) as line:
            line.show("planning")
        assert made.getvalue() == expected


# JSON ------------------------------------------------------------------------------------------------


def test_a_script_that_reads_json_finds_these_keys(folder: Path, capsys: Capture) -> None:
    def keys(*arguments: str) -> set[str]:
        main([*arguments, "--json"])
        return set(json.loads(capsys.readouterr().out.splitlines()[0]))

    assert keys("check", "ds.json", "--quick") == {"file", "world", "quick", "tally", "verdicts"}
    assert keys("migrate", "train.py") == {"file", "diff", "findings", "remarks", "notes"}
    assert keys("doctor") == {"report", "measured", "problems"}
    arguments = ("plan", "--model", "models:tiny", "--config", "ds.json", "--world", "2")
    assert keys(*arguments) >= {"stage", "world", "peak", "between_steps", "peak_has_activations", "sent"}


# Ctrl-C ----------------------------------------------------------------------------------------------

# A module in torch's place that does with Ctrl-C what numpy does while it is imported.
SLOW = """
import time
print("ready", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    raise ImportError("a part is missing") from None
"""


def interrupted(arguments: list[str], folder: Path | None = None) -> tuple[int, str]:
    """The exit code and stderr of a Python program that gets Ctrl-C after it has printed "ready"."""
    pipe = subprocess.PIPE
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job does not
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=env, preexec_fn=heed
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_is_one_line() -> None:
    code = "import zero_full.doctor.machine as m, time, zero_full.__main__ as command; "
    code += "m.report = lambda: (print('ready', flush=True), time.sleep(60)); "
    code += "import sys; sys.argv[1:] = ['doctor']; command.run()"
    assert interrupted(["-c", code]) == (130, "interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(
    "command",
    [
        *("zero_full doctor", "zero_full check ds.json", "zero_full inspect . --tag none"),
        *("zero_full plan --model models:tiny --config ds.json --world 2", "lessons bill", "lessons run 1"),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(command: str, folder: Path) -> None:
    (folder / "torch.py").write_text(SLOW)
    assert interrupted(["-m", *command.split()], folder) == (130, "interrupted\n")
