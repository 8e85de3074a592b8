# SPDX-License-Identifier: Apache-2.0
"""What a session costs beside its engines: switching against bare stop and start; processor time when idle.

    python -m benchmarks.session_switch --rounds 10
    SPLITBENCH_STORE=.splitbench python -m benchmarks.session_switch --rounds 3 --real

Both arms run in turn, in one go, on the same engines (a prefill and a decode engine and their proxy; stubbed ones with
one second of start, or the demo's on this machine's cores): bare = SIGTERM to the processes, wait, start them, poll
/health, ask one completion; session = `acquire` of another restart, which does all that and its checks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from splitbench.files import write_text
from splitbench.measuring.stage import places as places_of
from splitbench.serving import readiness
from splitbench.serving.plan import Plan, filled
from splitbench.serving.render import render
from splitbench.serving.session import Places, SessionRequest, acquire, stop
from splitbench.serving.state import Owner, read_record, session_record
from splitbench.workflow import Workflow
from tests.fakes.layouts import REPOSITORY, disaggregated, free_ports, request
from tests.real.fault_campaign import config_of


def layouts(real: bool, folder: Path) -> tuple[Plan, Plan, Places]:
    """The same layout on two sets of ports, and what fills its places."""
    if not real:
        slow = {"startup_s": "1.0"}
        bare = disaggregated(free_ports(5), prefill=slow, decode=slow)
        session = disaggregated([port + 100 for port in bare.ports], prefill=slow, decode=slow)
        return bare, session, request(bare, folder).places
    plans = []
    for shift in (0, 200):
        config = config_of("pd-1+1core")
        config["node"]["base_port"] += shift
        flow = Workflow(config, root=REPOSITORY)
        plans.append(render(flow.experiment, "pd-1+1core"))
    return plans[0], plans[1], places_of(flow)


def bare_start(plan: Plan, places: Places, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the plan's processes without a session, and wait for a completion."""
    content = filled(plan, {**places.values(), "session": str(folder), "runtime": str(folder)})
    for name, text in content["files"].items():
        write_text(folder / name, text)
    processes = []

    async def healthy(port: int) -> None:
        while (await readiness.ask("127.0.0.1", port, "/health")).status != 200:
            await asyncio.sleep(0.03)

    async def ready() -> None:
        for part in content["engines"]:
            processes.append(start(part, part["devices"]))
        await asyncio.gather(*(healthy(part["port"]) for part in content["engines"]))
        processes.append(start(content["proxy"], ()))
        await healthy(content["proxy"]["port"])
        wrong = await readiness.complete("127.0.0.1", content["proxy"]["port"], plan.served_model, 0, 300)
        assert wrong is None, wrong

    def start(part: dict[str, Any], cores: Any) -> subprocess.Popen[bytes]:
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (folder / "bare.log").open("ab") as log:
            return subprocess.Popen(
                [*pinned, *part["argv"]], env={**inherited, **part["env"]}, stdout=log, stderr=log, cwd=folder
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
    parser.add_argument("--real", action="store_true", help="the demo's engines instead of stubs")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="sb-"))
    state = base / "s"
    state.mkdir(mode=0o700)
    bare_plan, session_plan, places = layouts(options.real, base)

    def wanted(number: int) -> SessionRequest:
        owner = Owner.current()
        return SessionRequest(session_plan, number, places, base / "logs", owner, idle_limit_s=600)

    bare_s: list[float] = []
    session_s: list[float] = []
    try:
        # One arm is up at a time: two layouts would share the cores. Each round ends what is up, and starts it anew.
        for number in range(options.rounds):
            processes = bare_start(bare_plan, places, base)
            begun = time.monotonic()
            bare_stop(processes)
            processes = bare_start(bare_plan, places, base)
            bare_s.append(time.monotonic() - begun)
            bare_stop(processes)
            acquire(wanted(2 * number), lambda text: None, state=state).close()
            begun = time.monotonic()
            session = acquire(wanted(2 * number + 1), lambda text: None, state=state)
            session_s.append(time.monotonic() - begun)
            session.close()
            if number + 1 < options.rounds:
                stop(state)
        number = 2 * options.rounds - 1
        bare, switch = statistics.median(bare_s), statistics.median(session_s)
        print(f"bare stop + start: median {bare:.2f} s of {options.rounds}")
        print(
            f"session switch:    median {switch:.2f} s, {switch / bare:.2f} of bare, {switch - bare:+.2f} s"
        )
        reuse_s = []
        for _ in range(20):
            begun = time.monotonic()
            acquire(wanted(number), lambda text: None, state=state).close()
            reuse_s.append(time.monotonic() - begun)
        print(f"session reuse:     median {1e3 * statistics.median(reuse_s):.1f} ms of {len(reuse_s)}")
        record = read_record(session_record(state))
        assert record is not None
        pid = int(record["supervisor"].partition(":")[0])
        with acquire(wanted(number), lambda text: None, state=state) as session:
            before, begun = ticks(pid), time.monotonic()
            while time.monotonic() - begun < options.idle_s:
                assert session.lost() is None
                time.sleep(0.5)
            used_ms = 1e3 * (ticks(pid) - before) / os.sysconf("SC_CLK_TCK")
        print(f"supervisor while measured: {used_ms:.0f} ms of processor time in {options.idle_s:.0f} s")
    finally:
        stop(state)
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
