# SPDX-License-Identifier: Apache-2.0
"""What must not leave the machine: how tokens, keys, logins, hosts, home paths and addresses look in text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

Replace = Callable[[re.Match[str]], str]

# Stand-ins are plain words, so that YAML, JSON, HTML, shell lines and URLs stay what they are.
STAND_IN = "redacted_{kind}"


def stand_in(kind: str) -> str:
    """What is written in place of a secret of this kind."""
    return STAND_IN.format(kind=kind)


@dataclass(frozen=True)
class Rule:
    """One look of a secret.

    Args:
        kind: what it is called in the stand-in and in the counts.
        pattern: where it is.
        replace: gives the new text; None: the stand-in.
        learn: group whose text is a secret wherever else it stands; 0: nothing is learned.
    """

    kind: str
    pattern: re.Pattern[str]
    replace: Replace | None = None
    learn: int = 0

    def new_text(self, match: re.Match[str]) -> str:
        """What the match becomes."""
        return stand_in(self.kind) if self.replace is None else self.replace(match)


# Names that say that their value is a secret. "TOKEN" alone counts only in names of credentials: first_token,
# input_tokens and eos_token are no secrets.
_SECRET_NAME = (
    r"(?:[A-Za-z0-9]+[_-])*(?:api[_-]?keys?|access[_-]?key(?:[_-]id)?|secret(?:[_-]?access)?(?:[_-]?key)?|passw(?:or)?d"
    r"|passphrase|private[_-]?key|credentials?|authorization"
    r"|(?:hf|hub|hugging[_-]?face|git(?:hub|lab)?|auth|access|bearer|session|refresh|id|api|wandb|registry|npm|pypi|slack)"
    r"[_-]token)"
)
SECRET_NAME = re.compile(rf"^(?:--?)?(?:{_SECRET_NAME}|token)$|^(?-i:[A-Z0-9_]+_TOKEN)$", re.IGNORECASE)
HARMLESS_NAME = re.compile(
    r"^(?:first|second|last|next|eos|bos|pad|unk|stop|max|min|per|num|prompt|output|input)[_-]token$",
    re.IGNORECASE,
)
HOST_NAME = re.compile(
    r"^(?:--?)?(?:[A-Za-z0-9]+[_-])*(?:host(?:[_-]?name)?|node[_-]?(?:name|list)|fqdn|(?:master|server)[_-]?addr)$",
    re.IGNORECASE,
)
NO_HOST = frozenset(
    {"localhost", "localhost.localdomain", "0.0.0.0", "127.0.0.1", "::1", "::", "none", "null"}
)

# Where everybody's software and documentation is; naming them says nothing about the machine.
_PUBLIC = [
    "huggingface.co",
    "github.com",
    "githubusercontent.com",
    "gitlab.com",
    "pypi.org",
    "pythonhosted.org",
    "python.org",
    "pytorch.org",
    "w3.org",
    "vllm.ai",
    "readthedocs.io",
    "docs.rs",
    "nvidia.com",
    "docker.com",
    "docker.io",
    "json-schema.org",
    "w3id.org",
    "schema.org",
    "apache.org",
    "openai.com",
    "modelscope.cn",
    "arxiv.org",
    "doi.org",
    "orcid.org",
    "zenodo.org",
    "spdx.org",
    "pydantic.dev",
    "matplotlib.org",
    "snakemake.readthedocs.io",
    "purl.org",
    "creativecommons.org",
    "bioschemas.org",
    "example.org",
    "example.com",
    "kernel.org",
    "debian.org",
    "conda.io",
    "anaconda.org",
]


def is_public_host(host: str) -> bool:
    """Whether a name in a URL is the loopback or a public site."""
    name = host.lower().strip("[]")
    if name in NO_HOST or name.startswith(("127.", "redacted_", "{")):
        return True
    return any(name == site or name.endswith(f".{site}") for site in _PUBLIC)


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6 and "::" in text:
        # C++ names such as add::face are made of hex letters too.
        groups = [group for group in text.split(":") if group]
        if len(groups) < 2 or not any(group.isdigit() or group[0].isdigit() for group in groups):
            return False
    return not (address.is_loopback or address.is_unspecified or text.startswith("255."))


def _address(match: re.Match[str]) -> str:
    return stand_in("address") if _is_address(match[0]) else match[0]


def _named(kind: str) -> Replace:
    return lambda match: f"{match['head']}{stand_in(kind)}"


def _url_host(match: re.Match[str]) -> str:
    host = match["host"]
    return match[0] if is_public_host(host) else f"{match['scheme']}{stand_in('host')}"


_VALUE = r"(?P<value>[^\s'\",;}\])&<\\]+)"

TOKENS = (
    r"hf_[A-Za-z0-9]{20,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"glpat-[A-Za-z0-9_-]{16,}",
    r"sk-[A-Za-z0-9_-]{16,}",
    r"nvapi-[A-Za-z0-9_-]{20,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"AIza[0-9A-Za-z_-]{30,}",
    r"(?:npm|pypi|dckr_pat|wandb)[_-][A-Za-z0-9_-]{24,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    r"ssh-(?:rsa|ed25519|dss) AAAA[0-9A-Za-z+/=]{20,}",
)

SECRET_RULES = (
    Rule(
        "key",
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
    ),
    Rule("token", re.compile(rf"(?<![\w-])(?:{'|'.join(TOKENS)})(?![\w-])")),
    Rule(
        "token",
        re.compile(r"(?P<head>\b(?:Bearer|Basic)\s+)(?P<value>(?!redacted_)[A-Za-z0-9._~+/=-]{8,})"),
        _named("token"),
        2,
    ),
    Rule(
        "login",
        re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"]+(?=@)(?<!redacted_login)"),
        _named("login"),
    ),
    Rule(
        "secret",
        re.compile(
            rf"(?P<head>(?<![A-Za-z0-9_])(?:{_SECRET_NAME}|(?-i:[A-Z0-9_]+_TOKEN))(?:\\?['\"])?\s*[:=]\s*(?:\\?['\"])?)"
            rf"(?!redacted_|(?:null|none|true|false|bearer|basic)\b){_VALUE}",
            re.IGNORECASE,
        ),
        _named("secret"),
        2,
    ),
    Rule(
        "secret",
        re.compile(rf"(?P<head>--(?:{_SECRET_NAME}|token)(?:=|\s+))(?!redacted_|--){_VALUE}", re.IGNORECASE),
        _named("secret"),
        2,
    ),
)

PLACE_RULES = (
    Rule(
        "home",
        re.compile(r"(?P<head>/(?:home|Users)/)(?P<value>[^/\s'\":,;)\]<>&\\{}$*]+)"),
        lambda m: "/redacted_home",
        2,
    ),
    Rule("home", re.compile(r"(?<![\w./-])/root(?![\w-])"), lambda m: "/redacted_home"),
    Rule(
        "host",
        re.compile(r"(?P<head>\[\d+\.\d+\]\s+\[)(?P<value>[A-Za-z][\w.-]*)(?=:\d+:\d+)"),
        _named("host"),
        2,
    ),
    Rule(
        "host",
        re.compile(
            r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://(?:redacted_login@)?)(?P<host>[A-Za-z0-9_][\w.-]*)"
        ),
        _url_host,
    ),
    Rule(
        "host",
        re.compile(
            r"(?<![\w.-])[A-Za-z0-9][\w-]*(?:\.[\w-]+)*\.(?:internal|lan|corp|intra|localdomain|cluster\.local)(?![\w.-])"
        ),
    ),
    Rule("email", re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}(?![\w-])")),
    Rule("address", re.compile(r"(?<![\w.-])(?<!==)\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\d)"), _address),
    Rule("address", re.compile(r"(?<![\w:.-])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)),
    Rule(
        "address",
        re.compile(r"(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?![\w:])", re.IGNORECASE),
        _address,
    ),
)
