#!/usr/bin/env bash
# In the first of two guests: starts a directory, and two memory nodes over its RDMA device. The
# first connection to port 9000 kills the second node, and the second one ends the script.
#
#   lender.sh AQUIFER
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
network_directory
for node in 1 2; do
    daemon "node-$node" node --id "$node" --memory 128M --fabric verbs --listen "10.9.0.1:740$node" \
        --directory etcd://10.9.0.1:2379
    last=$daemon
done
await_connection() {
    python3 -c 'import socket; socket.create_server(("10.9.0.1", 9000)).accept()'
}
echo 'the nodes lend'
await_connection
kill -KILL "$last"
wait "$last"
echo "a node ended with $?"
await_connection
kill "$etcd"
