#!/usr/bin/env bash
# In a guest: starts a cluster over its RDMA device, and a redis-server on it, which is filled,
# saves from a forked child, and is read back.
#
#   redis.sh AQUIFER LIMIT BYTES CHECK
#
# CHECK is the path of redis_check.py.
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
cluster
"$aquifer" run --local "$2" --stats "$state/stats.json" -- \
    redis-server --port 7777 --bind 127.0.0.1 --dir "$state" \
    --save '' --appendonly no --daemonize no --enable-debug-command local >"$state/redis.log" 2>&1 &
run=$!
until redis-cli -p 7777 PING 2>/dev/null | grep -q PONG; do sleep 0.2; done
python3 "$4" --port 7777 load --bytes "$3"
code=$?
redis-cli -p 7777 SHUTDOWN NOSAVE
wait "$run" || code=$?
cat "$state/stats.json"
exit "$code"
