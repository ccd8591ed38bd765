#!/usr/bin/env bash
# In a guest: a cluster over its RDMA device, and a command on it.
#
#   on-pool.sh AQUIFER LIMIT COMMAND…
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
part directory directory
part keeper keeper
part node node --id 1 --memory 128M --fabric verbs --listen 10.9.0.1:7400
part agent agent --mempool 32M
"$aquifer" run --local "$2" --stats "$state/stats.json" -- "${@:3}"
code=$?
cat "$state/stats.json"
exit "$code"
