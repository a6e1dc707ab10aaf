# SPDX-License-Identifier: Apache-2.0
# kbmla: `make` prints help. `make demo` and `make test` do all their set-up.
#
# The C core is built here into a static library; only the binding (csrc/torch) goes through
# torch's extension builder, in setup.py.

VENV     ?= .venv
PYTHON   ?= $(VENV)/bin/python
CC       ?= gcc
BUILD    ?= build
SANITIZE ?= address,undefined
PYTEST_ARGS ?=

CFLAGS_COMMON = -std=c11 -fPIC -g -Wall -Wextra -Wconversion -Werror -Icsrc
CFLAGS   ?= -O3

# CUDA: "auto" builds the kernels wherever nvcc is, whether or not a GPU is; 0 never, 1 insists.
# TORCH_CUDA_ARCH_LIST chooses the cards of the portable kernels (tools/nvcc.py has the default).
KBMLA_CUDA ?= auto
NVCC     ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc))
ifeq ($(KBMLA_CUDA),1)
HAS_CUDA = 1
else ifeq ($(KBMLA_CUDA),auto)
HAS_CUDA = $(if $(NVCC),1)
endif
# Where nvcc keeps the runtime, which is linked statically: no CUDA library is needed at import.
CUDART   = $(firstword $(wildcard $(addsuffix /libcudart_static.a,$(shell $(NVCC) --dryrun x.cu 2>&1 | sed -nE 's/.*LIBRARIES=//p' | grep -oE '\-L[^" ]+' | cut -c3-))))
LINK_FLAGS = -lm $(if $(HAS_CUDA),$(CUDART) -lrt -ldl -lpthread)
NVCC_FLAGS = -std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-Wall -Icsrc

