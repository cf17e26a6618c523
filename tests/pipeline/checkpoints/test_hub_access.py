"""Settings with which no request to the Hub could be sent: named before anything is asked, exit status 2."""

import pytest
from click.testing import CliRunner
from scalegate.pipeline.cli.main import main

CASES = {
    "scheme": ({"ALL_PROXY": "socks://127.0.0.1:7890/"}, "ALL_PROXY=socks://127.0.0.1:7890/"),
    "letters": ({"HF_TOKEN": "hf_\u00e4"}, "access token holds characters"),
    "two words": ({"HF_TOKEN": "hf_a hf_b"}, "access token holds characters"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_sent_is_refused_by_name(case: str, monkeypatch, tmp_path):
    environment, told = CASES[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["quantize", "org/model", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and told in done.output.replace("\n", " "), done.output
