# shellcheck shell=bash
# Parts of a cluster in a guest, for the scripts beside this. Whoever uses it has set `aquifer`, the program under test.
state=$(mktemp -d)
export AQUIFER_STATE="$state"
umask 077
# It guards nothing here.
printf '%064d\n' 1 >"$state/cluster.key"

# part NAME ARGUMENTS…: start a part in the background, and wait until it serves; `part` is its process.
part() {
    mkfifo "$state/$1.ready"
    "$aquifer" "${@:2}" --detached >"$state/$1.ready" 2>"$state/$1.log" &
    part=$!
    read -r _ <"$state/$1.ready"
}

# cluster: a cluster of one node over the RDMA device.
cluster() {
    part directory directory
    part keeper keeper
    part node node --id 1 --memory 128M --fabric verbs --listen 10.9.0.1:7400
    part agent agent --mempool 32M
}

# await_port ADDRESS PORT: wait until somebody listens there; whoever does is called by this.
await_port() {
    until (: >"/dev/tcp/$1/$2") 2>/dev/null; do sleep 0.2; done
}

# Whatever happened, say what the parts said last.
trap 'tail -n 5 "$state"/*.log >&2' EXIT
