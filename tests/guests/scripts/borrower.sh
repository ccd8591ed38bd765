#!/usr/bin/env bash
# In the second of two guests: starts an agent on the nodes of the first guest, and runs a command.
# Causes the kill of a node once the command has pages on it.
#
#   borrower.sh AQUIFER LIMIT COMMAND…
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
await_port 10.9.0.1 2379
daemon keeper keeper
daemon agent agent --mempool 32M --directory etcd://10.9.0.1:2379
until [ "$("$aquifer" status --json | grep -c '"memory_bytes_wanted"')" -ge 2 ]; do sleep 0.2; done
"$aquifer" run --local "$2" --replicas 2 --stats "$state/stats.json" -- "${@:3}" &
run=$!
remote_reads() {
    "$aquifer" status --json | sed -n 's/^ *"remote_reads": \([0-9]*\),*$/\1/p' | sort -n | tail -n 1
}
until reads=$(remote_reads) && [ "${reads:-0}" -ge 100 ] || ! kill -0 "$run" 2>/dev/null; do sleep 0.2; done
kill -0 "$run" && echo 'the command runs; a node is killed'
await_port 10.9.0.1 9000
wait "$run"
code=$?
await_port 10.9.0.1 9000
cat "$state/stats.json"
exit "$code"
