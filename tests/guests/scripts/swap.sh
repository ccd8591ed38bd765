#!/usr/bin/env bash
# In a guest, with cgroups of version 2 and all rights of root: runs a command on kernel swap,
# lowers its limit, and raises it again.
#
#   swap.sh AQUIFER COMMAND…
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
cluster
modprobe -a fuse loop
mount -t cgroup2 cgroup2 /sys/fs/cgroup
"$aquifer" run --swap --local 120M -- "${@:2}" &
run=$!
# Waits until the cgroup's limit, rounded down to MiB, is this number.
await_limit() {
    until limit=$(cat /sys/fs/cgroup/aquifer-setup-*/memory.max) && [ $((limit >> 20)) = "$1" ]; do
        kill -0 "$run" || exit 1
        sleep 0.2
    done
    echo "the limit is $1 MiB"
}
until "$aquifer" status | grep -q 'by swap: [1-9][0-9][0-9]'; do kill -0 "$run" || exit 1; sleep 0.2; done
"$aquifer" limit "$run" 40M && await_limit 36
"$aquifer" status | grep 'by swap'
"$aquifer" limit "$run" 100M && await_limit 96
kill "$run"
wait "$run"
cat "$state"/log/swap.log
