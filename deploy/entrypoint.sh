#!/usr/bin/env bash
# entrypoint.sh MODEL [arguments of `vllm serve`]: serve MODEL with the sparse-prefill backend.
set -euo pipefail

# Counters that an earlier run left would be added to this one's.
mkdir -p "$PROMETHEUS_MULTIPROC_DIR"
rm -f "$PROMETHEUS_MULTIPROC_DIR"/*.db

exec vllm serve "$@" --attention-backend sparse-prefill
