# Run `make` for a list of these commands. Each one installs or starts what it needs.
CARGO ?= cargo
ARGS ?=
# Most tests wait for leases to expire and for servers, so more of them run than there are cores.
export RUST_TEST_THREADS ?= 8

.DEFAULT_GOAL := help
.PHONY: help demo demo-mysql demo-redlock test servers matrix sim storm failovers mutants \
	cargo-mutants loom tsan miri bench screenshot deny msrv check

help: ## lists these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## five processes contend for one lock: live view, timeline, verdict; try ARGS=--help
	@tools/need-redis.sh --or-url
	@$(CARGO) run --features mysql --example contention -- $(ARGS)

demo-mysql: ## the same with the lock in a MariaDB; try ARGS=--chaos
	@tools/need-mariadb.sh
	@$(CARGO) run --features mysql --example contention -- --mysql $(ARGS)

demo-redlock: ## the same over five servers, two of which are killed; try ARGS=--help
	@tools/need-redis.sh
	@$(CARGO) run --features mysql --example redlock -- $(ARGS)

test: ## runs all tests, against real servers that the tests start themselves
	@tools/need-redis.sh
	@tools/need-mariadb.sh
	$(CARGO) test --workspace --all-features $(ARGS)
	$(CARGO) test --workspace --all-features --bench table

servers: ## fetches other versions of Redis and Valkey into a cache outside of this folder
	tools/servers.sh

matrix: ## the tests of locking on each of these servers; ARGS="valkey-9.1.2" selects by name
	tools/matrix.sh $(ARGS)

storm: ## random faults in processes, servers and network, also with MariaDB; try ARGS=--help
	@tools/need-redis.sh
	@tools/need-mariadb.sh
	$(CARGO) test --workspace --all-features --test storm -- --run $(ARGS)

COUNT ?= 20
failovers: ## kills and freezes masters behind Sentinel, COUNT=20 times each, while locks are held
	@tools/need-redis.sh
	DISTLOCK_FAILOVERS=$(COUNT) $(CARGO) test --all-features --test it \
		sentinel::processes -- --nocapture --test-threads=1

SEEDS ?= 10000
sim: ## the simulator with SEEDS=10000 seeds from FIRST=0; `SIM_SEED=n make sim` replays one
	SIM_SEEDS=$(SEEDS) SIM_FIRST=$(or $(FIRST),0) \
		$(CARGO) test --release --features testing --test sim seeds -- --nocapture

mutants: ## breaks each promise in a copy and shows that its test fails; ARGS=token selects by name
	@tools/need-redis.sh
	@tools/need-mariadb.sh
	$(CARGO) test --workspace --all-features --test mutants -- --run $(ARGS)

cargo-mutants: ## cargo-mutants on the pure files; docs/mutants.md explains the survivors
	@$(CARGO) mutants --version >/dev/null 2>&1 || $(CARGO) install cargo-mutants --locked
	@mkdir -p target
	CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) mutants --output target/cargo-mutants $(ARGS)

loom: ## every interleaving of the small handshakes between threads
	RUSTFLAGS="--cfg loom" $(CARGO) test --release --lib --target-dir target/loom -- \
		wait::loom_tests:: renew::loom_tests:: cleanup::loom_tests:: local::loom_tests:: $(ARGS)

# tsan and miri need a nightly toolchain. docs/races.md lists all interactions between threads.
nightly := rustup toolchain install nightly --profile minimal \
	--component miri,rust-src --no-self-update

tsan: ## looks for data races with ThreadSanitizer; installs a nightly toolchain
	@tools/need-redis.sh
	@tools/need-mariadb.sh
	@$(nightly)
	RUSTFLAGS=-Zsanitizer=thread $(CARGO) +nightly test -Zbuild-std \
		--target x86_64-unknown-linux-gnu --target-dir target/tsan \
		--all-features --lib --test it -- --skip verify::model $(ARGS)

miri: ## looks for undefined behaviour and data races with Miri; installs a nightly toolchain
	@$(nightly)
	PROPTEST_CASES=2 MIRIFLAGS=-Zmiri-disable-isolation \
		$(CARGO) +nightly miri test --target-dir target/miri --lib -- \
		$(or $(ARGS),core::lease:: wait::registry:: core::claim:: core::holder::)

bench: ## the table of speeds, each beside the raw figure of the same run
	@tools/need-redis.sh
	@tools/need-mariadb.sh
	$(CARGO) build --release -p distlock-cli
	$(CARGO) bench --features mysql,tls --bench table $(ARGS)
	$(CARGO) run --release --manifest-path benches/peers/Cargo.toml --target-dir target/peers

screenshot: ## renders docs/top.svg, the picture in the README, from `distlock top`
	@tools/need-redis.sh
	DISTLOCK_SCREENSHOT=$(CURDIR)/docs/top.svg $(CARGO) test -p distlock-cli --test cli screenshot::

deny: ## checks licences, sources and known vulnerabilities of the dependencies
	tools/deny.sh

# Tests may need a newer toolchain than users do.
msrv: ## builds library and command with the minimum Rust version; installs that toolchain
	@version=$$(sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml) && \
	rustup toolchain install "$$version" --profile minimal --no-self-update && \
	cargo "+$$version" check --locked --target-dir target/msrv \
		-p distlock -p distlock-cli --all-features

check: ## formatting, clippy and documentation; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --workspace --no-deps --all-features
