# SPDX-License-Identifier: Apache-2.0
"""Sessions on stubbed engines: started once, reused, ended wholly, and honest about what went wrong."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitbench.serving import ending, leftovers, ports
from splitbench.serving.failures import SessionError
from splitbench.serving.plan import Plan, ServicePlan
from splitbench.serving.processes import ProcessId, environment, marked
from splitbench.serving.session import Owner, acquire, node_lock, status, stop
from splitbench.serving.state import read_record, session_record
from tests.fakes.layouts import aggregated, disaggregated, free_ports, request, warm_client


class Told(list[str]):
    """Collects progress lines."""

    def __call__(self, text: str) -> None:
        self.append(text)


def eventually(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for something that must come, with a limit far above what it takes."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def journal(path: Path) -> list[dict[str, object]]:
    """What the stubs wrote of themselves."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def starts(path: Path) -> int:
    """How many engines were started."""
    return sum(entry["event"] == "start" for entry in journal(path))


def supervisor(state: Path) -> ProcessId:
    """The supervisor that is in the record."""
    record = read_record(session_record(state))
    assert record is not None
    return ProcessId.parse(record["supervisor"])


@contextmanager
def another_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that can be an owner."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def owner_of(child: subprocess.Popen[bytes]) -> Owner:
    """The identity of a child as owner."""
    process = ProcessId.of(child.pid)
    assert process is not None
    return Owner(process.pid, process.started)


# -- start, reuse, switch ------------------------------------------------------------------------------------
def test_a_session_is_started_once_and_reused(state: Path, tmp_path: Path) -> None:
    book = tmp_path / "journal"
    wanted = request(aggregated(free_ports(1)[0], journal=str(book)), tmp_path / "logs")
    with acquire(wanted, Told(), state=state) as first:
        assert not first.reused
        assert first.lost() is None
    with acquire(wanted, Told(), state=state) as second:
        assert second.reused
        assert second.id == first.id
        assert second.age_s > 0
        assert second.engines[0].pid == first.engines[0].pid
    assert starts(book) == 1
    assert first.engines[0].log.parent == first.folder
    assert "Application startup complete" in first.engines[0].log.read_text()


def test_times_of_the_steps_are_kept_in_order(state: Path, tmp_path: Path) -> None:
    plan = disaggregated(free_ports(5))
    with acquire(request(plan, tmp_path, client=warm_client()), Told(), state=state) as session:
        times = session.times_s
    engines = max(times["engine prefill0"], times["engine decode0"])
    assert 0 < engines <= times["proxy"] <= times["first_completion"] <= times["ready"]
    assert times["client"] <= times["proxy"]


def test_what_the_engines_say_of_themselves_is_kept(state: Path, tmp_path: Path) -> None:
    with acquire(request(disaggregated(free_ports(5)), tmp_path), Told(), state=state) as session:
        content = json.loads((session.folder / "engine_facts.json").read_text())
    assert {name: entry["role"] for name, entry in content["engines"].items()} == {
        "prefill0": "prefill",
        "decode0": "decode",
    }
    facts = content["engines"]["decode0"]["facts"]
    assert facts["kv_cache_tokens"]["value"] == 65536
    assert facts["kv_cache_tokens"]["source"].startswith("log:")
    assert facts["enforce_eager"] == {"value": True, "source": "server_info"}


def test_another_plan_ends_the_one_that_is_up_before_it_starts(state: Path, tmp_path: Path) -> None:
    book = tmp_path / "journal"
    port, other = free_ports(2)
    for number in (port, other, port):
        plan = aggregated(number, journal=str(book), children="1")
        acquire(request(plan, tmp_path), Told(), state=state).close()
    events = [(entry["event"], entry["port"]) for entry in journal(book)]
    one = [("start", port), ("serving", port), ("end", port)]
    two = [("start", other), ("serving", other), ("end", other)]
    assert events == one + two + one[:2]


def test_another_restart_is_another_session(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0])
    with acquire(request(plan, tmp_path, restart=0), Told(), state=state) as first:
        pass
    with acquire(request(plan, tmp_path, restart=1), Told(), state=state) as second:
        assert not second.reused
        assert second.id != first.id


