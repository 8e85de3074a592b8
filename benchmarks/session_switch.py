# SPDX-License-Identifier: Apache-2.0
"""What a session costs beside its engines: switching against bare stop and start; processor time when idle.

    python -m benchmarks.session_switch --rounds 10

Both arms run in turn, in one go, on the same stubbed engines (a prefill and a decode engine and their proxy,
one second of start): bare = SIGTERM to the processes, wait, start them, poll /health, ask one completion;
session = `acquire` of another restart, which does all that and its checks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from splitbench.serving import readiness
from splitbench.serving.plan import Plan, filled
from splitbench.serving.session import acquire, stop
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import disaggregated, free_ports, request


def bare_start(plan: Plan, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the plan's processes without a session, and wait for a completion."""
    python = sys.executable
    content = filled(
        plan,
        {
            "serving_python": python,
            "workflow_python": python,
            "model": "m",
            "repository": ".",
            "session": str(folder),
        },
    )
    processes = []

    async def healthy(port: int) -> None:
        while (await readiness.ask("127.0.0.1", port, "/health")).status != 200:
            await asyncio.sleep(0.03)

    async def ready() -> None:
        for part in content["engines"]:
            processes.append(start(part))
        await asyncio.gather(*(healthy(part["port"]) for part in content["engines"]))
        processes.append(start(content["proxy"]))
        await healthy(content["proxy"]["port"])
        wrong = await readiness.complete("127.0.0.1", content["proxy"]["port"], plan.served_model, 0, 300)
        assert wrong is None, wrong

    def start(part: dict[str, object]) -> subprocess.Popen[bytes]:
        with (folder / "bare.log").open("ab") as log:
            return subprocess.Popen(
                part["argv"],  # type: ignore[call-overload]
                env={**os.environ, **part["env"]},  # type: ignore[dict-item]
                stdout=log,
                stderr=log,
            )

    asyncio.run(ready())
    return processes


def bare_stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait()


def ticks(pid: int) -> int:
    """Processor time of a process, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--idle-s", type=float, default=30.0)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="sb-"))
    state = base / "s"
    state.mkdir(mode=0o700)
    slow = {"startup_s": "1.0"}
    bare_plan = disaggregated(free_ports(5), prefill=slow, decode=slow)
    session_plan = disaggregated([port + 100 for port in bare_plan.ports], prefill=slow, decode=slow)
    bare_s: list[float] = []
    session_s: list[float] = []
    processes = bare_start(bare_plan, base)
    try:
        acquire(request(session_plan, base), lambda text: None, state=state).close()
        for number in range(1, options.rounds + 1):
            begun = time.monotonic()
            bare_stop(processes)
            processes = bare_start(bare_plan, base)
            bare_s.append(time.monotonic() - begun)
            begun = time.monotonic()
            session = acquire(request(session_plan, base, restart=number), lambda text: None, state=state)
            session_s.append(time.monotonic() - begun)
            session.close()
        bare, switch = statistics.median(bare_s), statistics.median(session_s)
        print(f"bare stop + start: median {bare:.2f} s of {options.rounds}")
        print(
            f"session switch:    median {switch:.2f} s, {switch / bare:.2f} of bare, {switch - bare:+.2f} s"
        )
        reuse_s = []
        for _ in range(20):
            begun = time.monotonic()
            acquire(request(session_plan, base, restart=number), lambda text: None, state=state).close()
            reuse_s.append(time.monotonic() - begun)
        print(f"session reuse:     median {1e3 * statistics.median(reuse_s):.1f} ms of {len(reuse_s)}")
        record = read_record(session_record(state))
        assert record is not None
        pid = int(record["supervisor"].partition(":")[0])
        with acquire(request(session_plan, base, restart=number), lambda text: None, state=state) as session:
            before, begun = ticks(pid), time.monotonic()
            while time.monotonic() - begun < options.idle_s:
                assert session.lost() is None
                time.sleep(0.5)
            used_ms = 1e3 * (ticks(pid) - before) / os.sysconf("SC_CLK_TCK")
        print(f"supervisor while measured: {used_ms:.0f} ms of processor time in {options.idle_s:.0f} s")
    finally:
        bare_stop(processes)
        stop(state)


if __name__ == "__main__":
    main()
