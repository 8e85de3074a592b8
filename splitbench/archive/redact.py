# SPDX-License-Identifier: Apache-2.0
"""Taking secrets out of everything that goes into an archive: first learn them, then replace them everywhere.

A secret is seen by its look (tokens, addresses), by the name before it (`HF_TOKEN=`, `--api-key`), or because the
machine says so (user, home, host names, values of secret environment variables). What was learned in one file is
replaced in all: an API key of the config is taken out of an engine's log, where nothing names it.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitbench.archive.patterns import (
    HARMLESS_NAME,
    HOST_NAME,
    NO_HOST,
    PLACE_RULES,
    SECRET_NAME,
    SECRET_RULES,
    Rule,
    is_public_host,
    stand_in,
)

# Accounts that every machine has; as a word they are everywhere and say nothing.
_COMMON = frozenset(
    [
        "root",
        "user",
        "users",
        "admin",
        "ubuntu",
        "debian",
        "centos",
        "rocky",
        "ec2-user",
        "azureuser",
        "runner",
        "vagrant",
        "docker",
        "nobody",
        "daemon",
        "test",
        "guest",
        "jovyan",
        "app",
        "home",
        "localhost",
        "localdomain",
        "host",
        "node",
        "server",
        "main",
        "default",
        "local",
        "none",
        "vllm",
        "python",
    ]
)
_LEAST = {"user": 3, "host": 3, "secret": 6, "token": 6}
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPLICED = re.compile(r"(data:[\w/+.-]+;base64,[A-Za-z0-9+/=]*)")


class Redactor:
    """Replaces secrets by stand-ins such as `redacted_token`, and counts by kind.

    Args:
        known: secrets of this machine, text to kind (`user`, `host`, `home`, `secret`, `token`).
        spared: words of the experiment (names of layouts and the like) that are never learned as a user's or a
            host's name.
    """

    def __init__(self, known: Mapping[str, str] | None = None, spared: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._spared = {word.lower() for word in spared} | _COMMON
        self._known: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._seen: dict[bytes, bytes] = {}
        for word, kind in (known or {}).items():
            self.learn(word, kind)

    def learn(self, word: str, kind: str) -> None:
        """Take a text for a secret from now on, unless it is too short or too common to be told from others."""
        if word.startswith("redacted_") or len(word) < _LEAST.get(kind, 4) or word in self._known:
            return
        if kind in ("user", "host") and (word.lower() in self._spared or word.isdigit()):
            return
        if kind in ("secret", "token") and (word.lower() in self._spared or "{" in word):
            return
        self._known[word] = kind
        self._pattern = None
        self._seen.clear()

    def learn_from(self, text: str) -> None:
        """Learn the secrets that this text names, without changing it."""
        for rule in (*SECRET_RULES, *PLACE_RULES):
            if not rule.learn:
                continue
            for match in rule.pattern.finditer(text):
                kind = "user" if rule.kind == "home" else rule.kind
                self.learn(match.group(rule.learn), kind)

    def learn_from_value(self, value: Any, name: str = "") -> None:
        """Learn the secrets of JSON data, where names stand before values and flags before their arguments."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.learn_from_value(item, str(key))
        elif isinstance(value, list):
            before = ""
            for item in value:
                self.learn_from_value(item, before if before.startswith("-") else "")
                before = item if isinstance(item, str) else ""
        elif isinstance(value, str):
            if _names_secret(name):
                self.learn(value, "secret")
            elif HOST_NAME.match(name) and _is_host(value):
                self.learn(value, "host")
            self.learn_from(value)

    def text(self, text: str) -> str:
        """The text with every secret replaced; embedded images are left as they are."""
        pieces = _SPLICED.split(text)
        return "".join(piece if at % 2 else self._plain(piece) for at, piece in enumerate(pieces))

    def credentials(self, text: str) -> str:
        """Code with tokens by their look, and secrets that were learned elsewhere, replaced; nothing else.

        Places are left: code speaks of hosts, paths and addresses without being on a machine.
        """
        text = self._by(SECRET_RULES[1:2], text)
        for word, kind in self._known.items():
            if kind in ("secret", "token", "home") and word in text:
                self.counts[kind] += text.count(word)
                text = text.replace(word, "/redacted_home" if kind == "home" else stand_in(kind))
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """JSON data with every secret replaced, in keys too."""
        if isinstance(value, Mapping):
            if name == "packages":
                # Versions such as 5.0.0.93 are no addresses.
                return {
                    key: self._by(SECRET_RULES, item) if isinstance(item, str) else self.value(item)
                    for key, item in value.items()
                }
            return {self._plain(str(key)): self.value(item, str(key)) for key, item in value.items()}
        if isinstance(value, list):
            done: list[Any] = []
            before = ""
            for item in value:
                done.append(self.value(item, before if before.startswith("-") else ""))
                before = item if isinstance(item, str) else ""
            return done
        if not isinstance(value, str) or not value:
            return value
        if _names_secret(name) and not value.startswith("redacted_"):
            self.counts["secret"] += 1
            return stand_in("secret")
        if HOST_NAME.match(name) and _is_host(value) and value.lower() not in self._spared:
            self.counts["host"] += 1
            return stand_in("host")
        return self._plain(value)

    def json_strings(self, data: bytes) -> bytes:
        """A large JSON text with the secrets in its strings replaced; numbers are passed over at memory speed."""

        def replaced(match: re.Match[bytes]) -> bytes:
            found = match[0]
            if len(found) <= 2:
                return found
            if found not in self._seen:
                text = json.loads(found)
                clean = self._plain(text)
                kept = found if clean == text else json.dumps(clean, ensure_ascii=False).encode()
                if len(self._seen) > 100_000:
                    self._seen.clear()
                self._seen[found] = kept
            return self._seen[found]

        return _STRING.sub(replaced, data)

    def _plain(self, text: str) -> str:
        text = self._by(SECRET_RULES, text)
        text = self._by(PLACE_RULES, text)
        if self._known:
            if self._pattern is None:
                words = sorted(self._known, key=lambda word: (-len(word), word))
                self._pattern = re.compile(
                    rf"(?<![A-Za-z0-9_])(?:{'|'.join(map(re.escape, words))})(?![A-Za-z0-9_])"
                )
            text = self._pattern.sub(self._known_word, text)
        return text

    def _known_word(self, match: re.Match[str]) -> str:
        kind = self._known[match[0]]
        self.counts[kind] += 1
        return "/redacted_home" if kind == "home" else stand_in(kind)

    def _by(self, rules: Iterable[Rule], text: str) -> str:
        for rule in rules:

            def replaced(match: re.Match[str], rule: Rule = rule) -> str:
                new = rule.new_text(match)
                if new != match[0]:
                    self.counts[rule.kind] += 1
                return new

            text = rule.pattern.sub(replaced, text)
        return text


