#!/usr/bin/env bash
# In the first of two guests: starts a directory, and a service of heaps whose reads
# the RDMA device serves. A connection to port 9000 ends the script.
#
#   heap-lender.sh AQUIFER
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
network_directory
daemon keeper keeper
daemon heaps heap-service --id 1 --memory 64M --listen 10.9.0.1:7401 --rdma 10.9.0.1:7402 \
    --directory etcd://10.9.0.1:2379
echo 'the service serves'
python3 -c 'import socket; socket.create_server(("10.9.0.1", 9000)).accept()'
kill "$etcd"
