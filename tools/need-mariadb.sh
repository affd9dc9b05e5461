#!/bin/sh
# Makes sure that mariadbd and mariadb-install-db are installed, so that private servers can be
# started.
#
# If one of them is missing, installs it with the system's package manager. Never leaves a service
# running that was not running before.
#
# MYSQLD can name a mysqld of MySQL. The tests then run on MySQL too; it is never installed.
set -eu
. "$(dirname "$0")/install-server.sh"

# Many systems keep servers out of the PATH of ordinary users. The tests look there too.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/usr/libexec

server='mariadbd or mariadb-install-db'
# mariadb-install-db calls my_print_defaults, which some systems package with the clients.
have_server() { has mariadbd && has mariadb-install-db && has my_print_defaults; }
services() { echo mariadb; }

packages_for() {
    case $1 in
        # All but the last have no service. Ubuntu 22.04 has the version in the packages' names.
        apt-get)
            echo mariadb-server-core mariadb-client-core \
                mariadb-server-core-10.6 mariadb-client-core-10.6 mariadb-server ;;
        dnf | yum) echo mariadb-server ;;
        *) echo mariadb ;;
    esac
}

advise() {
    say "Install MariaDB 10.6 or newer, for example from https://mariadb.org/download,"
    say "and try again."
}

if [ -n "${MYSQLD-}" ] && ! has "$MYSQLD"; then
    say "MYSQLD names $MYSQLD, which is not a program. Name a mysqld of MySQL, or unset MYSQLD."
    exit 1
fi
have_server && exit 0
install_server
say "installed $(command -v mariadbd)."
