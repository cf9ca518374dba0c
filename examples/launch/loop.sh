#!/bin/sh
# A plain loop: sh loop.sh --run-dir runs/first --model bert --stages 2
# Exit code 75 says that the same command goes on from the last checkpoint once it is given --resume; others are final.
# TRIES ends a run that never gets on; COMMAND and PAUSE_S are for tests.
set -u
command=${COMMAND:-python -m jvpipe.train}
tries=${TRIES:-20}
resume=
while :; do
    # shellcheck disable=SC2086 # the command is words
    $command "$@" $resume
    code=$?
    tries=$((tries - 1))
    if [ "$code" -ne 75 ] || [ "$tries" -le 0 ]; then
        exit "$code"
    fi
    resume=--resume
    sleep "${PAUSE_S:-10}"
done
