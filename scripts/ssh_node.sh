#!/usr/bin/env bash
# One node of scripts/ssh_launch.sh: run_train.sh with the same arguments, and signals by name from the standard input.
# ssh forwards no signals. The end of the input says that the launching side is gone: the run saves and leaves.
set -uo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec 3<&0 # a background process has no standard input of its own
"$repo/run_train.sh" "$@" </dev/null 3<&- &
run=$!
{
    while read -r name; do
        kill -s "$name" "$run"
    done
    kill -s TERM "$run"
} <&3 2>/dev/null &
reader=$!
wait "$run"
status=$?
kill "$reader" 2>/dev/null
exit "$status"
