#!/bin/sh
# Makes sure that redis-server or valkey-server is in PATH, so that private servers can be started.
#
# If neither is, installs one with the system's package manager. Never leaves a service running that
# was not running before.
set -eu

has() { command -v "$1" >/dev/null 2>&1; }
say() { echo "need-redis: $*" >&2; }
have_server() { has redis-server || has valkey-server; }

# The demo can use the server of a URL. Tests always start their own servers.
if [ "${1-}" = --or-url ] && [ -n "${DISTLOCK_URL-}${REDIS_URL-}" ]; then exit 0; fi
have_server && exit 0

manager=
for candidate in apt-get dnf yum apk pacman zypper brew; do
    if has "$candidate"; then manager=$candidate; break; fi
done

fail() {
    say "$1"
    say "Install redis-server or valkey-server, for example from https://redis.io/downloads,"
    say "and try again."
    say "To run the demo on a running server, set DISTLOCK_URL=redis://host:port."
    exit 1
}

[ -n "$manager" ] ||
    fail "neither redis-server nor valkey-server is in PATH, and there is no known package manager."

as_root=
if [ "$manager" != brew ] && [ "$(id -u)" -ne 0 ]; then
    if has sudo; then as_root=sudo
    elif has doas; then as_root=doas
    else
        fail "installing redis-server with $manager needs root, but sudo and doas are missing."
    fi
fi

say "neither redis-server nor valkey-server is in PATH;" \
    "installing one with ${as_root:+$as_root }$manager."

# Debian starts a service when its package is installed, unless this program forbids it.
policy=/usr/sbin/policy-rc.d
made_policy=
remove_policy() { [ -z "$made_policy" ] || $as_root rm -f "$policy"; made_policy=; }
forbid_services() {
    [ -e "$policy" ] && return
    made_policy=yes
    trap remove_policy EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
}

# Installs a package. Distributions that have dropped Redis have Valkey.
install() {
    case $manager in
        apt-get)
            $as_root env DEBIAN_FRONTEND=noninteractive \
                apt-get install -y --no-install-recommends "$1" ;;
        dnf | yum) $as_root "$manager" install -y "$1" ;;
        apk) $as_root apk add --no-cache "$1" ;;
        pacman) $as_root pacman -S --noconfirm --needed "$1" ;;
        zypper) $as_root zypper --non-interactive install --no-recommends "$1" ;;
        brew) brew install "$1" ;;
    esac >&2 </dev/null
}

case $manager in
    apt-get)
        forbid_services
        packages='redis-server valkey-server'
        # The package lists may be outdated or missing, so updates them after a failure.
        install redis-server || $as_root apt-get update >&2 </dev/null || true ;;
    pacman) packages='valkey redis' ;;
    *) packages='redis valkey' ;;
esac
for package in $packages; do
    have_server && break
    install "$package" || true
done
remove_policy
if [ "$manager" = apt-get ] && has systemctl; then
    # The service must not start at the next boot either. There was no such service before.
    for service in redis-server valkey-server; do
        $as_root systemctl disable --quiet "$service.service" >/dev/null 2>&1 || true
    done
fi

have_server || fail "$manager could not install it; see its messages above."
say "installed $(command -v redis-server || command -v valkey-server)."
