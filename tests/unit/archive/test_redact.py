# SPDX-License-Identifier: Apache-2.0
"""Secrets that are planted in config, environment, logs and command lines are not in the archive, which still holds."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from splitbench.archive.bag import PAYLOAD
from splitbench.archive.build import build_archive
from splitbench.archive.redact import Redactor
from splitbench.archive.verify import unpacked, verify
from tests.fakes.finished_results import finish, small_config

# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "token in the config's environment": "hf_" + "Qw3rTyUiOp" * 3 + "AsDf",
    "login in the config": "cacher:" + "r3d1s",
    "address in the config": "192.168" + ".77.5",
    "host in the config": "tracer9" + ".hpc.made",
    "key in a comment": "opaque-" + "71f0c9e2aa",
    "mail address in a comment": "zora.quill" + "@" + "lab.uni-made.edu",
    "user in a path of the config": "zquill",
    "user in the client's file": "mherzog",
    "user as a bare word, learned from a path": "pvandyck",
    "token in a log": "ghp_" + "a1B2c3D4e5" * 4,
    "cloud key in a log": "AKIA" + "Z7Y6X5W4V3U2T1S0",
    "web token in a log": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0x" + ".c2lnbmF0dXJlLW1hZGU",
    "bearer in a log": "b3ar" + "erValue_9081",
    "private key in a log": "MIIE" + "vQIBADANBgkqhkiG9w0BAQEFAASC",
    "password in a log": "hunter" + "2-and-more",
    "login in a URL": "deploy" + "er:pa55",
    "host in a URL": "wheels7" + ".hpc.made",
    "host in UCX's prefix": "gpunode" + "17a",
    "address in a log": "10.44" + ".7.201",
    "IPv6 address in a log": "fd12:3456" + ":789a::42",
    "hardware address in a log": "3c:ec:ef" + ":12:34:9d",
    "key in a command line": "cli-" + "key-44d1",
    "token in a command line": "sk-" + "proj-Zx81Kq" * 3,
    "address in the machine's record": "172.31" + ".9.4",
    "host in the machine's record": "racksw" + "3-n08",
    "host of this machine": "thismachine" + "-04",
}


def _planted(folder: Path, repository: Path) -> tuple[Path, dict[str, object]]:
    s = SECRETS
    config = small_config()
    config["stack"]["python"] = f"/home/{s['user in a path of the config']}/env/bin/python"
    # The config refuses keys that are secrets by name; values and comments can still hold some.
    config["engine"] = {
        "env": {
            "LMCACHE_EXTRA": s["token in the config's environment"],
            "LMCACHE_REMOTE_URL": f"redis://{s['login in the config']}@{s['address in the config']}:6379",
        }
    }
    config["layouts"]["agg"]["args"] = {"otlp-traces-endpoint": f"http://{s['host in the config']}:4317"}
    text = f"# ask {s['mail address in a comment']}, VLLM_API_KEY={s['key in a comment']}\n" + yaml.safe_dump(
        config, sort_keys=False
    )
    host, user = s["host in UCX's prefix"], s["user as a bare word, learned from a path"]
    key = s["key in a comment"]
    addresses = (s["address in a log"], s["IPv6 address in a log"], s["hardware address in a log"])
    log = "\n".join(
        [
            f"using {key} for requests",
            f"loaded /home/{user}/model by {user}",
            f"cloned with {s['token in a log']} and {s['cloud key in a log']}",
            f"cookie={s['web token in a log']}; Authorization: Bearer {s['bearer in a log']}",
            f"-----BEGIN PRIVATE KEY-----\n{s['private key in a log']}\n-----END PRIVATE KEY-----",
            f"db password={s['password in a log']} ok",
            f"index https://{s['login in a URL']}@{s['host in a URL']}:8443/simple",
            f"[1764590000.123456] [{host}:4711:0] ucp_context.c:1 UCX INFO",
            f"listening on {addresses[0]}:5000 and [{addresses[1]}] via {addresses[2]}",
            f"host {s['host of this machine']} up; first_token: decoder; opencv==5.0.0.93; std::vector 127.0.0.1:18100",
        ]
    )
    flow = finish(
        folder,
        config,
        root=repository,
        text=text,
        log=log,
        tokenizer="/home/" + s["user in the client's file"] + "/models/made",
        machine={
            "environment": {
                "MASTER_ADDR": s["address in the machine's record"],
                "UCX_HOSTNAME": s["host in the machine's record"],
            }
        },
        argv=(
            "--api-key",
            s["key in a command line"],
            "--header",
            f"Authorization=Bearer {s['token in a command line']}",
        ),
    )
    known = {s["host of this machine"]: "host"}
    index = build_archive(
        flow, config, "--configfile experiment.yaml", folder / "tiny.zip", folder=folder, known=known
    )
    return folder / "tiny.zip", index


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> tuple[Path, dict[str, object]]:
    return _planted(tmp_path_factory.mktemp("planted"), repository)


def test_no_planted_secret_is_in_the_archive(planted: tuple[Path, dict[str, object]]) -> None:
    assert len(SECRETS) >= 20
    leaks = []
    with unpacked(planted[0]) as (bag, _):
        for path in sorted(bag.rglob("*")):
            if not path.is_file():
                continue
            data = path.read_bytes()
            if path.suffix == ".gz":
                data = gzip.decompress(data)
            elif path.suffix == ".parquet":
                table = pq.read_table(path)
                data += (str(table.to_pylist()) + str(table.schema.metadata)).encode()
            name = str(path.relative_to(bag)).encode()
            leaks += [(what, path.name) for what, secret in SECRETS.items() if secret.encode() in data + name]
    assert not leaks


def test_a_redacted_archive_still_holds(planted: tuple[Path, dict[str, object]]) -> None:
    assert verify(planted[0]).differs == []
    redaction = planted[1]["redaction"]
    assert {"parts", "report.html"} <= set(redaction["made_again"])  # type: ignore[index]


def test_what_is_no_secret_stays(planted: tuple[Path, dict[str, object]]) -> None:
    with unpacked(planted[0]) as (bag, _):
        (log,) = (bag / PAYLOAD).glob("results/tiny/logs/sessions/agg-*/*/engine-0.log.gz")
        text = gzip.decompress(log.read_bytes()).decode()
        for kept in ("first_token: decoder", "opencv==5.0.0.93", "std::vector", "127.0.0.1:18100"):
            assert kept in text
        config = (bag / PAYLOAD / "experiment.yaml").read_text()
        assert "LMCACHE_EXTRA: redacted_token" in config
        assert "redis://redacted_login@redacted_host:6379" in config
        assert "# ask redacted_email, VLLM_API_KEY=redacted_secret" in config
        assert "of the files as they are in here" in (bag / PAYLOAD / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "first_token: prefiller, eos_token: </s>, max_tokens: 128",
        "torch 2.13.0+cpu, opencv-python-headless-5.0.0.93",
        "http://127.0.0.1:18100/v1 and http://0.0.0.0:8000",
        "12:18:53.489000 7489 torch/_library/triton.py:53",
        "https://huggingface.co/openai/gpt-oss-120b",
        "kv_cache_tokens=1024 tokenizer_id=/srv/models/x",
        "@dataclass a@b vector<int>::size_type",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    redactor = Redactor({})
    redactor.learn_from(text)
    assert redactor.text(text) == text


def test_a_users_name_that_is_a_word_of_the_experiment_is_no_secret() -> None:
    redactor = Redactor({"long": "user", "root": "user", "alicia": "user"}, ["long"])
    assert redactor.text("root alicia long /root/x") == "root redacted_user long /redacted_home/x"


def test_large_json_keeps_its_numbers_bytes() -> None:
    data = b'{"a": [0.1000, 1e-3, NaN], "tokenizer_id": "/home/zo/x", "t": ["", "\\u00e9"]}'
    assert Redactor({}).json_strings(data) == data.replace(b"/home/zo", b"/redacted_home")
