#!/bin/sh
# Makes sure that redis-server or valkey-server is in PATH, so that private servers can be started.
#
# If neither is, installs one with the system's package manager. Never leaves a service running that
# was not running before.
set -eu
. "$(dirname "$0")/install-server.sh"

server='redis-server or valkey-server'
have_server() { has redis-server || has valkey-server; }
services() { echo redis-server valkey-server; }

# Distributions that have dropped Redis have Valkey.
packages_for() {
    case $1 in
        apt-get) echo redis-server valkey-server ;;
        pacman) echo valkey redis ;;
        *) echo redis valkey ;;
    esac
}

advise() {
    say "Install $server, for example from https://redis.io/downloads, and try again."
    say "To run the demo on a running server, set DISTLOCK_URL=redis://host:port."
}

# The demo can use the server of a URL. Tests always start their own servers.
if [ "${1-}" = --or-url ] && [ -n "${DISTLOCK_URL-}${REDIS_URL-}" ]; then exit 0; fi
have_server && exit 0
install_server
say "installed $(command -v redis-server || command -v valkey-server)."
