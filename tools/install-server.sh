# The common part of need-redis.sh and need-mariadb.sh: installs a server with the system's package
# manager. Never leaves a service running that was not running before.
#
# The script that sources this file sets `server`, the server's name for messages, and defines:
#   have_server     succeeds if the server is installed
#   advise          prints how to install the server without this script
#   packages_for    prints the packages to try with a package manager, the best first
#   services        prints the services that these packages contain

has() { command -v "$1" >/dev/null 2>&1; }
say() { echo "$(basename "$0" .sh): $*" >&2; }

fail() {
    say "$1"
    advise
    exit 1
}

find_manager() {
    manager=
    for candidate in apt-get dnf yum apk pacman zypper brew; do
        if has "$candidate"; then manager=$candidate; break; fi
    done
    [ -n "$manager" ] || fail "$server is missing, and there is no known package manager."

    as_root=
    if [ "$manager" != brew ] && [ "$(id -u)" -ne 0 ]; then
        if has sudo; then as_root=sudo
        elif has doas; then as_root=doas
        else fail "installing $server with $manager needs root, but sudo and doas are missing."
        fi
    fi
}

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

install_server() {
    find_manager
    say "$server is missing; installing it with ${as_root:+$as_root }$manager."
    packages=$(packages_for "$manager")
    if [ "$manager" = apt-get ]; then
        forbid_services
        # The package lists may be outdated or missing, so updates them after a failure.
        install "${packages%% *}" || $as_root apt-get update >&2 </dev/null || true
    fi
    for package in $packages; do
        have_server && break
        install "$package" || true
    done
    remove_policy
    if [ "$manager" = apt-get ] && has systemctl; then
        # The service must not start at the next boot either. There was no such service before.
        for service in $(services); do
            $as_root systemctl disable --quiet "$service.service" >/dev/null 2>&1 || true
        done
    fi
    have_server || fail "$manager could not install $server; see its messages above."
}
