#!/usr/bin/env bash
# Builds what the container image holds, without a container engine: image_tree.sh FOLDER. Then runs the service in it as the
# image would be run, its root read-only, as user 10001 without any right, and says what it takes. As root; wants debootstrap,
# Debian's mirror, PyPI and python3 with pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "$1")
root=$out/root
suite=trixie
python=3.13
mkdir -p "$out/wheels" "$out/data"

[ -d "$root/usr" ] || debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$root"
if [ ! -d "$root/opt/kvstore" ]; then
    pip() { python3 -m pip --disable-pip-version-check "$@"; }
    src=$(mktemp -d)
    cp -r pyproject.toml constraints.txt README.md kvstore clients "$src"
    pip wheel -q --no-deps -w "$out/wheels" "$src"
    rm -rf "$src"
    pip download -q -d "$out/wheels" --find-links "$out/wheels" -c constraints.txt --only-binary=:all: --python-version "$python" \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 'kvstore[service]'
    cp -r "$out/wheels" "$root/wheels"
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -ec '
        python3 -m venv /opt/kvstore
        /opt/kvstore/bin/pip install -q --no-index --find-links /wheels "kvstore[service]"
        /opt/kvstore/bin/pip uninstall -q -y pip
        find /opt/kvstore -type d \( -name tests -o -name include \) -prune -exec rm -rf {} +
        python3 -m compileall -q /opt/kvstore/lib
        dpkg --purge --force-depends python3-venv python$0-venv python3-pip-whl python3-setuptools-whl >/dev/null 2>&1' "$python"
    # What debian:trixie-slim leaves out.
    rm -rf "$root"/wheels "$root"/var/{cache,lib/apt/lists}/* "$root"/usr/share/{doc,man,info,locale}
fi
mkdir -p "$root"/{run,var/lib}/kvstore
chown 10001:10001 "$out/data"
echo "image: $(du -sm "$root" | cut -f1) MiB, of them /opt/kvstore $(du -sm "$root/opt/kvstore" | cut -f1) MiB"

unshare --mount --propagation private sh -ec '
    mount --bind "$0" "$0"
    mount -t tmpfs tmpfs "$0/run/kvstore" -o mode=2777
    mount --bind "$1" "$0/var/lib/kvstore"
    mount --rbind /proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mount -o remount,bind,ro "$0"
    exec chroot "$0" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
        env -i PATH=/opt/kvstore/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 \
        KVSTORE_DIR=/var/lib/kvstore/store KVSTORE_SOCKETS=/run/kvstore/sockets bash -ec "
            kvstore serve --disk 256MiB --memory 128MiB --log-format json & service=\$!
            tries=100
            until kvstore stats ready --dir /run/kvstore/sockets 2>/dev/null; do
                tries=\$((tries - 1)); [ \$tries -gt 0 ] && kill -0 \$service
            done
            grep VmRSS /proc/\$service/status
            kvstore drain --dir /run/kvstore/sockets --timeout 5s
            kill -TERM \$service
            wait \$service"' "$root" "$out/data"
echo "ran with its root read-only, and stopped in order"
