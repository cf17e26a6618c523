#!/usr/bin/env bash
# on_each_python.sh [VERSION...]: for each Python that is supported, or named, and to be had here, a new environment from
# the lock, a release of the bundled checkpoint and a quick part of the suite. Prints a table; fails where one of these
# did. The environments, of 2.4 to 6.2 GB each, are deleted again; logs stay in .venv/pythons.
set -uo pipefail
cd "$(dirname "$0")/.."
QUICK=(tests/test_lock.py tests/test_registries.py tests/test_toy_format.py tests/layouts
    tests/pipeline/machine/test_tested_stack.py tests/pipeline/records/test_recipe.py tests/serving_check/server/test_completions.py)
LOGS=.venv/pythons

find_python() { # an entry of PATH may be a shim that has none
    local found
    for found in "python$1" "$(uv python find --no-python-downloads "$1" 2>/dev/null)" \
        "$(pyenv root 2>/dev/null)/versions/$1".*/bin/python; do
        "$found" -c 'import sys; print(sys.executable)' 2>/dev/null && return
    done
}

step() { # NAME COMMAND...: its seconds, or "failed"
    local name=$1 begun=$SECONDS
    shift
    if [ "$state" = failed ]; then
        printf ' %10s' -
    elif "$@" >"$LOGS/$version-$name.log" 2>&1; then
        printf ' %8d s' $((SECONDS - begun))
    else
        printf ' %10s' failed
        state=failed status=1
    fi
}

[ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.14
status=0
mkdir -p "$LOGS"
printf '%-8s %10s %10s %10s\n' Python install release tests
for version in "$@"; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        printf '%-8s not to be had here\n' "$version"
        continue
    fi
    state=fine work=$(mktemp -d) environment=$LOGS/$version
    rm -rf "$environment"
    printf '%-8s' "$version"
    step install make install "PYTHON=$python" "VENV=$environment"
    step release "$environment/bin/pipeline" release examples/qwen3-pycode-5m --recipe examples/int4-example.yaml \
        --work "$work/work" --to "folder:$work/release"
    step tests "$environment/bin/pytest" -q -m "not gpu and not alone" "${QUICK[@]}"
    printf '\n'
    rm -rf "$environment" "$work"
done
exit "$status"
