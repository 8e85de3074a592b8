# SPDX-License-Identifier: Apache-2.0
"""Why an engine did not start or did not live, in words that help: its log's end and the known causes."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitbench.errors import UserError

TAIL_LINES = 25
_TAIL_BYTES = 128 * 1024
_LONGEST_LINE = 400


class SessionError(UserError):
    """A session that failed: one line as in every UserError, then, on further lines, the end of a log."""

    def __init__(
        self, message: str, *, where: str | None = None, mend: str | None = None, tail: str = ""
    ) -> None:
        super().__init__(message, where=where, mend=mend)
        self.tail = tail
        self.mend = mend
        if tail:
            self.args = (f"{self.args[0]}\n{tail}",)

    def record(self) -> dict[str, Any]:
        """Plain data, from which `from_record` makes the same error in another process."""
        return {"message": self.message, "where": self.where, "mend": self.mend, "tail": self.tail}

    @classmethod
    def from_record(cls, record: dict[str, Any], *, note: str = "") -> SessionError:
        """The error of a record, with a note appended to its first line."""
        return cls(
            f"{record['message']}{note}", where=record["where"], mend=record["mend"], tail=record["tail"]
        )


@dataclass(frozen=True)
class KnownCause:
    """A text that logs hold when something is wrong, and what to try."""

    pattern: str
    mend: str


# First match wins, so that causes stand before the errors that follow from them.
KNOWN_CAUSES: tuple[KnownCause, ...] = (
    KnownCause(
        r"operator torchvision::\w+ does not exist",
        "torchvision does not fit this torch: remove torchvision, torchaudio and torchcodec from the "
        "serving environment",
    ),
    KnownCause(r"No module named 'vllm'", "make the serving environment, or name its interpreter"),
    KnownCause(
        r"PackageNotFoundError: .*vllm", "the serving environment lacks the metadata of 'vllm': make it anew"
    ),
    KnownCause(r"No module named '([\w.]+)'", "install the missing module in the serving environment"),
    KnownCause(
        r"unrecognized arguments|invalid choice:",
        "this vLLM does not know an argument: look at `args` of the engine",
    ),
    KnownCause(
        r"[Aa]ddress already in use|Errno 98|ZMQError: Address",
        "a port is taken: choose another `port`, or end the process that holds it",
    ),
    KnownCause(
        r"No supported cpu connector found",
        "LMCache's in-process connector does not run on CPU: use connector nixl or lmcache-mp",
    ),
    KnownCause(
        r"transports? .*(cuda_ipc|cuda_copy).* not available|NIXL_ERR_BACKEND|no usable transports",
        "NIXL found no transport for this memory: check UCX_TLS, and that UCX's CUDA modules are there",
    ),
    KnownCause(
        r"Free memory on device .* is less than desired|less than desired GPU memory utilization",
        "somebody else holds memory of the device: free it, or lower the engine's memory share",
    ),
    KnownCause(
        r"No available memory for the cache blocks"
        r"|larger than the (available|maximum number of tokens).*KV cache"
        r"|KV cache is needed, which is larger",
        "raise the engine's memory share (on CPU: VLLM_CPU_KVCACHE_SPACE), or lower --max-model-len",
    ),
    KnownCause(
        r"CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory|std::bad_alloc",
        "out of memory: lower the memory share or --max-model-len, or use more devices",
    ),
    KnownCause(
        r"illegal memory access",
        "a fault on the device, often of a pair of versions: try --enforce-eager or another stack",
    ),
    KnownCause(r"No space left on device", "a disk or /dev/shm is full: free some space"),
    KnownCause(r"Too many open files", "raise the limit of open files (ulimit -n)"),
    KnownCause(
        r"Repository Not Found|is not a valid model identifier|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|does not appear to have a file named config\.json|Invalid repository ID",
        "the model was not found: check `model.path`",
    ),
    KnownCause(
        r"CUDA driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver",
        "check the driver with nvidia-smi",
    ),
    KnownCause(
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError",
        "set NCCL_DEBUG=INFO in the engine's env and look at its log",
    ),
    KnownCause(
        r"Illegal instruction",
        "this CPU lacks an instruction set that the stack was built for (AVX512 or AVX2)",
    ),
)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log of any size, long ones cut; a progress bar that was redrawn counts as one."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - _TAIL_BYTES))
            text = handle.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    found = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    found = [plain(line) for line in found if line]
    return [line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " ..." for line in found[-lines:]]


def plain(line: str) -> str:
    """A line without colours, and with every other control character spelled out: it goes to a terminal."""
    text = _COLOUR.sub("", line)
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def known_cause(path: Path) -> str | None:
    """What to try, if the log holds a text that is known."""
    text = "\n".join(log_tail(path, lines=2000))
    return next((cause.mend for cause in KNOWN_CAUSES if re.search(cause.pattern, text)), None)


def ended_how(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def mend_for(path: Path, status: int | None = None) -> str:
    """What to try: a known cause, a hint from the signal, or the log."""
    found = known_cause(path)
    if found is None and status is not None and os.WIFSIGNALED(status):
        found = {
            signal.SIGKILL: "the kernel may have killed it for want of memory (see dmesg): use less memory",
            signal.SIGILL: "this CPU lacks an instruction set that the stack was built for",
        }.get(signal.Signals(os.WTERMSIG(status)))
    return f"{found}; whole log: {path}" if found else f"read its log: {path}"


def with_tail(message: str, *, where: str, mend: str, log: Path) -> SessionError:
    """A failure with the end of a log below it."""
    lines = log_tail(log)
    tail = "\n".join(f"    {line}" for line in lines) if lines else "    (its log is empty)"
    return SessionError(message, where=where, mend=mend, tail=f"  last lines of {log}:\n{tail}")