def test_disaggregated_layout_moves_kv_behind_its_proxy(state: Path, tmp_path: Path) -> None:
    with acquire(request(disaggregated(free_ports(5)), tmp_path), Told(), state=state) as session:
        assert [engine.role for engine in session.engines] == ["prefill", "decode"]
        assert session.proxy is not None
        assert session.front_url == session.proxy.url


def test_plan_files_and_placeholders_are_filled(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0])
    engine = plan.engines[0].model_copy(
        update={"argv": (*plan.engines[0].argv, "--config", "{session}/sender.yaml")}
    )
    plan = plan.model_copy(update={"engines": (engine,), "files": {"sender.yaml": "enable_pd: true\n"}})
    with acquire(request(plan, tmp_path), Told(), state=state) as session:
        assert (session.folder / "sender.yaml").read_text() == "enable_pd: true\n"
        words = Path(f"/proc/{session.engines[0].pid}/cmdline").read_bytes().split(b"\0")
        assert str(session.folder / "sender.yaml").encode() in words


def test_a_warm_client_lives_as_long_as_the_engines(state: Path, tmp_path: Path) -> None:
    wanted = request(aggregated(free_ports(1)[0]), tmp_path, client=warm_client())
    with acquire(wanted, Told(), state=state) as session:
        assert session.client_socket is not None
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(session.client_socket))
        client = next(each for each in session.record["processes"] if each["kind"] == "client")
        ProcessId.parse(client["process"]).signal(signal.SIGKILL)
        eventually(session.lost)
        assert "client" in str(session.lost())
        assert "SIGKILL" in str(session.lost())
    eventually(lambda: not session.client_socket or not session.client_socket.exists())


# -- the end -------------------------------------------------------------------------------------------------
def test_stop_leaves_nothing(state: Path, tmp_path: Path) -> None:
    numbers = free_ports(5)
    plan = disaggregated(numbers, decode={"children": "2", "core": "1"})
    session = acquire(request(plan, tmp_path, client=warm_client()), Told(), state=state)
    assert len(marked(str(state))) == 7
    assert stop(state) is True
    assert marked(str(state)) == []
    assert ports.busy(numbers) == []
    assert session.lost() == "told to stop"
    assert stop(state) is False


def test_what_ignores_sigterm_is_killed_after_the_grace(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0], grace_s=0.5, ignore_term="1", children="2", core="1")
    acquire(request(plan, tmp_path), Told(), state=state).close()
    stop(state)
    record = read_record(session_record(state))
    assert record is not None
    assert record["stop"]["killed"] == 4
    assert record["stop"]["processes_gone_s"] >= 0.5


def test_the_session_ends_with_its_owner(state: Path, tmp_path: Path) -> None:
    with another_process() as owner:
        plan = aggregated(free_ports(1)[0], children="1")
        session = acquire(request(plan, tmp_path, owner=owner_of(owner)), Told(), state=state)
        owner.kill()
        eventually(session.lost)  # not collected by its parent yet: a zombie owner is a dead one
        assert "owner" in str(session.lost())
    eventually(lambda: not status(state)["supervisor"])
    assert marked(str(state)) == []


def test_an_unused_session_ends_and_a_used_one_does_not(state: Path, tmp_path: Path) -> None:
    wanted = request(aggregated(free_ports(1)[0]), tmp_path, idle_limit_s=0.4)
    session = acquire(wanted, Told(), state=state)
    time.sleep(1.2)
    assert session.lost() is None
    session.close()
    eventually(lambda: not status(state)["supervisor"])
    record = read_record(session_record(state))
    assert record is not None
    assert record["reason"] == "not used for 0.4 s"
    assert marked(str(state)) == []


def test_a_workflow_ends_only_its_own_session(state: Path, tmp_path: Path) -> None:
    with another_process() as other:
        acquire(request(aggregated(free_ports(1)[0]), tmp_path), Told(), state=state).close()
        assert stop(state, owner=owner_of(other)) is False
        assert status(state)["supervisor"]
        assert stop(state, owner=Owner.current()) is True