CORE_C   = $(wildcard csrc/*.c) $(wildcard csrc/cpu/*.c)
HEADERS  = $(wildcard csrc/*.h) $(wildcard csrc/cpu/*.h)
CUDA_SRC = $(if $(HAS_CUDA),$(wildcard csrc/cuda/*.cu csrc/sm90/*.cu))
CUDA_HEADERS = $(wildcard csrc/cuda/*.h csrc/cuda/*.cuh csrc/sm90/*.h csrc/sm90/*.cuh)
LIB      = $(BUILD)/libkbmla.a
OBJECTS  = $(CORE_C:csrc/%.c=$(BUILD)/obj/%.o) $(CUDA_SRC:csrc/%.cu=$(BUILD)/obj/%.o)
ASAN_OBJECTS = $(CORE_C:csrc/%.c=$(BUILD)/asan/%.o)

# Per-file instruction sets; the choice among them is made at run time.
ifeq ($(shell uname -m),x86_64)
ISA_avx2   = -mavx2 -mfma
ISA_avx512 = $(ISA_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
endif
isa_flags = $(if $(findstring avx512,$(1)),$(ISA_avx512),$(if $(findstring avx2,$(1)),$(ISA_avx2)))

.DEFAULT_GOAL := help
.PHONY: help venv build lib demo test test-c test-py test-vllm sanitize lint format bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo '  PYTHON=/path/to/python uses an existing environment instead of $(VENV)'

# ---- environment --------------------------------------------------------------------------------
# With the default PYTHON a virtual environment is made and filled; with PYTHON given, that
# environment is used as it is and only what pyproject.toml asks for and it lacks is installed.

ENV_STAMP = $(BUILD)/env-$(subst /,_,$(PYTHON)).stamp

$(VENV)/bin/python:
	python3 -m venv $(VENV)

ifeq ($(PYTHON),$(VENV)/bin/python)
$(ENV_STAMP): $(VENV)/bin/python
endif

$(ENV_STAMP): pyproject.toml requirements-dev.txt
	@mkdir -p $(BUILD)
	$(PYTHON) -m pip install -q -r requirements-dev.txt
	@touch $@

venv: $(ENV_STAMP) ## the development environment in .venv

# ---- build --------------------------------------------------------------------------------------

$(BUILD)/obj/%.o: csrc/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_COMMON) $(CFLAGS) $(call isa_flags,$*) -c $< -o $@

# One folder, one set of images: csrc/cuda is portable, csrc/sm90 sm_90a alone. tools/nvcc.py fails on
# spills and warnings.
$(BUILD)/obj/cuda/%.o: csrc/cuda/%.cu $(HEADERS) $(CUDA_HEADERS) tools/nvcc.py Makefile
	@mkdir -p $(@D)
	python3 tools/nvcc.py "$(NVCC)" cuda $< $@ $(NVCC_FLAGS)

$(BUILD)/obj/sm90/%.o: csrc/sm90/%.cu $(HEADERS) $(CUDA_HEADERS) tools/nvcc.py Makefile
	@mkdir -p $(@D)
	python3 tools/nvcc.py "$(NVCC)" sm90 $< $@ $(NVCC_FLAGS)

# Rebuilt when CUDA is switched on or off: kbmla.c names the backends.
CUDA_STAMP = $(BUILD)/obj/cuda-$(or $(HAS_CUDA),0).stamp
$(CUDA_STAMP):
	@mkdir -p $(@D)
	@rm -f $(BUILD)/obj/cuda-*.stamp
	@touch $@
	@$(if $(HAS_CUDA),,echo 'kbmla: no CUDA kernels in this build (nvcc not found, or KBMLA_CUDA=0)')

$(BUILD)/obj/kbmla.o: $(CUDA_STAMP)
$(BUILD)/obj/kbmla.o: CFLAGS_COMMON += $(if $(HAS_CUDA),-DKBMLA_HAS_CUDA)

$(LIB): $(OBJECTS)
	@rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/link-flags: $(LIB)
	@$(if $(HAS_CUDA),$(if $(CUDART),,echo 'kbmla: libcudart_static.a was not found beside $(NVCC)' >&2; exit 1))
	@echo '$(LINK_FLAGS)' > $@

lib: $(LIB) $(BUILD)/link-flags ## the core alone, build/libkbmla.a

BUILD_STAMP = $(BUILD)/package-$(subst /,_,$(PYTHON)).stamp

$(BUILD_STAMP): $(ENV_STAMP) $(BUILD)/link-flags csrc/torch/ops.cpp setup.py pyproject.toml
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

build: $(BUILD_STAMP) ## the package, installed in place (editable)

# ---- what a newcomer runs -----------------------------------------------------------------------

demo: build ## plan, decode and check a batch from a public trace, with pictures
	$(PYTHON) -m kbmla demo

test: test-c test-py ## everything that needs no GPU; GPU tests run where there is one

test-py: build
	$(PYTHON) -m pytest tests $(PYTEST_ARGS)

# ---- vLLM ---------------------------------------------------------------------------------------
# The adapter against vLLM's real classes, no GPU needed: one environment with what vLLM imports, and
# each release beside it in a folder of its own.

VLLM_RELEASES ?= 0.33.0 0.26.0
VLLM_VENV  = .venv-vllm
VLLM_STAMP = $(BUILD)/env-vllm.stamp

$(VLLM_STAMP): tests/vllm/requirements.txt tests/vllm/requirements-alone.txt
	@mkdir -p $(BUILD)
	python3 -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps -r tests/vllm/requirements-alone.txt
	@touch $@

$(BUILD)/vllm/%.stamp: $(VLLM_STAMP)
	rm -rf $(BUILD)/vllm/$*
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps --target $(BUILD)/vllm/$* vllm==$*
	@touch $@

.PRECIOUS: $(BUILD)/vllm/%.stamp

test-vllm: build $(VLLM_RELEASES:%=$(BUILD)/vllm/%.stamp) ## the vLLM backend against vLLM's own classes
	@$(PYTHON) setup.py -q egg_info # where the entry point is found beside the sources
	@set -e; for release in $(VLLM_RELEASES); do \
		echo "vLLM $$release"; \
		PYTHONPATH=$(CURDIR)/$(BUILD)/vllm/$$release:$(CURDIR) \
			$(VLLM_VENV)/bin/python -m pytest tests/vllm $(PYTEST_ARGS); \
	done

# ---- GPU ----------------------------------------------------------------------------------------

sanitize: build ## the kernels under compute-sanitizer's four tools; needs a GPU
	PYTHON=$(PYTHON) tests/device.sh sanitize

# ---- torch-free C tests, under sanitizers -------------------------------------------------------

TEST_HEADERS = $(wildcard tests/c/*.h)
TEST_LIB = $(BUILD)/libkbmla-cpu.a

# The C tests need no CUDA, and link without it.
$(TEST_LIB): $(CORE_C:csrc/%.c=$(BUILD)/cpu-obj/%.o)
	@rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/cpu-obj/%.o: csrc/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_COMMON) $(CFLAGS) $(call isa_flags,$*) -c $< -o $@

$(BUILD)/asan/%.o: csrc/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_COMMON) -O1 -fsanitize=$(SANITIZE) -fno-sanitize-recover=all $(call isa_flags,$*) -c $< -o $@

$(BUILD)/test_core_asan: tests/c/test_core.c $(ASAN_OBJECTS) $(TEST_HEADERS)
	$(CC) $(CFLAGS_COMMON) -O1 -fsanitize=$(SANITIZE) -fno-sanitize-recover=all $(filter-out %.h,$^) -o $@ -lm -lpthread

$(BUILD)/test_core: tests/c/test_core.c $(TEST_LIB) $(TEST_HEADERS)
	$(CC) $(CFLAGS_COMMON) -O2 -DKBMLA_COUNT_ALLOCATIONS -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc $(filter-out %.h,$^) -o $@ -lm -lpthread

test-c: $(BUILD)/test_core $(BUILD)/test_core_asan ## the torch-free C tests, plain and under ASan and UBSan
	$(BUILD)/test_core
	$(BUILD)/test_core_asan

# ---- the rest -----------------------------------------------------------------------------------

PY_SOURCES = kbmla tests benchmarks examples tools setup.py
C_SOURCES  = $(CORE_C) $(HEADERS) $(wildcard csrc/torch/*.cpp) $(wildcard csrc/cuda/*) $(wildcard csrc/sm90/*) $(wildcard tests/c/*.[ch])

lint: venv ## clang-format, ruff, mypy
	$(PYTHON) -m ruff check $(PY_SOURCES)
	$(PYTHON) -m ruff format --check $(PY_SOURCES)
	$(PYTHON) -m mypy
	$$($(PYTHON) -c 'import clang_format as c; print(c.get_executable("clang-format"))') --dry-run -Werror $(C_SOURCES)

format: venv ## rewrite all sources in the project's format
	$(PYTHON) -m ruff format $(PY_SOURCES)
	$(PYTHON) -m ruff check --fix -q $(PY_SOURCES)
	$$($(PYTHON) -c 'import clang_format as c; print(c.get_executable("clang-format"))') -i $(C_SOURCES)

bench: build ## CPU decode against eager PyTorch, and the planner's simulation
	$(PYTHON) benchmarks/bench_cpu.py
	$(PYTHON) benchmarks/simulate_plan.py

clean: ## remove what was built, the environment excepted
	rm -rf $(BUILD) kbmla/_C*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
