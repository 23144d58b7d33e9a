#!/usr/bin/env bash
# entrypoint.sh MODEL [arguments of `vllm serve`]: serve MODEL with the sparse-prefill backend.
set -euo pipefail

exec vllm serve "$@" --attention-backend sparse-prefill
