#!/bin/sh
# Looks at the dependencies by deny.toml. Installs cargo-deny if it is missing; where its advisory database cannot be
# fetched it says so, and looks at all the rest.
set -eu

say() { echo "deny: $*" >&2; }

if ! cargo deny --version >/dev/null 2>&1; then
    say "cargo-deny is missing; installing it"
    cargo install cargo-deny --locked
fi
cargo deny --all-features check --hide-inclusion-graph bans licenses sources
if cargo deny fetch db >/dev/null 2>&1; then
    cargo deny --all-features check --hide-inclusion-graph advisories
else
    say "the advisory database cannot be fetched from here: known defects of dependencies were NOT looked at"
fi
