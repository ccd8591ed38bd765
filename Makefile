# The commands of the project. Their steps are in scripts/ and in the binary.

AQUIFER := target/release/aquifer
BENCHES := alloc objects page-cache migration cache fabric faults 'faults --fabric tcp' failover eviction kv malloc apps restart
RESEARCH := alloc objects packing
# Seconds of random programs and chaos in `make test-long`: a fifth is for programs, and a fifth for
# each kind of chaos.
SECONDS := 600

.PHONY: help build demo check test test-long mutants survivors fuzz bench research clean

help:
	@echo 'make demo       runs a real program in a quarter of its memory, and with kernel swap (6 minutes with the build)'
	@echo 'make build      builds target/release/aquifer and the libraries'
	@echo 'make check      runs formatting, rules, lints, unit tests and simulators (5 minutes)'
	@echo 'make test       runs all tests except the long ones (15 minutes from a clean clone)'
	@echo 'make test-long  runs virtual machines, other languages, chaos for SECONDS=$(SECONDS), one large run;'
	@echo '                or one of them: PART=checks, fuzz, benches, simulators, peers, programs, chaos, guests'
	@echo 'make mutants    searches and records the schedules that notice each mutation'
	@echo 'make survivors  changes 20 functions at random, and reports the changes that no test notices'
	@echo 'make fuzz       searches for inputs that break a parser, a minute for each of them'
	@echo 'make bench      runs all benches, each with its peers'
	@echo 'make research   builds target/release/aquifer-research, and replays all figures on a model'
	@echo 'make clean      removes build output'

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
	AQUIFER_SOAK_S=$$(($(SECONDS) / 5)) PART='$(PART)' scripts/test.sh long

mutants:
	AQUIFER_RECORD_MUTANTS=1 cargo test --workspace --test simulators every_mutation_is_noticed \
		-- --nocapture --test-threads=1

survivors:
	scripts/install-deps.sh test
	scripts/survivors.py

fuzz:
	scripts/install-deps.sh fuzz
	scripts/fuzz.sh

bench:
	scripts/install-deps.sh bench
	cargo build --release
	set -e; for name in $(BENCHES); do $(AQUIFER) bench $$name; done

research:
	scripts/install-deps.sh build
	cargo build --release -p aquifer-research
	set -e; for name in $(RESEARCH); do target/release/aquifer-research $$name; done

clean:
	cargo clean
