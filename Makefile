# The few commands that people type. What they do is in scripts/ and in the binary itself.

AQUIFER := target/release/aquifer
BENCHES := alloc packing dilemma fabric faults 'faults --fabric tcp' malloc apps
# Seconds of random programs and chaos in `make test-long`: a third for programs, the rest for chaos with nodes that lose their memory and with nodes that keep it.
SECONDS := 600

.PHONY: help build demo check test test-long mutants bench clean

help:
	@echo 'make demo       a real program in a quarter of the memory it needs, beside kernel swap (3 minutes)'
	@echo 'make build      target/release/aquifer and the libraries beside it'
	@echo 'make check      before each commit: formatting, rules, lints, unit tests, simulators (5 minutes)'
	@echo 'make test       that, and all other tests but the long ones (15 minutes from a clean clone)'
	@echo 'make test-long  the rest: virtual machines, other languages, chaos and random programs for SECONDS=$(SECONDS), one large run'
	@echo 'make mutants    searches the schedules that notice each mutation of a protocol, and records them in crates/sim/corpus'
	@echo 'make bench      all benches, each beside its peers'
	@echo 'make clean      removes what was built'

build:
	scripts/install-deps.sh build
	cargo build --release
	ln -sf libaquifer_malloc.so target/release/libaquifer-malloc.so

demo:
	scripts/install-deps.sh demo
	cargo build --release
	$(AQUIFER) demo

check:
	scripts/test.sh check

test:
	scripts/test.sh test

test-long:
	AQUIFER_SOAK_S=$$(($(SECONDS) / 3)) scripts/test.sh long

mutants:
	AQUIFER_RECORD_MUTANTS=1 cargo test --workspace --test simulators every_mutation_is_noticed -- --nocapture --test-threads=1

bench:
	scripts/install-deps.sh bench
	cargo build --release
	set -e; for name in $(BENCHES); do $(AQUIFER) bench $$name; done

clean:
	cargo clean
