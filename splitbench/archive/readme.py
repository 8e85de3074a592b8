# SPDX-License-Identifier: Apache-2.0
"""The archive's own README: what it holds, how to check it, what was taken out, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {
    "token": "tokens",
    "key": "private keys",
    "secret": "secrets known by their name",
    "login": "logins in URLs",
    "user": "user names",
    "host": "host names",
    "home": "home paths",
    "email": "mail addresses",
    "address": "network addresses",
}


def readme(index: Mapping[str, Any]) -> str:
    """The text, from the archive's index."""
    name, cells = index["experiment"], index["cells"]
    layouts = list(dict.fromkeys(cell["layout"] for cell in cells))
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    config = (
        "`experiment.yaml` is the config that the experiment was run with."
        if index["config"]["verbatim"]
        else "`experiment.yaml` is the effective config, merged from several files or command line values."
    )
    return f"""# {index["title"]}

Results of the splitbench experiment `{name}`: {len(cells)} cells, measured
from {index["measured"]["first"]} to {index["measured"]["last"]}.
Layouts: {", ".join(layouts)}. Workloads: {", ".join(workloads)}.

## What lies where

{config} `experiment.resolved.json` has every default written out. `archive.json` is an index for programs.

| path | what |
|---|---|
| `results/{name}/report.html` | the page to open first |
| `results/{name}/figures/` | figures; `.csv` holds the numbers drawn, `.json` what they rest on |
| `results/{name}/statistics.json`, `tables/`, `parts/` | statistics and Parquet tables, one part per cell |
| `results/{name}/cells/` | per cell: the client's JSON, counters, record, effective slice (`.gz`) |
| `results/{name}/plans/`, `environment/`, `logs/` | launch plans; machine and software; logs (`.gz`) |
| `workflow/` | the workflow's code; `workflow/envs/` has the locks |
| `ro-crate-metadata.json` | the same for machines: RO-Crate 1.2, profile Workflow Run Crate |

{index["code"]["words"]}

## Check it

    splitbench verify ARCHIVE.zip

needs no GPU. It compares every file with the manifest, makes every Parquet part again from the raw files, and
the numbers of the figures and of the report again from Parquet, and names what differs. In the folder above this
one, `sha256sum -c manifest-sha256.txt` does the first part alone.

    splitbench trace results/{name}/figures/NAME.csv --in ARCHIVE.zip

says which cells, plans, config lines, environment and raw files something rests on.

## Go on with it

    splitbench restore ARCHIVE.zip FOLDER
    cd FOLDER && snakemake --snakefile workflow/Snakefile --configfile experiment.yaml -n

says that there is nothing to do; after an edit of one layout it plans the cells of that layout. Without splitbench:
unzip, then `gunzip -r data/results`. `snakemake --touch --forceall` once, with the same options, lets snakemake notice
edits of what has no digest in its path (SLO, figures, title).

## What was taken out

{_redaction(index["redaction"])}
"""


def _redaction(redaction: Mapping[str, Any]) -> str:
    replaced = redaction["replaced"]
    if not replaced:
        return "Nothing: no token, key, login, user or host name, home path or address was found."
    found = ", ".join(f"{_KINDS.get(kind, kind)} ({count})" for kind, count in replaced.items())
    text = (
        f"Replaced by words such as `redacted_token` (number of places looked at): {found}.\n"
        "All digests, those in records and tables too, are of the files as they are in here; the originals' digests\n"
        "are not given, since a short secret could be guessed from one."
    )
    again = redaction["made_again"]
    if again:
        listed = ", ".join(again[:12]) + (" and more" if len(again) > 12 else "")
        text += f"\nWhat rests on a changed file was made again from it: {listed}."
    return text
