#!/bin/sh
# In a guest: a node, a keeper and an agent over the RDMA device with this guest's address; then a command within a limit.
#
#   pool-over-verbs.sh AQUIFER LIMIT COMMAND...
aquifer=$1
limit=$2
shift 2
state=$(mktemp -d)
export AQUIFER_STATE="$state"
umask 077
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$state/cluster.key"
part() {
    "$aquifer" "$@" >"$state/$1.log" 2>&1 &
    until grep -q ready "$state/$1.log" || ! kill -0 $!; do :; done
}
part directory --detached
part keeper --detached
part node --detached --id 1 --memory 128M --fabric verbs --listen 10.9.0.1:7400
part agent --detached --mempool 32M
"$aquifer" run --local "$limit" --stats "$state/stats.json" -- "$@"
code=$?
cat "$state/stats.json"
"$aquifer" status
tail -n 5 "$state"/*.log >&2
exit $code
