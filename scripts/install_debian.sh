#!/usr/bin/env bash
# Installs a package of Debian where that can be done without asking, and says what to do where it cannot:
#   scripts/install_debian.sh "Python has no venv module" python3-venv
set -euo pipefail
complain() { printf 'error: %s\n' "$1" >&2; exit 2; }

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    complain "$1; run: sudo apt-get install -y $2"
fi
echo "$1: installing $2"
{ apt-get update -q && apt-get install -y -q --no-install-recommends "$2"; } >&2 || complain "$1, and apt-get could not install $2"
