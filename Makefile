# Commands of the project. Each sets up what it needs, even on a fresh clone.

# Tests that run under miri, which does not support C++: pure Rust only.
MIRI_TESTS ?= -p brimful-plan --lib
MIRI_OOM_TESTS ?= -p brimful --lib -- oom::tests::each oom::tests::cuda oom::tests::an_arena

# If MPI is installed, everything is built with it and its tests run, in one build.
MPI := $(shell command -v mpicc >/dev/null && command -v mpirun >/dev/null && echo --features mpi)
WITHOUT_MPI := skipped: what needs MPI, which is not installed (make mpi installs it)

CHECKS := format typos clippy test-all own-crate setup-test docs package licences miri

.PHONY: help demo test test-all fuzz check bench bench-peers mpi chromium transformers clean rust libtorch $(CHECKS)
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 13

demo: libtorch ## show what brimful does, in a minute
	@cargo run -p brimful-cli -- demo

test: libtorch ## run the tests
	scripts/test $(MPI)

test-all: libtorch ## run all tests: long ones too, and those in a browser, beside transformers and over two hosts
	scripts/test --all $(MPI)
	@$(if $(MPI),scripts/test-two-hosts,echo "$(WITHOUT_MPI)")

fuzz: export OMP_NUM_THREADS := 1
fuzz: export BRIMFUL_FUZZ_CASES := $(or $(N),2000)
fuzz: export BRIMFUL_FUZZ_SEED := $(or $(SEED),0)
fuzz: libtorch ## draw N cases (default 2000): compare every engine with the plain model; change configs of folders (N / 10)
	cargo test -q -p brimful $(MPI) --test differential -- --nocapture --test-threads 1
	BRIMFUL_FUZZ_CASES=$$((BRIMFUL_FUZZ_CASES / 10 + 1)) cargo test -q -p brimful-cli --test mutations -- --nocapture

# Incremental compilation makes the first build a sixth slower, so it is off until there is something to reuse.
check: export CARGO_INCREMENTAL ?= $(if $(wildcard target),1,0)
check: ## format, lints, tests, docs, licences: what must hold before a commit
	@for part in $(CHECKS); do \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory $$part || exit 1; \
		echo "check: $$part took $$(($$(date +%s) - start)) s"; \
	done

bench: libtorch ## measure speed and memory, a small table of each kind: build/bench
	@cargo build --release -q -p brimful-bench
	@PEERS=none bench/run build/bench

bench-peers: libtorch ## set the peers up, and measure them in turns with ours: build/bench
	@cargo build --release -q -p brimful-bench
	@bench/peers/setup
	@bench/run build/bench micro auto pipeline

mpi: ## install what training over several processes needs (Debian)
	@scripts/mpi

chromium: ## install the browser that the report's page is tested in (Debian)
	@scripts/chromium

transformers: ## install what folders are tested against: transformers and PEFT, 3.6 GB in the user's cache
	@scripts/transformers

clean: rust ## remove what was built; the downloaded libtorch stays in the user's cache
	cargo clean
	rm -rf .libtorch
	@echo "kept: $${XDG_CACHE_HOME:-$$HOME/.cache}/brimful, where the next set-up finds libtorch"

rust:
	@command -v cargo >/dev/null || \
		{ echo "make: no cargo: install Rust (rustup), and run this again" >&2; exit 1; }

libtorch: rust ## bring libtorch, as .libtorch: what crates elsewhere need
	@scripts/libtorch

format: rust
	cargo fmt --all --check

# Without libtorch, like the docs: nothing is linked, so the bridge's C++ need not be compiled. Most users build the
# program without MPI, so that is checked too.
clippy: rust
	cargo clippy --workspace --all-targets --features doc-only $(MPI) -- -D warnings
	@$(if $(MPI),cargo clippy -p brimful-cli --features doc-only -- -D warnings)

# Builds a crate elsewhere as the guide says; after `test-all`, which compiles most of it.
own-crate: libtorch
	scripts/test-own-crate

setup-test:
	scripts/test-libtorch

typos:
	@scripts/typos

# Built as for the registry, where there is no libtorch.
docs: rust
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace --features doc-only

# Does not build the packages: the release does.
package: rust
	cargo package --quiet --workspace --exclude brimful-guide --exclude brimful-bench --no-verify --allow-dirty

licences: rust
	@if command -v cargo-deny >/dev/null; \
	then cargo deny check licenses bans sources; \
	else echo "skipped: cargo-deny is not installed"; fi

miri: libtorch
	@if cargo +nightly miri --version >/dev/null 2>&1; \
	then cargo +nightly miri test $(MIRI_TESTS) && cargo +nightly miri test $(MIRI_OOM_TESTS); \
	else echo "skipped: the nightly toolchain has no miri"; fi
