# SPDX-License-Identifier: Apache-2.0
"""What a person reads when an engine fails."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from splitbench.errors import UserError
from splitbench.serving.failures import SessionError, ended_how, known_cause, log_tail, mend_for, with_tail


def test_the_tail_is_bounded_whatever_the_log_holds(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("w") as handle:
        handle.writelines(f"line {number}\n" for number in range(100_000))
        handle.write("x" * 10_000 + "\n\n")
        handle.write("load:  10%\rload:  50%\rload: 100%\n")
        handle.write("end without newline")
    tail = log_tail(log, 4)
    assert tail[0] == "line 99999"
    assert tail[1] == "x" * 400 + " ..."
    assert tail[2:] == ["load: 100%", "end without newline"]
    assert log_tail(tmp_path / "none.log") == []


def test_a_log_that_is_no_text_does_not_hurt(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff\xfe\x00 broken \x80\nfine\n")
    assert log_tail(log)[-1] == "fine"


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision"),
        ("/envs/s/bin/python: Error while finding module: No module named 'vllm'", "serving environment"),
        ("ModuleNotFoundError: No module named 'nixl'", "install the missing module"),
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')", "a port is taken"),
        ("ValueError: No supported cpu connector found", "use connector nixl"),
        ("nixl_cu13._bindings.nixlBackendError: NIXL_ERR_BACKEND", "UCX_TLS"),
        (
            "ValueError: Free memory on device (20.1/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.2 GiB).",
            "somebody else holds memory",
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing it.", "memory share"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory"),
        ("vllm serve: error: unrecognized arguments: --no-such-flag", "does not know an argument"),
        ("CUDA error: an illegal memory access was encountered", "fault on the device"),
        ("OSError: [Errno 28] No space left on device", "free some space"),
    ],
)
def test_known_causes_are_recognised(tmp_path: Path, line: str, mend: str) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"INFO starting\n{line}\nTraceback (most recent call last):\n  more\n")
    assert mend in str(known_cause(log))


def test_the_cause_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("RuntimeError: operator torchvision::nms does not exist\nNo module named 'vllm'\n")
    assert "torchvision" in str(known_cause(log))


def test_a_sound_log_has_no_known_cause(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("INFO Application startup complete.\n")
    assert known_cause(log) is None
    assert mend_for(log) == f"read its log: {log}"
    assert "want of memory" in mend_for(log, int(signal.SIGKILL))


def test_endings_in_words() -> None:
    assert ended_how(int(signal.SIGSEGV)) == "was killed by SIGSEGV"
    assert ended_how(3 << 8) == "ended with exit code 3"
    assert ended_how(int(signal.SIGRTMIN) + 1) == f"was killed by signal {int(signal.SIGRTMIN) + 1}"


def test_the_error_has_one_line_then_the_log_and_survives_its_record(tmp_path: Path) -> None:
    log = tmp_path / "decode0.log"
    log.write_text("first\nlast\n")
    error = with_tail("engine decode0 ended with exit code 1", where="pd", mend="do this", log=log)
    assert isinstance(error, UserError)
    first, *rest = str(error).splitlines()
    assert first == "pd: engine decode0 ended with exit code 1; do this"
    assert rest == [f"  last lines of {log}:", "    first", "    last"]
    again = SessionError.from_record(error.record(), note=" (again)")
    assert str(again) == str(error).replace("exit code 1;", "exit code 1 (again);")
