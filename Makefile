# Each command says what it does, and sets up what it needs.
CARGO ?= cargo
ARGS ?=
# Tests mostly wait: for leases to end, and for servers.
export RUST_TEST_THREADS ?= 4

.DEFAULT_GOAL := help
.PHONY: help demo demo-redlock test sim storm mutants loom tsan miri cargo-mutants bench screenshot deny msrv check

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## processes that want one lock, a timeline and a verdict; ARGS=--chaos kills and stops some, ARGS=--help says more
	@tools/need-redis.sh --or-url
	@$(CARGO) run --example contention -- $(ARGS)

demo-redlock: ## the same over five servers, two of which are killed and come back; ARGS=--help says more
	@tools/need-redis.sh
	@$(CARGO) run --example redlock -- $(ARGS)

test: ## all tests, on real servers that are started and ended with them
	@tools/need-redis.sh
	$(CARGO) test --workspace --all-features $(ARGS)
	$(CARGO) test --all-features --bench table

storm: ## processes, servers and the network ill-treated at random, on one server and on five; ARGS=--help says more
	@tools/need-redis.sh
	$(CARGO) test --all-features --test storm -- --run $(ARGS)

SEEDS ?= 10000
sim: ## the simulator with SEEDS=10000 seeds; FIRST=n begins elsewhere, `SIM_SEED=n make sim` replays one
	SIM_SEEDS=$(SEEDS) SIM_FIRST=$(or $(FIRST),0) $(CARGO) test --release --features testing --test sim seeds -- --nocapture

mutants: ## breaks each promise on purpose, in a copy, and shows that its test notices; ARGS=token takes those so named
	@tools/need-redis.sh
	$(CARGO) test --all-features --test mutants -- --run $(ARGS)

cargo-mutants: ## cargo-mutants on the files that only compute; docs/mutants.md explains the mutants that survive
	@$(CARGO) mutants --version >/dev/null 2>&1 || $(CARGO) install cargo-mutants --locked
	@mkdir -p target
	CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) mutants --output target/cargo-mutants $(ARGS)

loom: ## every order of events in the handshakes between threads
	RUSTFLAGS="--cfg loom" $(CARGO) test --release --lib --target-dir target/loom -- acquire::checks:: renewer::checks:: $(ARGS)

# Both need what no stable toolchain has. All that threads do to each other stands in docs/races.md.
nightly := rustup toolchain install nightly --profile minimal --component miri,rust-src --no-self-update

tsan: ## data races of the real threads with real servers, as ThreadSanitizer sees them; installs a nightly toolchain
	@tools/need-redis.sh
	@$(nightly)
	RUSTFLAGS=-Zsanitizer=thread $(CARGO) +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu \
		--target-dir target/tsan --all-features --lib --test it -- --skip redlock::model $(ARGS)

miri: ## undefined behaviour and data races in what needs no socket, as Miri sees them; installs a nightly toolchain
	@$(nightly)
	PROPTEST_CASES=2 MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test --target-dir target/miri --lib -- \
		$(or $(ARGS),lease:: mailbox:: grant:: holder::)

bench: ## the table of speeds, with the raw figures beside
	@tools/need-redis.sh
	$(CARGO) build --release -p distlock-cli
	$(CARGO) bench --bench table $(ARGS)
	$(CARGO) run --release --manifest-path benches/peers/Cargo.toml --target-dir target/peers

screenshot: ## docs/top.svg, the picture in the README, from the real thing
	@tools/need-redis.sh
	DISTLOCK_SCREENSHOT=docs/top.svg $(CARGO) test -p distlock-cli --test cli screenshot::

deny: ## licences, sources and known defects of the dependencies
	tools/deny.sh

# Tests may need a newer toolchain than users do.
msrv: ## builds the library and the command with the oldest Rust that Cargo.toml promises; installs that toolchain
	@version=$$(sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml) && \
	rustup toolchain install "$$version" --profile minimal --no-self-update && \
	cargo "+$$version" check --locked --target-dir target/msrv -p distlock -p distlock-cli --all-features

check: ## formatting, clippy and documentation, warnings being errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps --all-features
