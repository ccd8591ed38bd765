#!/usr/bin/env bash
# Unpacks a kernel with Soft-RoCE, nbd and ublk from Debian's packages, and builds an initramfs with
# which it boots into this machine's file system.
#
#   kernel.sh FOLDER            creates FOLDER/PACKAGE unless it exists, and prints its path;
#                               it has vmlinuz, initrd and package/
#   kernel.sh FOLDER SUITE      creates FOLDER/SUITE/PACKAGE from a suite of Debian, such as
#                               trixie-backports, with any sources of this machine
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/${2:-}"
cache=$(cd "$1/${2:-}" && pwd)

# The package lists of a suite are in its folder; those of the machine are not changed.
apt=()
if [ -n "${2:-}" ]; then
    lists=$cache/lists
    mkdir -p "$lists"/{state/lists/partial,cache/archives/partial}
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$keys] http://deb.debian.org/debian $2 main" >"$lists/sources.list"
    apt=(
        -o "Dir::Etc::sourcelist=$lists/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State=$lists/state" -o "Dir::Cache=$lists/cache"
    )
    apt-get -qq "${apt[@]}" -o Acquire::Retries=3 -o APT::Sandbox::User=root update >&2 || true
fi

# Name of Debian's newest kernel package. Kernels for clouds have no Soft-RoCE.
newest_package() {
    apt-cache "${apt[@]}" --names-only search '^linux-image-[0-9]+\.[0-9]+\.[0-9]+.*-amd64$' |
        cut -d' ' -f1 |
        grep -Ev -- '-(cloud|rt|dbg|unsigned)' | sort -V | tail -n 1
}

# Without a network, use the newest kernel that an earlier call has unpacked.
package=$(newest_package || true)
[ -n "$package" ] || package=$(
    find "$cache" -maxdepth 2 -name initrd -printf '%P\n' | xargs -r dirname | sort -V | tail -n 1
)
if [ -z "$package" ]; then
    echo "kernel.sh: apt has no package linux-image-*-amd64;" \
        "add Debian's main archive to its sources, and run apt-get update" >&2
    exit 1
fi
kernel=$cache/$package
if [ -e "$kernel/initrd" ]; then
    echo "$kernel"
    exit 0
fi

work=$(mktemp -d "$cache/making-XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
# Newer releases have kernel, modules and module lists in separate packages.
parts=$(
    apt-cache "${apt[@]}" depends --important "$package" |
        awk '$1 == "Depends:" && $2 ~ /^linux-(base|binary|modules)-[0-9]/ { print $2 }'
)
# shellcheck disable=SC2086
(
    cd "$work" && apt-get -qq "${apt[@]}" -o Acquire::Retries=3 -o APT::Sandbox::User=root \
        download "$package" $parts >&2
)
for file in "$work"/*.deb; do
    dpkg-deb -x "$file" "$work/package"
    rm "$file"
done
# Some releases have all files below usr.
base=$work/package
[ -d "$base/lib/modules" ] || base=$work/package/usr
version=$(basename "$base"/lib/modules/*)
depmod -b "$base" "$version"
image=$(find "$work/package" -name 'vmlinuz*' -type f | sort | head -n 1)
cp "$image" "$work/vmlinuz"

# The initramfs: busybox, and the modules that mount the host's files, in the order of loading.
tree=$work/tree
mkdir -p "$tree"/{bin,modules,proc,sys,dev,system,host,layer}
cp "$(command -v busybox)" "$tree/bin/busybox"
modprobe -d "$base" -S "$version" -D -a virtio_pci 9pnet_virtio 9p overlay |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
    name=$(basename "$module")
    case $name in
    *.xz) xz -dc "$module" >"$tree/modules/${name%.xz}" ;;
    *.zst) zstd -dqc "$module" >"$tree/modules/${name%.zst}" ;;
    *) cp "$module" "$tree/modules/$name" ;;
    esac
    name=${name%.xz}
    echo "/modules/${name%.zst}"
done >"$tree/modules.list"
install -m 755 "$here/guest/init" "$tree/init"
(cd "$tree" && find . | cpio --quiet -o -H newc | gzip -1) >"$work/initrd"
rm -rf "$tree"

rm -rf "$kernel"
trap - EXIT
mv "$work" "$kernel"
echo "$kernel"
