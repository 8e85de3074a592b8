# SPDX-License-Identifier: Apache-2.0
# One rule for every figure; its params are the slice of the config that it shows.


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
            subcategory=figure_workload,
            labels={"figure": "{figure}"},
        ),
        pdf=flow.path("figures/{figure}.pdf"),
        svg=flow.path("figures/{figure}.svg"),
        data=flow.path("figures/{figure}.csv"),
        sidecar=flow.path("figures/{figure}.json"),
    log:
        flow.path("logs/figures/{figure}.log"),
    wildcard_constraints:
        figure=r"[^/]+",
    conda:
        "../envs/workflow.yaml"
    params:
        spec=figure_slice,
    script:
        "../scripts/figure.py"


# `snakemake figures/itl_of_layouts-long` draws that one. A rule with a wildcard can be wanted by its files only, and these
# lie below results/, so each figure has a rule that is named like it.
for figure_name in flow.figure_names:

    rule:
        name:
            f"figures/{figure_name}"
        input:
            flow.path(f"figures/{figure_name}.png"),
        localrule: True
        conda:
            "../envs/workflow.yaml"
