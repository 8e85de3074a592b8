# SPDX-License-Identifier: Apache-2.0
"""An archive is whole, the same twice, and any touched byte shows by name."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from splitbench.archive.bag import PAYLOAD, pack, write_tags
from splitbench.archive.verify import unpacked, verify
from splitbench.cli import main
from splitbench.files import read_json, write_json
from tests.unit.archive.conftest import Finished, git

# The Workflow Run profile was written upon RO-Crate 1.1, and its validator asks for that version's name.
OLDER_VERSION = "ro-crate-1.1_5.3"
PROFILES = ("ro-crate-1.2", "workflow-run-crate-0.5")


def test_it_holds_everything(finished: Finished) -> None:
    with zipfile.ZipFile(finished.archive) as archive:
        names = {name.removeprefix("tiny/data/") for name in archive.namelist()}
    cell = finished.flow.cells.ids[0]
    results = "results/tiny"
    wanted = {
        *(
            "experiment.yaml",
            "experiment.resolved.json",
            "archive.json",
            "README.md",
            "ro-crate-metadata.json",
        ),
        *("LICENSE", "CITATION.cff", "workflow/Snakefile", "workflow/rules/common.smk"),
        *(f"{results}/plans/{layout}.json" for layout in ("agg", "pd")),
        *(
            f"{results}/cells/{cell}/{name}.json.gz"
            for name in ("bench", "metrics", "engine_facts", "telemetry", "record", "cell", "status")
        ),
        *(f"{results}/parts/{cell}/{name}.parquet" for name in ("cell", "requests", "tokens", "checks")),
        *(
            f"{results}/figures/itl_by_concurrency-long{suffix}"
            for suffix in (".png", ".pdf", ".svg", ".csv", ".json")
        ),
        *(f"{results}/{name}" for name in ("report.html", "statistics.json", "tables/cells.parquet")),
        f"{results}/environment/client-{finished.flow.stack_key}.json",
        f"{results}/logs/cells/{cell}.log.gz",
    }
    assert wanted <= names
    assert finished.index["redaction"] == {"replaced": {}, "made_again": []}


def test_it_verifies(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(finished.archive)]) == 0
    out = capsys.readouterr().out
    for stage in ("manifest", "config", "tables", "statistics", "figures", "report"):
        assert f"ok       {stage}: " in out


def test_the_same_results_give_the_same_bytes(finished: Finished, tmp_path: Path) -> None:
    finished.build(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == finished.archive.read_bytes()


def test_any_flipped_byte_is_found_and_its_file_named(finished: Finished, tmp_path: Path) -> None:
    data = finished.archive.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        start_dir = archive.start_dir
    rng = random.Random(5)
    places = []
    for info in rng.sample(infos, 12):
        content = info.header_offset + 30 + len(info.filename)
        places.append((content + rng.randrange(info.file_size), info.filename))
    first = infos[0]
    # Times and modes in the zip's own headers are under no digest; the zip as a whole has but one form.
    places += [
        (first.header_offset + 10, first.filename),
        (start_dir + 12, first.filename),
        (start_dir + 38, first.filename),
    ]
    places.append((len(data) - 1, None))
    for at, name in places:
        for bit in (0x01, 0x20):
            flipped = bytearray(data)
            flipped[at] ^= bit
            path = tmp_path / "flipped.zip"
            path.write_bytes(flipped)
            found = _names(path)
            assert found, f"byte {at} of {name} was not noticed"
            if name is not None:
                short = name.partition("/")[2]
                assert any(short in one for one in found), (name, found)


def _names(path: Path) -> list[str]:
    from splitbench.errors import UserError

    try:
        return [name for name, _ in verify(path).differs]
    except UserError as error:
        return [str(error)]


def _forged(finished: Finished, tmp_path: Path, edit: object) -> list[tuple[str, str]]:
    """What is found in an archive that was edited and put under new, right digests."""
    with unpacked(finished.archive) as (bag, _):
        copy = tmp_path / "tiny"
        shutil.copytree(bag, copy)
    edit(copy / PAYLOAD)  # type: ignore[operator]
    write_tags(copy, {"External-Identifier": "tiny"})
    pack(copy, "tiny", tmp_path / "forged.zip")
    return verify(tmp_path / "forged.zip").differs


def test_a_changed_number_of_a_figure_is_found_under_right_digests(
    finished: Finished, tmp_path: Path
) -> None:
    name = "results/tiny/figures/ttft_of_layouts-long.csv"

    def edit(tree: Path) -> None:
        lines = (tree / name).read_text().splitlines()
        fields = lines[1].split(",")
        at = lines[0].split(",").index("x_ms")
        fields[at] = repr(float(fields[at]) * 1.01)
        (tree / name).write_text("\n".join([lines[0], ",".join(fields), *lines[2:]]) + "\n")

    found = dict(_forged(finished, tmp_path, edit))
    assert list(found) == [name]


def test_a_changed_parquet_value_is_found_under_right_digests(finished: Finished, tmp_path: Path) -> None:
    name = f"results/tiny/parts/{finished.flow.cells.ids[0]}/requests.parquet"

    def edit(tree: Path) -> None:
        table = pq.read_table(tree / name)
        at = table.column_names.index("ttft_ms")
        values = table["ttft_ms"].to_pylist()
        values[0] += 1.0
        import pyarrow as pa

        pq.write_table(
            table.set_column(at, table.schema.field(at), pa.array(values, pa.float64())), tree / name
        )

    found = dict(_forged(finished, tmp_path, edit))
    assert "ttft_ms, row 0" in found[name]


def test_a_changed_word_of_the_report_is_found_under_right_digests(
    finished: Finished, tmp_path: Path
) -> None:
    name = "results/tiny/report.html"

    def edit(tree: Path) -> None:
        page = (tree / name).read_text(encoding="utf-8")
        assert "4 of 4" in page
        (tree / name).write_text(page.replace("4 of 4", "5 of 4", 1), encoding="utf-8")

    found = _forged(finished, tmp_path, edit)
    assert [path for path, _ in found] == [name]
    assert "5 of 4" in found[0][1]


def test_a_changed_statistic_and_a_changed_plan_are_found_under_right_digests(
    finished: Finished, tmp_path: Path
) -> None:
    def edit(tree: Path) -> None:
        statistics = read_json(tree / "results/tiny/statistics.json")
        statistics["cells"][0]["itl_ms"]["p99"]["value"] += 0.1
        write_json(tree / "results/tiny/statistics.json", statistics)
        plan = read_json(tree / "results/tiny/plans/agg.json")
        plan["engines"][0]["argv"].append("--enforce-eager")
        write_json(tree / "results/tiny/plans/agg.json", plan)

    found = dict(_forged(finished, tmp_path, edit))
    assert "cells[0].itl_ms.p99.value" in found["results/tiny/statistics.json"]
    assert "results/tiny/plans/agg.json" in found


def test_public_validators_take_it(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    bagit = pytest.importorskip("bagit")
    rocrate = pytest.importorskip("rocrate")
    pytest.importorskip("rocrate_validator")
    import requests
    import requests_cache
    from rocrate_validator import models, services

    # The terms come with the library, so that the test asks nothing of the network; they are 1.3's, in which one has
    # another name than in the 1.2 that the archive states.
    terms = json.loads(
        (Path(rocrate.__file__).parent / "data" / "ro-crate.jsonld").read_text(encoding="utf-8")
    )
    terms["@context"]["ComputationalWorkflow"] = "https://bioschemas.org/ComputationalWorkflow"

    def answered(self: requests.Session, method: str, url: str, **_: Any) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer.url, answer._content = 200, url, json.dumps(terms).encode()
        answer.headers["Content-Type"] = "application/ld+json"
        return answer

    for session in (requests.Session, requests_cache.CachedSession):
        monkeypatch.setattr(session, "request", answered)
    with unpacked(finished.archive) as (bag, _):
        assert bagit.Bag(str(bag)).validate()
        for profile in PROFILES:
            settings = services.ValidationSettings(
                rocrate_uri=str(bag / PAYLOAD),
                profile_identifier=profile,
                requirement_severity=models.Severity.REQUIRED,
                skip_checks=[OLDER_VERSION],
            )
            issues = services.validate(settings).get_issues()
            assert not issues, [f"{issue.check.identifier}: {issue.message}" for issue in issues]


def test_the_code_says_what_it_is(finished: Finished, repository: Path, tmp_path: Path) -> None:
    from splitbench.archive.code import code_of

    clean = code_of(repository)
    assert clean.commit and not clean.changed and "without any change" in clean.words
    copy = tmp_path / "dirty"
    shutil.copytree(repository, copy)
    (copy / "Snakefile").write_text("# edited\n", encoding="utf-8")
    (copy / "rules" / "new.smk").write_text("# new\n", encoding="utf-8")
    (copy / "private.txt").write_text("not code\n", encoding="utf-8")
    dirty = code_of(copy)
    assert dirty.commit == clean.commit
    assert dirty.changed == ("Snakefile", "rules/new.smk")
    assert dirty.files["Snakefile"] == b"# edited\n" and "private.txt" not in dirty.files
    assert "uncommitted changes in 2 file(s)" in dirty.words
    shutil.rmtree(copy / ".git")
    loose = code_of(copy)
    assert loose.commit is None and "no git said" in loose.words and "rules/new.smk" in loose.files
    git(repository, "status")