def test_another_workflow_waits_while_a_session_is_up(state: Path, tmp_path: Path) -> None:
    with another_process() as first:
        theirs = request(aggregated(free_ports(1)[0]), tmp_path, owner=owner_of(first), idle_limit_s=0.5)
        with node_lock(state, "their cell", Told(), owner=theirs.owner):
            acquire(theirs, Told(), state=state).close()
        with node_lock(state, "their next cell", Told(), owner=theirs.owner):
            pass  # they don't wait for themselves
        said = Told()
        with node_lock(state, "our cell", said, owner=Owner.current(), poll_s=0.02):
            record = read_record(session_record(state))
    assert record is not None
    assert record["reason"] == "not used for 0.5 s"
    assert said == [f"waiting for the workflow of pid {first.pid}, whose session {theirs.label} is up"]


# -- loss ----------------------------------------------------------------------------------------------------
def test_an_engine_that_dies_is_noticed_and_named(state: Path, tmp_path: Path) -> None:
    wanted = request(disaggregated(free_ports(5)), tmp_path)
    session = acquire(wanted, Told(), state=state)
    os.kill(session.engines[1].pid, signal.SIGKILL)
    eventually(session.lost)
    assert "engine decode0" in str(session.lost())
    assert "was killed by SIGKILL" in str(session.lost())
    eventually(lambda: not status(state)["supervisor"])
    assert marked(str(state)) == []
    with acquire(wanted, Told(), state=state) as again:  # it had been up: not a plan that can't start
        assert again.id != session.id


def test_the_death_of_an_engines_child_ends_the_session(state: Path, tmp_path: Path) -> None:
    session = acquire(request(aggregated(free_ports(1)[0], core="1"), tmp_path), Told(), state=state)
    engine = session.engines[0].pid
    core = int(Path(f"/proc/{engine}/task/{engine}/children").read_text().split()[0])
    os.kill(core, signal.SIGKILL)
    eventually(session.lost)
    assert "exit code 1" in str(session.lost())


def test_an_unhealthy_session_is_not_reused(state: Path, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    wanted = request(aggregated(free_ports(1)[0], fail_health_file=str(sick)), tmp_path)
    first = acquire(wanted, Told(), state=state)
    first.close()
    sick.touch()
    said = Told()

    def say(text: str) -> None:
        said(text)
        sick.unlink(missing_ok=True)  # the next one is well

    with acquire(wanted, say, state=state) as second:
        assert second.id != first.id
    assert any("not healthy any more (HTTP 503)" in text for text in said)


def test_a_killed_supervisor_is_noticed_and_cleaned_up_after(state: Path, tmp_path: Path) -> None:
    numbers = free_ports(5)
    stubborn = {"ignore_term": "1", "children": "2", "core": "1"}
    plan = disaggregated(numbers, prefill=stubborn, decode=stubborn)
    session = acquire(request(plan, tmp_path), Told(), state=state)
    supervisor(state).signal(signal.SIGKILL)
    eventually(session.lost)
    assert session.lost() == "its supervisor has gone"
    assert len(marked(str(state))) >= 8
    assert stop(state) is True
    assert marked(str(state)) == []
    assert ports.busy(numbers) == []


def test_the_next_start_cleans_up_after_a_killed_supervisor(state: Path, tmp_path: Path) -> None:
    numbers = free_ports(1)
    plan = aggregated(numbers[0], ignore_term="1", children="2", grace_s=0.5)
    first = acquire(request(plan, tmp_path), Told(), state=state)
    supervisor(state).signal(signal.SIGKILL)
    said = Told()
    with acquire(request(plan, tmp_path), said, state=state) as second:
        assert second.id != first.id
        assert second.lost() is None
    assert any("a killed supervisor left behind" in text for text in said)
    assert {environment(process.pid)["SPLITBENCH_SESSION"] for process in marked(str(state))} == {second.id}  # type: ignore[index]


def test_without_its_record_what_was_left_is_found_by_its_mark(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0], ignore_term="1", children="1")
    acquire(request(plan, tmp_path), Told(), state=state)
    supervisor(state).signal(signal.SIGKILL)
    eventually(lambda: not status(state)["supervisor"])
    session_record(state).unlink()
    assert stop(state) is True
    assert marked(str(state)) == []


