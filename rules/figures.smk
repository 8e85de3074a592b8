# SPDX-License-Identifier: Apache-2.0
# One rule for every figure; its params are the slice of the config that it shows.


def figure_slice(wildcards):
    return flow.figure_text(wildcards.figure)


def figure_files():
    return [flow.path(f"figures/{name}.png") for name in flow.figure_names]


rule figure:
    input:
        parts=rules.tables.output.parts,
        # The listing keeps its content when a part is made again, so the parts count themselves.
        tokens=rules.tables.input.tokens,
        checks=rules.tables.input.checks,
    output:
        png=report(
            flow.path("figures/{figure}.png"),
            caption="../docs/captions/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        pdf=flow.path("figures/{figure}.pdf"),
        svg=flow.path("figures/{figure}.svg"),
        data=flow.path("figures/{figure}.csv"),
        sidecar=flow.path("figures/{figure}.json"),
    wildcard_constraints:
        figure=r"[^/]+",
    log:
        flow.path("logs/figures/{figure}.log"),
    params:
        spec=figure_slice,
    conda:
        "../envs/workflow.yaml"
    script:
        "../scripts/figure.py"
