# The few commands that people type. What they do is in scripts/ and in the binary itself.

AQUIFER := target/release/aquifer
BENCHES := alloc packing dilemma fabric faults 'faults --fabric tcp' malloc apps
# A third of it are random programs, the rest is chaos, with nodes that lose their memory and with nodes that keep it; `make test-long SOAK_S=36000` lasts ten hours.
SOAK_S := 600

.PHONY: help build demo test test-long test-guests bench clean

help:
	@echo 'make demo       a real program in a quarter of the memory it needs, beside kernel swap (3 minutes)'
	@echo 'make build      target/release/aquifer and the libraries beside it'
	@echo 'make test       formatting, lints, all tests'
	@echo 'make test-long  random programs under random limits, then real ones while parts of the cluster die, for SOAK_S=$(SOAK_S) seconds'
	@echo 'make test-guests  all that runs in virtual machines with Soft-RoCE; `make test` runs some of it'
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

test:
	scripts/test.sh

test-long:
	scripts/install-deps.sh test
	cargo build --release
	AQUIFER_SCHEDULES=100000 cargo test -p aquifer-sim --test paging
	AQUIFER_SOAK_S=$$(($(SOAK_S) / 3)) cargo test -p aquifer-tests-e2e --test soak --test chaos -- --nocapture

test-guests:
	scripts/install-deps.sh test guests
	cargo build --release
	cargo test -p aquifer-tests-guests --test runner --test verbs --test long -- --test-threads=1

bench:
	scripts/install-deps.sh bench
	cargo build --release
	set -e; for name in $(BENCHES); do $(AQUIFER) bench $$name; done

clean:
	cargo clean
