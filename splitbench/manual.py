# SPDX-License-Identifier: Apache-2.0
"""Reference pages made from the code: `python -m splitbench.manual` writes them, a test compares.

Whole pages: the config's keys, the command line, the tables, the JSON Schema. In pages written by hand a block between
`<!-- made: NAME -->` and `<!-- /made -->` is filled in.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from splitbench.cli import EXIT_CODES, build_parser
from splitbench.experiment.cli_config import schema_text
from splitbench.experiment.explain import Key, all_keys
from splitbench.files import write_text
from splitbench.measuring import checks, signatures
from splitbench.serving.failures import KNOWN_CAUSES
from splitbench.tables import docs as tables_page

_MADE = "<!-- Made by `make pages` from {source}; edits here are lost. -->"
_BLOCK = re.compile(r"(?P<head><!-- made: (?P<name>[\w-]+) -->\n).*?(?P<foot><!-- /made -->)", re.DOTALL)

_ABOUT_KEYS = """\
`splitbench config explain KEY` says the same in the terminal, and editors that know YAML's language server read it from
`config/schema.json`. `NAME` is a name that you give, `[]` an item of a list. A key without a default must be given.
What a change runs again holds for `snakemake` with this repository's profile.""".splitlines()
_ABOUT_OUTPUT = """\
`snakemake` runs experiments; `splitbench` is for what a person does beside it. What is asked for goes to standard
output, progress and errors to standard error. There are no colours. One line moves while a cell is measured, on a
terminal only; elsewhere it is a plain line a minute.""".splitlines()
_ABOUT_CODES = """\
`snakemake` itself ends with 0 when all targets are there, and with 1 when a job failed, the config is wrong, or it was
interrupted. A cell that a check refuses is a result, not a failure: its job ends with 0.""".splitlines()


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    columns = lines[0].count(" | ") + 1
    return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]]) + "\n"


def config_page() -> str:
    """Every key of an experiment."""
    parts = [
        _MADE.format(source="splitbench/experiment/models.py"),
        "",
        "# Keys of an experiment",
        "",
        *_ABOUT_KEYS,
        "",
    ]
    top = [key for key in all_keys() if "." not in key.path]
    parts += ["## Top level", "", _keys_table(top)]
    for key in top:
        groups = _groups(key.path)
        if groups:
            parts += [f"## {key.path}", "", f"{_sentence(key.meaning)}", ""]
        for titles, rows in groups:
            if titles != [key.path]:
                parts += [f"### {', '.join(f'`{title}`' for title in titles)}", ""]
            parts.append(_keys_table(rows))
    return "\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _groups(section: str) -> list[tuple[list[str], list[Key]]]:
    """Keys below a section, by the place they stand at; places with the same keys are one group."""
    groups: dict[tuple[tuple[str, str, str | None], ...], tuple[list[str], list[Key]]] = {}
    places: dict[str, list[Key]] = {}
    for key in all_keys():
        if key.path.startswith(f"{section}."):
            place = key.path.rpartition(".")[0]
            # The kind tells layouts apart, not the engines inside them.
            of = f" ({key.kind})" if key.kind and place.count(".") == 1 else ""
            places.setdefault(f"{place}{of}", []).append(key)
    for place, keys in places.items():
        same = tuple((key.path.rpartition(".")[2], key.type, key.default) for key in keys)
        groups.setdefault(same, ([], keys))[0].append(place)
    return list(groups.values())


def _keys_table(keys: list[Key]) -> str:
    rows = (
        (
            f"`{key.path.rpartition('.')[2]}`",
            key.meaning,
            key.type,
            "" if key.default is None else key.default,
            key.reruns,
        )
        for key in keys
    )
    return table(("key", "meaning", "type", "default", "a change runs again"), rows)