def test_a_stuck_supervisor_is_killed(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "HELLO_LIMIT_S", 0.5)
    wanted = request(aggregated(free_ports(1)[0]), tmp_path)
    first = acquire(wanted, Told(), state=state)
    supervisor(state).signal(signal.SIGSTOP)
    said = Told()
    with acquire(wanted, said, state=state) as second:
        assert second.id != first.id
    assert any("does not answer: killing it" in text for text in said)


# -- services, and engines that share a device ---------------------------------------------------------------
def with_service(plan: Plan, folder: Path, port: int, script: str | None = None) -> Plan:
    """The plan with a service, by default a small web server; it must be up before the engines."""
    command = ("-m", "http.server", str(port), "--bind", "127.0.0.1") if script is None else ("-c", script)
    service = ServicePlan(
        name="cache",
        ports=(port,),
        argv=("{workflow_python}", *command),
        health_port=port,
        health_path="/",
        ready_file="{runtime}",
        startup_limit_s=20.0,
    )
    return plan.model_copy(update={"services": (service,)})


def test_a_service_is_up_before_the_engines_and_ends_with_them(state: Path, tmp_path: Path) -> None:
    port, *others = free_ports(6)
    with acquire(
        request(with_service(disaggregated(others), tmp_path, port), tmp_path), Told(), state=state
    ) as session:
        assert session.confirm() is None
        processes = {each["name"]: each for each in session.record["processes"]}
        ready_s = session.times_s["service cache"]
        assert all(processes[name]["started_s"] >= ready_s - 0.01 for name in ("prefill0", "decode0"))
        assert [engine.name for engine in session.engines] == ["prefill0", "decode0"]
        assert len(list(state.glob("run-*"))) == 1
    stop(state)
    assert list(state.glob("run-*")) == []
    assert ports.busy([port, *others]) == []


def test_a_session_is_lost_with_its_service(state: Path, tmp_path: Path) -> None:
    port, *others = free_ports(6)
    wanted = request(with_service(disaggregated(others), tmp_path, port), tmp_path)
    with acquire(wanted, Told(), state=state) as session:
        service = next(each for each in session.record["processes"] if each["name"] == "cache")
        os.kill(ProcessId.parse(service["process"]).pid, signal.SIGKILL)
        eventually(session.lost)
        assert "service cache" in str(session.lost())


def test_a_service_that_fails_is_named_and_no_engine_is_started(state: Path, tmp_path: Path) -> None:
    port, *others = free_ports(6)
    book = tmp_path / "journal"
    plan = disaggregated(others, prefill={"journal": str(book)})
    error = failure(request(with_service(plan, tmp_path, port, "raise SystemExit(7)"), tmp_path), state)
    assert "service cache ended with exit code 7" in str(error)
    assert starts(book) == 0
    assert list(state.glob("run-*")) == []


def test_a_killed_supervisors_runtime_folder_goes_with_what_it_left(state: Path, tmp_path: Path) -> None:
    port, *others = free_ports(6)
    acquire(
        request(with_service(disaggregated(others), tmp_path, port), tmp_path), Told(), state=state
    ).close()
    process = supervisor(state)
    process.signal(signal.SIGKILL)
    eventually(lambda: not process.alive())
    stop(state)
    assert list(state.glob("run-*")) == []
    assert marked(str(state)) == []
    assert ports.busy([port, *others]) == []


@pytest.mark.parametrize("how", ["stop", "engine", "supervisor"])
def test_sockets_temporary_files_and_shared_memory_go_with_their_session(
    state: Path, tmp_path: Path, how: str
) -> None:
    port = free_ports(1)[0]
    with acquire(request(aggregated(port, litter="1", core="1"), tmp_path), Told(), state=state) as session:
        (link,) = state.glob("run-*")
        folder = link.resolve()
        shared = [leftovers.SHARED_MEMORY / name for name in session.record["shared_memory"]]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(folder)) <= 16
        kinds = {("socket" if path.is_socket() else path.name.partition("_")[0]) for path in folder.iterdir()}
        assert kinds == {"socket", "vllm"}
        assert len(shared) == 1
        assert shared[0].exists()
        if how == "engine":
            os.kill(session.engines[0].pid, signal.SIGKILL)
            eventually(session.lost)
        elif how == "supervisor":
            process = supervisor(state)
            process.signal(signal.SIGKILL)
            eventually(lambda: not process.alive())
    stop(state)
    assert not folder.exists()
    assert list(state.glob("run-*")) == []
    assert not shared[0].exists()


