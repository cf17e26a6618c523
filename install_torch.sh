#!/bin/sh
# Installs torch and Triton in the versions of a lock: install_torch.sh PYTHON LOCK [cpu|cuda].
# Without the third word, Linux without an NVIDIA GPU gets torch's build for CPUs, where it is to be had: an environment
# with Scalegate then takes 2.4 GB of disk in place of 6.2.
set -eu
python=$1 lock=$2 build=${3:-auto}
torch=$(grep '^torch==' "$lock")
# The one that kernels were tuned on, where the lock leaves it to torch and torch brings none: its build for CPUs.
triton=$(grep '^triton==' "$lock" || echo triton==3.6.0)

pip_install() { "$python" -m pip install --quiet --constraint "$lock" "$@"; }

# Knows PyTorch's own index, and fails within seconds where that cannot be reached.
uv_install() {
    pip_install uv && UV_HTTP_CONNECT_TIMEOUT=5 UV_HTTP_RETRIES=1 \
        "$python" -m uv pip install --quiet --python "$python" --no-deps --torch-backend cpu "$@"
}

has_gpu() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }

if [ "$build" = auto ] && [ "$(uname -s)" = Linux ] && ! has_gpu; then build=cpu; fi
if [ "$build" != cpu ]; then
    pip_install torch
elif ! { pip_install "$torch+cpu" || uv_install "$torch"; } 2>/dev/null; then
    echo "torch's build for CPUs cannot be reached; installing the one for CUDA, a download of about 3 GB"
    pip_install torch
fi
"$python" -c "from importlib.metadata import requires; exit('triton' not in str(requires('torch')))" ||
    pip_install "$triton; platform_system == 'Linux'"
