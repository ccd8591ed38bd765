#!/usr/bin/env bash
# In the second of two guests: starts an agent, and uses the heaps of the first guest.
#
#   heap-borrower.sh AQUIFER
set -e
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
await_port 10.9.0.1 2379
daemon keeper keeper
daemon agent agent --mempool 32M --directory etcd://10.9.0.1:2379
until "$aquifer" kv put greeting 'far away' 2>/dev/null; do sleep 0.2; done
for number in 1 2 3 4; do "$aquifer" kv put "key $number" "value $number"; done
for number in 1 2 3 4; do "$aquifer" kv get "key $number"; done
"$aquifer" kv get greeting
head -c 200000 /dev/urandom >"$state/large"
"$aquifer" kv put large <"$state/large"
packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts; }
before=$(packets)
"$aquifer" kv get large | cmp - "$state/large"
after=$(packets)
echo "the device has received $((after - before)) packets"
await_port 10.9.0.1 9000