def test_engines_on_one_device_start_one_after_the_other(state: Path, tmp_path: Path) -> None:
    plan = disaggregated(free_ports(5), prefill={"startup_s": "0.5"})
    shared = tuple(engine.model_copy(update={"devices": (0,)}) for engine in plan.engines)
    wanted = request(plan.model_copy(update={"engines": shared}), tmp_path)
    with acquire(wanted, Told(), state=state) as session:
        processes = {each["name"]: each for each in session.record["processes"]}
        assert processes["decode0"]["started_s"] >= session.times_s["engine prefill0"] - 0.01
    with acquire(request(plan, tmp_path), Told(), state=state) as session:
        processes = {each["name"]: each for each in session.record["processes"]}
        assert processes["decode0"]["started_s"] < session.times_s["engine prefill0"]


# -- failures to start ---------------------------------------------------------------------------------------
def failure(wanted: object, state: Path) -> SessionError:
    """The error of a session that must not start."""
    with pytest.raises(SessionError) as caught:
        acquire(wanted, Told(), state=state)  # type: ignore[arg-type]
    assert not status(state)["supervisor"]
    assert marked(str(state)) == []
    return caught.value


def test_an_engine_that_dies_early_is_explained_and_not_started_again(state: Path, tmp_path: Path) -> None:
    book = tmp_path / "journal"
    bad = {"journal": str(book), "die_early": "ValueError: No available memory for the cache blocks."}
    plan = disaggregated(free_ports(5), decode=bad)
    error = failure(request(plan, tmp_path), state)
    first, *tail = str(error).splitlines()
    assert first.startswith("pd: engine decode0 ended with exit code 1 ")
    assert "raise the engine's memory share" in first
    assert "decode0.log" in first
    assert any("No available memory for the cache blocks." in line for line in tail)
    assert starts(book) == 1

    again = failure(request(plan, tmp_path, restart=1), state)
    assert again.message == f"{error.message} (not tried again in this run)"
    assert again.tail == error.tail
    assert starts(book) == 1

    with another_process() as other:
        failure(request(plan, tmp_path, owner=owner_of(other)), state)
    assert starts(book) == 2


def test_an_engine_that_hangs_meets_its_time_limit(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0], hang_start="1", startup_limit_s=0.5)
    error = failure(request(plan, tmp_path), state)
    assert "engine engine0 was not healthy within 0.5 s" in str(error)


def test_an_engine_killed_from_outside_names_the_signal(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0], hang_start="1")

    def kill(text: str) -> None:
        if "engine0: started (pid " in text:
            os.kill(int(text.partition("(pid ")[2].partition(",")[0]), signal.SIGKILL)

    with pytest.raises(SessionError, match=r"engine engine0 was killed by SIGKILL.*want of memory"):
        acquire(request(plan, tmp_path), kill, state=state)


def test_a_server_of_another_model_is_refused(state: Path, tmp_path: Path) -> None:
    error = failure(request(aggregated(free_ports(1)[0], served_name="other"), tmp_path), state)
    assert "serves the wrong model: stub wanted, other found" in str(error)


def test_a_first_completion_that_fails_is_a_failed_start(state: Path, tmp_path: Path) -> None:
    error = failure(request(aggregated(free_ports(1)[0], fail_requests="1"), tmp_path), state)
    assert "fails the first completion: HTTP 500" in str(error)


