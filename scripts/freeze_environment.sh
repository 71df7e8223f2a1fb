#!/usr/bin/env bash
# freeze_environment.sh DIRECTORY LOCK: rewrite the versions of LOCK from an environment that passed the tests.
# The comment at the top of LOCK stays. setuptools is kept: it builds our own packages without a download.
set -euo pipefail
directory=$1 lock=$2
versions=$("$directory/bin/python" -m pip freeze --all --exclude-editable |
    grep -E '^[A-Za-z0-9._-]+==' | grep -vE '^(pip|wheel|fledge.*|torchvision|torchaudio|torchcodec)==')
{
    grep '^#' "$lock" || true
    sort --ignore-case <<<"$versions"
} >"$lock.new"
mv "$lock.new" "$lock"
