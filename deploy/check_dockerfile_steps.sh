#!/usr/bin/env bash
# Run the Dockerfile's steps without a Docker engine: build the wheel, install it next to vLLM and its dependencies
# only, start the entry point with a small model on this machine's CPU, and run the health check before and after.
#
#     deploy/check_dockerfile_steps.sh        (after `make setup`)
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/.venv
work=$(mktemp -d)
server=
cleanup() {
    if [ -n "$server" ]; then
        kill -- "-$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
        kill -KILL -- "-$server" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap cleanup EXIT

echo "1. Wheel"
"$venv/bin/python" -m pip wheel --disable-pip-version-check -qq --no-deps --wheel-dir "$work/wheels" .
ls "$work/wheels"

echo "2. Install into an environment that has vLLM and nothing of this checkout"
"$venv/bin/python" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# A path in a .pth file is searched, but .pth files inside it are not run: the editable install stays out.
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$site/vllm-of-the-image.pth"
pip=("$venv/bin/python" -m pip --python "$work/venv/bin/python" --disable-pip-version-check -qq install --no-index)
"${pip[@]}" --no-deps --force-reinstall "$work"/wheels/*.whl
"${pip[@]}" --dry-run "$work"/wheels/*.whl  # fails if a dependency is missing: the image must have them all
cp "$venv/bin/vllm" "$work/venv/bin/vllm"
sed -i "1s|.*|#!$work/venv/bin/python|" "$work/venv/bin/vllm"

# As in a container, commands inherit nothing from the caller's environment. Without multiprocessing, an engine on a CPU
# is its own worker, which saves a third of the start.
clean() {
    env -i HOME="$work" PATH="$work/venv/bin:/usr/bin:/bin" LANG=C.UTF-8 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
        DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 "$@"
}
cd "$work"
clean python -c 'import vllm_sparse_backend, vllm_sparse_kernels as k; print(vllm_sparse_backend.__file__, k.__file__)'
clean sparse-prefill doctor

echo "3. Entry point and health check"
(cd "$root" && "$venv/bin/python" -c 'import pathlib, sys; from tests.helpers.tiny_models import make_model
make_model(pathlib.Path(sys.argv[1]))' "$work/model")
port=$(clean python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
if clean python "$root/deploy/healthcheck.py" "$port" 2>/dev/null; then
    echo "the health check says yes to a port where nothing listens" >&2
    exit 1
fi
set -m
clean "$root/deploy/entrypoint.sh" "$work/model" --host 127.0.0.1 --port "$port" \
    --gpu-memory-utilization 0.3 --dtype float32 --enforce-eager --max-model-len 8192 \
    --additional-config '{"sparse_prefill": {"method": "vertical_slash"}}' > server.log 2>&1 &
server=$!
set +m
began=$SECONDS
until clean python "$root/deploy/healthcheck.py" "$port" 2>/dev/null; do
    if ! kill -0 "$server" 2>/dev/null || [ $((SECONDS - began)) -gt 600 ]; then
        tail -n 40 server.log
        echo "the server did not become healthy in $((SECONDS - began)) s" >&2
        exit 1
    fi
    sleep 1
done
echo "healthy after $((SECONDS - began)) s"
clean python -c 'import re, sys, urllib.request as u; open_ = u.build_opener(u.ProxyHandler({})).open
sys.exit(not re.search(rb"\nsparse_prefill_layers\{attention=.*engine=\"0\"", open_(sys.argv[1]).read()))' "http://127.0.0.1:$port/metrics?sparse_prefill=fresh" ||
    { echo "the engine's counters are not on /metrics" >&2; exit 1; }
