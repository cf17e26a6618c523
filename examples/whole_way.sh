#!/bin/sh
# The whole way on the bundled model, as docs/tutorial.md explains it: run it in the repository's root.
# `pipeline` and `python` are those of the environment that Scalegate is installed in. All is left in whole-way/.
set -eux

pipeline doctor
pipeline quantize examples/qwen3-pycode-5m --recipe examples/int4-example.yaml --out whole-way/artifact --dry-run
pipeline quantize examples/qwen3-pycode-5m --recipe examples/int4-example.yaml --out whole-way/artifact
pipeline inspect whole-way/artifact
pipeline layout whole-way/artifact
pipeline validate whole-way/artifact
pipeline push whole-way/artifact --to folder:whole-way/release --dry-run
pipeline push whole-way/artifact --to folder:whole-way/release
pipeline verify whole-way/release
python -P examples/generate.py whole-way/release
pipeline release examples/qwen3-pycode-5m --recipe examples/int4-example.yaml --to folder:whole-way/release --dry-run
