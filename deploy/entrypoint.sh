#!/usr/bin/env bash
# entrypoint.sh MODEL [arguments of `vllm serve`]: serve MODEL with the sparse-prefill backend.
set -euo pipefail

for argument in "$@"; do
    case "$argument" in
        --attention[-_]backend | --attention[-_]backend=*)
            echo "sparse-prefill: given $argument, expected no such argument: this image adds --attention-backend" \
                "sparse-prefill, which would win. For another backend, start the container with --entrypoint vllm and" \
                "the arguments: serve MODEL ..." >&2
            exit 2
            ;;
    esac
done
exec vllm serve "$@" --attention-backend sparse-prefill