@pytest.mark.parametrize("how", ["proxy", "decoder"])
def test_kv_that_does_not_move_is_a_failed_start(state: Path, tmp_path: Path, how: str) -> None:
    forgets = ("--forget-transfer",) if how == "proxy" else ()
    decode = {"broken_transfer": "1"} if how == "decoder" else {}
    plan = disaggregated(free_ports(5), proxy_arguments=forgets, decode=decode)
    error = failure(request(plan, tmp_path), state)
    assert "engine decode0 computed a prompt of 300 tokens itself" in str(error)


def test_lmcaches_hits_without_loads_are_a_failed_start(state: Path, tmp_path: Path) -> None:
    # The stub counts the tokens as transferred, and its log has no word of LMCache's loading any.
    plan = disaggregated(free_ports(5)).model_copy(update={"connector": "lmcache"})
    assert "no KV was loaded" in str(failure(request(plan, tmp_path), state))


def test_a_missing_interpreter_is_named(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0])
    engine = plan.engines[0].model_copy(update={"argv": ("/no/such/python", "-m", "vllm")})
    error = failure(request(plan.model_copy(update={"engines": (engine,)}), tmp_path), state)
    assert "can't be started: No such file or directory: /no/such/python" in str(error)


def test_a_port_in_use_names_its_holder_and_is_tried_again(state: Path, tmp_path: Path) -> None:
    book = tmp_path / "journal"
    port = free_ports(1)[0]
    wanted = request(aggregated(port, journal=str(book)), tmp_path)
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", port))
        holder.listen()
        error = failure(wanted, state)
    assert f"port {port} of engine0 is in use by pid {os.getpid()} (" in str(error)
    assert starts(book) == 0
    acquire(wanted, Told(), state=state).close()


def test_a_stranger_that_answers_on_our_port_does_not_pass_for_the_engine(
    state: Path, tmp_path: Path
) -> None:
    port = free_ports(1)[0]

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "stub"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    servers: list[http.server.HTTPServer] = []

    def answer_in_its_place(text: str) -> None:
        if "engine0: started" in text:
            servers.append(http.server.HTTPServer(("0.0.0.0", port), Stranger))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()

    wanted = request(aggregated(port, hang_start="1"), tmp_path)
    try:
        with pytest.raises(SessionError, match=f"shares port {port} with another process: pid {os.getpid()}"):
            acquire(wanted, answer_in_its_place, state=state)
    finally:
        servers[0].shutdown()
        servers[0].server_close()


def test_an_endless_log_does_no_harm(state: Path, tmp_path: Path) -> None:
    plan = aggregated(free_ports(1)[0], log_mib="8", log_forever="1", die_after_requests="0")
    error = failure(request(plan, tmp_path), state)
    assert len(str(error)) < 20_000
    assert "engine engine0" in str(error)


def test_a_session_stopped_while_starting_says_so(state: Path, tmp_path: Path) -> None:
    wanted = request(aggregated(free_ports(1)[0], hang_start="1"), tmp_path)
    stopper: list[threading.Thread] = []

    def stop_it(text: str) -> None:
        if "engine0: started" in text:
            stopper.append(threading.Thread(target=stop, args=(state,)))
            stopper[0].start()

    with pytest.raises(SessionError, match="ended while it was being started: told to stop"):
        acquire(wanted, stop_it, state=state)
    stopper[0].join()
    assert marked(str(state)) == []


# -- what a session is made of -------------------------------------------------------------------------------
def test_engines_see_the_plans_environment_and_not_the_callers(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "VLLM_ATTENTION_BACKEND",
        "UCX_TLS",
        "VLLM_CACHE_ROOT",
    ):
        monkeypatch.setenv(name, "1")
    said = Told()
    with acquire(request(aggregated(free_ports(1)[0]), tmp_path), said, state=state) as session:
        variables = environment(session.engines[0].pid)
    assert variables is not None
    assert not {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "VLLM_ATTENTION_BACKEND", "UCX_TLS"} & set(variables)
    assert variables["VLLM_CACHE_ROOT"] == "1"
    assert variables["SPLITBENCH_SESSION"] == session.id
    assert any("UCX_TLS, VLLM_ATTENTION_BACKEND" in text for text in said)


