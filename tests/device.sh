#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The device pass: everything that needs a GPU, on a machine that has one and nothing else.
#
#   tests/device.sh [correctness] [contract] [sanitize] [bench]      (all of them by default)
#
#   correctness  the suite's GPU half, pytest -m gpu, on each of $BACKENDS; if that takes the first
#                one long, the others run the files that say most about a kernel
#   contract     the contract's tests, $CONTRACT, on CUDA
#   sanitize     compute-sanitizer's memcheck, racecheck, synccheck and initcheck, each over the
#                short tests marked sanitize, on each of $BACKENDS, once it has found the fault of a
#                faulty kernel
#   bench        benchmarks/bench_decode.py
#
# kbmla is taken from this tree as built (kbmla/_C.abi3.so); nothing is built, installed or fetched.
# Every step has a time limit of its own and runs whatever became of the others. Logs, one per step,
# and the benchmark's files go to $OUT, or to build/device; the table of results is printed last.
#
# Variables:
#   PYTHON        the interpreter that has torch (python3)
#   KBMLA_SITE    a folder of Python packages, or of wheels that are unpacked, for what it lacks
#   BACKENDS      GPU backends, some of "sm90 cuda" (the device's, fastest first)
#   CONTRACT      path of test_contract.py
#   FLASHMLA      FlashMLA's FP8 library, timed by bench in the same run
#   BENCH_ARGS    more arguments of bench, such as --quick
#   PYTEST_ARGS   more arguments of correctness, such as -x or -k WORD
#   SANITIZERS    the tools of sanitize (memcheck racecheck synccheck initcheck)
#   LIMIT_CORRECTNESS (per backend), LIMIT_CONTRACT, LIMIT_SANITIZE (per tool and
#                 backend), LIMIT_BENCH   seconds
#
# Exit status: 0 all passed, 1 a step failed, 2 nothing could be run.

set -u

STEPS="correctness contract sanitize bench"
stop() {
    echo "device.sh: $1" >&2
    exit 2
}

# ---- what to run --------------------------------------------------------------------------------

if [ $# -gt 0 ]; then
    wanted="$*"
    named=1
else
    wanted=$STEPS
    named=0
fi
for step in $wanted; do
    case " $STEPS " in
        *" $step "*) ;;
        *) stop "unknown step '$step', expected some of: $STEPS" ;;
    esac
done

# A path of the caller's, which may be relative to where the caller is.
absolute() {
    case $1 in
        "" | /*) printf '%s' "$1" ;;
        *) printf '%s/%s' "$here" "$1" ;;
    esac
}

here=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || stop "no repository around this script"
cd "$root" || stop "cannot enter $root"
logs=$(absolute "${OUT:-$root/build/device}")
contract=$(absolute "${CONTRACT:-}")
flashmla=$(absolute "${FLASHMLA:-}")
site=$(absolute "${KBMLA_SITE:-}")
mkdir -p "$logs" || stop "cannot make $logs"
python=${PYTHON:-python3}
command -v "$python" >/dev/null || stop "no $python"

# ---- the environment ----------------------------------------------------------------------------

path=$root
unpacked=
if [ -n "$site" ]; then
    [ -d "$site" ] || stop "KBMLA_SITE is not a folder: $site"
    path=$path:$site
    for wheel in "$site"/*.whl; do
        [ -e "$wheel" ] || continue
        if [ -z "$unpacked" ]; then
            unpacked=$(mktemp -d) || stop "no temporary folder"
            trap 'rm -rf "$unpacked"' EXIT
            path=$path:$unpacked
        fi
        "$python" -m zipfile -e "$wheel" "$unpacked" || stop "cannot unpack $wheel"
    done
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

needs_pytest=0
case " $wanted " in *" correctness "* | *" contract "* | *" sanitize "*) needs_pytest=1 ;; esac
if [ $needs_pytest = 1 ]; then
    "$python" -c 'import pytest' 2>/dev/null ||
        stop "$python has no pytest; put its wheels in a folder and name it in KBMLA_SITE"
fi
case " $wanted " in
    *" correctness "* | *" sanitize "*)
        "$python" -c 'import hypothesis' 2>/dev/null ||
            stop "$python has no hypothesis; put its wheels in a folder and name it in KBMLA_SITE"
        ;;
esac
"$python" -c 'import torch' 2>/dev/null || stop "$python has no torch"
"$python" - <<'PY' || stop "torch sees no CUDA device"
import sys
import torch
sys.exit(0 if torch.cuda.is_available() else 1)
PY
"$python" - >"$logs/summary.txt" 2>&1 <<'PY' || stop "kbmla does not import: $(tail -n 1 "$logs/summary.txt")"
import torch
import kbmla
for name, value in kbmla.build_info().items():
    print(f"{name}: {value}")
for index in range(torch.cuda.device_count()):
    print(f"device {index}: {torch.cuda.get_device_name(index)}")
PY
cat "$logs/summary.txt"
backends=${BACKENDS:-$("$python" -c '
import torch
from kbmla import core
print(*core._backends_of(torch.device("cuda", 0)))')} || stop "no GPU backend"

# Seconds of a backend's correctness beyond which the next ones run a part: 100 for what they would
# run, 50 for test_sm90.py, which only the first one runs.
LONG=150
KERNEL_TESTS="tests/test_cuda.py tests/test_decode.py tests/test_numerics.py tests/test_dcp.py"

# ---- running steps ------------------------------------------------------------------------------

table=
failed=0

record() { # NAME RESULT SECONDS LAST_LINE
    table+=$(printf '%-17s %-8s %5s  %s' "$1" "$2" "$3" "${4:0:110}")$'\n'
    case $2 in
        ok) ;;
        skip) [ $named = 0 ] || failed=1 ;;
        *) failed=1 ;;
    esac
}

# The line that says most: a sanitizer's own count, else the last one that is not empty.
last_line() { # FILE
    local found
    found=$(grep -a 'ERROR SUMMARY\|RACECHECK SUMMARY' "$1" | tail -n 1 | sed 's/^=* *//')
    [ -n "$found" ] || found=$(grep -av '^[[:space:]]*$' "$1" | tail -n 1)
    printf '%s' "$found"
}

