# SPDX-License-Identifier: Apache-2.0
"""How often a 95 % interval holds the truth, on simulated ITLs that cluster in requests and server starts.

The table that it prints stands in docs/method-statistics.md; `--write FILE` puts it between the marks there.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import beta

from splitbench.files import write_text
from splitbench.statistics.bootstrap import SEED
from splitbench.statistics.clusters import clustered, clustered_quantile

TOKENS = 40
MARKS = ("<!-- coverage -->", "<!-- /coverage -->")


@dataclass(frozen=True)
class Design:
    """An experiment, and how much its parts vary (standard deviations of the logarithm)."""

    restarts: int
    runs: int
    requests: int
    restart_sd: float
    run_sd: float
    request_sd: float = 0.1

    @property
    def text(self) -> str:
        """As the table names it."""
        size = f"{self.restarts} starts x {self.runs} runs x {self.requests} requests"
        return f"{size} | {self.restart_sd:g} / {self.run_sd:g} / {self.request_sd:g}"


DESIGNS = (
    Design(1, 1, 400, 0.0, 0.0),
    Design(1, 3, 200, 0.0, 0.03),
    Design(3, 1, 150, 0.0, 0.0),
    Design(3, 1, 150, 0.05, 0.03),
    Design(3, 2, 150, 0.0, 0.0),
    Design(3, 2, 150, 0.05, 0.03),
    Design(5, 2, 100, 0.1, 0.05),
)


def simulate(rng: np.random.Generator, d: Design) -> np.ndarray:
    """ITLs of shape (restarts, runs, requests, tokens): log-normal with stalls, more in some requests."""
    shape = (d.restarts, d.runs, d.requests)
    log = (
        rng.normal(0, 1, (d.restarts, 1, 1)) * d.restart_sd
        + rng.normal(0, 1, (d.restarts, d.runs, 1)) * d.run_sd
        + rng.normal(0, 1, shape) * d.request_sd
    )
    values = np.exp(log[..., None] + rng.normal(0, 0.15, (*shape, TOKENS)))
    often = 0.02 * np.exp(rng.normal(-0.125, 0.5, (*shape, 1)))
    stalled = rng.random(values.shape) < often
    return np.where(stalled, values * (5 + 5 * rng.random(values.shape)), values)


def true_quantile(d: Design, p: float) -> float:
    """Quantile of the population, from a sample so large that its own error does not matter."""
    wide = Design(6000, 1, 20, d.restart_sd, d.run_sd, d.request_sd)
    return float(np.quantile(simulate(np.random.default_rng(1), wide), p))


def ours(values: np.ndarray, d: Design, p: float) -> tuple[float, float]:
    """The library's interval."""
    unit, level = np.arange(values[..., 0].size).reshape(values.shape[:3]), "request"
    if d.restarts > 1:
        unit, level = np.broadcast_to(np.arange(d.restarts)[:, None, None], values.shape[:3]), "restart"
    elif d.runs > 1:
        unit, level = np.broadcast_to(np.arange(d.runs)[None, :, None], values.shape[:3]), "run"
    sample = clustered(values.ravel(), np.repeat(unit.ravel(), TOKENS), level, values[..., 0].size)
    interval = clustered_quantile(sample, p).interval
    return interval.low, interval.high


def tokens_as_independent(values: np.ndarray, d: Design, p: float) -> tuple[float, float]:
    """What the token count would promise."""
    n = values.size
    low, high = beta.ppf([0.025, 0.975], n * p, n * (1 - p))
    ends = np.quantile(values, [low, high])
    return float(ends[0]), float(ends[1])


def every_level_again(values: np.ndarray, d: Design, p: float, draws: int = 200) -> tuple[float, float]:
    """Percentiles of a bootstrap that draws starts, then runs in them, then requests in these."""
    rng = np.random.default_rng(7)
    edges = np.quantile(
        values, np.concatenate([np.linspace(0.001, 0.97, 200), np.linspace(0.97, 1, 200)[1:]])
    )
    flat = values.reshape(-1, TOKENS)
    below = np.stack([np.searchsorted(np.sort(row), edges, side="right") for row in flat])
    weights = np.zeros((draws, len(flat)))
    for k in range(draws):
        starts = rng.integers(0, d.restarts, d.restarts)
        runs = starts[:, None] * d.runs + rng.integers(0, d.runs, (d.restarts, d.runs))
        picked = runs[..., None] * d.requests + rng.integers(0, d.requests, (d.restarts, d.runs, d.requests))
        weights[k] = np.bincount(picked.ravel(), minlength=len(flat))
    shares = weights @ below / (weights.sum(axis=1, keepdims=True) * TOKENS)
    drawn = [np.interp(p, line, edges) for line in shares]
    ends = np.quantile(drawn, [0.025, 0.975])
    return float(ends[0]), float(ends[1])


WAYS = {
    "splitbench": ours,
    "every level drawn again": every_level_again,
    "tokens as independent": tokens_as_independent,
}


def coverage(runs: int, peers: int, seed: int = SEED) -> str:
    """The table, in Markdown; the peers only on the first simulations, as they are slow and far off."""
    lines = [
        f"| design | sd of start / run / request | quantile | {' | '.join(WAYS)} |",
        f"|---|---|---|{'---|' * len(WAYS)}",
    ]
    number = {name: runs if name == "splitbench" else min(peers, runs) for name in WAYS}
    totals = dict.fromkeys(WAYS, 0)
    for d in DESIGNS:
        for p in (0.5, 0.99):
            truth = true_quantile(d, p)
            hits = dict.fromkeys(WAYS, 0)
            for k in range(runs):
                values = simulate(np.random.default_rng([seed, k]), d)
                for name, way in WAYS.items():
                    if k < number[name]:
                        low, high = way(values, d, p)
                        hits[name] += low <= truth <= high
            shares = " | ".join(f"{hits[name] / number[name]:.1%}" for name in WAYS)
            lines.append(f"| {d.text} | P{p * 100:g} | {shares} |")
            for name in WAYS:
                totals[name] += hits[name]
            print(lines[-1], flush=True)
    overall = " | ".join(f"**{totals[name] / (2 * number[name] * len(DESIGNS)):.1%}**" for name in WAYS)
    lines.append(f"| all of them | | | {overall} |")
    margin = 1.96 * (0.05 * 0.95 / runs) ** 0.5
    sizes = f"{runs} simulations each (others: {min(peers, runs)}), {TOKENS} ITLs a request, seed {seed}"
    return "\n".join([*lines, "", f"{sizes}; a true 95 % would read 95 ± {100 * margin:.1f}."])


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--peers", type=int, default=60, help="simulations of the other ways")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose table is replaced")
    args = parser.parse_args()
    table = coverage(args.runs, args.peers)
    print(table)
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        pattern = re.compile(f"{MARKS[0]}.*?{MARKS[1]}", re.DOTALL)
        write_text(args.write, pattern.sub(lambda _: f"{MARKS[0]}\n{table}\n{MARKS[1]}", page))


if __name__ == "__main__":
    main()
