# SPDX-License-Identifier: Apache-2.0
"""Where the user's pip looks for packages, so that other installers can look there too.

pip's order, later wins: global files, the user's file, the file of the environment, PIP_CONFIG_FILE, PIP_*
variables (pip's user guide, "Configuration"). Sections [global] and [install]; lists are separated by white
space.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_KEYS = ("index-url", "extra-index-url", "find-links", "cert", "no-index")


@dataclass(frozen=True)
class PipSettings:
    """Where packages come from, as pip is set. Addresses may hold credentials: never log them."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    no_index: bool = False


def read_pip_settings(environment: Mapping[str, str] | None = None) -> PipSettings:
    """Read pip's files and variables as pip itself would; absent or unreadable files count as empty."""
    environment = os.environ if environment is None else environment
    found: dict[str, str] = {}
    for path in _files(environment):
        found.update(_read(path))
    for key in _KEYS:
        value = environment.get("PIP_" + key.upper().replace("-", "_"), "")
        if value:
            found[key] = value
    return PipSettings(
        index_url=found.get("index-url") or None,
        extra_index_urls=tuple(found.get("extra-index-url", "").split()),
        find_links=tuple(found.get("find-links", "").split()),
        cert=found.get("cert") or None,
        no_index=found.get("no-index", "").lower() in {"1", "true", "yes", "on"},
    )


def uv_variables(settings: PipSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make uv look where pip would; what the user set for uv itself stays.

    As variables and not as arguments: an index address may hold a password, and arguments show in `ps`.
    """
    variables: dict[str, str] = {}
    if settings.index_url:
        variables["UV_DEFAULT_INDEX"] = settings.index_url
    if settings.extra_index_urls:
        variables["UV_INDEX"] = " ".join(settings.extra_index_urls)
        # pip takes the best version of all indexes; uv would stop at the first index that knows the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if settings.find_links:
        variables["UV_FIND_LINKS"] = ",".join(settings.find_links)
    if settings.no_index:
        variables["UV_NO_INDEX"] = "1"
    if settings.cert:
        variables["SSL_CERT_FILE"] = settings.cert
    own = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
    return {
        name: value
        for name, value in variables.items()
        if name not in environment and own.get(name, name) not in environment
    }


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    chosen = environment.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:  # pip's own way of saying "no files at all"
        return
    home = Path(environment.get("HOME", "") or "~").expanduser()
    for folder in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"):
        if folder:
            yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(environment.get("XDG_CONFIG_HOME", "") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def _read(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        if not parser.read(path, encoding="utf-8"):
            return {}
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    return {
        key: parser.get(section, key)
        for section in ("global", "install")
        for key in _KEYS
        if parser.has_option(section, key)
    }
