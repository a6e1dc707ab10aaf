#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Opens what pack.sh made, on the GPU machine: unpack.sh FOLDER..., for each of its two folders once.
# Afterwards `export PYTHONPATH=$KBMLA_VLLM_SITE` (/tmp/vllm-site) has vLLM and kbmla installed.
set -euo pipefail

site=${KBMLA_VLLM_SITE:-/tmp/vllm-site}
mkdir -p "$site"
for folder in "$@"; do
    for archive in "$folder"/*.tar.xz; do
        [ -e "$archive" ] || continue
        tar xJf "$archive" -C "$site"
    done
    if [ -e "$folder/kbmla.whl" ]; then
        rm -rf "$site"/kbmla "$site"/kbmla-*.dist-info
        python3 -m zipfile -e "$folder/kbmla.whl" "$site"
    fi
done
