# SPDX-License-Identifier: Apache-2.0
"""Faults of others beside a run: stolen ports, a second workflow, rude clients, endless logs, deleted folders."""

from __future__ import annotations

import itertools
import random
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from splitbench.serving.state import read_record, session_record
from tests.faults.ground import (
    Ground,
    Trial,
    digests,
    ended,
    measuring,
    nothing_left,
    phase,
    rerun,
    told,
    wait_for,
)
from tests.workflow.flow import Flow

Scenario = Callable[[Ground, Trial, random.Random], None]


def stolen_port(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """Somebody takes a port of the plan after it was made."""
    flow = ground.flow("port")
    port = int(flow.config["node"]["base_port"]) + dice.randrange(3)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        output = ended(flow, trial, flow.start("cells"))
        trial.check(f"port {port}" in output, "the port is not named")
    rerun(flow, trial, "cells")


def two_workflows(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """Two workflows on one machine, and a second one in the same folder."""
    del dice
    one, other = ground.flow("two-a"), ground.flow("two-b")
    other.state = one.state
    both = [one.start("cells"), other.start("cells")]
    wait_for(lambda: phase(one) is not None, "a session")
    second = one.run("cells")
    trial.check(second.returncode != 0, "a second run in the same folder was let in")
    trial.check("lock" in (second.stdout + second.stderr).lower(), "it does not say why")
    for flow, running in zip((one, other), both, strict=True):
        ended(flow, trial, running, fails=False)
        trial.check(len(digests(flow, trial)) == 2, "cells are missing")
    records = [
        read_record(path) or {}
        for flow in (one, other)
        for path in flow.results.glob("cells/*/*/*/*/record.json")
    ]
    spans = sorted((record["started_at"], record["ended_at"]) for record in records)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    trial.check(apart, "two cells were measured at once")
    trial.sees.append("(same folder: Snakemake says that it is locked)")
    rerun(one, trial, "cells")


def rude_clients(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """Beside a cell, clients at the front door that send half a request, read nothing, or vanish."""
    flow = ground.flow("rude")
    running = flow.start("cells")
    wait_for(measuring(flow, running), "a cell")
    record = read_record(session_record(flow.state)) or {}
    rude = [
        _rude(tuple(record["front"]), dice.choice(("silent", "head", "body", "deaf", "reset")))
        for _ in range(150)
    ]
    ended(flow, trial, running, fails=False)
    trial.check(len(digests(flow, trial)) == 2, "cells are missing")
    for connection in rude:
        if connection is not None:
            connection.close()
    rerun(flow, trial, "cells")


def _rude(address: tuple[str, int], how: str) -> socket.socket | None:
    """A connection that is left as it is; None where it was cut off."""
    try:
        connection = socket.create_connection(address, timeout=5)
    except OSError:
        return None
    body = b'{"model": "stub", "prompt": "a b c", "max_tokens": 16, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    sent = {
        "silent": b"",
        "head": head,
        "body": whole[:-20],
        "deaf": whole,
        "reset": whole,
    }[how]
    if how == "deaf":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sendall(sent)
    if how == "reset":  # gone without a goodbye
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        return None
    return connection


def long_log_at_the_end(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """An engine dies after 10,000 lines, one of them of a megabyte."""
    del dice
    flow = ground.flow("log-end")
    dying = {"VLLM_STUB_LOG_LINES": "10000", "VLLM_STUB_LOG_LINE_KIB": "1024"}
    dying["VLLM_STUB_DIE_EARLY"] = "ValueError: no room for the KV cache"
    config = flow.edited("layouts/pd/decode/env", dying)
    running = flow.start("cells", config=config)
    output = ended(flow, trial, running)
    trial.check(len(output) < 40_000, f"{len(output):,} characters of output")
    trial.check("no room for the KV cache" in output, "the cause is not shown")
    rerun(flow, trial, "cells")


def long_log_beside(ground: Ground, trial: Trial, dice: random.Random) -> None:
    """An engine writes some megabytes of log a second as long as it lives."""
    del dice
    flow = ground.flow("log-beside")
    flow.config["layouts"]["pd"]["decode"]["env"] = {"VLLM_STUB_LOG_FOREVER": "1"}
    running = flow.start("cells")
    ended(flow, trial, running, fails=False)
    rerun(flow, trial, "cells")


def deleted(what: str, how: str) -> Scenario:
    """A folder is deleted or renamed while a cell is measured."""

    def scenario(ground: Ground, trial: Trial, dice: random.Random) -> None:
        flow = ground.flow(f"{how}-{what}")
        running = flow.start("cells")
        wait_for(measuring(flow, running), "a cell")
        time.sleep(dice.uniform(0.0, 0.5))
        folder = _folder(flow, what)
        if how == "deleted":
            # As `rm -rf` beside a writer: again, where something was written meanwhile.
            while folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.rename(folder.with_name(f"{folder.name}-old"))
        running.wait(timeout=240)
        told(trial, (flow.folder / "run.log").read_text(encoding="utf-8"))
        nothing_left(flow, trial, "after the fault")
        if how == "renamed":
            shutil.rmtree(folder.with_name(f"{folder.name}-old"))
        rerun(flow, trial, "cells", unlock=True)

    return scenario


def _folder(flow: Flow, what: str) -> Path:
    if what == "cell":
        statuses = sorted(flow.results.glob("cells/*/*/*/*/status.json"), key=lambda p: p.stat().st_mtime)
        return statuses[-1].parent
    if what == "logs":
        return flow.results / "logs" / "sessions"
    return flow.results if what == "results" else flow.state
