# SPDX-License-Identifier: Apache-2.0
"""The reference of the tables, made from their schema: `python -m splitbench.tables.docs docs/tables.md`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

from splitbench.files import write_text
from splitbench.tables.schema import LINEAGE_KEYS, SCHEMA_VERSION, TABLES, Table

_HEAD = """\
<!-- Made by `python -m splitbench.tables.docs docs/tables.md` from splitbench/tables/schema.py. -->

# Tables

Every cell's numbers are Parquet files beside its raw result: one part per cell and table, read together as
one table. This page is schema version {version}. Latencies are in milliseconds, times and durations in
seconds; the names say so. A value that the source lacks is null. A latency is the source's seconds times
1,000, rounded once to a double; the source file's sha256 is in every part.

## Ask

SQL over all cells below `results/`:

```bash
.venv/bin/splitbench sql "select layout, concurrency, quantile_disc(itl_ms, 0.99) p99_ms \
  from tokens join cells using (cell_id) where ok group by all order by all"
```

The same file by file in pandas:

```python
import pandas as pd
from pathlib import Path

requests = pd.concat(map(pd.read_parquet, sorted(Path("results").rglob("requests.parquet"))))
```

In Python, without holding the ITLs of all cells at once:

```python
from pathlib import Path
from splitbench.tables import dataset
from splitbench.statistics.clusters import clustered_quantile

parts = dataset.find_parts(Path("results/demo"))
table = dataset.cells(parts).to_pandas()
for batch in dataset.tokens(parts, ["request", "itl_ms"]):
    ...
print(clustered_quantile(dataset.clustered_itls(parts[:3]), 0.99).text)
```

`ok` parts answered requests from failed ones. A failed request keeps what it got before it failed (TTFT,
ITLs), so filter on `ok` before taking quantiles; `dataset.tokens` does unless told otherwise.

## Other tools' results

```bash
.venv/bin/splitbench import theirs.json --layout theirs --kind pd --budget 4 --budget-kind gpus
```

reads the files of the tools below into the same tables (by default under `results/imported/cells`).

| tool | file | requests | single ITLs | not in the file, hence null |
|---|---|---|---|---|
| vLLM | `bench serve` JSON, also appended to | yes | yes | identity of the layout |
| SGLang | `bench_serving` JSON Lines | with details | yes | start times, E2E (derived), prompts asked |
| AIPerf | `profile_export.jsonl` | yes | per chunk | concurrency or rate |
| AIPerf | `profile_export_aiperf.json` | no | no | everything per request |
| GenAI-Perf | `profile_export_genai_perf.json` | no | no | everything per request |
| GenAI-Perf | `profile_export.json` | yes | per chunk with text | token counts, TPOT |
| guidellm | `benchmarks.json` | yes | no, their mean only | second token, P99 and max of a request's ITLs |
| inference-perf | `per_request_lifecycle_metrics.json` | yes | yes | concurrency or rate |
| inference-perf | `stage_N_...`, `summary_lifecycle_metrics.json` | no | no | everything per request |
| InferenceX | raw results (vLLM's shape) | yes | yes | identity of the layout |
| InferenceX | `agg_*.json` | no | no | everything per request, counts, duration |
| inference-benchmarker | `results.json` | no | no | everything per request |
"""

_TAIL = """\
## Lineage

Keys in the metadata of every part (`pyarrow.parquet.read_schema(path).metadata`, or
`splitbench.tables.parts.read_lineage`):

| key | meaning |
|---|---|
{lineage}

A new nullable column may come without a new schema version; readers fill it with null in older parts. A
column that changes its meaning or goes away raises the version.
"""


def type_name(type_: pa.DataType) -> str:
    """An Arrow type as a reader of the documentation wants it."""
    if pa.types.is_map(type_):
        return f"map of text to {type_name(type_.item_type)}"
    if pa.types.is_dictionary(type_) or pa.types.is_string(type_):
        return "text"
    if pa.types.is_timestamp(type_):
        return "time, UTC"
    return {"double": "float64", "bool": "true or false"}.get(str(type_), str(type_))


def _table(table: Table) -> str:
    lines = [f"## {table.name}", "", f"One row is {table.row}. File: `{table.file}`.", ""]
    lines += ["| column | type | null | meaning |", "|---|---|---|---|"]
    for column in table.columns:
        null = "yes" if column.nullable else "no"
        lines.append(f"| `{column.name}` | {type_name(column.type)} | {null} | {column.meaning} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """The whole page, as Markdown."""
    lineage = "\n".join(f"| `{key}` | {meaning} |" for key, meaning in LINEAGE_KEYS.items())
    sections = [
        _HEAD.format(version=SCHEMA_VERSION),
        *map(_table, TABLES.values()),
        _TAIL.format(lineage=lineage),
    ]
    return "\n".join(sections)


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), render())
