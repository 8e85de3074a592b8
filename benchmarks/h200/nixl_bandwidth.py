# SPDX-License-Identifier: Apache-2.0
"""NIXL alone between two processes on one GPU: how fast, by direction, size of a descriptor and agent's threads.

    python nixl_bandwidth.py OUT.jsonl [MIB]

A transfer moves MIB (default 128: the KV cache of 1,024 tokens of an 8B model) in equal descriptors at random places of
a pool, as a paged KV cache lies. Each line of OUT: what was tried, the GB/s of the median of five after a warm-up, and
the seconds that the first transfer took.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POOL_MIB = 2048
BLOCKS_KIB = (32, 64, 256, 2048, 32768)
ROUNDS = 5
LIMIT_S = 15.0


def agent_and_pool(name: str, threads: int) -> tuple[Any, Any]:
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(
        name, nixl_agent_config(num_threads=threads) if threads else nixl_agent_config(backends=["UCX"])
    )
    pool = torch.zeros(POOL_MIB << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    agent.register_memory(pool)
    return agent, pool


def peer(connection: Connection, threads: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    agent, pool = agent_and_pool("peer", threads)
    connection.send((agent.get_agent_metadata(), pool.data_ptr()))
    while not connection.poll(0.001):  # the far side's progress is nobody else's affair
        agent.get_new_notifs()


def measure(connection: Connection, out: Path, mib: int, threads: int, label: dict[str, Any]) -> None:
    agent, pool = agent_and_pool("first", threads)
    metadata, far = connection.recv()
    remote = agent.add_remote_agent(metadata)
    near = pool.data_ptr()
    for direction in ("READ", "WRITE"):
        for kib in BLOCKS_KIB:
            size = kib << 10
            count = max(1, (mib << 20) // size)
            places = range((POOL_MIB << 20) // size)
            here, there = random.Random(1).sample(places, count), random.Random(2).sample(places, count)
            prepare = time.perf_counter()
            handle = agent.initialize_xfer(
                direction,
                agent.get_xfer_descs([(near + at * size, size, 0) for at in here], "VRAM"),
                agent.get_xfer_descs([(far + at * size, size, 0) for at in there], "VRAM"),
                remote,
            )
            prepare = time.perf_counter() - prepare
            times = []
            for _ in range(1 + ROUNDS):
                start = time.perf_counter()
                state = agent.transfer(handle)
                while state not in ("DONE", "ERR") and time.perf_counter() - start < LIMIT_S:
                    state = agent.check_xfer_state(handle)
                times.append(time.perf_counter() - start)
                if state != "DONE":
                    break
            line = label | {
                "direction": direction,
                "block_kib": kib,
                "blocks": count,
                "state": state,
                "prepare_s": round(prepare, 6),
                "first_s": round(times[0], 6),
            }
            if state == "DONE":
                line["gb_per_s"] = round(count * size / sorted(times[1:])[ROUNDS // 2] / 1e9, 3)
            with out.open("a", encoding="utf-8") as handle_out:
                handle_out.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if state != "DONE":
                return


def one(connection: Connection, out: Path, mib: int, threads: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    measure(connection, out, mib, threads, {"threads": threads, **environment})


def main() -> None:
    out = Path(sys.argv[1])
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 128
    spawn = multiprocessing.get_context("spawn")
    # 4 threads is what vLLM's connector asks for; none is NIXL's own default. Without NVLink peers UCX reads over CUDA
    # IPC only when it is told to.
    tls = "cuda_ipc,cuda_copy,tcp,sm,self"
    for threads, reads in ((4, "auto"), (4, "on"), (0, "on")):
        environment = {"UCX_TLS": tls, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": reads}
        if not out.exists():
            environment["UCX_PROTO_INFO"] = "y"
        a, b = spawn.Pipe()
        first = spawn.Process(target=one, args=(a, out, mib, threads, environment))
        second = spawn.Process(target=peer, args=(b, threads, environment))
        first.start()
        second.start()
        first.join(40)
        a.send(None)
        for process in (first, second):
            process.join(5)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
