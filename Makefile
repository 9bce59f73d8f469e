# Everyday commands; each is one script or CMake preset that can be run by itself.
.DEFAULT_GOAL := help
.PHONY: layering help setup build run test test-all test-neon test-asan test-tsan fuzz fuzz-long format format-check tidy serve load test-page peers results pictures spirv docs update-docs sbom wheel test-python llama test-llama clean
SHELL := /bin/bash

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '  make %-13s %s\n' "$$target" "$$text"; done

setup: ## install missing packages (says which and why; does nothing when none is missing)
	@scripts/bootstrap.sh

build: setup ## build the libraries and the command: build/weft
	@cmake --preset release -Wno-dev --log-level=WARNING
	@cmake --build --preset release --target weft_installed

wheel: build ## build the Python wheels from the release objects: dist/weft_mixers-*.whl, and weft_mixers_cuda-*.whl where nvcc is
	@scripts/bootstrap.sh --with python
	@scripts/wheel.sh

# Without an NVIDIA driver, `make run` builds no cuda backend, which takes most of the compile time, and uses a folder of its own.
CUDA ?= $(shell test -e /proc/driver/nvidia -o -e /dev/nvidiactl || ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' && echo AUTO || echo OFF)
run_preset := $(if $(filter OFF,$(CUDA)),release-cpu,release)
run_weft := $(if $(filter OFF,$(CUDA)),build-cpu,build)/weft

run: setup ## build the command, let the bundled model write, and measure what compressing its KV cache costs (CUDA=OFF: cpu only)
	@cmake --preset $(run_preset) -Wno-dev --log-level=WARNING
	@cmake --build --preset $(run_preset) --target weft_command
	@$(run_weft) devices
	@$(run_weft) generate --backend best --stream --max-tokens 260 --until-sentence 120 </dev/null
	@echo
	@echo "Perplexity of the same model on held-out text, by format of cached keys and values (bits of keys v bits of values):"
	@$(run_weft) perplexity --backend best --compare f16 8v8 8v4 4v4 4v2 3v3 2v2
	@echo
	@echo "Shown: the bundled model (models/weft-11m) wrote the passage; the table says what each KV format costs it in perplexity and memory."
	@echo "Next:  $(run_weft) generate --prompt 'The ship' --kv 4v4; $(run_weft) bench --summary; $(run_weft) --help"
	@echo "More:  your own checkpoint with --model DIR (docs/run-a-model.md), C++ and C programs in examples/model/, the design in DESIGN.md"

test: ## the fast tier: release, sanitizers, fuzzing, NEON under qemu, format, lint, install
	@scripts/bootstrap.sh --with test --with neon
	@scripts/test.sh fast

test-all: ## all that the fast tier covers, and the slow tier: every test under sanitizers, ThreadSanitizer, long fuzzing, full qemu set, every case, Vulkan, the HTML reference, the page in a browser, load, llama.cpp
	@scripts/bootstrap.sh --with test --with neon --with docs --with page --with llama
	@scripts/test.sh all

test-neon: ## cross-build for aarch64 and run the cpu tests under qemu
	@scripts/bootstrap.sh --with test --with neon
	@scripts/test.sh neon

test-asan: ## every test under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/bootstrap.sh --with test
	@scripts/test.sh full-asan

test-tsan: ## tests under ThreadSanitizer
	@scripts/bootstrap.sh --with test
	@scripts/test.sh tsan

test-python: ## tests of the Python package with torch, transformers and fla-core, which it installs from PyPI (6 GB)
	@scripts/bootstrap.sh --with test
	@scripts/test.sh torch

fuzz: ## every fuzz target for three minutes
	@scripts/bootstrap.sh --with test
	@scripts/test.sh long-fuzz

fuzz-long: build ## every fuzz target and random legal calls for HOURS (default 2); minimises and replaces fuzz/corpus
	@scripts/bootstrap.sh --with test
	@scripts/fuzz_long.py --hours $(or $(HOURS),2)

format: ## format every tracked source file
	@scripts/bootstrap.sh --with test
	@scripts/format.sh

format-check: ## say which files are not formatted
	@scripts/bootstrap.sh --with test
	@scripts/format.sh --check

tidy: ## lint what changed against the default branch
	@scripts/bootstrap.sh --with test
	@scripts/tidy.sh

serve: setup ## build the command and serve the bundled model at http://127.0.0.1:8080 (SERVE='--port 8081': further options)
	@cmake --preset $(run_preset) -Wno-dev --log-level=WARNING
	@cmake --build --preset $(run_preset) --target weft_command
	@exec $(run_weft) serve $(SERVE)

load: setup ## measure weft serve with 1, 8 and 64 clients beside weft speed: build/load.json
	@cmake --preset release -Wno-dev --log-level=WARNING
	@cmake --build --preset release --target weft_command weft_load
	@scripts/load.sh -o build/load.json

test-page: ## the page of weft serve in Chromium
	@scripts/bootstrap.sh --with test --with page
	@scripts/test.sh page

llama: ## build llama.cpp from the package on PyPI, and libggml-weft.so for it: build-llama/bin (10 minutes on 2 cores)
	@scripts/bootstrap.sh --with llama
	@scripts/llama.sh

test-llama: ## test libggml-weft.so in llama.cpp: its op tests, forms and refusals, logits of random hybrid models
	@scripts/bootstrap.sh --with llama
	@scripts/test.sh llama

peers: ## time Weft beside onnxruntime and ggml (their wheels go into .venv-peers)
	@scripts/bootstrap.sh --with peers
	@scripts/peers.sh

results: ## write bench/RESULTS.md, and result tables elsewhere, from bench/baselines/*.json
	@scripts/results.py

sbom: ## write build/weft.spdx.json: Weft, its dependencies with versions and licences, the bundled model (SPDX 2.3)
	@scripts/sbom.py

spirv: build ## replace the committed SPIR-V by what the build made of the shaders
	@scripts/spirv.sh update build/spirv

pictures: ## draw docs/pictures/*.svg from bench/baselines/*.json
	@scripts/bootstrap.sh --with pictures
	@scripts/pictures.py

docs: ## build the HTML reference of the public headers, with the guides: build-docs/html/index.html
	@scripts/bootstrap.sh --with docs
	@scripts/docs.sh

update-docs: build results ## refresh every generated part of the documents
	@scripts/update_docs.sh

layering: ## check includes against the table of rooms in DESIGN.md
	@python3 scripts/layering.py

clean: ## remove everything that was built
	@rm -rf build build-*
