"""engram survives damaged files, links and pipes in their place, kills and signals: tools/attack_*.py, shortened.

A fault is printed with the command that repeats it. For more, run the scripts with a larger --count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
# Each way in which a command can go wrong, and a word of the fault that it must be reported as.
BROKEN = """
import os, signal, sys, time
from pathlib import Path
from attack_files import MEMORY_BYTES, differences, faults_of, is_allowed, run_command, snapshot

here = Path.cwd()
os.mkfifo("pipe")


def raises():
    raise RuntimeError("x")


def says(text, status=0):
    return lambda: print(text, file=sys.stderr) or status


for action, word in (
    (lambda: len(open("pipe").read()), "hangs"),
    (lambda: sum(iter(int, 1)), "hangs"),
    (raises, "traceback"),
    (lambda: len(bytearray(2 * MEMORY_BYTES)), "traceback"),
    (lambda: os.kill(os.getpid(), signal.SIGSEGV) or time.sleep(9), "killed by SIGSEGV"),
    (says("engram: unexpected error: x", 1), "unexpected"),
    (says("engram: there is not enough memory", 2), "memory"),
    (says("something else", 2), "without a message"),
    (says("\\x1b[2J"), "control character"),
    (says("x" * 20_000), "20,001 characters"),
    (says("engram: refused", 2), ""),
    (says("engram: a warning"), ""),
):
    found = list(faults_of(run_command(action, here, here, here / "log", 1.0), 1e9))
    assert [word in fault for fault in found] == [True] * bool(word), (word, found)

before = snapshot(here)
(here / "log.out").write_text("x")
assert [name for name, was in snapshot(here).items() if was != before[name]] == ["log.out"]
assert is_allowed("out/a", ["out"]) and not is_allowed("outside", ["out"])
assert differences({"a": 1.0}, {"a": 1.1}) and not differences({"a": 1.0}, {"a": 1.0})
"""


def attack(*arguments: str | Path, cwd: Path) -> str:
    """What a script prints; fails if it found a fault."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(TOOLS)])}
    environment |= {"TMPDIR": str(cwd)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False, errors="replace"
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# Damage that was once passed on: as a traceback, a hang, a wrong number, or a file outside the folder that was written.
CASES = """
swap:cache:0:1 fifo:cache:0:1 signed:cache:1:1 swap:unfinished:1:1 edit:inside:2:2 signed:inside:4:1 link:unfinished:4:1
rename:finished:3:1 rename:paper:2:1 edit:paper:0:2 edit:finished:42:2 fifo:results:0:1 link:results:4:1
edit:results:20:8 rename:finished:0:8 edit:cache:41:11 edit:finished:41:11 edit:finished:44:11 edit:results:60:11
hard:unfinished:1:1 hard:unfinished:2:1 edit:lesson:0:1 signed:lesson:0:1 signed:pretrained:0:1 edit:weights:27:52
"""


@pytest.mark.slow
def test_damaged_files_are_refused_or_give_the_same_numbers(tmp_path: Path) -> None:
    chosen = [word for case in CASES.split() for word in ("--case", case)]
    found = attack(TOOLS / "attack_files.py", *chosen, cwd=tmp_path)
    assert f"{len(CASES.split())} mutations in" in found


@pytest.mark.slow
def test_killed_and_interrupted_runs_continue_to_the_same_result(tmp_path: Path) -> None:
    numbers = ["--kills", "1", "--terms", "1", "--interrupts", "0", "--pairs", "1", "--lessons", "1"]
    found = attack(TOOLS / "attack_processes.py", *numbers, "--seed", "1", cwd=tmp_path)
    assert "4 attacks in" in found


def test_the_scripts_notice_what_goes_wrong(tmp_path: Path) -> None:
    attack("-c", BROKEN, cwd=tmp_path)
