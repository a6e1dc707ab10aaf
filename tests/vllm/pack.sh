#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs what tests/vllm/device.py needs on a GPU machine without network: vLLM 0.26.0, the packages
# it imports, and this tree's kbmla as a wheel. The machine brings Python 3.12 on x86-64, torch 2.11
# for CUDA 13, transformers and the usual scientific packages.
#
#   tests/vllm/pack.sh OUT          everything, into two folders below 64 MB that may travel apart:
#                                   OUT/a  vLLM's kernels
#                                   OUT/b  the rest, kbmla included
#   tests/vllm/pack.sh OUT kbmla    kbmla alone, after a change (OUT/b/kbmla.whl)
#
# PYTHON names an interpreter that has torch and this tree's build requirements (.venv/bin/python).
set -euo pipefail

out=$(realpath -m "${1:?usage: pack.sh OUT [kbmla]}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/a" "$out/b"

"$python" -m pip wheel -q --no-deps --no-build-isolation -w "$work" .
mv "$work"/kbmla-*.whl "$out/b/kbmla.whl"
if [ "${2:-}" = kbmla ]; then
    exit
fi

# Wheels for the other machine. pip takes a platform tag only as it is written.
target=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
target+=(--only-binary=:all:)
for glibc in 39 35 34 31 28 27 24 17; do
    target+=(--platform "manylinux_2_${glibc}_x86_64")
done
target+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

"$python" -m pip download -q --no-deps "${target[@]}" -d "$work" vllm==0.26.0
# With what they need: the server, the client, and small libraries of the engine.
"$python" -m pip install -q --target "$work/site" "${target[@]}" --no-compile \
    blake3 cachetools cbor2 email-validator fastapi-cli 'fastapi>=0.133,<0.137' ijson \
    'jsonschema>=4.23' lark==1.2.2 msgspec nvtx==0.2.15 'openai>=2' openai-harmony \
    orjson outlines_core==0.2.14 partial-json-parser 'prometheus-fastapi-instrumentator>=8' pybase64 \
    pycountry 'pydantic>=2.12' pydantic-extra-types python-json-logger python-multipart \
    'pyzmq>=25' setproctitle 'starlette>=1.0.1' uvicorn uvloop watchfiles
# Alone: what they ask for is large, or there already.
"$python" -m pip install -q --target "$work/site" "${target[@]}" --no-compile --no-deps --upgrade \
    anthropic apache-tvm-ffi astor compressed-tensors==0.17.0 depyf==0.20.0 dill \
    docstring-parser fastsafetensors httpx-sse interegular jmespath 'llguidance>=1.7,<1.8' \
    lm-format-enforcer==0.11.3 mcp 'mistral_common>=1.11.5' \
    'model-hosting-container-standards>=0.1.14,<1' opentelemetry-api opentelemetry-sdk \
    opentelemetry-semantic-conventions pydantic-settings pyjwt python-dotenv sse-starlette xgrammar
rm -rf "$work/site/pycountry/locales" "$work/site/mistral_common/data"

"$python" -m zipfile -e "$work"/vllm-0.26.0-*.whl "$work/vllm"
cd "$work/vllm"
# Kernels that a dense MLA model on Hopper does not call.
rm -rf vllm/third_party/fmha_sm100 vllm/vllm-rs vllm/_qutlass_C.abi3.so \
    vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
find vllm/third_party/deep_gemm -name '_C.cpython-31[0134]*' -delete
# By their paths in the wheel, so that unpacking is one loop.
tar c vllm/_C_stable_libtorch.abi3.so | xz -T0 -3 >"$out/a/kernels.tar.xz"
rm vllm/_C_stable_libtorch.abi3.so
tar c . | xz -T0 -3 >"$out/b/vllm.tar.xz"
tar c -C "$work/site" . | xz -T0 -3 >"$out/b/site.tar.xz"
du -sh "$out/a" "$out/b"
