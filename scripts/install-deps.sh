#!/usr/bin/env bash
# Installs missing packages for the build, tests, demo and benches.
#
#   scripts/install-deps.sh [build] [check] [test] [long] [fuzz] [demo] [bench]
#
# Without arguments it installs all lists.
# Each list includes build; long includes test, and test includes check.
# If nothing is missing it prints nothing and needs no privileges.
# It supports Debian and its derivatives. On other systems it prints the names of the packages.
set -euo pipefail
cd "$(dirname "$0")/.."

python=/usr/bin/python3 # Debian's Python, for which the packages python3-* are.
missing=

# need PACKAGE COMMAND…: adds the package to the missing ones unless the command succeeds.
need() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

has() { command -v "$1"; }

# The data of the demo. Small images have the package without its documentation.
has_kernel_docs() { ls /usr/share/doc/linux-doc-*/html/index.html; }

# Debian installs several versions in parallel, and does not put their servers into PATH.
has_postgres() { ls /usr/lib/postgresql/*/bin/initdb /usr/lib/postgresql/*/bin/pgbench; }

has_clang_library() {
    ls /usr/lib/llvm-*/lib/libclang*.so && ls /usr/lib/llvm-*/lib/clang/*/include/stddef.h
}

# A dynamically linked busybox does not find its libraries in an initramfs.
busybox_is_static() { has busybox && ! ldd "$(command -v busybox)"; }

has_rdma_providers() { ls /usr/lib/*/libibverbs/librxe-rdmav*.so; }

need_compiler() {
    need gcc has cc
    need libc6-dev test -e /usr/include/linux/userfaultfd.h
    need make has make
}

need_for_build() {
    need_compiler
    # The client of etcd is generated from etcd's protocol buffers.
    need protobuf-compiler has protoc
    need libprotobuf-dev test -e /usr/include/google/protobuf/descriptor.proto
    # The bindings of libibverbs are generated from its headers.
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
    need g++ has c++ # Compiles programs with containers in segments.
    need etcd-server has etcd
    need iproute2 has ip
    need libjemalloc2 test -e /usr/lib/x86_64-linux-gnu/libjemalloc.so.2
    # The server that `aquifer cache` is compared with, and its test program.
    need libmemcached-tools has memccapable
    need openssl has openssl # Makes certificates for tests of TLS.
    need memcached has memcached
}

need_for_fuzz() {
    need_for_build
    need g++ has c++ # Compiles libFuzzer.
}

need_for_long() {
    need_for_test
    need_for_fuzz
    need gdb has gdb
    need golang-go has go
    need openjdk-17-jdk-headless has javac
    need openssl has openssl # Makes certificates for tests with etcd.
    need postgresql has_postgres
    need python3-numpy "$python" -c 'import numpy'
    need redis-server has redis-server
    need redis-tools has redis-cli
    # Virtual machines and the packages that they boot from (tests/guests).
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

# Installs the tools of the test loop that are not packages of Debian.
install_tools() {
    case " $lists " in *" check "* | *" test "* | *" long "*) ;; *) return 0 ;; esac
    tools=$PWD/target/tools
    cmp -s scripts/tools.txt "$tools/installed.txt" && return
    echo "install-deps: installing the tools of scripts/tools.txt into target/tools"
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
    need kmod has modprobe # Loads zram if it is a module.
    need memcached has memcached
    need openssl has openssl # Makes certificates for the peers of stores.
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
        echo "install-deps: missing packages, which only root can install:$missing" >&2
        exit 1
    fi
}

apt() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
        -o 'Dpkg::Options::=--path-include=/usr/share/doc/linux-doc-*' "$@"
}

# Forbids packages to start their services while this script runs.
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
        build | check | test | long | fuzz | demo | bench) "need_for_$list" ;;
        *)
            echo "install-deps: unknown list '$list': use build, check, test, long, fuzz, demo or bench" >&2
            exit 2
            ;;
        esac
    done
    # shellcheck disable=SC2086 # The list must be split.
    missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
    missing=${missing% }
}

# linux-doc depends on the package with the pages. If that package is installed without its pages,
# it must be named to be installed again.
name_packages_of_docs() {
    case " $missing " in
    *" linux-doc "*)
        installed=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' 'linux-doc-*' 2>/dev/null || true)
        missing="$missing $(printf '%s\n' "$installed" | sed -n 's/^ii *//p' | tr '\n' ' ')"
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
    echo "install-deps: this is not Debian: install the equivalents of these packages: $missing" >&2
    exit 1
fi
name_packages_of_docs
echo "install-deps: installing $missing"
forbid_services
log=$(mktemp)
# The package lists may be outdated or empty: update them and retry once.
# --reinstall adds documentation that was excluded before.
# shellcheck disable=SC2086 # The list must be split.
if ! apt install -y --no-install-recommends --reinstall $missing >"$log" 2>&1; then
    # shellcheck disable=SC2086 # The list must be split.
    if ! { apt update && apt install -y --no-install-recommends --reinstall $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "install-deps: apt-get failed to install $missing; its whole output is in $log" >&2
        exit 1
    fi
fi
rm -f "$log"
wanted=$missing
collect
if [ -n "$missing" ]; then
    echo "install-deps: installed $wanted, but these are still missing: $missing" >&2
    exit 1
fi
install_tools
