#!/usr/bin/env bash
# install.sh VENV VLLM_VENV: a real SGLang on CPU from pinned wheels, in a virtual environment of its own that takes
# torch and what else both need from the one of vLLM.  Unofficial: upstream builds its CPU kernels from source, and the
# wheel without them runs on torch's own attention.
set -euo pipefail
venv=$1
vllm=$2
here=$(cd "$(dirname "$0")" && pwd)
[ -e "$venv/.installed" ] && exit 0
"$here/../vllm/install.sh" "$vllm"
python3 -m venv "$venv"
"$venv/bin/pip" install -qq --no-deps -r "$here/requirements.txt"
purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'
"$vllm/bin/python" -c "$purelib" > "$("$venv/bin/python" -c "$purelib")/of_vllm.pth"
touch "$venv/.installed"
