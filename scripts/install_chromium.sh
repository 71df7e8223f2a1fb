#!/usr/bin/env bash
# The browser tests use the system's Chromium. Installs it where that needs no question, else says how.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium for the browser tests ..."
    if { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/tmp/chromium-install.$$ 2>&1; then
        rm -f /tmp/chromium-install.$$
        exit 0
    fi
    tail -5 /tmp/chromium-install.$$ >&2
fi
echo "no Chromium found: the browser tests will fail" >&2
echo "  what to do: install the package 'chromium' (Debian: sudo apt-get install chromium)" >&2
