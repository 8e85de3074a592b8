# SPDX-License-Identifier: Apache-2.0
"""Other tools' result files into the same tables. What a format lacks is null, never invented.

The formats are those that the tools' own documentation and writers state:

- AIPerf: `profile_export.jsonl` (per request) and `profile_export_aiperf.json` (summary)
- GenAI-Perf: `profile_export.json` (per request) and `profile_export_genai_perf.json` (summary)
- guidellm: `benchmarks.json`, of the versions before and after 0.4
- inference-perf: `per_request_lifecycle_metrics.json` and the lifecycle summaries
- InferenceX (InferenceMAX): the raw results, which are the vLLM client's, and the `agg_*.json` made of them
- Hugging Face inference-benchmarker: `results.json`
- SGLang's bench_serving: its JSON Lines, which are the vLLM client's shape under a few other keys
"""

from splitbench.tables.importers.run import import_file

__all__ = ["import_file"]