run() { # NAME LIMIT LOG COMMAND...
    local name=$1 limit=$2 log=$3 part began status result
    shift 3
    part=$(mktemp) || stop "no temporary file"
    echo "== $name (at most $limit s)"
    began=$SECONDS
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$part"
    status=${PIPESTATUS[0]}
    case $status in
        0) result=ok ;;
        5) result=none ;; # pytest found no test to run: as bad as a failure
        124 | 137) result=timeout ;;
        *) result="fail $status" ;;
    esac
    # A pass that ran no test is none, whatever a tool in front of pytest made of the exit status.
    if [ "$result" = ok ] && [ "$name" != bench ] && ! grep -aq '[0-9] passed' "$part"; then
        result=none
    fi
    { echo "== $name: $*"; cat "$part"; echo "== $name: $result"; } >>"$logs/$log"
    record "$name" "$result" $((SECONDS - began)) "$(last_line "$part")"
    rm -f "$part"
}

for step in $wanted; do
    : >"$logs/$step.log"
    case $step in
        correctness)
            tests=tests
            marks=gpu
            for backend in $backends; do
                start=$SECONDS
                # shellcheck disable=SC2086  # tests and PYTEST_ARGS are lists of words
                run "correctness $backend" "${LIMIT_CORRECTNESS:-300}" correctness.log \
                    "$python" -m pytest -p no:cacheprovider $tests -m "$marks" \
                    --backend "$backend" --durations=5 ${PYTEST_ARGS:-}
                [ $((SECONDS - start)) -le $LONG ] || tests=$KERNEL_TESTS
                marks="gpu and not sm90" # those name their backends themselves
            done
            ;;
        contract)
            if [ -f "$contract" ]; then
                run contract "${LIMIT_CONTRACT:-150}" contract.log \
                    env KBMLA_CONTRACT_DEVICE=cuda \
                    "$python" -m pytest -p no:cacheprovider "$contract"
            else
                record contract skip 0 "CONTRACT names no file: '$contract'"
            fi
            ;;
        sanitize)
            if ! command -v compute-sanitizer >/dev/null; then
                record sanitize skip 0 "no compute-sanitizer on the PATH"
                continue
            fi
            for tool in ${SANITIZERS:-memcheck racecheck synccheck initcheck}; do
                # Without torch's cache every tensor is an allocation of its own, so a read past one
                # is a read of nothing instead of a read of a neighbour.
                checked=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool"
                    --error-exitcode 86 --print-limit 20)
                # torch probes the driver with calls that are meant to fail.
                [ "$tool" != memcheck ] || checked+=(--report-api-errors no)
                # 60 s are many times what it takes.
                timeout 60 "${checked[@]}" "$python" tests/faulty_kernel.py "$tool" \
                    >"$logs/faulty.log" 2>&1
                status=$?
                if [ $status -ne 86 ] || ! grep -q faulty_kernel "$logs/faulty.log"; then
                    cat "$logs/faulty.log" >>"$logs/sanitize.log"
                    record "$tool" "fail $status" 0 "tests/faulty_kernel.py: expected its fault, see sanitize.log"
                    continue
                fi
                for backend in $backends; do
                    run "$tool $backend" "${LIMIT_SANITIZE:-120}" sanitize.log \
                        "${checked[@]}" "$python" -m pytest -p no:cacheprovider tests -m sanitize \
                        --backend "$backend" -x
                done
            done
            ;;
        bench)
            # shellcheck disable=SC2086  # BENCH_ARGS is a list of words
            run bench "${LIMIT_BENCH:-400}" bench.log \
                "$python" benchmarks/bench_decode.py \
                --json "$logs/bench.json" --csv "$logs/bench.csv" \
                ${flashmla:+--flashmla "$flashmla"} ${BENCH_ARGS:-}
            ;;
    esac
done

{
    printf '\n%-17s %-8s %5s  %s\n' step result s "last line"
    printf '%s' "$table"
} | tee -a "$logs/summary.txt"
exit $failed
