# SPDX-License-Identifier: Apache-2.0
"""The command line: the reference experiment's parameters and their pairing rules."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from splitbench.errors import UserError
from splitbench.proxy.options import EngineAddress, parse_options

REFERENCE = shlex.split(
    "--host localhost --port 9100 --prefiller-host localhost --prefiller-port 7100 --num-prefillers 1 "
    "--decoder-host localhost --decoder-port 7200 --decoder-init-port 7300,7301 "
    "--decoder-alloc-port 7400,7401 --num-decoders 1 --proxy-host localhost --proxy-port 7500"
)


def test_the_reference_experiments_command_line() -> None:
    options = parse_options(["--mode", "lmcache", *REFERENCE])
    assert options.prefillers == (EngineAddress("localhost", 7100),)
    assert options.decoders == (EngineAddress("localhost", 7200, (7300, 7301), (7400, 7401)),)
    assert (options.host, options.port, options.notify_host, options.notify_port) == (
        "localhost",
        9100,
        "localhost",
        7500,
    )
    assert options.first_token == "prefiller" and options.policy == "round-robin"


def addresses(text: str) -> list[str]:
    return [address.name for address in parse_options(["--mode", "nixl", *text.split()]).decoders]


def test_pairing() -> None:
    assert addresses("--decoder-host a --decoder-port 10") == ["a:10"]
    assert addresses("--decoder-host a --decoder-port 10 --num-decoders 3") == ["a:10", "a:11", "a:12"]
    assert addresses("--decoder-host a --decoder-port 10,20 --num-decoders 2") == ["a:10", "a:20"]
    assert addresses("--decoder-host a,b --decoder-port 10") == ["a:10", "b:10"]
    assert addresses("--decoder-host a,b --decoder-port 10,20") == ["a:10", "b:20"]
    assert addresses("--decoder-host ::1 --decoder-port 10") == ["[::1]:10"]


def test_rank_ports_step_with_the_decoders_and_can_be_given_for_each() -> None:
    base = ["--mode", "lmcache", "--decoder-host", "a", "--decoder-port", "10", "--num-decoders", "2"]
    options = parse_options([*base, "--decoder-init-port", "30", "--decoder-alloc-port", "40"])
    assert [(d.init_ports, d.alloc_ports) for d in options.decoders] == [((30,), (40,)), ((31,), (41,))]
    options = parse_options(
        [*base, "--decoder-init-port", "30,31;32,33", "--decoder-alloc-port", "40,41;42,43"]
    )
    assert [d.init_ports for d in options.decoders] == [(30, 31), (32, 33)]
    base = ["--mode", "lmcache", "--decoder-host", "a,a", "--decoder-port", "10,20"]
    options = parse_options(
        [*base, "--decoder-init-port", "30,31,32,33", "--decoder-alloc-port", "40,41,42,43"]
    )
    assert [d.init_ports for d in options.decoders] == [(30, 31), (32, 33)]
    assert [d.alloc_ports for d in options.decoders] == [(40, 41), (42, 43)]
    base = ["--mode", "lmcache", "--decoder-host", "a,b", "--decoder-port", "10"]
    options = parse_options([*base, "--decoder-init-port", "30,31", "--decoder-alloc-port", "40,41"])
    assert [d.init_ports for d in options.decoders] == [(30, 31), (30, 31)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("--mode nixl --decoder-host a,b --decoder-port 1,2,3", "--decoder-host, --decoder-port"),
        ("--mode nixl --decoder-host a,b --decoder-port 1 --num-decoders 3", "--num-decoders"),
        ("--mode nixl --decoder-port 10,10", "--decoder-port"),
        ("--mode nixl --decoder-port x", "--decoder-port"),
        ("--mode nixl --prefiller-port 70000", "--prefiller-port"),
        ("--mode nixl --first-token prefiller", "--first-token"),
        ("--mode nixl --decoder-init-port 7300", "--decoder-init-port"),
        ("--mode round-robin --prefiller-port 7100", "--prefiller-port"),
        ("--mode round-robin --num-prefillers 1", "--num-prefillers"),
        (
            "--mode lmcache --num-decoders 2 --decoder-init-port 3,4 --decoder-alloc-port 5",
            "--decoder-init-port",
        ),
        ("--mode lmcache --decoder-init-port 30,31 --decoder-alloc-port 40", "--decoder-alloc-port"),
        ("--mode lmcache --decoder-init-port 30;31 --decoder-alloc-port 40", "--decoder-init-port"),
        ("--mode nixl --kv-timeout-s 0", "--kv-timeout-s"),
        ("--mode lmcache --decoder-port 1,2 --decoder-init-port 3,4,5", "--decoder-init-port"),
    ],
)
def test_contradictions_name_the_parameter_and_the_mend(text: str, where: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(text.split())
    assert caught.value.where == where
    assert caught.value.mend


def test_the_program_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "splitbench.proxy", "--mode", "round-robin", "--port", "0"]
    process = subprocess.Popen([*command, "--decoder-port", "1"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        port = int(line.rsplit(":", 1)[1])
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)
        assert caught.value.code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_waiting_costs_no_cpu() -> None:
    """Nothing ticks: a proxy that serves nobody uses no processor time at all."""
    command = [
        sys.executable,
        "-m",
        "splitbench.proxy",
        "--mode",
        "lmcache",
        "--port",
        "0",
        "--proxy-port",
        "0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        process.stderr.readline()

        def ticks() -> int:
            with open(f"/proc/{process.pid}/stat") as stat:  # noqa: PTH123 (not a file)
                fields = stat.read().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        time.sleep(0.5)  # the last of the start
        before = ticks()
        time.sleep(1)
        assert ticks() - before <= os.sysconf("SC_CLK_TCK") // 100
    finally:
        process.kill()
        process.wait()


def test_a_mistake_is_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "splitbench.proxy", "--mode", "nixl", "--decoder-port", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--decoder-port" in done.stderr