def test_the_supervisor_yields_to_engines_and_keeps_no_file_of_its_caller(
    state: Path, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    pipe = f"pipe:[{os.fstat(writing).st_ino}]"
    with acquire(request(aggregated(free_ports(1)[0]), tmp_path), Told(), state=state) as session:
        process = supervisor(state)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
        assert os.getpriority(os.PRIO_PROCESS, session.engines[0].pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getsid(process.pid) != os.getsid(0)
        assert os.getsid(session.engines[0].pid) == session.engines[0].pid
        open_files = [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
    os.close(reading)
    os.close(writing)
    assert pipe not in open_files


def test_an_idle_supervisor_uses_no_processor_time(state: Path, tmp_path: Path) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{supervisor(state).pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with acquire(request(aggregated(free_ports(1)[0]), tmp_path), Told(), state=state) as session:
        before = ticks()
        for _ in range(6):
            time.sleep(0.5)
            assert session.lost() is None
        assert ticks() - before <= 1  # 10 ms, the resolution of the count


def test_the_record_tells_what_is_up(state: Path, tmp_path: Path) -> None:
    nothing = {"supervisor": False, "session": None, "measuring": None, "progress": None}
    assert status(state) == {"state": str(state), **nothing}
    with acquire(request(aggregated(free_ports(1)[0]), tmp_path), Told(), state=state) as session:
        now = status(state)
    assert now["supervisor"] is True
    assert now["session"]["phase"] == "ready"
    assert now["session"]["id"] == session.id
    assert [each["alive"] for each in now["session"]["processes"]] == [True]
    stop(state)
    kept = json.loads((session.folder / "session.json").read_text())
    assert kept["phase"] == "ended"
    assert kept["reason"] == "told to stop"
    assert [each["alive"] for each in status(state)["session"]["processes"]] == [False]


def test_a_measurement_that_was_killed_is_not_shown_as_running(state: Path) -> None:
    note = {"purpose": "a cell", "process": "4194304:1", "since": 0.0}  # beyond the largest pid: nobody
    (state / "node.json").write_text(json.dumps(note), encoding="utf-8")
    assert status(state)["measuring"] is None
    me = str(ProcessId.current())
    (state / "node.json").write_text(json.dumps(note | {"process": me}), encoding="utf-8")
    assert "a cell" in status(state)["measuring"]


def test_a_deleted_state_folder_ends_its_session_and_the_next_one_is_left_alone(
    state: Path, tmp_path: Path
) -> None:
    one, two = free_ports(2)
    with acquire(request(aggregated(one, core="1"), tmp_path), Told(), state=state) as first:
        old = supervisor(state)
        shutil.rmtree(state)
        assert "state folder was deleted" in str(first.confirm())
        state.mkdir(mode=0o700)
        with acquire(request(aggregated(two), tmp_path), Told(), state=state) as second:
            eventually(lambda: not old.alive())
            assert second.confirm() is None
            now = status(state)
    assert now["session"]["id"] == second.id
    assert now["session"]["phase"] == "ready"
    assert stop(state)
    assert ports.busy([one, two]) == []


def test_a_session_whose_logs_are_deleted_does_not_make_them_again(state: Path, tmp_path: Path) -> None:
    with acquire(request(aggregated(free_ports(1)[0]), tmp_path / "logs"), Told(), state=state) as session:
        shutil.rmtree(tmp_path / "logs")
        assert session.confirm() is None
    stop(state)
    assert not (tmp_path / "logs").exists()


def test_whoever_cleans_up_while_a_session_begins_takes_nothing_from_it(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A workflow that ends cleans up without the node's lock: here, when the next one's supervisor is about to start.
    run = subprocess.run

    def cleaned_before(*given: Any, **more: Any) -> Any:
        ending.clean_leftovers(state, Told())
        return run(*given, **more)

    monkeypatch.setattr(subprocess, "run", cleaned_before)
    wanted = request(aggregated(free_ports(1)[0], litter="1"), tmp_path)
    with acquire(wanted, Told(), state=state) as session:
        (link,) = state.glob("run-*")
        assert any(path.is_socket() for path in link.resolve().iterdir())
        assert session.confirm() is None
