#!/usr/bin/env bash
# The checks of this repository: lint, types, tests.   ./run_tests.sh [arguments of pytest]
#
#   ./run_tests.sh                             everything but the long runs
#   ./run_tests.sh -m slow                     the long runs
#   ./run_tests.sh tests/models -k rope        some tests only, without lint and types
#
# Uses .venv as run_train.sh does, with the [dev] packages; TITAN5D_PYTHON=/path/to/python takes your own instead.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$repo"

if [[ -z ${TITAN5D_PYTHON:-} ]]; then
    source scripts/setup_venv.sh
    setup_venv dev
    python=$repo/.venv/bin/python
elif ! python=$(command -v -- "$TITAN5D_PYTHON"); then
    echo "refused: TITAN5D_PYTHON=$TITAN5D_PYTHON is no program; give the path of a Python, or unset it" >&2
    exit 2
fi
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

# Tests fork their ranks; a process that has computed with several threads must not fork.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0

if (($# > 0)); then
    exec "$python" -m pytest "$@"
fi
failed=0
step() {
    echo "== $*"
    local start=$SECONDS
    "$python" -m "$@" || failed=1
    echo "== $1: $((SECONDS - start)) s"
}
step ruff check .
step mypy
step pytest -n 2 -m "not slow" --durations=25 tests integration_tests
exit $failed
