"""schemathesis, all checks, against `pipeline serve`: what `/openapi.json` says is what the server does.

schemathesis runs from an environment of its own (`pip install schemathesis`). One check is told that 400 may
answer a request that fits the schema: whether a prompt fits the context, a token the vocabulary, or
`min_tokens` `max_tokens` is more than a JSON schema can say. An answer has 10 s, whatever else the machine
does, and a request may ask for 128 full contexts: they are short here, and 64 are computed at once.

    python -P tests/bench/server/fuzz_api.py examples/qwen3-pycode-5m --schemathesis ENV/bin/schemathesis
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.tests.bench.server.clients import with_chat_template

RESULTS = Path(__file__).parents[1] / "results" / "server" / "fuzz_api.json"
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "404", "413"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--schemathesis", required=True, help="its executable")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = with_chat_template(options.checkpoint, folder / "checkpoint")
        serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
        serve += ["--served-model-name", "served", "--max-num-seqs", "64", "--max-model-len", "128"]
        (folder / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
        with SubprocessEndpoint(serve, "served", log=folder / "server.txt") as endpoint:
            command = [options.schemathesis, "--config-file", str(folder / "schemathesis.toml"), "run"]
            command += [f"{endpoint.base_url}/openapi.json", "--checks", "all", "--continue-on-failure"]
            command += ["--max-time", str(options.seconds), "--request-timeout", "60", "--seed", "1"]
            ended = subprocess.run(command, check=False, capture_output=True, text=True)
            print(ended.stdout)
            endpoint_lives = bool(endpoint.metrics())
    said = subprocess.run([options.schemathesis, "--version"], capture_output=True, text=True, check=True)
    result = {
        "version": said.stdout.strip(),
        "seconds": options.seconds,
        "exit_status": ended.returncode,
        "server_lives": endpoint_lives,
        "summary": re.findall(r"^  (.+ generated, .+)$", ended.stdout, re.MULTILINE),
    }
    write_json(options.out, result)
    sys.exit(ended.returncode or not endpoint_lives)


if __name__ == "__main__":
    main()