def _names_secret(name: str) -> bool:
    return bool(SECRET_NAME.match(name)) and not HARMLESS_NAME.match(name)


def _is_host(value: str) -> bool:
    return (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*", value) is not None
        and value.lower() not in NO_HOST
        and not value.isdigit()
        and not is_public_host(value)
    )


def of_this_machine(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Secrets that this machine knows of itself, text to kind.

    `SPLITBENCH_REDACT` may name a file with further words, one a line.
    """
    environment = os.environ if environment is None else environment
    known: dict[str, str] = {}
    for name, value in environment.items():
        if _names_secret(name):
            known[value] = "secret"
    for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER"):
        if environment.get(name):
            known[environment[name]] = "user"
    with suppress(KeyError):
        known[pwd.getpwuid(os.getuid()).pw_name] = "user"
    for host in (socket.gethostname(), *(environment.get(n, "") for n in ("HOSTNAME", "SLURMD_NODENAME"))):
        if host:
            known[host] = "host"
            known[host.partition(".")[0]] = "host"
    home = environment.get("HOME", "")
    if home.count("/") >= 2:  # "/root" has a rule of its own; "/" is no secret
        known[home.rstrip("/")] = "home"
    if extra := environment.get("SPLITBENCH_REDACT"):
        known |= {
            line.strip(): "secret"
            for line in Path(extra).read_text(encoding="utf-8").splitlines()
            if line.strip()
        }
    return known
