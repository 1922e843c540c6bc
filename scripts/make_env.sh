#!/usr/bin/env bash
# Makes a virtual environment from lock files: scripts/make_env.sh FOLDER LOCK [LOCK ...]
# LIBRARIES names shared libraries that its packages load, each with the Debian package that has it.
# A finished one has FOLDER/.done, which is newer than the locks it was made from; a half-made one is made again.
# A lock with hashes is installed with --require-hashes; requirements/torch.lock has none, and is installed by itself. Where pip's index
# has no PyTorch for CPUs, that is the one for GPUs, and what it needs comes from requirements/gpu.lock.
set -euo pipefail
folder=$1; shift
python=${PYTHON:-python3}
install_debian=$(dirname "$0")/install_debian.sh

complain() { printf 'error: %s\n' "$1" >&2; exit 2; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    complain "$("$python" -V 2>&1) was found as $python; the lock files are for Python 3.11 to 3.13: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || "$install_debian" "Python has no venv module" python3-venv
for library in ${LIBRARIES:-}; do # such as libnuma.so.1=libnuma1
    "$python" -c "import ctypes; ctypes.CDLL('${library%=*}')" 2>/dev/null || "$install_debian" "${library%=*} is not installed" "${library#*=}"
done

hashed=() plain=()
for lock in "$@"; do
    if grep -q -e --hash= "$lock"; then hashed+=(-r "$lock"); else plain+=(-r "$lock"); fi
done
pip() { "$folder/bin/python" -m pip --disable-pip-version-check install --no-deps "$@"; }
make_env() {
    "$python" -m venv "$folder" && pip --require-hashes "${hashed[@]}" || return
    [ ${#plain[@]} = 0 ] && return
    pip "${plain[@]}" || return
    "$folder/bin/python" -c 'import torch' || pip --require-hashes -r "$(dirname "$0")/../requirements/gpu.lock"
}
log=$folder.log
rm -rf "$folder"
echo "Making $folder from $* (a few minutes; log in $log)"
if ! make_env >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    complain "$folder could not be made; the lines above are the end of $log"
fi
touch "$folder/.done"
