#!/usr/bin/env bash
# A kernel with Soft-RoCE, nbd and ublk out of Debian's packages, and an initramfs with which it boots into this machine's own files.
#
#   kernel.sh FOLDER    makes FOLDER/PACKAGE, if it is not there, and prints its name: vmlinuz, initrd, package/
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cache=$(cd "$1" && pwd)

# The newest that Debian has; those for clouds have no Soft-RoCE. Versions come and go, so none is named here.
newest_package() {
    apt-cache --names-only search '^linux-image-[0-9]+\.[0-9]+\.[0-9]+.*-amd64$' | cut -d' ' -f1 |
        grep -Ev -- '-(cloud|rt|dbg|unsigned)' | sort -V | tail -n 1
}

# Without a network, what was made before is good enough.
package=$(newest_package || true)
[ -n "$package" ] || package=$(find "$cache" -maxdepth 2 -name initrd -printf '%P\n' | xargs -r dirname | sort -V | tail -n 1)
if [ -z "$package" ]; then
    echo "kernel.sh: apt knows no linux-image-*-amd64; is bookworm among its sources, and has apt-get update been run?" >&2
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
(cd "$work" && apt-get -qq -o Acquire::Retries=3 -o APT::Sandbox::User=root download "$package" >&2)
dpkg-deb -x "$work"/*.deb "$work/package"
rm "$work"/*.deb
# Some releases have everything below usr.
base=$work/package
[ -d "$base/lib/modules" ] || base=$work/package/usr
version=$(basename "$base"/lib/modules/*)
depmod -b "$base" "$version"
cp "$work"/package/boot/vmlinuz-* "$work/vmlinuz"

# The initramfs: busybox, and what it takes to mount the host's files, in the order in which it is loaded.
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
