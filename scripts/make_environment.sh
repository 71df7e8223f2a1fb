#!/usr/bin/env bash
# make_environment.sh DIRECTORY LOCK PACKAGE: a virtual environment with exactly the lock's versions,
# and PACKAGE (a folder of this repository) installed so that edits take effect at once.
# Safe to run again: a finished environment of the same lock is left alone; of another lock, it is updated.
set -euo pipefail
directory=$1 lock=$2 package=$3

find_python() {
    local candidate
    # 3.11 first: the locks were proven with it. PYTHON=... overrides.
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "no Python >= 3.11 with the venv module was found" >&2
    echo "  expected: python3.11 or newer on PATH, or PYTHON=/path/to/python" >&2
    echo "  what to do: install python3.11 and python3.11-venv, then run make setup again" >&2
    return 1
}

install() { "$directory/bin/python" -m pip install -qq --no-compile --no-deps "$@"; }

# The plain torch of PyPI is the CUDA build, so the CPU build is asked for by its full version: from the
# default index where it has it, else from PyTorch's own. A short timeout, so as not to hang offline.
install_torch() {
    local torch
    torch=$(grep -E '^torch==' "$lock")
    install "$torch" 2>/dev/null && return
    install --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 1 "$torch" && return
    echo "$torch could not be installed" >&2
    echo "  expected: it on the default package index or on https://download.pytorch.org/whl/cpu" >&2
    echo "  what to do: make one of the two reachable (PIP_INDEX_URL, PIP_FIND_LINKS) and run make setup again" >&2
    return 1
}

checksum=$(cat "$lock" "$package/pyproject.toml" | sha256sum | cut -c1-16)
stamp="$directory/fledge-$checksum.done"
unfinished="$directory.unfinished" # beside it, because clearing the directory may be interrupted too
[ -e "$stamp" ] && [ ! -e "$unfinished" ] && exit 0

started=$SECONDS
if [ -e "$unfinished" ] || ! "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) # absent, or an installation was interrupted: from nothing
    echo "$directory: building with $python ($(grep -c == "$lock") packages) ..."
    touch "$unfinished"
    "$python" -m venv --clear "$directory"
else
    echo "$directory: updating to its lock ..."
    touch "$unfinished"
fi
rm -f "$directory"/fledge-*.done
install_torch
install -r "$lock"
install --no-build-isolation --editable "$package"
rm "$unfinished"
touch "$stamp"
echo "$directory: ready after $((SECONDS - started)) s"
