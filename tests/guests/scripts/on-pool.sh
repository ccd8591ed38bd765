#!/usr/bin/env bash
# In a guest: starts a cluster over its RDMA device, and runs a command on it.
#
#   on-pool.sh AQUIFER LIMIT COMMAND…
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
cluster
"$aquifer" run --local "$2" --stats "$state/stats.json" -- "${@:3}"
code=$?
cat "$state/stats.json"
exit "$code"
