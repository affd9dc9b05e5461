#!/bin/sh
# Checks the dependencies against deny.toml. Installs cargo-deny if it is missing. If the advisory
# database cannot be downloaded, checks everything else and says so.
set -eu

say() { echo "deny: $*" >&2; }

if ! cargo deny --version >/dev/null 2>&1; then
    say "cargo-deny is missing; installing it"
    # Not optimised, because compiling it takes far longer than running it.
    CARGO_PROFILE_DEV_DEBUG=false cargo install cargo-deny --locked --debug
fi
cargo deny --workspace --all-features check --hide-inclusion-graph bans licenses sources
if cargo deny fetch db >/dev/null 2>&1; then
    cargo deny --workspace --all-features check --hide-inclusion-graph advisories
else
    say "cannot download the advisory database;" \
        "dependencies were NOT checked for known vulnerabilities"
fi
