#!/bin/sh
# Keeps a run going in a plain loop: sh loop.sh --run-dir runs/first --model bert --stages 2
# Exit code 75 means that the run can continue. The loop then repeats the command, with --resume if
# the run has checkpoints, and gives up after TRIES starts. Any other exit code ends the loop.
# COMMAND and PAUSE_S are for tests.
set -u
command=${COMMAND:-python -m jvpipe.train}
tries=${TRIES:-20}
run=
before=
for word in "$@"; do
    [ "$before" = --run-dir ] && run=$word
    before=$word
done
while :; do
    resume=
    [ -d "$run/checkpoints" ] && resume=--resume
    # shellcheck disable=SC2086 # $command and $resume must be split into words
    $command "$@" $resume
    code=$?
    tries=$((tries - 1))
    if [ "$code" -ne 75 ] || [ "$tries" -le 0 ]; then
        exit "$code"
    fi
    sleep "${PAUSE_S:-10}"
done
