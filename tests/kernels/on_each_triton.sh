#!/usr/bin/env bash
# Compiles every kernel with each Triton that torch 2.11 to 2.15 bring, with no GPU, and prints which ones passed.
#
#   tests/kernels/on_each_triton.sh                  all of them
#   tests/kernels/on_each_triton.sh 3.6.0 3.9.0      the oldest and the newest
#
# Each is installed once into a folder of its own, .tritons/VERSION, which needs about 1 GB.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
ALL=(3.6.0 3.7.1 3.8.0 3.9.0)
[ $# -gt 0 ] || set -- "${ALL[@]}"

table=() failed=0
for version in "$@"; do
  folder=.tritons/$version
  if [ ! -e "$folder" ]; then
    rm -rf "$folder.partial"
    "$PYTHON" -m pip install --quiet --no-deps --target "$folder.partial" "triton==$version" || exit 2
    mv "$folder.partial" "$folder"
  fi
  log=.tritons/$version.log
  echo "== Triton $version"
  # A cache for each: what one has compiled is nothing to another.
  PYTHONPATH=$PWD/$folder TRITON_CACHE_DIR=$PWD/.tritons/cache-$version "$PYTHON" -m pytest -q \
    --numprocesses 2 --dist worksteal tests/kernels/*/test_*compile*.py | tee "$log" | grep -E '^(FAILED|ERROR)'
  [ "${PIPESTATUS[0]}" = 0 ] || failed=1
  table+=("$(printf '%-8s %s' "$version" "$(grep -E ' (passed|failed)' "$log" | tail -n 1)")")
done
printf '%s\n' "${table[@]}"
exit $failed
