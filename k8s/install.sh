#!/usr/bin/env bash
# Installs raystream and what it needs to serve into an empty folder: all that the image has besides its
# base. The Dockerfile calls it, and it works the same without containers:
#
#   k8s/install.sh --torch cpu /opt/raystream
#
# Versions are those of requirements.lock. Packages for development are left out, nothing is compiled,
# and pip removes itself at the end. share/raystream/packages.json then lists what was installed.
set -euo pipefail

usage() {
    echo "usage: k8s/install.sh [--torch cpu|cuda] [--python PYTHON] [--dry-run] FOLDER" >&2
    exit 2
}

torch=cuda python=python3 dry_run='' folder=''
while (($#)); do
    case $1 in
        --torch) torch=${2:?--torch needs a value}; shift 2 ;;
        --python) python=${2:?--python needs a value}; shift 2 ;;
        --dry-run) dry_run=1; shift ;;
        -*) usage ;;
        *) [[ -z $folder ]] || usage; folder=$1; shift ;;
    esac
done
[[ -n $folder ]] || usage

# cuda is what PyPI has: wherever pip's own configuration leads, torch comes from there.
case $torch in
    cpu) index=(--extra-index-url https://download.pytorch.org/whl/cpu) ;;
    cuda) index=() ;;
    *) usage ;;
esac

if [[ -d $folder && -n $(ls -A "$folder") ]]; then
    echo "$folder is not empty; nothing was installed" >&2
    exit 1
fi

run() {
    if [[ $dry_run ]]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input)

run "$python" -m venv "$folder"
# A source archive would need a compiler, so only wheels are taken; raystream itself is pure Python.
run "${pip[@]}" install --progress-bar off --only-binary :all: --no-cache-dir "${index[@]}" \
    --constraint "$source/requirements.lock" "$source"
run mkdir -p "$folder/share/raystream"
run cp "$source/serve.env" "$source/serve_config.yaml" "$folder/share/raystream/"
run bash -c "\"\$1\" -m pip --disable-pip-version-check inspect --local > \"\$2\"" inspect \
    "$folder/bin/python" "$folder/share/raystream/packages.json"
# Fails if versions do not fit together, or if the embedded models are missing.
run "${pip[@]}" check
run "$folder/bin/raystream" check "$folder/share/raystream/serve_config.yaml"
run "${pip[@]}" uninstall --yes --quiet pip
