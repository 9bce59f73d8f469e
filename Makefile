# Everyday commands; each is one script or CMake preset that can be run by itself.
.DEFAULT_GOAL := help
.PHONY: help setup build run test test-all test-neon test-asan test-tsan fuzz format format-check tidy peers results pictures docs update-docs clean
SHELL := /bin/bash

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '  make %-13s %s\n' "$$target" "$$text"; done

setup: ## install missing packages (says which and why; does nothing when none is missing)
	@scripts/bootstrap.sh

build: setup ## build the library and the command: build/weft
	@cmake --preset release -Wno-dev --log-level=WARNING
	@cmake --build --preset release --target weft_command

run: build ## set up, build, let the model that comes with Weft write, and measure what compressing its cache costs
	@build/weft devices
	@build/weft generate --backend best --stream --max-tokens 160
	@echo
	@echo "Perplexity of the same model on held-out text, by format of cached keys and values (bits of keys v bits of values):"
	@build/weft perplexity --backend best --compare f16 8v8 8v4 4v4 4v2 3v3 2v2

test: ## the fast tier: release, sanitizers, fuzzing, NEON under qemu, format, lint, install
	@scripts/bootstrap.sh --with test --with neon
	@scripts/test.sh fast

test-all: ## the fast tier, then the slow one: ThreadSanitizer, long fuzzing, full qemu set, every case, the HTML reference
	@scripts/bootstrap.sh --with test --with neon --with docs
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

fuzz: ## every fuzz target for three minutes
	@scripts/bootstrap.sh --with test
	@scripts/test.sh long-fuzz

format: ## format every tracked source file
	@scripts/bootstrap.sh --with test
	@scripts/format.sh

format-check: ## say which files are not formatted
	@scripts/bootstrap.sh --with test
	@scripts/format.sh --check

tidy: ## lint what changed against the default branch
	@scripts/bootstrap.sh --with test
	@scripts/tidy.sh

peers: ## time Weft beside onnxruntime and ggml (their wheels go into .venv-peers)
	@scripts/bootstrap.sh --with peers
	@scripts/peers.sh

results: ## write bench/RESULTS.md, and result tables elsewhere, from bench/baselines/*.json
	@scripts/results.py

pictures: ## draw docs/pictures/*.svg from bench/baselines/*.json
	@scripts/bootstrap.sh --with pictures
	@scripts/pictures.py

docs: ## build the HTML reference of the public headers, with the guides: build-docs/html/index.html
	@scripts/bootstrap.sh --with docs
	@scripts/docs.sh

update-docs: build results ## refresh every generated part of the documents
	@scripts/update_docs.sh

clean: ## remove everything that was built
	@rm -rf build build-*