def cli_page() -> str:
    """Every command with its arguments, and the exit codes."""
    parts = [
        _MADE.format(source="splitbench/cli.py"),
        "",
        "# The command line",
        "",
        *_ABOUT_OUTPUT,
        "",
        *_command(build_parser(), "splitbench"),
        "## Exit codes",
        "",
        table(("code", "meaning"), ((str(code), meaning) for code, meaning in EXIT_CODES.items())),
        *_ABOUT_CODES,
        "",
        "## Variables",
        "",
        table(
            ("variable", "meaning"),
            (
                ("`SPLITBENCH_STORE`", "folder of environments and models (default `.splitbench`)"),
                (
                    "`SPLITBENCH_STATE`",
                    "folder of the supervisor's state (default: one per user and machine)",
                ),
                ("`SPLITBENCH_QUIET`", "set to anything: no lines of progress, from rules either"),
                ("`SPLITBENCH_REDACT`", "file of further words that are taken out of archives, a line each"),
            ),
        ),
    ]
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, name: str) -> list[str]:
    rows, below = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            described = {each.dest: each.help or "" for each in action._choices_actions}
            for child, child_parser in action.choices.items():
                below.append((child_parser, f"{name} {child}", described.get(child, "")))
        elif action.dest != "help":
            rows.append(
                (_argument(action), _argument_default(action), (action.help or "").split(" (default")[0])
            )
    lines = [table(("argument", "default", "meaning"), rows)] if rows else []
    for child_parser, child_name, words in below:
        has_own = any(
            not isinstance(each, argparse._SubParsersAction | argparse._HelpAction)
            for each in child_parser._actions
        )
        if has_own or not child_parser._subparsers:
            lines += [f"## {child_name}", "", _sentence(words), ""]
        lines += _command(child_parser, child_name)
    return lines


def _argument(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`{value}`" + (" (may be left out)" if action.nargs == "?" else "")
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{takes}`" for option in action.option_strings)


def _argument_default(action: argparse.Action) -> str:
    shown = action.default not in (None, False, argparse.SUPPRESS)
    return f"`{action.default}`" if shown else ""


def failures_block() -> str:
    """Texts that logs of engines hold, and what to do: in the order in which they are looked for."""
    lines = []
    for cause in KNOWN_CAUSES:
        lines += [
            f"- {', '.join(f'`{text}`' for text in _messages(cause.pattern))}<br>",
            f"  {_sentence(cause.mend)}",
        ]
    return "\n".join(lines) + "\n"


def _messages(pattern: str) -> list[str]:
    """A pattern's alternatives as a person would see them in a log."""
    found, depth, text = [], 0, ""
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            found.append(text)
            text = ""
        else:
            text += character
    return [_readable(each) for each in (*found, text)]


def _readable(pattern: str) -> str:
    text = re.sub(r"\(?\[\\w\.\]\+\)?|\\w\+|\.\*", "...", pattern)
    text = re.sub(r"\[(\w)\w+\]", r"\1", text)
    text = re.sub(r"\((?:\?:)?([^()]+)\)", lambda found: found[1].replace("|", "/"), text)
    return re.sub(r"\\(.)", r"\1", text.replace("s? ", "s "))


def thresholds_block() -> str:
    """The limits of the checks with their defaults."""
    keys = [key for key in all_keys() if key.path.startswith("thresholds.")]
    return table(
        ("key", "default", "meaning"), ((f"`{key.path}`", str(key.default), key.meaning) for key in keys)
    )


def check_names() -> dict[str, str]:
    """Every check that `all_checks` makes, by its name, with the first line of its text."""
    found = {}
    for module, name in re.findall(r"(?:(\w+)\.)?(\w+)\(evidence\)", inspect.getsource(checks.all_checks)):
        function = getattr(getattr(checks, module) if module else checks, name)
        first = (inspect.getdoc(function) or "").split("\n")[0]
        found[name.replace("_", "-")] = first.partition("; None")[0].removesuffix(".")
    return found


def checks_block() -> str:
    """The checks on one line each."""
    return table(
        ("check", "what holds when it is ok"), ((f"`{name}`", text) for name, text in check_names().items())
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "failures": failures_block,
    "thresholds": thresholds_block,
    "checks": checks_block,
}
WHOLE: dict[str, Callable[[], str]] = {
    "config/schema.json": schema_text,
    "docs/cli.md": cli_page,
    "docs/config.md": config_page,
    "docs/log-signatures.md": signatures.render,
    "docs/tables.md": tables_page.render,
}


def filled(text: str) -> str:
    """A page with its blocks as the code makes them now.

    Raises:
        KeyError: a block that nothing makes.
    """
    return _BLOCK.sub(lambda found: f"{found['head']}{BLOCKS[found['name']]()}{found['foot']}", text)


def current(repository: Path) -> dict[Path, str]:
    """Every page that is made in whole or part, as it should be."""
    pages = {repository / name: make() for name, make in WHOLE.items()}
    for page in sorted((repository / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page not in pages and _BLOCK.search(text):
            pages[page] = filled(text)
    return pages


def main() -> int:
    """Write every page that isn't as it should be."""
    for path, text in current(Path.cwd()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            sys.stdout.write(f"{path.relative_to(Path.cwd())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
