# shellcheck shell=bash
# Functions that start the daemons of a cluster in a guest, for the other scripts of this folder.
# The variable `aquifer` must be the path of the program under test.
state=$(mktemp -d)
export AQUIFER_STATE="$state"
umask 077
# The key need not be secret here.
printf '%064d\n' 1 >"$state/cluster.key"

# daemon NAME ARGUMENTS…: starts a daemon in the background, and waits until it serves; `daemon` is
# its process.
daemon() {
    mkfifo "$state/$1.ready"
    "$aquifer" "${@:2}" --detached >"$state/$1.ready" 2>"$state/$1.log" &
    daemon=$!
    read -r _ <"$state/$1.ready"
}

# cluster: starts a cluster of one node over the RDMA device.
cluster() {
    daemon directory directory
    daemon keeper keeper
    daemon node node --id 1 --memory 128M --fabric verbs --listen 10.9.0.1:7400
    daemon agent agent --mempool 32M
}

# await_port ADDRESS PORT: connects to a port, and retries until the connection is accepted.
await_port() {
    until (: >"/dev/tcp/$1/$2") 2>/dev/null; do sleep 0.2; done
}

# network_directory: starts etcd at an address that the other guest reaches; `etcd` is its process.
network_directory() {
    etcd --data-dir "$state/etcd" --listen-client-urls http://10.9.0.1:2379 \
        --advertise-client-urls http://10.9.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380 >"$state/etcd.log" 2>&1 &
    etcd=$!
    await_port 10.9.0.1 2379
}

# Prints the ends of the daemons' logs, also after a failure.
trap 'tail -n 5 "$state"/*.log >&2' EXIT
